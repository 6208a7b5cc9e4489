"""The live page in Firefox: its views at two widths, its keys, and nothing that it complains about."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent_folders import make_agent_run
from firefox import FirefoxPage, find_firefox, open_firefox
from forge.ui.server import UiOptions, serve_ui
from run_folders import make_grpo_run, write_system, write_trace
from ui_serving import LIMIT_S, OFTEN_S

pytestmark = pytest.mark.skipif(find_firefox() is None, reason="no firefox-esr or firefox on PATH")

ROOT = "document.documentElement"
READY = {
    "/": "document.querySelectorAll('[data-run]').length === 2",
    "/run/grpo": "document.querySelectorAll('.chart .line').length > 3",
    "/run/grpo?view=rollouts&sort=gap": "document.querySelector('.detail .token')",
    "/run/agents?view=rollouts&side=1": "document.querySelectorAll('.abreast .column').length === 2",
    "/run/grpo?view=configuration": "document.querySelector('.settings dt')",
    "/run/grpo?view=timeline": "document.querySelector('[data-test=totals] td')",
    "/run/grpo?view=system": "document.querySelector('.chart .dot')",
    "/run/grpo?view=control": "document.querySelector('[data-test=inactive]')?.innerText.includes('no commands')",
    "/compare?run=grpo&run=agents": "document.querySelectorAll('.chart .line').length > 3",
    "/compare?run=grpo&run=agents&view=values": "document.querySelector('[data-test=values] td')",
}


async def walk(page: FirefoxPage, base_url: str) -> None:
    colours = []
    for width in (390, 1400):
        for path, ready in READY.items():
            await page.open(f"{base_url}{path}", width=width)
            await page.until(ready)
            assert await page.ask(f"{ROOT}.scrollWidth - {ROOT}.clientWidth") == 0, (path, width)
            assert await page.ask("window.violations.length") == 0
        await page.press("t")  # dark, and light again
        colours.append(await page.ask("getComputedStyle(document.body).backgroundColor"))
    assert colours[0] != colours[1]
    await page.open(f"{base_url}/run/grpo?view=timeline", width=1400)
    await page.until("document.querySelector('[data-test=totals] td')")
    await page.ask("document.querySelector('.timeline').focus()")
    await page.press("+")
    await page.until("/[?&]t=[0-9]/.test(location.search)")
    await page.press(".")
    await page.until("document.querySelector('[data-test=span]')?.innerText.includes('step')")
    await page.open(f"{base_url}/run/grpo?view=rollouts&outcome=trained", width=1400)
    await page.until("document.querySelector('[data-test=position]')?.innerText === '1 of 80'")
    await page.press("j")
    await page.until("document.querySelector('[data-test=position]')?.innerText === '2 of 80'")
    await page.ask("document.querySelector('.token').click()")
    await page.until("document.querySelector('.lesson .sum')?.innerText.includes('gradient')")
    await page.press("/")
    for key in "größe":
        await page.press(key)
    await page.until("document.querySelector('[data-test=active]').innerText.includes('größe')")
    await page.until("/^[1-9]\\d* of 80 rollouts$/.test(document.querySelector('[data-test=count]').innerText)")


def test_every_view_at_two_widths_with_keys(tmp_path: Path) -> None:
    folder = make_grpo_run(tmp_path / "runs" / "grpo", num_steps=10)
    write_trace(folder / "trace.json", 10)
    write_system(folder / "system.jsonl", 10)
    make_agent_run(tmp_path / "runs" / "agents")

    async def inside() -> None:
        options = UiOptions(tmp_path / "runs", interval_s=OFTEN_S, control=True)
        async with asyncio.timeout(LIMIT_S), serve_ui(options) as ui, open_firefox(tmp_path / "browser") as page:
            await page.open(ui.url())
            await page.until("document.querySelector('[data-run]')")
            await walk(page, ui.base_url)
            assert page.errors == []
            # The policy is at work here, too: it refuses what would be fetched from elsewhere.
            await page.ask("void (new Image().src = 'http://127.0.0.1:9/x.png')")
            await page.until("window.violations.includes('img-src')")

    asyncio.run(inside())
