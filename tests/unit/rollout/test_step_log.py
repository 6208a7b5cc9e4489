"""The step log: groups come back as they were, files are whole, and the disk that they take is bounded."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forge.config import ReplayRecordConfig
from forge.errors import RecordError
from forge.rollout.group_codec import decode_groups, encode_groups
from forge.rollout.step_log import StepLog, read_sessions, read_step, recorded_steps
from forge.rollout.step_record import CriticRecord, LearnedBatch, batch_digest
from forge.types import (
    AgentResult,
    Batch,
    Completion,
    Episode,
    Group,
    MalformedCall,
    Sample,
    Score,
    StepResult,
    Task,
    ToolCall,
    Turn,
    VersionSpan,
)

TASK = Task("a:1", ({"role": "user", "content": "\ud800 1 + 1?"},), answer="2", metadata={"n": [1, {"x": None}]})


def group(number: int) -> Group:
    completion = Completion(
        (5, 6), (7, 8, 2**31), (-0.5, -1.25, -0.1), None, "text", "stop", 2, (VersionSpan(3, 0, 3),)
    )
    plain = Episode.single(TASK, completion, Score(1.5, {"a": 1.5}, {"b": "failed"}, 1.0), advantage=0.1)
    turn = Turn.of(completion, index=1, parent=0, previous=0, path=(0, 1), seed=17, agent="row", order=4)
    calls = (ToolCall("1", "add", {"x": 1}), MalformedCall("2", "add(", "not JSON"))
    second = replace(turn, calls=calls, full_logprobs=(-0.4, -1.0, -math.inf), prefix_break="template")
    rich = Episode(
        TASK,
        (Turn.of(completion, full_logprobs=completion.logprobs), second),
        Score(math.nan),
        member=1,
        ref_logprobs=(0.1,) * 6,
        token_advantages=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0),
        turn_rewards={1: 0.5},
        outcome="turn_limit",
        stats={"num_turns": 2.0},
        agents={"row": AgentResult(Score(1.0), policy="version 3", advantage=0.3), "column": AgentResult(None, False)},
    )
    return Group(number, 2, (plain, rich))


BATCH = Batch.of([Sample(torch.tensor([1, 2, 3]), torch.tensor([0.0, 1.0, 1.0]), {"advantages": torch.ones(3)})])
CRITIC = CriticRecord("values", {"critic/loss": 0.25, "critic/grad_norm": float("inf")}, learning_rate=1e-4)
LEARNED = LearnedBatch(BATCH, critic=CRITIC)
RESULT = StepResult(1, 0.5, 1.5, 1e-3, 3, 2, metrics={"entropy": 0.1, "memory_gib": 3.0})


def write_steps(
    folder: Path, config: ReplayRecordConfig, *, checkpoints: list[list[int]], resume: int | None
) -> StepLog:
    """Write one step for each entry of `checkpoints`, which says what checkpoints there are by then."""
    now: list[int] = []
    log = StepLog(folder, config=config, kept_checkpoints=lambda: now, resume_step=resume)
    log.begin({"config": {}})
    for step, kept in enumerate(checkpoints, start=(resume or 0) + 1):
        log.flush()
        now[:] = kept
        log.write(step, [group(step)], learned=LEARNED, result=RESULT, weights=f"digest {step}")
    log.close()
    return log


def test_groups_come_back_as_they_were() -> None:
    groups = [group(3), group(9)]
    documents, columns = encode_groups(groups)
    found = decode_groups(documents, columns)
    assert repr(found) == repr(groups)  # NaN is not equal to itself
    assert columns["token_ids"].dtype.itemsize == 8, "the smallest type that holds all values"
    assert columns["ref_logprobs"].dtype.itemsize == 8
    assert columns["logprobs"].dtype.itemsize == 8
    narrow = encode_groups(
        [Group(0, 0, (Episode.single(TASK, Completion((1,), (2,), (-0.5,), None, "", "stop"), Score(0)),))]
    )
    assert {column.dtype.itemsize for column in narrow[1].values()} == {4}


def test_a_step_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_steps(tmp_path, ReplayRecordConfig(), checkpoints=[[]], resume=None)
    found = read_step(tmp_path, 1)
    assert repr(found.groups) == repr((group(1),))
    assert (found.batch, found.weights, found.altered) == (batch_digest(BATCH), "digest 1", ())
    assert found.critic == CRITIC
    assert found.outcome["metrics.entropy"] == 0.1
    assert "metrics.memory_gib" not in found.outcome
    other = replace(BATCH, loss_weights=BATCH.loss_weights + 1e-7)
    assert batch_digest(other) != found.batch


def test_the_newest_steps_are_kept(tmp_path: Path) -> None:
    write_steps(tmp_path / "steps", ReplayRecordConfig(keep_steps=2), checkpoints=[[]] * 5, resume=None)
    assert list(recorded_steps(tmp_path / "steps")) == [4, 5]
    size = next(iter(recorded_steps(tmp_path / "steps").values())).stat().st_size
    write_steps(tmp_path / "size", ReplayRecordConfig(max_gb=3.5 * size / 1e9), checkpoints=[[]] * 6, resume=None)
    assert list(recorded_steps(tmp_path / "size")) == [4, 5, 6]
    write_steps(tmp_path / "less", ReplayRecordConfig(max_gb=size / 2e9), checkpoints=[[]] * 3, resume=None)
    assert list(recorded_steps(tmp_path / "less")) == [3], "the newest stays, whatever it takes"


def test_steps_go_with_the_checkpoint_that_they_follow(tmp_path: Path) -> None:
    kept = [[], [], [2], [2], [2, 4], [4], [4, 6]]
    write_steps(tmp_path / "five", ReplayRecordConfig(), checkpoints=kept[:5], resume=None)
    assert list(recorded_steps(tmp_path / "five")) == [1, 2, 3, 4, 5], "no checkpoint has gone yet"
    write_steps(tmp_path / "seven", ReplayRecordConfig(), checkpoints=kept, resume=None)
    assert list(recorded_steps(tmp_path / "seven")) == [5, 6, 7]


def test_a_resume_removes_what_comes_again(tmp_path: Path) -> None:
    write_steps(tmp_path, ReplayRecordConfig(), checkpoints=[[]] * 4, resume=None)
    (tmp_path / ".step_000005.bin.part").write_bytes(b"killed")
    write_steps(tmp_path, ReplayRecordConfig(), checkpoints=[[2]], resume=2)
    assert list(recorded_steps(tmp_path)) == [1, 2, 3]
    assert [session["start_step"] for session in read_sessions(tmp_path).values()] == [0, 2]
    write_steps(tmp_path, ReplayRecordConfig(), checkpoints=[[]], resume=None)
    assert (list(recorded_steps(tmp_path)), list(read_sessions(tmp_path))) == ([1], [0])


def test_a_step_that_cannot_be_written_ends_the_run_with_the_file(tmp_path: Path) -> None:
    log = StepLog(tmp_path, config=ReplayRecordConfig(), kept_checkpoints=list, resume_step=None)
    (tmp_path / "step_000001.bin").mkdir()
    (tmp_path / "step_000001.bin" / "file").touch()
    log.write(1, [group(1)], learned=LEARNED, result=RESULT, weights=None)
    with pytest.raises(RecordError) as refused:
        log.flush()
    assert refused.value.path == str(tmp_path / "step_000001.bin")
    log.close()
