"""The report in a real browser: it draws, answers to mouse and keys, complains about nothing, and asks for nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from devtools import Page, find_browser, open_browser
from episodes import with_turn
from forge.config import RecordConfig
from forge.observe.report import write_report
from forge.rollout.record import RolloutRecorder
from run_folders import HOSTILE, decode, encode, make_groups, make_grpo_run, make_sft_run, write_metrics

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no chromium or google-chrome on PATH")

Visit = Callable[[Page], Awaitable[None]]


def visit(folder: Path, body: Visit) -> None:
    """Run `body` with a browser, and fail for anything that the page complained about or fetched."""

    async def inside() -> None:
        async with open_browser(folder) as page:
            await body(page)
            assert page.errors == []
            assert {url.partition(":")[0] for url in page.requests} == {"file"}

    asyncio.run(inside())


async def text(page: Page, selector: str) -> str:
    return str(await page.ask(f"document.querySelector({selector!r}).innerText"))


async def legend(page: Page, title: str) -> list[str]:
    """The values that a chart's legend shows."""
    found: list[str] = await page.ask(
        f"[...document.querySelectorAll('.chart')].find((card) => card.querySelector('h3').textContent === {title!r})"
        ".querySelector('.legend').innerText.split('\\n')"
    )
    return found


async def set_field(page: Page, selector: str, value: object) -> None:
    await page.ask(
        f"(() => {{ const field = document.querySelector({selector!r}); field.value = {value!r}; "
        "field.dispatchEvent(new Event('input')); field.dispatchEvent(new Event('change')); })()"
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_grpo_run(tmp_path_factory.mktemp("runs") / "arithmetic-grpo", num_steps=40, max_steps=100)
    return write_report(folder).path


def test_the_charts_share_a_cursor_and_a_range(run: Path, tmp_path: Path) -> None:
    async def body(page: Page) -> None:
        await page.open(run)
        await page.settled()
        assert await page.ask("document.querySelectorAll('.chart').length") == 19
        drawn = "[...document.querySelectorAll('.chart svg')].filter((svg) => svg.querySelector('.line, .area')).length"
        assert await page.ask(drawn) == 19
        assert await page.ask("document.querySelectorAll('.band').length") == 1
        assert await text(page, "h1") == "arithmetic-grpo"
        assert await text(page, ".state b") == "step 40 of 100"

        await page.mouse("mouseMoved", await page.middle(".chart svg"))
        reading = await text(page, "[data-test=reading]")
        assert reading in {f"Step {step}" for step in range(19, 24)}
        assert await page.ask("document.querySelectorAll('.cursor line').length") == 19
        step = int(reading.removeprefix("Step "))
        told = await page.ask(
            f"JSON.parse(document.getElementById('data').textContent).columns['train/kl'][{step - 1}]"
        )
        assert float((await legend(page, "KL divergence"))[1]) == pytest.approx(told, rel=1e-3)

        await page.click(".chart svg")
        assert (await text(page, "[data-test=reading]")).endswith("· held")
        await page.click(".bar button")
        assert await text(page, ".stepname") == f"step {step}"
        await page.ask("window.scrollTo(0, 0)")

        width = await page.ask("document.querySelector('.chart .line').getAttribute('d').length")
        for kind, right in (("mousePressed", 0.4), ("mouseMoved", 0.8), ("mouseReleased", 0.8)):
            await page.mouse(kind, await page.middle(".chart svg", right=right))
        zoomed = await page.ask("document.querySelector('.chart .line').getAttribute('d').length")
        assert 0 < zoomed < 0.7 * width
        await page.click(".bar button:not([hidden]):not(.theme) + button:not(.theme)")
        assert await page.ask("document.querySelector('.chart .line').getAttribute('d').length") == width

    visit(tmp_path, body)


def test_the_switches_change_what_is_drawn(run: Path, tmp_path: Path) -> None:
    async def body(page: Page) -> None:
        await page.open(run)
        await page.settled()
        find = "[...document.querySelectorAll('.chart')].find((card) => /KL/.test(card.innerText))"
        path = f"{find}.querySelector('.line').getAttribute('d')"
        before = await page.ask(path)
        await page.ask(f"{find}.querySelector('.switch').click()")
        logarithmic = await page.ask(path)
        assert logarithmic != before
        await set_field(page, ".bar input", "0.8")
        assert await page.ask(path) != logarithmic
        assert await page.ask("document.querySelectorAll('.faint').length") > 10
        await page.ask(f"{find}.querySelector('.item').click()")
        assert await page.ask(f"{find}.querySelectorAll('.line').length") == 1
        await page.ask("document.querySelector('.more').open = true")
        await page.settled()
        assert await page.ask("document.querySelectorAll('.more .chart .line').length") == 2
        dark = "getComputedStyle(document.body).backgroundColor"
        light = await page.ask(dark)
        await page.click(".theme")
        assert await page.ask(dark) != light

    visit(tmp_path, body)


def test_samples_can_be_paged_sorted_filtered_and_searched(run: Path, tmp_path: Path) -> None:
    async def body(page: Page) -> None:
        await page.open(run)
        where = "[data-test=position]"
        assert await text(page, where) == "1 of 320"
        await page.click(".moves button:last-child")
        assert await text(page, where) == "2 of 320"
        await page.press("ArrowRight")
        await page.press("j")
        assert await text(page, where) == "4 of 320"
        await page.press("ArrowLeft")
        await page.click(".moves button:first-child")
        assert await text(page, where) == "2 of 320"
        await page.click(".pager button:last-child")
        assert await text(page, where) == "13 of 320"
        assert await text(page, "tr.chosen .col0") == "2"

        await set_field(page, ".controls input[type=range]", 40)
        assert (await text(page, ".stepname"), await text(page, where)) == ("step 40", "1 of 8")
        await set_field(page, ".controls input[type=range]", 0)
        await set_field(page, "select[aria-label=Sort]", "worst")
        assert await text(page, ".chips .main dd") == "0"
        await set_field(page, "input[aria-label='Reward from']", "1")
        rewards = await page.ask("[...document.querySelectorAll('tbody .col2')].map((cell) => cell.innerText.trim())")
        assert set(rewards) == {"1.1"}
        await set_field(page, "input[aria-label='Reward from']", "")
        await page.press("/")
        for key in "größe":
            await page.press(key)
        found = int((await text(page, where)).rpartition(" ")[2])
        assert 0 < found < 100
        assert "Größe" in await text(page, "[data-test=tokens]")
        await set_field(page, "input[type=search]", "no completion has this")
        assert "No sample is like that" in await text(page, "tbody")

    visit(tmp_path, body)


def test_a_token_shows_its_numbers_and_colours(run: Path, tmp_path: Path) -> None:
    async def body(page: Page) -> None:
        await page.open(run)
        assert await text(page, ".tokenbar select") != ""
        colours = (
            "[...new Set([...document.querySelectorAll('.token')].map((node) => node.style.backgroundColor))].length"
        )
        assert await page.ask(colours) > 5
        await page.mouse("mouseMoved", await page.middle(".token"))
        tip = await text(page, ".tip")
        for word in ("token", "sampler", "trainer", "reference", "difference", "ratio", "version 0", '"<think>"'):
            assert word in tip
        await page.ask("document.querySelector('.tokens').focus()")
        await page.press("End")
        assert await page.ask("[...document.querySelectorAll('.token')].pop().classList.contains('picked')")
        await page.press("ArrowLeft")
        assert await page.ask("document.querySelectorAll('.token.picked').length") == 1
        assert "advantage" in await text(page, ".tip")
        assert await text(page, "[data-test=position]") == "1 of 320"  # the keys were those of the tokens
        await page.ask("document.activeElement.blur()")
        await set_field(page, ".tokenbar select", "version")
        assert "v0" in await text(page, ".tokenbar")
        assert await page.ask(colours) == 1
        before = await text(page, ".detail h3")
        await page.click(".siblings button:last-child")
        assert await text(page, ".detail h3") != before

    visit(tmp_path, body)


def hostile_report(folder: Path) -> Path:
    folder.mkdir()
    write_metrics(folder, 2)
    (group,) = make_groups(1, num_groups=1, group_size=1)
    episode, ids = group.episodes[0], encode(HOSTILE)
    odd = replace(
        with_turn(episode, token_ids=ids, logprobs=(-1.0,) * len(ids), text=HOSTILE),
        task=replace(episode.task, id=HOSTILE, answer=HOSTILE, messages=({"role": HOSTILE, "content": HOSTILE},)),
        score=replace(episode.score, parts={HOSTILE: 1.0}, failures={HOSTILE: HOSTILE}),
        ref_logprobs=None,
    )
    recorder = RolloutRecorder(folder / "rollouts", decode=decode, config=RecordConfig(), resume_step=None)
    recorder.write(1, [replace(group, episodes=(odd,))])
    return write_report(folder).path


def test_hostile_text_is_shown_as_text_and_nothing_of_it_runs(tmp_path: Path) -> None:
    report = hostile_report(tmp_path / "hostile")

    async def body(page: Page) -> None:
        await page.open(report)
        assert await page.ask("document.title") == "hostile · TorchForge report"
        shown = await page.ask("document.querySelector('[data-test=tokens]').textContent")
        assert "</script><script>document.title='broken'</script>" in shown
        assert await page.ask("document.querySelectorAll('#report script, img').length") == 0
        assert "not recorded" in await text(page, ".completion")

        assert page.errors == []
        await page.ask("(() => { const own = document.createElement('script'); own.textContent = 'document.title = 1'; "
                       "document.body.append(own); })()")  # fmt: skip
        await page.settled()
        assert await page.ask("document.title") == "hostile · TorchForge report"
        assert "Content Security Policy" in page.errors.pop()
        await page.ask("setTimeout(() => { throw new Error('seen'); }, 0)")
        await page.settled()
        assert "Error: seen" in page.errors.pop()

    visit(tmp_path, body)


def test_other_runs_and_other_screens(run: Path, tmp_path: Path) -> None:
    sft = write_report(make_sft_run(tmp_path / "sft")).path
    (tmp_path / "first").mkdir()
    write_metrics(tmp_path / "first", 1)
    (tmp_path / "first" / "config.yaml").write_text("run: {name: first}\n")
    change = {"step": 3, "key": "<i>rate</i>", "before": 1, "after": 2, "by": "forge control"}
    (tmp_path / "first" / "runtime_changes.jsonl").write_text(json.dumps(change) + "\n")
    first = write_report(tmp_path / "first").path

    async def body(page: Page) -> None:
        await page.open(run, width=390, height=844)
        assert await page.ask("document.documentElement.scrollWidth") == 390
        await page.open(run, dark=True)
        dark = await page.ask("getComputedStyle(document.body).backgroundColor")
        await page.open(sft)
        assert await page.ask("getComputedStyle(document.body).backgroundColor") != dark
        await page.settled()
        assert await legend(page, "Loss") != []
        assert await page.ask("document.querySelectorAll('.odd').length") == 1
        assert "no samples" in await text(page, "#samples")
        await page.open(first)
        await page.settled()
        assert await page.ask("document.querySelectorAll('.chart .dot').length") > 10
        changed = "Changed while the run ran: after step 3: <i>rate</i> 1 → 2 (forge control)."
        assert await page.ask("document.querySelector('.config p').textContent") == changed

    visit(tmp_path, body)
