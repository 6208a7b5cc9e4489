"""Several runs beside each other in a real browser: curves that grow, means over seeds, addresses, screens, keys."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlencode

import pytest

from devtools import Page, find_browser
from forge.ui.server import UiServer
from run_folders import CONFIG, HOSTILE, make_sft_run, write_metrics
from ui_visits import chart, going, set_field, text, visit

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no chromium or google-chrome on PATH")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs with two learning rates, of which two differ only in their seeds."""
    folder = tmp_path / "runs"
    for name, seed, rate in (("sweep/a0", 0, "1.0e-4"), ("sweep/a1", 1, "1.0e-4"), ("sweep/b0", 0, "2.0e-4")):
        run = folder / name
        run.mkdir(parents=True)
        write_metrics(run, 40 + seed, seed=seed)
        config = CONFIG.format(max_steps=100).replace("seed: 7", f"seed: {seed}").replace("arithmetic-grpo", name)
        (run / "config.yaml").write_text(f"{config}  learning_rate: {rate}\n")
    return folder


def address(ui: UiServer, *ids: str, **query: str) -> str:
    return f"{ui.base_url}/compare?{urlencode([*(('run', run) for run in ids), *query.items()])}"


async def enter(page: Page, ui: UiServer) -> None:
    await page.open(ui.url())
    await page.until("document.querySelectorAll('[data-run]').length > 2")


LINES = f"{chart('Reward')}?.querySelectorAll('.line').length"


def test_runs_are_ticked_in_the_list_and_compared_with_the_keyboard(runs: Path) -> None:
    async def body(page: Page, ui: UiServer) -> None:
        await enter(page, ui)
        await page.press("j")
        await page.press("x")
        assert "Tick another run" in await text(page, "[data-test=tray]")
        await page.press("j")
        await page.press("x")
        assert "Compare 2 runs" in await text(page, "[data-test=tray]")
        await page.press("c")
        await page.until(f"{LINES} === 2")
        assert (
            await page.ask("location.pathname + new URLSearchParams(location.search).getAll('run').length")
            == "/compare2"
        )
        await set_field(page, "input[aria-label='Add a run']", "sweep/b0")
        await page.until(f"{LINES} === 3")
        await page.click("[aria-label='Leave out sweep/b0']")
        await page.until(f"{LINES} === 2")
        await page.ask("history.back()")
        await page.until(f"{LINES} === 3")
        await page.ask(f"{chart('Reward')}.querySelector('svg').focus()")
        for key in ("ArrowLeft", "ArrowLeft"):
            await page.press(key)
        await page.until("document.querySelector('[data-test=reading]').innerText === 'Step 40 · held'")
        assert await page.ask(f"{chart('Reward')}.querySelectorAll('.cursor circle').length") == 3
        await page.press("Escape")
        await page.ask("document.activeElement.blur()")
        await page.press("/")
        for key in "entropy":
            await page.press(key)
        assert await page.ask("[...document.querySelectorAll('.chart')].filter((node) => !node.hidden).length") == 1

    visit(runs, body)


def test_a_live_run_grows_beside_a_finished_one(runs: Path) -> None:
    async def body(page: Page, ui: UiServer) -> None:
        with going(runs / "live") as sink:
            sink.write(1, {"rollout/reward_mean": 0.25})
            await enter(page, ui)
            await page.until("document.querySelectorAll('[data-run]').length === 4")
            await page.open(address(ui, "sweep/a0", "live"))
            dots = f"{chart('Reward')}?.querySelectorAll('.dot.tone1').length"
            await page.until(f"{dots} === 1")
            for step in range(2, 5):
                sink.write(step, {"rollout/reward_mean": 0.25 * step})
                await page.until(f"{dots} === {step}")
            await page.until("document.querySelector('[data-run=live] small').innerText === 'step 4'")
            sink.write(5, {"rollout/reward_mean": 1.0, "train/novelty": 3.0})
            await page.until("document.querySelector('.more summary')?.innerText.startsWith('More metrics (2)')")
        await page.until("document.querySelector('[data-run=live] [data-test=state]').innerText === 'stopped'")

    visit(runs, body)


def test_the_mean_over_seeds_has_a_band_and_an_address(runs: Path) -> None:
    async def body(page: Page, ui: UiServer) -> None:
        await enter(page, ui)
        await page.open(address(ui, "sweep/a0", "sweep/a1", "sweep/b0"))
        await page.until(f"{LINES} === 3")
        assert await page.ask(f"{chart('Reward')}.querySelectorAll('.reach').length") == 0
        await page.click(".seeds .switch")
        await page.until(f"{LINES} === 2 && {chart('Reward')}.querySelectorAll('.reach').length === 1")
        said = await text(page, "[data-test=groups]")
        assert said.startswith("a0, a1: mean of 2 runs.")
        assert "differ only in their seeds" in said
        await page.click(".chart svg")
        await page.until("/at=/.test(location.search) && location.search.includes('group=seed')")
        legend = f"{chart('Reward')}.querySelector('.item b').innerText"
        assert " to " in await page.ask(legend)
        await set_field(page, ".seeds select", "deviation")
        await page.until("location.search.includes('band=deviation')")
        await page.until(f"{legend}.includes(' ± ')")
        line = await page.ask(f"{chart('Reward')}.querySelector('.line').getAttribute('d')")
        await page.open(await page.ask("location.href"))
        await page.until(f"{chart('Reward')}?.querySelector('.line')?.getAttribute('d') === {line!r}")
        await page.until(f"{legend}.includes(' ± ')")
        await set_field(page, ".bar select[aria-label='Horizontal axis']", "time")
        await page.until(f"location.search.includes('x=time') && {chart('Reward')}.textContent.includes('time')")
        await page.click("[data-test=compared] [data-run='sweep/b0'] .toggle")
        await page.until(f"{LINES} === 1 && location.search.includes('hide=3')")

    visit(runs, body)


def test_values_and_configurations_are_tables(runs: Path) -> None:
    async def body(page: Page, ui: UiServer) -> None:
        await enter(page, ui)
        await page.open(address(ui, "sweep/a0", "sweep/a1", "sweep/b0", view="values"))
        await page.until("document.querySelectorAll('[data-test=values] tbody tr').length > 5")
        assert "mean ± deviation of 2 seeds" in await text(page, "[data-test=values]")
        assert await page.ask("document.querySelectorAll('[data-test=values] td.best').length") > 2
        await set_field(page, "select[aria-label='Which values']", "best")
        await page.until(
            "[...document.querySelectorAll('[data-test=values] th')].every((cell) => cell.innerText !== 'train/kl')"
        )
        await page.click(".tabs a:nth-child(3)")
        await page.until("document.querySelectorAll('[data-test=configurations] tbody tr').length === 3")
        row = "[...document.querySelectorAll('[data-test=configurations] tbody tr')].map((row) => row.innerText)"
        assert any("training.learning_rate" in line and "0.0002" in line for line in await page.ask(row))
        await page.ask("document.querySelector('.check input').click()")
        await page.until("document.querySelectorAll('[data-test=configurations] tbody tr').length > 10")

    visit(runs, body)


def test_zoom_loads_every_run_in_more_detail(runs: Path) -> None:
    for number in range(2):
        folder = runs / f"long{number}"
        folder.mkdir()
        lines = (
            f'{{"step": {step}, "time": {1e9 + step}, "values": {{"train/loss": {float(step == 4_999 + number)}}}}}\n'
            for step in range(1, 10_001)
        )
        (folder / "metrics.jsonl").write_text("".join(lines))

    async def body(page: Page, ui: UiServer) -> None:
        await enter(page, ui)
        await page.until("document.querySelectorAll('[data-run]').length === 5")
        await page.open(address(ui, "long0", "long1", range="4990~5010"))
        lines = f"[...{chart('Loss')}?.querySelectorAll('.line') || []]"
        points = f"{lines}.map((line) => line.getAttribute('d').split('L').length)"
        await page.until(f"{points}.join() === '21,21'")

    visit(runs, body)


def test_hostile_names_are_text_and_missing_runs_are_named(runs: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    (runs / name).mkdir()
    write_metrics(runs / name, 3)
    (runs / name / "config.yaml").write_text(f'{{"run": {{"name": "<b>", "tags": [{HOSTILE[:50]!r}]}}}}')

    async def body(page: Page, ui: UiServer) -> None:
        await enter(page, ui)
        await page.until("document.querySelectorAll('[data-run]').length === 4")
        for view in ("charts", "values", "configuration"):
            await page.open(address(ui, name, "sweep/a0", "gone", view=view))
            await page.until("document.querySelector('.line, [data-test=values] td, [data-test=configurations] td')")
            assert await page.ask("document.querySelectorAll('main img, main b > *').length") == 0
            assert await text(page, "[data-test=notes]") == "There is no run gone here."
        await page.open(f"{ui.base_url}/compare")
        await page.until("document.querySelector('[data-test=notes]')?.innerText.includes('two to eight runs')")

    visit(runs, body)


@pytest.mark.parametrize("is_dark", [False, True])
def test_compared_runs_fit_narrow_and_wide_screens(runs: Path, is_dark: bool) -> None:
    make_sft_run(runs / "a-run-with-a-rather-long-name-that-must-break-or-be-cut", num_steps=9)
    ids = ("sweep/a0", "sweep/a1", "sweep/b0", "a-run-with-a-rather-long-name-that-must-break-or-be-cut")

    async def body(page: Page, ui: UiServer) -> None:
        await enter(page, ui)
        for width in (390, 1400):
            for view in ("charts", "values", "configuration"):
                await page.open(address(ui, *ids, view=view, group="seed"), width=width, dark=is_dark)
                await page.until(
                    "document.querySelector('.line, [data-test=values] td, [data-test=configurations] td')"
                )
                assert await page.ask("document.documentElement.scrollWidth") == width

    visit(runs, body)
