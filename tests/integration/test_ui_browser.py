"""The live page in a real browser: a run that appears and goes on, keys, addresses, screens, hostile text."""

from __future__ import annotations

import asyncio
import json
import math
import os
from pathlib import Path

import pytest

from devtools import Page, find_browser, open_browser
from forge.loops.runtime_changes import RuntimeChange, record_change
from forge.observe.jsonl import JsonlSink
from forge.observe.league_table import LEAGUE_TABLE
from forge.ui.server import UiOptions, UiServer, serve_ui
from run_folders import HOSTILE, make_grpo_run, make_sft_run, write_metrics
from ui_serving import LIMIT_S, OFTEN_S
from ui_visits import chart, going, set_field, text, visit

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no chromium or google-chrome on PATH")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


def test_a_run_appears_while_the_list_is_open_and_its_curves_grow(runs: Path) -> None:
    async def body(page: Page, ui: UiServer) -> None:
        await page.open(ui.url())
        await page.until("document.querySelector('[data-test=note]')?.innerText.includes('No run is here yet')")
        assert "token" not in await page.ask("location.href")
        with going(runs / "grpo" / "first") as sink:
            await page.until("document.querySelectorAll('[data-run]').length === 1")
            await page.until("document.querySelector('[data-test=state]').innerText === 'starting'")
            sink.write(1, {"rollout/reward_mean": 0.25, "train/kl": 0.1})
            await page.until("document.querySelector('[data-test=state]').innerText === 'running'")
            await page.click("[data-run] .open")
            await page.until("document.querySelector('.runhead .state b')?.innerText === 'step 1 of 100'")
            await page.until(f"{chart('Reward')}?.querySelectorAll('.dot').length === 1")
            for step in range(2, 6):
                sink.write(step, {"rollout/reward_mean": 0.25 * step, "train/kl": 0.1})
                await page.until(f"document.querySelector('.runhead .state b').innerText === 'step {step} of 100'")
                await page.until(f"{chart('Reward')}.querySelectorAll('.dot').length === {step}")
            assert await page.ask("document.title") == "5 · arithmetic-grpo · TorchForge"
            assert (await text(page, ".tile b")).startswith("1.25")
            assert await page.ask(f"{chart('Entropy')} === null")
            sink.write(6, {"rollout/reward_mean": 1.0, "train/entropy": 1.5})  # a metric that is new
            await page.until(f"{chart('Entropy')}?.querySelectorAll('.dot').length === 1")
            assert "left" in await text(page, ".runhead .state")
        await page.until("document.querySelector('[data-test=state]').innerText === 'stopped'")

    visit(runs, body)


def test_a_resumed_run_shows_the_rows_that_it_has_now(runs: Path) -> None:
    with going(runs / "run") as sink:
        for step in range(1, 9):
            sink.write(step, {"train/loss": 1.0 / step})

    async def body(page: Page, ui: UiServer) -> None:
        await page.open(ui.url("run"))
        await page.until(f"{chart('Loss')}?.querySelectorAll('.dot').length === 8")
        again = JsonlSink(runs / "run" / "metrics.jsonl", resume_step=3)
        again.write(4, {"train/loss": 0.5})
        again.close()
        await page.until(f"{chart('Loss')}.querySelectorAll('.dot').length === 4")
        await page.until("document.querySelector('.runhead .state b').innerText === 'step 4 of 100'")

    visit(runs, body)


def test_the_address_has_range_step_axis_and_smoothing(runs: Path) -> None:
    make_grpo_run(runs / "run", num_steps=40, max_steps=100)

    async def body(page: Page, ui: UiServer) -> None:
        await page.open(ui.url("run"))
        await page.until(f"{chart('Reward')}?.querySelector('.line')")
        for kind, right in (("mousePressed", 0.4), ("mouseMoved", 0.8), ("mouseReleased", 0.8)):
            await page.mouse(kind, await page.middle(".chart svg", right=right))
        await page.click(".chart svg")
        await set_field(page, ".bar input[type=range]", "0.6")
        await page.until("/range=.+at=/.test(location.search) && location.search.includes('smooth=0.6')")
        reading, address = await text(page, "[data-test=reading]"), await page.ask("location.href")
        line = await page.ask(f"{chart('Reward')}.querySelector('.line').getAttribute('d')")
        assert reading.endswith("· held")
        await page.open(address)
        await page.until(f"{chart('Reward')}?.querySelector('.line')?.getAttribute('d') === {line!r}")
        assert await text(page, "[data-test=reading]") == reading
        await page.ask(f"{chart('Reward')}.querySelector('svg').focus()")
        await page.press("Escape")
        await page.until("!location.search.includes('range')")
        await set_field(page, ".bar select", "time")
        await page.until("location.search.includes('x=time')")
        assert await page.ask(f"{chart('Reward')}.querySelector('svg').textContent.includes('time')")

    visit(runs, body)


def test_everything_can_be_reached_with_the_keyboard(runs: Path) -> None:
    make_grpo_run(runs / "a", num_steps=20)
    make_sft_run(runs / "b", num_steps=20)

    async def body(page: Page, ui: UiServer) -> None:
        await page.open(ui.url())
        await page.until("document.querySelectorAll('[data-run]').length === 2")
        await page.press("/")
        for key in "dapo":
            await page.press(key)
        await page.until("document.querySelectorAll('[data-run]').length === 1")
        await page.ask("document.activeElement.blur()")
        await page.press("j")
        assert await page.ask("document.activeElement.textContent") == "a"
        await page.ask("document.activeElement.click()")  # what Enter does to a link
        await page.until("document.querySelector('h1')?.innerText === 'arithmetic-grpo'")
        await page.until(f"{chart('Reward')}?.querySelector('.line')")
        await page.ask(f"{chart('Reward')}.querySelector('svg').focus()")
        for key in ("ArrowLeft", "ArrowLeft", "ArrowLeft"):
            await page.press(key)
        assert await text(page, "[data-test=reading]") == "Step 18 · held"
        await page.press("+")
        await page.until("!document.querySelector('.bar button:nth-of-type(2)').hidden")
        await page.ask("document.activeElement.blur()")
        await page.press("/")
        for key in "entropy":
            await page.press(key)
        shown = "[...document.querySelectorAll('.chart')].filter((node) => !node.hidden).length"
        assert await page.ask(shown) == 1
        await page.ask("document.activeElement.blur()")
        await page.press("?")
        assert await page.ask("document.querySelector('dialog').open")
        await page.ask("document.querySelector('dialog button').click()")
        await page.press("g")
        await page.until("document.querySelector('h1').innerText === 'Runs'")

    visit(runs, body)


def test_configuration_and_events_have_views_of_their_own(runs: Path) -> None:
    folder = make_grpo_run(runs / "run", num_steps=3)
    make_grpo_run(runs / "other", num_steps=3)
    config = (runs / "other" / "config.yaml").read_text()
    (runs / "other" / "config.yaml").write_text(config.replace("seed: 7", "seed: 8"))
    record_change(folder, RuntimeChange(2, "rollout.staleness", 2, 2, 1, "forge control"))

    async def body(page: Page, ui: UiServer) -> None:
        await page.open(ui.url("run"))
        await page.until("document.querySelector('.tabs a')")
        await page.click(".tabs a[href*=configuration]")
        await page.until("document.querySelector('[data-test=settings]')?.innerText.includes('rollout.staleness')")
        await set_field(page, "input[aria-label='Compare with run']", "other")
        await page.until("document.querySelectorAll('[data-test=settings] dt.other').length === 1")
        assert await text(page, "[data-test=settings] dd.other") == "7 8"
        await page.ask("document.querySelector('.check input').click()")
        await page.until("document.querySelectorAll('[data-test=settings] dt').length === 1")
        await page.until("location.search.includes('against=other') && location.search.includes('diff=1')")
        await page.click(".tabs a[href*=events]")
        await page.until("document.querySelector('[data-test=events]')?.innerText.includes('rollout.staleness: 2 → 1')")
        await page.ask("history.back()")
        await page.until("document.querySelectorAll('[data-test=settings] dt').length === 1")

    visit(runs, body)


def test_a_long_run_is_drawn_in_a_few_points_and_in_more_where_one_looks(runs: Path) -> None:
    folder = runs / "long"
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 20_001):
            values = {"train/loss": 1.0 if step == 9_999 else 0.5, "train/num_tokens": 10}
            file.write(json.dumps({"step": step, "time": 1e9 + step, "values": values}) + "\n")

    async def body(page: Page, ui: UiServer) -> None:
        await page.open(ui.url("long"))
        await page.until(f"{chart('Loss')}?.querySelector('.line')")
        points = f"{chart('Loss')}.querySelector('.line').getAttribute('d').split('L').length"
        await page.until(f"{points} > 300 && {chart('Loss')}.querySelector('.reach')")
        assert await page.ask(points) <= 700
        await page.open(f"{ui.base_url}/run/long?range=9990~10010")
        await page.until(f"{chart('Loss')}?.querySelector('.line') && {points} === 21")
        top = "Math.min(...line.split(/[ML]/).slice(1).map((point) => Number(point.split(' ')[1])))"
        find = f"(() => {{ const line = {chart('Loss')}.querySelector('.line').getAttribute('d'); return {top}; }})()"
        assert await page.ask(find) < 30  # the one step that stands out

    visit(runs, body)


def test_hostile_text_is_shown_as_text(runs: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    folder = runs / name
    folder.mkdir()
    write_metrics(folder, 2)
    sink = JsonlSink(folder / "metrics.jsonl", resume_step=2)
    sink.write(3, {f"x/{HOSTILE[:70]}": 1.0})
    sink.close()
    (folder / "config.yaml").write_text(json.dumps({"run": {"name": HOSTILE[:60], "tags": [HOSTILE[:50]]}}))
    crash = {
        "time": "2026-01-01T00:00:00+00:00",
        "event": "crash",
        "status": 1,
        "action": "stop",
        "tail": [HOSTILE[:60]],
    }
    (folder / "supervisor.jsonl").write_text(json.dumps(crash) + "\n")

    async def body(page: Page, ui: UiServer) -> None:
        await page.open(ui.url())
        await page.until("document.querySelectorAll('[data-run]').length === 1")
        assert await text(page, "[data-run] .open") == name
        assert await text(page, ".tag") == HOSTILE[:50]
        await page.click("[data-run] .open")
        await page.until("document.querySelector('.runhead h1')")
        assert await text(page, ".runhead h1") == HOSTILE[:60]
        for view in ("configuration", "events", "charts"):
            await page.open(f"{await page.ask('location.origin + location.pathname')}?view={view}")
            await page.until("document.querySelector('.settings dt, .happened li, .chart .line')")
            assert await page.ask("document.querySelectorAll('main script, main img').length") == 0
        assert page.errors == []
        await page.ask("document.querySelector('.more').open = true")
        await page.until("document.querySelectorAll('.more .chart').length > 2")
        await page.ask(
            "(() => { const own = document.createElement('p'); try { own.innerHTML = '<b>x</b>'; } catch { } })()"
        )
        assert "TrustedHTML" in page.errors.pop()

    visit(runs, body)


@pytest.mark.parametrize("is_dark", [False, True])
def test_narrow_and_wide_screens(runs: Path, is_dark: bool) -> None:
    make_grpo_run(runs / "a-run-with-a-rather-long-name-that-must-break" / "inside", num_steps=30, max_steps=100)
    make_sft_run(runs / "b")

    async def body(page: Page, ui: UiServer) -> None:
        await page.open(ui.url())
        await page.until("document.querySelectorAll('[data-run]').length === 2")
        colours = set()
        for width in (390, 1400):
            for path in ("/", "/run/a-run-with-a-rather-long-name-that-must-break/inside"):
                for view in ("charts", "configuration", "events") if path != "/" else ("charts",):
                    await page.open(f"{ui.base_url}{path}?view={view}", width=width, dark=is_dark)
                    await page.until(
                        "document.querySelector('[data-run], .settings dt, .chart .line, [data-test=events]')"
                    )
                    assert await page.ask("document.documentElement.scrollWidth") == width
                    colours.add(await page.ask("getComputedStyle(document.body).backgroundColor"))
        assert len(colours) == 1
        await page.click("button[aria-label='Light or dark']")
        assert await page.ask("getComputedStyle(document.body).backgroundColor") not in colours
        chosen = await page.ask("document.documentElement.dataset.theme")
        await page.open(f"{ui.base_url}/")
        assert await page.ask("document.documentElement.dataset.theme") == chosen

    visit(runs, body)


def test_names_and_times_that_a_page_cannot_have_leave_the_others_alone(runs: Path) -> None:
    """Each of them would end the program of the list, or of the run: an address, a date or a number cannot be made."""
    write_metrics(runs, 2)  # the folder of runs is one, which a browser's address cannot name
    odd = os.fsencode(runs) + b"/bytes-\xff"
    os.mkdir(odd)
    write_metrics(Path(os.fsdecode(odd)), 2)
    late = runs / "late"
    late.mkdir()
    values = {"train/loss": 1.0, "constructor": 1.0, "__proto__": 2.0, "toString": 3.0}
    lines = [{"step": step, "time": 1e18, "values": values} for step in (1, 2)]
    (late / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = {
        "member": "m",
        "rating": math.nan,
        "games": True,
        "wins": 1,
        "draws": math.inf,
        "losses": 0,
        "win_rate": math.nan,
    }
    (late / LEAGUE_TABLE).write_text(json.dumps({"step": 1, "rating": 1.0, "members": [row]}))

    async def body(page: Page, ui: UiServer) -> None:
        await page.open(ui.url())
        await page.until("document.querySelectorAll('[data-run]').length === 3")
        for run in (".", "bytes"):
            await page.click(f'[data-run^="{run}"] .open')
            await page.until(f"{chart('Reward')}?.querySelectorAll('.dot').length === 2")
            await page.open(await page.ask("location.href"))
            await page.until(f"{chart('Reward')}?.querySelectorAll('.dot').length === 2")
            await page.press("g")
            await page.until("document.querySelectorAll('[data-run]').length === 3")
        await page.click('[data-run="late"] .open')
        await page.until("document.querySelector('[data-test=league]')?.innerText.includes('–')")
        await page.click("details.more summary")
        await page.until(f"{chart('constructor')}?.querySelectorAll('.dot').length === 2")
        await page.until(f"{chart('__proto__')}?.querySelectorAll('.dot').length === 2")

    visit(runs, body)


def test_a_run_that_is_not_there_yet_is_shown_when_it_begins(runs: Path) -> None:
    async def body(page: Page, ui: UiServer) -> None:
        await page.open(ui.url("soon"))
        await page.until("document.querySelector('[data-test=refused]')")
        assert "There is no run 'soon' here" in await text(page, "[data-test=refused]")
        refused = [error for error in page.errors if "404" in error]
        assert page.errors == refused  # the browser's own note of the answer
        page.errors.clear()
        with going(runs / "soon") as sink:
            sink.write(1, {"train/loss": 1.0})
            await page.until(f"{chart('Loss')}?.querySelector('.dot')")

    visit(runs, body)


def test_a_server_that_ends_is_noticed_and_the_page_stays(runs: Path) -> None:
    make_sft_run(runs / "run", num_steps=5)

    async def inside() -> None:
        async with asyncio.timeout(LIMIT_S), open_browser(runs.parent / "browser") as page:
            async with serve_ui(UiOptions(runs, interval_s=OFTEN_S)) as ui:
                await page.open(ui.url("run"))
                await page.until(f"{chart('Loss')}?.querySelector('.line')")
            await page.until("document.querySelector('[data-test=link]').innerText.includes('does not answer')")
            assert await page.ask(f"{chart('Loss')}.querySelector('.line') !== null")

    asyncio.run(inside())
