"""The rollouts of a run in a real browser: finding one, reading it, its tokens, its group, and a run that goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_folders import make_agent_run
from devtools import Page, find_browser, open_browser
from episodes import with_turn
from forge.config import RecordConfig
from forge.rollout.record import RolloutRecorder
from forge.trainer.checkpoint_folder import WriterLock
from forge.ui.server import UiOptions, UiServer, serve_ui
from run_folders import (
    CONFIG,
    HOSTILE,
    decode,
    encode,
    make_groups,
    make_grpo_run,
    trainer_logprobs,
    write_metrics,
    write_other_rollouts,
)
from ui_serving import LIMIT_S, OFTEN_S

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no chromium or google-chrome on PATH")

Visit = Callable[[Page, UiServer], Awaitable[None]]
COUNT, POSITION, DETAIL = "[data-test=count]", "[data-test=position]", "[data-test=detail]"


def visit(folder: Path, scratch: Path, body: Visit) -> None:
    """Run `body` with a browser and a server. Fail for what the page complained about, or asked others for."""

    async def inside() -> None:
        runs = UiOptions(folder, interval_s=OFTEN_S)
        async with asyncio.timeout(LIMIT_S), serve_ui(runs) as ui, open_browser(scratch) as page:
            await body(page, ui)
            assert page.errors == []
            foreign = [url for url in page.requests if not url.startswith((f"{ui.base_url}/", "data:"))]
            assert foreign == []

    asyncio.run(inside())


async def text(page: Page, selector: str) -> str:
    return str(await page.ask(f"document.querySelector({selector!r}).innerText"))


async def until_text(page: Page, selector: str, expected: str) -> None:
    await page.until(f"document.querySelector({selector!r})?.innerText.includes({expected!r})")


async def set_field(page: Page, selector: str, value: object) -> None:
    await page.ask(
        f"(() => {{ const field = document.querySelector({selector!r}); field.value = {value!r}; "
        "field.dispatchEvent(new Event('input')); field.dispatchEvent(new Event('change')); })()"
    )


async def enter(page: Page, ui: UiServer, path: str, **options: Any) -> None:
    """Open an address of the server with the cookie that the first visit gave."""
    if not page.requests:
        await page.open(ui.url())
        await page.until("document.querySelector('[data-run]')")
    await page.open(f"{ui.base_url}{path}", **options)
    await page.until("document.querySelector('.rollouts .detail h3')")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rollouts") / "runs"
    make_grpo_run(folder / "grpo", num_steps=30)
    write_other_rollouts(folder / "grpo", range(28, 31))
    make_agent_run(folder / "agents")
    (folder / "agents" / "config.yaml").write_text("run: {name: agents}\nalgorithm: {preset: grpo}\n")
    return folder


def test_rollouts_are_found_and_the_address_has_where(runs: Path, tmp_path: Path) -> None:
    async def body(page: Page, ui: UiServer) -> None:
        await enter(page, ui, "/run/grpo?view=rollouts")
        assert await text(page, COUNT) == "264 rollouts"
        assert await text(page, f"{DETAIL} h3") == "Evaluation after step 30 · group 29 · sample 0"
        await set_field(page, "select[aria-label=Show]", "trained")
        await until_text(page, COUNT, "240 of 264")
        await set_field(page, "input[aria-label='Reward from']", "1")
        await until_text(page, "[data-test=active]", "Reward: at least 1")
        await page.press("/")
        for key in "größe":
            await page.press(key)
        await until_text(page, "[data-test=active]", "“größe”")
        lines = [json.loads(line) for path in runs.glob("grpo/rollouts/step_*") for line in path.open()]
        found = sum(line["reward"] >= 1 and "Größe" in line["text"] for line in lines)
        await until_text(page, COUNT, f"{found} of 264 rollouts")
        await page.ask("document.activeElement.blur()")
        for key in ("j", "ArrowRight", "n", "k"):
            await page.press(key)
        await until_text(page, POSITION, f"3 of {found}")
        await page.until(f"document.querySelector('{DETAIL} .tokens')?.innerText.includes('Größe')")
        chosen = await page.ask("document.querySelector('tr.chosen').dataset.sample")
        await page.until(f"location.search.includes('sample={chosen}') && location.search.includes('reward=1')")
        address, name = await page.ask("location.href"), await text(page, f"{DETAIL} h3")
        await page.open(address)
        await until_text(page, f"{DETAIL} h3", name)
        await until_text(page, POSITION, f"3 of {found}")
        assert await page.ask("document.querySelector('tr.chosen').dataset.sample") == chosen
        await page.click("[data-test=active] .chip:last-child")  # clear all
        await until_text(page, COUNT, "264 rollouts")
        assert await page.ask("document.querySelector('tr.chosen').dataset.sample") == chosen  # it is among them
        await page.ask("document.querySelector('[data-sample]').click()")
        await page.until("document.querySelector('[data-test=position]').innerText === '1 of 264'")
        for _ in range(50):
            await page.press("j")
        await until_text(page, POSITION, "51 of 264")  # over the edge of a page
        await until_text(page, "[data-test=pages]", "page 2 of 6")
        await page.press("k")
        await until_text(page, POSITION, "50 of 264")
        assert await page.ask("document.documentElement.scrollWidth") == 1280

    visit(runs, tmp_path, body)


def test_charts_histograms_and_rollouts_lead_to_each_other(runs: Path, tmp_path: Path) -> None:
    async def body(page: Page, ui: UiServer) -> None:
        await enter(page, ui, "/run/grpo?view=rollouts")
        left, right = [await page.middle(".histogram", right=part) for part in (0.02, 0.28)]
        for kind, place in (("mousePressed", left), ("mouseMoved", right), ("mouseReleased", right)):
            await page.mouse(kind, place)
        await until_text(page, "[data-test=active]", "Step: 1 to 9")
        await until_text(page, COUNT, "72 of 264")
        await page.ask("document.querySelector('.histogram').dispatchEvent(new MouseEvent('dblclick'))")
        await until_text(page, COUNT, "264 rollouts")
        await page.open(f"{ui.base_url}/run/grpo")
        await page.until("document.querySelector('.chart .line')")
        await page.click(".chart svg")
        step = (await text(page, "[data-test=reading]")).split()[1]
        await page.ask(
            "[...document.querySelectorAll('.bar button')].find((node) => node.innerText === 'its samples').click()"
        )
        await until_text(page, COUNT, "8 of 264")
        await until_text(page, f"{DETAIL} h3", f"Step {step} · ")
        await page.ask(
            "[...document.querySelectorAll('.hop')].find((node) => node.innerText === 'on the charts').click()"
        )
        await until_text(page, "[data-test=reading]", f"Step {step} · held")
        await page.ask("history.back()")
        await until_text(page, f"{DETAIL} h3", f"Step {step} · ")
        await page.ask(
            "[...document.querySelectorAll('.hop')].find((node) => node.innerText === 'this prompt').click()"
        )
        await until_text(page, "[data-test=active]", "prompt: arithmetic:0:")
        prompt = (await text(page, "[data-test=active]")).split()[1]
        lines = [json.loads(line) for path in runs.glob("grpo/rollouts/*.jsonl") for line in path.open()]
        found = sum(line["prompt_id"] == prompt for line in lines)
        await until_text(page, COUNT, f"{found} of 264")

    visit(runs, tmp_path, body)


def test_a_token_says_what_the_step_did_to_it(runs: Path, tmp_path: Path) -> None:
    async def body(page: Page, ui: UiServer) -> None:
        await enter(page, ui, "/run/grpo?view=rollouts&outcome=trained&sort=gap")
        await until_text(page, "[data-test=lesson]", "tokens in the loss")
        modes = await page.ask("[...document.querySelector('.tokenbar select').options].map(({ value }) => value)")
        assert {"difference", "sampler", "advantage", "reference", "gradient", "ratio", "version"} <= set(modes)
        colours = "new Set([...document.querySelectorAll('.token')].map((node) => node.style.backgroundColor)).size"
        for mode, at_least in (("difference", 5), ("gradient", 3), ("ratio", 5), ("advantage", 1)):
            await set_field(page, ".tokenbar select", mode)
            assert await page.ask(colours) >= at_least, mode
        name = await page.ask("document.querySelector('tr.chosen').dataset.sample")
        sample = await page.ask(f"fetch('/api/rollouts/sample?run=grpo&name={name}').then((answer) => answer.json())")
        tokens = sample["gradient"]["tokens"]
        gaps = [abs(a - b) for a, b in zip(sample["item"]["trainer"], sample["item"]["sampler"], strict=True)]
        widest = gaps.index(max(gaps))
        await page.ask(f"document.querySelectorAll('.token')[{widest}].click()")
        await until_text(page, "[data-test=lesson]", f"TOKEN {widest + 1}")
        lesson = await page.ask(
            "Object.fromEntries([...document.querySelectorAll('.lesson tr')].map((row) => "
            "[row.children[0].innerText, [row.children[1].innerText, row.children[2].innerText]]))"
        )
        shown = float(lesson["ratio r"][0].replace("−", "-"))
        assert shown == pytest.approx(tokens["ratio"][widest], rel=1e-3)
        bound = tokens["bound"][widest]
        expected = {"": "inside", "low": "clipped below", "high": "clipped above", "outside": "not clipped"}
        assert lesson["clipping"][0] == expected[bound]
        assert lesson["weight"][0].startswith("1 / ")
        total = float(lesson["gradient"][0].replace("−", "-"))
        assert total == pytest.approx(tokens["gradient"][widest], rel=1e-3)
        await page.ask("document.querySelector('.tokens').focus()")
        await page.press("Home")
        await until_text(page, "[data-test=lesson]", "TOKEN 1:")
        await page.press("ArrowRight")
        await until_text(page, "[data-test=lesson]", "TOKEN 2:")
        assert await page.ask("document.querySelector('tr.chosen').dataset.sample") == name  # the keys are the tokens'
        await page.ask("document.activeElement.blur()")
        await set_field(page, "select[aria-label=Show]", "evaluation")
        await until_text(page, "[data-test=lesson]", "Nothing: held-out prompts are not trained on.")
        await page.mouse("mouseMoved", await page.middle(".token"))
        assert '"<think>"' in await text(page, ".tip")

    visit(runs, tmp_path, body)


def test_conversations_and_groups_side_by_side(runs: Path, tmp_path: Path) -> None:
    async def body(page: Page, ui: UiServer) -> None:
        await enter(page, ui, "/run/agents?view=rollouts&tool=lookup")
        await page.until("document.querySelectorAll('.detail .turn').length === 5")
        assert "calls lookup" in await text(page, ".detail .call")
        assert "17+25" in await text(page, ".detail .call")
        assert "malformed call" in await text(page, f"{DETAIL} .call.bad")
        assert await page.ask("document.querySelectorAll('.detail .turn.depth1').length") == 2
        await page.ask("document.querySelectorAll('.detail .turn')[1].querySelector('.token').click()")
        await until_text(page, "[data-test=lesson]", "clipping")
        lost = "document.querySelectorAll('.detail .turn')[4].querySelector('.token')"
        assert await page.ask(f"{lost}.style.backgroundColor") == ""
        await page.ask(f"{lost}.click()")
        await until_text(page, "[data-test=lesson]", "It is not in the loss")
        await page.press("c")
        await page.until("document.querySelectorAll('.abreast .column').length === 2")
        assert await page.ask("document.querySelectorAll('.abreast .turn').length") == 10
        await page.ask("document.querySelectorAll('.column')[1].querySelector('.token').click()")
        await until_text(page, "[data-test=lesson]", "SAMPLE 1, TOKEN 1")
        await page.ask("document.querySelectorAll('.column header button')[1].click()")
        await until_text(page, f"{DETAIL} h3", "sample 1")
        await page.until("document.querySelectorAll('.column')[1]?.classList.contains('own')")
        await page.until("location.search.includes('side=1')")
        await page.press("c")
        await page.until("!document.querySelector('.abreast')")

    visit(runs, tmp_path, body)


def test_a_run_that_goes_on_is_followed(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "live"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG.format(max_steps=100))
    write_metrics(folder, 1)
    lock = WriterLock(folder)
    recorder = RolloutRecorder(folder / "rollouts", decode=decode, config=RecordConfig(), resume_step=None)

    def step(number: int) -> None:
        groups = make_groups(number, num_groups=2, group_size=3)
        recorder.write(number, groups, trainer_logprobs(groups, seed=number))

    async def body(page: Page, ui: UiServer) -> None:
        await page.open(ui.url())
        await page.until("document.querySelector('[data-run]')")
        await page.open(f"{ui.base_url}/run/live?view=rollouts")
        await until_text(page, ".rolloutrows", "This run has no rollouts yet")
        step(1)
        await until_text(page, COUNT, "6 rollouts")
        await until_text(page, f"{DETAIL} h3", "Step 1 · group 0 · sample 0")
        await page.press("j")
        await until_text(page, f"{DETAIL} h3", "Step 1 · group 0 · sample 1")
        for number in range(2, 5):
            step(number)
            await until_text(page, COUNT, f"{6 * number} rollouts")
            await until_text(page, POSITION, f"{6 * (number - 1) + 2} of {6 * number}")
        assert await text(page, "[data-sample] .col0") == "4"
        assert await text(page, f"{DETAIL} h3") == "Step 1 · group 0 · sample 1"
        RolloutRecorder(folder / "rollouts", decode=decode, config=RecordConfig(), resume_step=2)  # a resumed run
        await until_text(page, COUNT, "12 rollouts")
        await page.open(f"{ui.base_url}/run/live?view=rollouts&sample=step.4.6.0")
        await until_text(page, "[data-test=gone]", "not any more")
        page.errors.remove(next(error for error in page.errors if "404" in error))

    try:
        visit(tmp_path / "runs", tmp_path, body)
    finally:
        lock.release()


def hostile_run(folder: Path) -> None:
    """A run whose texts would do harm in a page that took them for markup."""
    folder.mkdir(parents=True)
    write_metrics(folder, 1)
    (folder / "config.yaml").write_text(CONFIG.format(max_steps=1))
    (group,) = make_groups(1, num_groups=1, group_size=2)
    ids = encode(HOSTILE)
    odd = replace(
        with_turn(group.episodes[0], token_ids=ids, logprobs=(-1.0,) * len(ids), text=HOSTILE),
        task=replace(group.task, id=HOSTILE, answer=HOSTILE, messages=({"role": HOSTILE, "content": HOSTILE},)),
        score=replace(group.episodes[0].score, parts={HOSTILE: 1.0}, failures={HOSTILE: HOSTILE}),
        ref_logprobs=None,
    )
    recorder = RolloutRecorder(folder / "rollouts", decode=decode, config=RecordConfig(), resume_step=None)
    recorder.write(1, [replace(group, episodes=(odd, group.episodes[1]))])
    path = folder / "rollouts" / "step_000001.jsonl"
    first, second = path.read_text().split("\n")[:2]
    changes = {"outcome": HOSTILE[:30], "ending": HOSTILE[:30], "reason": HOSTILE}
    path.write_text(f"{json.dumps(json.loads(first) | changes)}\n{second}\n")


@pytest.mark.parametrize("is_dark", [False, True])
def test_hostile_text_narrow_and_wide_screens(runs: Path, tmp_path: Path, is_dark: bool) -> None:
    folder = tmp_path / "runs"
    hostile_run(folder / "hostile")
    for name in ("grpo", "agents"):
        (folder / name).mkdir()
        for path in (runs / name).rglob("*"):
            target = folder / name / path.relative_to(runs / name)
            target.mkdir() if path.is_dir() else target.write_bytes(path.read_bytes())

    async def body(page: Page, ui: UiServer) -> None:
        for width in (390, 1400):
            for path in ("hostile?view=rollouts&sort=best", "grpo?view=rollouts", "agents?view=rollouts&side=1"):
                await enter(page, ui, f"/run/{path}", width=width, dark=is_dark)
                await page.until("document.querySelector('.detail .token')")
                assert await page.ask("document.documentElement.scrollWidth") == width, path
                await page.ask(
                    "document.querySelectorAll('.rolloutbar details').forEach((node) => { node.open = true; })"
                )
                assert await page.ask("document.documentElement.scrollWidth") == width, path
        await enter(page, ui, "/run/hostile?view=rollouts&sample=step.1.0.0", width=1400, dark=is_dark)
        await until_text(page, f"{DETAIL} .tokens", "</script><script>")
        await page.ask("document.querySelector('.token').click()")
        await page.settled()
        assert await page.ask("document.querySelectorAll('main script, main img').length") == 0
        assert "broken" not in await page.ask("document.title")
        await set_field(page, "input[aria-label='Search rollouts']", "onerror=alert(1)")
        await until_text(page, COUNT, "1 of 2 rollouts")

    visit(folder, tmp_path, body)
