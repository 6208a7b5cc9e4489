"""A live run in a real browser: its timeline grows, and it is controlled from the page."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from devtools import Page, find_browser
from forge.loops.runtime_changes import RuntimeChange, read_changes
from forge.observe import trace_file
from forge.observe.trace_file import read_events
from forge.trainer.checkpoint_folder import list_checkpoints
from forge.ui.server import UiServer
from live_runs import LiveRun, live_run
from ui_visits import set_field, text, visit

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no chromium or google-chrome on PATH")

RATE = "training.learning_rate"
RESULTS = "document.querySelector('[data-test=results]')?.innerText"
OVERRIDES = (
    "training.max_steps=40", "record.system_interval_s=0", "checkpointing.save_interval=null",
    "evaluation={sources: [{task: arithmetic, num_prompts: 4}], num_samples: 2, at_end: false}",
)  # fmt: skip


async def step(run: LiveRun) -> None:
    await asyncio.to_thread(run.step)


async def until_heard(run: LiveRun, count: int) -> None:
    """Wait until the run knows of so many commands."""
    while await asyncio.to_thread(run.num_commands) != count:
        pass


async def open_tab(page: Page, name: str) -> None:
    await page.until(f"[...document.querySelectorAll('.tabs a')].some((tab) => tab.innerText === {name!r})")
    await page.ask(f"[...document.querySelectorAll('.tabs a')].find((tab) => tab.innerText === {name!r}).click()")


def test_a_live_run_is_controlled_from_the_page(tmp_path: Path) -> None:
    runs = tmp_path / "runs"

    async def body(page: Page, ui: UiServer) -> None:
        await page.open(ui.url("live"))
        await open_tab(page, "Control")
        await page.until(f"document.querySelector('[name=\"{RATE}\"]')?.value === '0.001'")
        assert "after step 1 of 40" in await text(page, "[data-test=where]")

        # a change, with the keyboard
        await page.ask(f"document.querySelector('[name=\"{RATE}\"]').select()")
        for key in "5e-4":
            await page.press(key)
        await page.ask("document.querySelector('[data-test=settings-form]').requestSubmit()")  # what Enter does
        await until_heard(run, 1)
        assert "is changed after the step in progress" in await page.ask(RESULTS)
        await step(run)
        await page.until(f"{RESULTS}.includes('from step 3 on: {RATE} 0.001 → 0.0005')")
        assert list(read_changes(run.folder)) == [RuntimeChange(2, RATE, 1e-3, 1e-3, 5e-4, "forge ui")]
        await page.until("document.querySelector('.settingsform small').innerText === 'configured: 0.001'")

        # a value that the run refuses
        await set_field(page, f'[name="{RATE}"]', "-1")
        await page.ask("document.querySelector('[data-test=settings-form]').requestSubmit()")
        await page.until("document.querySelector('.results .refused dl')")
        refused = await text(page, ".results .refused")
        for word in (RATE, "-1", "must be greater than 0", "choose a value that fits"):
            assert word in refused
        assert "409" in page.errors.pop()  # the browser's own note of the answer
        assert len(list(read_changes(run.folder))) == 1

        # an evaluation, a checkpoint, and a profile of the next step
        for name in ("evaluate", "save", "profile"):
            await page.click(f"[data-act={name}]")
        await until_heard(run, 3)
        await step(run)
        await page.until(f"{RESULTS}.includes('after step 2: num_prompts 4')")
        await page.until(f"/after step 2: .*step-00000002/.test({RESULTS})")
        assert [each.step for each in list_checkpoints(run.folder / "checkpoints")] == [2]
        await step(run)
        await page.until(f"/step 3: .*step-00000003-controller.json.gz/.test({RESULTS})")

        await open_tab(page, "Events")
        await page.until(f"document.querySelector('[data-test=events]')?.innerText.includes('{RATE}: 0.001 → 0.0005')")
        assert "by forge ui" in await text(page, "[data-test=events]")
        await open_tab(page, "Timeline")
        await page.until("document.querySelector('[data-test=profiles] a')?.innerText.includes('step-00000003')")

        # the end of the run, which is asked for twice
        await open_tab(page, "Control")
        await page.until("document.querySelector('[data-act=stop]')")
        await page.click("[data-act=stop]")
        await page.ask("document.querySelector('dialog[open] form button').click()")  # let it run
        assert not await page.ask(f"{RESULTS}?.includes('Stop') || false")
        await page.click("[data-act=stop]")
        await page.click("[data-test=confirm-stop]")
        await page.until(f"{RESULTS}.includes('saves and ends with exit code 130')")
        await asyncio.to_thread(run.finish)
        await page.until("document.querySelector('.runhead [data-test=state]').innerText.startsWith('stopped')")
        await page.until("document.querySelector('[data-test=inactive]')?.innerText.includes('takes no commands')")

    with live_run(runs / "live", *OVERRIDES) as run:
        visit(runs, body, control=True)


def test_the_timeline_of_a_live_run_grows_and_is_moved_with_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "ORIGIN_NS", trace_file.ORIGIN_NS - 1438 * 10**9)  # of a process that is older
    runs = tmp_path / "runs"
    rows = "[...document.querySelectorAll('[data-test=totals] tbody tr')]"
    names = f"{rows}.map((row) => row.innerText.split(/\\s+/)[1])"
    tabs = "[...document.querySelectorAll('.tabs a')].map((tab) => tab.innerText)"

    async def body(page: Page, ui: UiServer) -> None:
        await page.open(ui.url("live"))
        await page.until(f"{tabs}.includes('Timeline')")
        assert "Control" not in await page.ask(tabs)
        await open_tab(page, "Timeline")
        await step(run)  # the first step is written when the generators have its weights
        await page.until(f"{names}.includes('train_step')")
        assert {"generate", "score", "publish_weights"} <= set(await page.ask(names))
        assert await page.ask("document.querySelector('.bar .switch').getAttribute('aria-pressed')") == "true"
        await page.until("document.querySelector('[data-test=window]').innerText.includes(' to ')")
        canvas = "document.querySelector('[data-test=timeline]')"
        window = f"{canvas}.dataset.window"  # exact: what is shown may be whole minutes
        steps = f"{rows}.find((row) => row.innerText.includes('train_step')).innerText"
        before = await page.ask(steps)
        for _ in range(2):
            await step(run)
        await page.until(f"{steps} !== {before!r}")  # it follows

        await page.ask(f"{canvas}.focus()")
        await page.press("+")
        await page.until("/[?&]t=[0-9]/.test(location.search)")
        assert await page.ask("document.querySelector('.bar .switch').getAttribute('aria-pressed')") == "false"
        zoomed = await page.ask(window)
        await page.press("ArrowLeft")
        await page.until(f"{window} !== {zoomed!r}")
        await page.press(".")
        await page.until("document.querySelector('[data-test=span] b')")
        assert "process" in await text(page, "[data-test=span]")
        await page.until(f"new URLSearchParams(location.search).get('t') === {canvas}.dataset.window")
        address, told = await page.ask("location.href"), await text(page, "[data-test=window]")
        await page.open(address)
        await page.until(f"document.querySelector('[data-test=window]')?.innerText === {told!r}")
        await page.until("document.querySelector('[data-test=totals] td')")
        links = await page.ask("[...document.querySelectorAll('a.link[download]')].map((link) => link.href)")
        assert any("start=" in link for link in links)
        for link in links[:2]:
            told = str(await page.ask(f"fetch({link!r}).then((answer) => answer.text())"))
            assert len(read_events(told.encode())[0]) > 5
        await page.ask(f"{canvas}.focus()")
        await page.press("Escape")
        await page.until("!location.search.includes('t=')")

        # the pointer: what is under it, a click, a drag; on one span that fills most of the width
        await page.press(".")
        name = await page.until("document.querySelector('[data-test=span] b')?.innerText")
        await page.ask(
            "[...document.querySelectorAll('button')].find((each) => each.innerText === 'zoom to it').click()"
        )
        await page.until("location.search.includes('t=')")
        await page.until("document.querySelector('[data-test=totals] td')")
        await page.ask(f"{canvas}.scrollIntoView()")
        await page.settled()
        box = await page.ask(f"{canvas}.getBoundingClientRect().toJSON()")
        place = (box["left"], box["top"], box["width"])
        names_there = set()
        for down in range(50, int(box["height"]), 5):
            await page.mouse("mouseMoved", (place[0] + place[2] * 0.6, place[1] + down))
            if await page.ask("!document.querySelector('[data-test=tip]').hidden"):
                names_there.add(await page.ask("document.querySelector('[data-test=tip] b')?.innerText"))
        assert name in names_there
        whole = await page.ask(window)
        for kind, part in (("mousePressed", 0.5), ("mouseMoved", 0.6), ("mouseMoved", 0.7), ("mouseReleased", 0.7)):
            await page.mouse(kind, (place[0] + place[2] * part, place[1] + 75))
        await page.until(f"{window} !== {whole!r}")

        await open_tab(page, "System")
        await page.until("document.querySelectorAll('[data-test=system] .chart').length > 3")
        await page.until("document.querySelector('.chart[data-title=CPU] .dot')")
        await step(run)
        dots = "document.querySelectorAll('.chart[data-title=CPU] .dot.tone0').length"
        shown = await page.ask(dots)
        await step(run)
        await page.until(f"{dots} > {shown}")

    with live_run(runs / "live", *OVERRIDES) as run:
        visit(runs, body)


@pytest.mark.parametrize("is_dark", [False, True])
def test_timeline_system_and_control_fit_narrow_and_wide_screens(tmp_path: Path, is_dark: bool) -> None:
    runs = tmp_path / "runs"

    async def body(page: Page, ui: UiServer) -> None:
        await page.open(ui.url())
        await page.until("document.querySelector('[data-run]')")
        for width in (390, 1400):
            shown_in = {"timeline": "[data-test=totals] td", "system": ".chart .dot", "control": ".settingsform input"}
            for view, shown in shown_in.items():
                await page.open(f"{ui.base_url}/run/live?view={view}", width=width, dark=is_dark)
                await page.until(f"document.querySelector({shown!r})")
                assert await page.ask("document.documentElement.scrollWidth") == width
                if view == "timeline":
                    assert await page.ask("document.querySelector('canvas').clientWidth <= innerWidth")

    with live_run(runs / "live", *OVERRIDES) as run:
        run.step()
        visit(runs, body, control=True)
