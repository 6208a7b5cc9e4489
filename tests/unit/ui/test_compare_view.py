"""What the server says of several runs beside each other."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from forge.loops.runtime_changes import RuntimeChange, record_change
from forge.observe.jsonl import JsonlSink
from forge.ui.compare_view import better, group_by_seed, is_seed
from run_folders import CONFIG, make_grpo_run, make_sft_run
from ui_serving import Client, ui_client


def with_ui(folder: Path, body: Callable[[Client], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with ui_client(folder) as client:
            await body(client)

    asyncio.run(inside())


def write_run(folder: Path, rewards: list[float], *, seed: int = 7, more: str = "") -> Path:
    folder.mkdir(parents=True)
    config = CONFIG.format(max_steps=len(rewards)).replace("seed: 7", f"seed: {seed}")
    (folder / "config.yaml").write_text(config.replace("arithmetic-grpo", folder.name) + more)
    sink = JsonlSink(folder / "metrics.jsonl")
    for step, reward in enumerate(rewards, start=1):
        sink.write(step, {"rollout/reward_mean": reward, "train/kl": 0.1})
    sink.close()
    return folder


async def ask(client: Client, path: str, *runs: str) -> Any:
    query = "&".join(f"run={run}" for run in runs)
    return await client.get(f"{path}?{query}")


def test_values_are_the_last_ones_and_the_best_with_their_steps(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.1, 0.9, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    write_run(tmp_path / "b", [math.nan, 0.25])

    async def body(client: Client) -> None:
        found = await ask(client, "/api/compare", "a", "b", "gone")
        assert found["missing"] == ["gone"]
        assert [run["summary"]["id"] for run in found["runs"]] == ["a", "b"]
        (reward,) = [row for row in found["values"] if row["key"] == "rollout/reward_mean"]
        first, second = reward["cells"]
        assert first == {"final": 0.65, "averaged": 2, "step": 8, "low": [0.1, 1], "high": [0.9, 2]}
        assert second == {"final": 0.25, "averaged": 1, "step": 2, "low": [0.25, 2], "high": [0.25, 2]}
        assert reward["better"] == "higher"
        (kl,) = [row for row in found["values"] if row["key"] == "train/kl"]
        assert kl["better"] == ""

    with_ui(tmp_path, body)


def test_charts_are_those_that_any_run_has(tmp_path: Path) -> None:
    make_grpo_run(tmp_path / "grpo", num_steps=12)
    make_sft_run(tmp_path / "sft", num_steps=3)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()

    async def body(client: Client) -> None:
        found = await ask(client, "/api/compare", "grpo", "sft", "empty")
        titles = {chart["title"] for chart in found["charts"]}
        assert {"Reward", "Gradient norm", "Held-out evaluation"} <= titles
        (norm,) = [row for row in found["values"] if row["key"] == "train/grad_norm"]
        assert [cell is None for cell in norm["cells"]] == [False, False, True]

    with_ui(tmp_path, body)


def test_runs_that_differ_only_in_seed_name_and_folder_are_one_group(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [1.0], seed=1, more="  learning_rate: 1.0e-4\n")
    write_run(tmp_path / "b", [1.0], seed=2, more="  learning_rate: 1.0e-4\n")
    write_run(tmp_path / "c", [1.0], seed=1, more="  learning_rate: 2.0e-4\n")
    for name in ("d", "e"):
        write_run(tmp_path / name, [1.0])
        (tmp_path / name / "config.yaml").unlink()

    async def body(client: Client) -> None:
        found = await ask(client, "/api/compare", "a", "b", "c", "d", "e")
        assert found["groups"] == [[0, 1], [2], [3], [4]]

    with_ui(tmp_path, body)
    assert is_seed("prompts.shuffle_seed")
    assert not is_seed("data.seed_prompts")
    assert group_by_seed([{"run.seed": "1"}, {"run.seed": "2"}]) == [[0], [1]]  # nothing says that they are alike


def test_configurations_say_what_differs_where_it_is_from_and_what_was_changed(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [1.0], more="  learning_rate: 1.0e-4\n")
    write_run(tmp_path / "b", [1.0], seed=0)
    record_change(tmp_path / "a", RuntimeChange(5, "rollout.staleness", 2, 2, 1, "forge control"))

    async def body(client: Client) -> None:
        found = await ask(client, "/api/compare/config", "a", "b")
        rows = {row["key"]: row for row in found["rows"]}
        assert rows["run.seed"]["values"] == ["7", "0"]
        assert rows["run.seed"]["origins"] == ["set", "preset"]
        assert rows["run.seed"]["isSeed"]
        assert rows["training.learning_rate"]["values"] == ["0.0001", None]
        assert rows["training.learning_rate"]["origins"] == ["set", ""]
        assert rows["rollout.staleness"]["changes"] == [[[5, 1]], []]
        assert found["presets"] == ["tiny + dapo", "tiny + dapo"]
        assert found["notes"] == []

    with_ui(tmp_path, body)


def test_damaged_configurations_are_noted_and_the_rest_is_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [1.0])
    write_run(tmp_path / "b", [1.0])
    (tmp_path / "b" / "config.yaml").write_text("run: [unclosed")
    (tmp_path / "b" / "runtime_changes.jsonl").write_text('{"key": 3}\n{"key": "x", "step": "y"}\nnot json\n')

    async def body(client: Client) -> None:
        found = await ask(client, "/api/compare/config", "a", "b")
        assert found["notes"] == ["config.yaml could not be read in full, so only its text is shown."]
        assert {row["values"][1] for row in found["rows"]} == {None}
        assert (await ask(client, "/api/compare", "a", "b"))["groups"] == [[0], [1]]

    with_ui(tmp_path, body)


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("", 400, None), ("&".join(f"run={number}" for number in range(9)), 400, None), ("run=../a", 200, None),
    ],
)  # fmt: skip
def test_how_many_runs_are_compared_is_bounded(tmp_path: Path, query: str, status: int, code: str | None) -> None:
    write_run(tmp_path / "a", [1.0])

    async def body(client: Client) -> None:
        async with client.raw(f"/api/compare?{query}") as answer:
            assert answer.status == status
            found = await answer.json()
            assert found.get("missing", []) == (["../a"] if status == 200 else [])
        async with client.raw("/api/compare/config?run=../a") as answer:
            assert answer.status == 404

    with_ui(tmp_path, body)


def test_a_page_hears_of_several_runs(tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / name, [1.0, 2.0]) for name in "ab")

    async def body(client: Client) -> None:
        tables = [(await client.get("/api/metrics", run=name))["table"] for name in "ab"]
        query = f"run=a&run=b&after=2&after=1&table={tables[0]}&table={tables[1]}"
        async with client.events_of(query) as following:
            assert {(await following("rows"))["run"] for _ in range(2)} == {"a", "b"}  # in whatever order
            sink = JsonlSink(second / "metrics.jsonl", resume_step=2)
            sink.write(3, {"train/kl": 0.5})
            sink.close()
            rows = await following("rows")
            assert (rows["run"], rows["steps"][-1]) == ("b", 3)

    with_ui(tmp_path, body)
    assert first.exists()


@pytest.mark.parametrize(
    "query", ["run=a&run=a&after=1", "run=a&after=x", "run=a&table=1.5", "run=a&table=-9", "&".join(["run=a"] * 9)]
)
def test_wrong_parameters_of_the_news_are_refused(tmp_path: Path, query: str) -> None:
    write_run(tmp_path / "a", [1.0])

    async def body(client: Client) -> None:
        async with client.raw(f"/api/events?{query}") as answer:
            assert answer.status == 400
            assert json.loads(await answer.text())["error"]["message"]

    with_ui(tmp_path, body)


@pytest.mark.parametrize(
    ("key", "direction"),
    [("evaluation/pass@4", "higher"), ("rollout/tokens_per_s", "higher"), ("validation/loss", "lower"), ("x", "")],
)
def test_the_better_direction_is_known_of_few_metrics(key: str, direction: str) -> None:
    assert better(key) == direction
