"""What the server says of rollouts: lists, single samples, groups, and what a page hears while a run writes them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_folders import make_agent_run
from episodes import with_turn
from forge.config import RecordConfig
from forge.rollout.record import RolloutRecorder
from forge.ui.live_run import LiveRun
from forge.ui.rollouts.index import CELLS_PER_ROW, IndexLimits, RolloutIndex
from forge.ui.rollouts.query import Filters, SampleName
from forge.ui.rollouts.view import GroupLimits, RolloutView, Window
from run_folders import decode, make_groups, make_grpo_run, trainer_logprobs, write_metrics, write_other_rollouts
from ui_serving import Client, ui_client

Body = Callable[[Client], Awaitable[None]]


def with_ui(folder: Path, body: Body, **options: Any) -> None:
    async def inside() -> None:
        async with ui_client(folder, **options) as client:
            await body(client)

    asyncio.run(inside())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_grpo_run(folder / "grpo", num_steps=30)
    write_other_rollouts(folder / "grpo", range(28, 31))
    make_agent_run(folder / "agents")
    (folder / "agents" / "config.yaml").write_text("algorithm: {preset: grpo}\n")
    (folder / "none").mkdir()
    write_metrics(folder / "none", 2)
    return folder


async def names_of(client: Client, **parameters: Any) -> list[str]:
    """The names of all samples of a list, page by page."""
    found: list[str] = []
    while True:
        page = await client.get("/api/rollouts", offset=len(found), limit=50, **parameters)
        found += [row["name"] for row in page["rows"]]
        if len(found) >= page["numFound"]:
            return found


def test_a_list_page_by_page(runs: Path) -> None:
    async def body(client: Client) -> None:
        first = await client.get("/api/rollouts", run="grpo")
        assert (first["numRows"], first["numFound"], first["progress"], len(first["rows"])) == (264, 264, 1.0, 50)
        names = await names_of(client, run="grpo")
        assert len(set(names)) == 264
        assert names[:3] == ["evaluation.30.29.0", "evaluation.30.29.1", "evaluation.30.29.2"]
        assert names[-1] == "step.1.1.3"
        row = first["rows"][4]
        assert (row["kind"], row["step"], row["outcome"], row["ending"]) == ("step", 30, "trained", "stop")
        assert row["text"].startswith("<think>")
        assert "\n" not in row["text"]
        around = await client.get("/api/rollouts", run="grpo", at=names[117], limit=20)
        assert (around["offset"], around["at"]) == (100, 117)
        assert around["rows"][17]["name"] == names[117]
        gone = await client.get("/api/rollouts", run="grpo", at="step.99.1.1", limit=20)
        assert (gone["offset"], gone["at"]) == (0, None)
        beyond = await client.get("/api/rollouts", run="grpo", offset=9999, limit=50)
        assert (beyond["offset"], len(beyond["rows"])) == (250, 14)
        none = await client.get("/api/rollouts", run="none")
        assert (none["numRows"], none["rows"], none["histograms"]["reward"]) == (0, [], None)

    with_ui(runs, body)


def test_filters_search_and_order_together(runs: Path) -> None:
    async def body(client: Client) -> None:
        found: dict[str, Any] = {"searched": 0.0}
        while found["searched"] < 1:
            found = await client.get(
                "/api/rollouts", run="grpo", q="GRÖßE", reward="1~", step="10~30", outcome="trained", sort="long"
            )
        assert 0 < found["numFound"] < 60
        for row in found["rows"]:
            assert row["reward"] >= 1
            assert "Größe" in row["text"]
            assert 10 <= row["step"] <= 30
        assert sum(found["histograms"]["tokens"]["counts"]) == found["numFound"]
        lengths = [row["tokens"] for row in found["rows"]]
        assert lengths == sorted(lengths, reverse=True)
        prompt = await client.get("/api/rollouts", run="grpo", prompt="arithmetic:0:10", sort="oldest")
        assert {row["step"] for row in prompt["rows"]} == {6}

    with_ui(runs, body)


def test_a_sample_with_its_group_and_its_gradient(runs: Path) -> None:
    async def body(client: Client) -> None:
        found = await client.get("/api/rollouts/sample", run="grpo", name="step.7.12.2")
        item, gradient = found["item"], found["gradient"]
        line = json.loads((runs / "grpo/rollouts/step_000007.jsonl").read_text().splitlines()[2])
        assert (item["step"], item["group"], item["index"]) == (7, 12, 2)
        assert "".join(item["pieces"]) == "".join(line["pieces"])
        assert found["prompts"][item["prompt"]][1]["content"] == line["prompt"][1]["content"]
        assert [member["name"] for member in found["group"]] == [f"step.7.12.{index}" for index in range(4)]
        assert gradient["rule"]["kind"] == "clip"
        assert gradient["hasWeight"]
        total = sum(len(json.loads(text)["token_ids"]) for text in (runs / "grpo/rollouts/step_000007.jsonl").open())
        assert gradient["tokens"]["weight"][0] == pytest.approx(1 / total, rel=1e-5)
        held_out = await client.get("/api/rollouts/sample", run="grpo", name="evaluation.30.29.1")
        assert held_out["gradient"]["none"] == "held-out prompts are not trained on"
        fruitless = await client.get("/api/rollouts/sample", run="grpo", name="fruitless.30.29.1")
        assert fruitless["gradient"]["none"] == "its group was not trained on: all rewards are 0"

    with_ui(runs, body)


def test_a_long_sample_is_cut(tmp_path: Path) -> None:
    (group,) = make_groups(1, num_groups=1, group_size=2)
    ids = group.episodes[0].turns[0].token_ids * 10
    long = with_turn(group.episodes[0], token_ids=ids, logprobs=(-1.0,) * len(ids))
    recorder = RolloutRecorder(tmp_path / "rollouts", decode=decode, config=RecordConfig(), resume_step=None)
    recorder.write(1, [replace(group, episodes=(replace(long, ref_logprobs=None), group.episodes[1]))])
    view = RolloutView(tmp_path)
    found = view.sample(SampleName(("step", 1), 0, 0), limit=100, metric=lambda name, step: None)
    assert found is not None
    assert (len(found["item"]["pieces"]), len(found["gradient"]["tokens"]["pull"])) == (100, 100)
    assert found["item"]["numTokens"] == len(ids) > 300
    assert found["notes"] == ("Of long completions only the first 100 tokens are shown.",)


def test_a_group_side_by_side(runs: Path) -> None:
    async def body(client: Client) -> None:
        found = await client.get("/api/rollouts/group", run="agents", name="step.2.1.0")
        assert (found["numMembers"], [each["name"] for each in found["members"]]) == (2, ["step.2.1.0", "step.2.1.1"])
        turns = found["members"][1]["item"]["turns"]
        assert [turn["break"] for turn in turns] == [None, None, "template", None, None]
        trainer = found["members"][1]["item"]["trainer"]
        assert trainer[turns[4]["start"] :] == [None] * (turns[4]["end"] - turns[4]["start"])  # it did not get them
        assert found["members"][0]["gradient"]["tokens"]["gradient"][turns[4]["start"]] is None

    with_ui(runs, body)


@pytest.mark.parametrize(
    ("path", "parameters", "status"),
    [
        ("", {"run": "no"}, 404), ("", {"run": "grpo", "sort": "x"}, 400), ("", {"run": "grpo", "limit": "201"}, 400),
        ("", {"run": "grpo", "limit": "0"}, 400), ("", {"run": "grpo", "offset": "-1"}, 400),
        ("", {"run": "grpo", "at": "../x"}, 400), ("", {"run": "grpo", "reward": "a~b"}, 400),
        ("", {"run": "grpo", "flags": "x"}, 400), ("", {"run": "grpo", "q": "x" * 500}, 400),
        ("/sample", {"run": "grpo"}, 400), ("/sample", {"run": "grpo", "name": "step.7.12.99"}, 404),
        ("/sample", {"run": "grpo", "name": "step.7.12"}, 400),
        ("/sample", {"run": "../grpo", "name": "step.7.12.2"}, 404),
        ("/sample", {"run": "grpo", "name": "step.7.12.2", "tokens": "63"}, 400),
        ("/sample", {"run": "grpo", "name": "step.7.12.2", "tokens": "200000"}, 400),
        ("/sample", {"run": "grpo", "name": "discarded/step.7.12.2"}, 400),
        ("/group", {"run": "grpo", "name": "evaluation.999.0.0"}, 404),
        ("/group", {"run": "none", "name": "step.1.0.0"}, 404),
        ("/other", {"run": "grpo"}, 404),
    ],
)  # fmt: skip
def test_wrong_requests_are_refused(runs: Path, path: str, parameters: dict[str, str], status: int) -> None:
    async def body(client: Client) -> None:
        async with client.raw(f"/api/rollouts{path}", **parameters) as answer:
            assert answer.status == status
            assert (await answer.json())["error"]["message"]

    with_ui(runs, body)


def test_a_page_hears_of_rollouts_once_it_has_asked_for_them(tmp_path: Path) -> None:
    folder = make_grpo_run(tmp_path / "run", num_steps=3, max_steps=10)

    async def body(client: Client) -> None:
        async with client.events(run="run") as following:
            assert (await following("run"))["rollouts"] is None
            assert (await client.get("/api/rollouts", run="run"))["numRows"] == 24
            recorder = RolloutRecorder(folder / "rollouts", decode=decode, config=RecordConfig(), resume_step=3)
            recorder.write(4, make_groups(4, num_groups=1, group_size=2))
            while ((await following("run"))["rollouts"] or {}).get("numRows") != 26:
                pass
            newest = await client.get("/api/rollouts", run="run", limit=1)
            assert newest["rows"][0]["name"] == "step.4.3.0"

    with_ui(tmp_path, body)


def test_an_index_in_the_making_answers_with_what_it_has(tmp_path: Path) -> None:
    folder = make_grpo_run(tmp_path / "run", num_steps=20)
    view = RolloutView(folder, index=RolloutIndex(folder, limits=IndexLimits(slice_files=2)))
    filters, window = Filters(), Window()
    first = view.find(filters, "newest", window)
    assert (first["numRows"], first["progress"]) == (16, 0.1)
    linked = view.find(filters, "newest", replace(window, at=SampleName(("step", 5), 9, 3)))
    assert (linked["at"], linked["numRows"]) == (23, 24)
    sample = view.sample(SampleName(("step", 3), 5, 0), limit=10, metric=lambda name, step: None)
    assert sample is not None
    assert sample["item"]["step"] == 3


def test_an_evaluation_has_its_samples(tmp_path: Path) -> None:
    make_grpo_run(tmp_path / "run", num_steps=1)
    write_other_rollouts(tmp_path / "run", [1])
    folder = tmp_path / "evaluation"
    folder.mkdir()
    (tmp_path / "run" / "rollouts" / "evaluation_000001.jsonl").rename(folder / "samples.jsonl")
    (folder / "results.json").write_text(json.dumps({"time": 1.0, "figures": {"reward": {"value": 0.5}}}))

    async def body(client: Client) -> None:
        found = await client.get("/api/rollouts", run="evaluation")
        assert [row["name"] for row in found["rows"]] == [f"evaluation.0.0.{index}" for index in range(4)]
        sample = await client.get("/api/rollouts/sample", run="evaluation", name="evaluation.0.0.3")
        assert sample["item"]["index"] == 3
        assert (await client.get("/api/run", run="evaluation"))["hasRollouts"]

    with_ui(tmp_path, body)


def test_nothing_is_written_into_the_folder_of_a_run(tmp_path: Path) -> None:
    folder = make_grpo_run(tmp_path / "run", num_steps=3)

    def state() -> dict[str, tuple[int, int]]:
        paths = [folder, *folder.rglob("*")]
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in paths}

    before = state()

    async def body(client: Client) -> None:
        for parameters in ({}, {"q": "result"}, {"sort": "gap"}):
            await client.get("/api/rollouts", run="run", **parameters)
        await client.get("/api/rollouts/sample", run="run", name="step.1.0.0")
        await client.get("/api/rollouts/group", run="run", name="step.1.0.0")

    with_ui(tmp_path, body)
    assert state() == before


def test_a_large_group_is_cut(tmp_path: Path) -> None:
    groups = make_groups(1, num_groups=1, group_size=6)
    recorder = RolloutRecorder(tmp_path / "rollouts", decode=decode, config=RecordConfig(), resume_step=None)
    recorder.write(1, groups, trainer_logprobs(groups))
    for limits, expected in ((GroupLimits(max_members=3), 3), (GroupLimits(max_bytes=1), 1)):  # one is always shown
        view = RolloutView(tmp_path, limits=limits)
        found = view.group(SampleName(("step", 1), 0, 5), metric=lambda name, step: None)
        assert found is not None
        assert (found["numMembers"], len(found["members"])) == (6, expected)


def test_lists_and_searches_that_are_kept_are_few(tmp_path: Path) -> None:
    make_grpo_run(tmp_path / "run", num_steps=2)
    view = RolloutView(tmp_path / "run")
    for number in range(30):
        view.find(
            Filters(text=f"text {number}", ranges=(("step", (0.0, number)),)),
            "newest",
            Window(),
        )
    assert len(view._lists) <= 4
    assert len(view._searches) <= 4


def test_rollouts_count_in_the_memory_of_a_run(tmp_path: Path) -> None:
    make_grpo_run(tmp_path / "run", num_steps=3)
    run = LiveRun(tmp_path / "run")
    while run.advance():
        pass
    before = run.num_cells
    run.rollouts.index.advance()
    assert run.num_cells - before == 24 * CELLS_PER_ROW
    assert run.metric_at("train/grad_norm", 2) is not None
    for name, step in (("train/grad_norm", 9), ("train/grad_norm", 0), ("train/none", 2)):
        assert run.metric_at(name, step) is None
