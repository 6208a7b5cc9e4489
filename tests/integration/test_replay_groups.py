"""`forge replay --group`: groups are sampled again bit for bit, and a difference has its cause."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge.cli import main
from forge.config import GRPOConfig
from forge.errors import ReplayError
from forge.loops.replay.bisecting import bisect_run
from forge.loops.replay.groups import GroupResult, resample_group
from forge.loops.replay.recorded import RecordedRun
from forge.loops.run_paths import run_dir
from forge.rollout.step_log import step_path
from forge.rollout.step_record import pack, unpack
from grpo_runs import config, train_here
from local_services import services_here


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> GRPOConfig:
    chosen = config(tmp_path_factory.mktemp("groups") / "plain", "training.max_steps=3", "checkpointing.keep=3")
    train_here(chosen)
    return chosen


@pytest.fixture
def copied(plain: GRPOConfig, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_dir(plain), tmp_path / "run"))


def resample(folder: Path, number: int) -> GroupResult:
    with services_here():
        return asyncio.run(resample_group(RecordedRun(folder), number))


def causes(found: GroupResult) -> set[str]:
    return {span.first.cause for span in found.spans if span.first is not None}


def edit_sessions(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    for path in (folder / "replay").glob("session_*.json"):
        session = json.loads(path.read_text())
        edit(session["config"])
        path.write_text(json.dumps(session))


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort"])
def test_completions_whose_weights_changed_on_the_way_are_sampled_again(mode: str, tmp_path: Path) -> None:
    chosen = config(
        tmp_path / mode,
        *("rollout.staleness=2", "generator.sampling.max_tokens=120", "training.max_seq_len=160"),
        *(f"generator.update.mode={mode}", "training.max_steps=3", "checkpointing.keep=3"),
    )
    train_here(chosen)
    recorded = RecordedRun(run_dir(chosen))
    groups = [group for step in recorded.steps for group in recorded.read(step).groups]
    spans = {
        group.number: sum(len(turn.versions) for each in group.episodes for turn in each.turns) for group in groups
    }
    found = resample(run_dir(chosen), max(spans, key=lambda number: spans[number]))  # chance decides how many it has
    assert found.is_same, found.spans
    assert len(found.spans) == max(spans.values())


def test_episodes_of_several_turns_and_agents_are_reproduced(tmp_path: Path) -> None:
    """The running baseline of an agent is restored from the checkpoint, and goes on."""
    chosen = config(
        tmp_path / "pennies",
        *("rewards.functions=[]", "episode.kind=own_games:pennies", "training.max_steps=3"),
        "episode.agents={row: {advantage: baseline}, column: {advantage: zero_sum}}",
        "checkpointing.save_interval=1",
    )
    train_here(chosen)
    recorded = RecordedRun(run_dir(chosen))
    with services_here():
        bisected = asyncio.run(bisect_run(recorded))
    assert (bisected.first, bisected.steps) == (None, recorded.window)
    assert recorded.starts.keys() & {1, 2}
    found = resample(run_dir(chosen), recorded.read(3).groups[0].number)
    assert found.is_same, found.spans
    assert max(span.turn for span in found.spans) > 0


def test_another_token_has_its_cause(copied: Path) -> None:
    record = RecordedRun(copied).read(3)
    number = record.groups[0].number
    assert resample(copied, number).is_same
    session = copied / "replay" / "session_000000.json"
    before = session.read_bytes()
    edit_sessions(copied, lambda chosen: chosen["run"].update(seed=7))
    assert causes(resample(copied, number)) == {"sampling"}
    session.write_bytes(before)
    path = step_path(copied / "replay", 3)
    kept = path.read_bytes()
    head, columns = unpack(kept, path=path)
    head["groups"][0]["temperature"] = 0.7
    path.write_bytes(pack(head, columns))
    assert causes(resample(copied, number)) == {"kernel"}
    path.write_bytes(kept)
    shutil.rmtree(copied / "checkpoints" / "step-00000002")  # version 2 is trained again, from other weights
    edit_sessions(copied, lambda chosen: chosen["training"].update(learning_rate=0.1))
    found = resample(copied, number)
    assert causes(found) == {"weights"}
    assert [version.is_same for version in found.versions] == [False]


def test_a_changed_record_is_the_cause(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = step_path(copied / "replay", 3)
    head, columns = unpack(path.read_bytes(), path=path)
    columns["token_ids"][4] ^= 1
    path.write_bytes(pack(head, columns))
    number = head["groups"][0]["number"]
    with services_here():
        assert main(["replay", str(copied), "--group", str(number)]) == 1
    printed = capsys.readouterr().out
    assert f"token 4 was {columns['token_ids'][4]}, is now {columns['token_ids'][4] ^ 1}" in printed
    assert "cause: record" in printed
    assert f"group {number}: differs" in printed


def test_groups_that_cannot_be_sampled_again_are_refused(copied: Path) -> None:
    recorded = RecordedRun(copied)
    with pytest.raises(ReplayError, match="not recorded") as refused:
        recorded.find_group(9999)
    assert (refused.value.path, refused.value.value) == ("--group", 9999)
    assert "steps 1 to 3" in (refused.value.rule or "")
    number = recorded.read(3).groups[0].number
    edit_sessions(copied, lambda chosen: chosen["generator"].update(engine="vllm"))
    with pytest.raises(ReplayError, match="cannot be sampled again") as refused:
        resample(copied, number)
    assert (refused.value.path, refused.value.value) == ("generator.engine", "vllm")
