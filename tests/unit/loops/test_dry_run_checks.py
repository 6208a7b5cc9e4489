"""A dry run refuses what the run refuses, with everything else that is wrong, and starts nothing."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from test_planning import REFUSED

from forge.config import PolicyConfig, SFTConfig, load
from forge.data.prompts import open_prompts
from forge.errors import DataError
from forge.loops.dry_run import _find_prompts, _Found, dry_run
from forge.loops.preflight import for_ranks
from forge.trainer.checkpoint_folder import CheckpointInfo, FileRecord, checkpoint_name, write_record
from grpo_runs import config

T = TypeVar("T")


def sft(tmp_path: Path, *overrides: str) -> SFTConfig:
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1 + 1?", "response": "2"}\n' * 30)
    words = ["model.preset=tiny", "training.max_seq_len=64", f"data.sources=[{{path: {data}}}]"]
    return load(SFTConfig, overrides=[*words, f"run.output_dir={tmp_path / 'runs'}", *overrides])


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_run_refuses_is_found_together_with_another_problem(case: str, tmp_path: Path) -> None:
    override, path = REFUSED[case]
    other = "evaluation.reward=absent" if case != "judged by what is not there" else "rollout.group_size=3000"
    chosen = config(tmp_path / "run", override, other)
    found = dry_run(chosen)
    assert path in [problem.path for problem in found.problems]
    assert len(found.problems) >= 2
    assert found.facts == ()
    assert not (tmp_path / "run").exists()


def test_an_accepted_run_starts_nothing_and_writes_nothing(tmp_path: Path) -> None:
    chosen = config(tmp_path / "run", "generator.sampling.top_p=0.9")
    children, threads = set(psutil.Process().children()), set(threading.enumerate())
    found = dry_run(chosen)
    assert found.problems == ()
    assert "top_p" in found.warnings[0]
    assert dict(found.facts)["start"].startswith("from the model's weights")
    assert set(psutil.Process().children()) <= children
    assert set(threading.enumerate()) <= threads
    assert not (tmp_path / "run").exists()


def test_the_checkpoint_that_a_run_would_resume_from_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "run" / "checkpoints" / checkpoint_name(7)
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(b"abc")
    files = {"data": FileRecord(3, hashlib.sha256(b"abc").hexdigest())}
    record = CheckpointInfo(folder, 7, 1, "2026-01-01T00:00:00+00:00", None, 1, "2.13.0", files=files)
    write_record(record, folder=folder)
    (problem,) = dry_run(sft(tmp_path)).problems
    assert problem.path == str(folder.parent)
    assert "already holds 1 checkpoint" in problem.rule


def test_a_record_that_cannot_be_read_is_named_by_file_and_line(tmp_path: Path) -> None:
    chosen = sft(tmp_path)
    data = tmp_path / "train.jsonl"
    data.write_text(data.read_text() + "{broken\n")
    assert [problem.path for problem in dry_run(chosen).problems] == [f"{data}:31"]


def test_a_policy_that_only_generates(tmp_path: Path) -> None:
    chosen = load(PolicyConfig, overrides=["model.preset=tiny", "generator.tensor_parallel=2"])
    assert [problem.path for problem in dry_run(chosen).problems] == ["generator.tensor_parallel"]
    found = dry_run(load(PolicyConfig, overrides=["model.preset=tiny"]))
    assert dict(found.facts)["generators"] == "1 of engine native"


def test_arguments_of_vllm_that_are_ours_are_named(tmp_path: Path) -> None:
    words = ["model.preset=tiny", "generator.engine=vllm", "generator.engine_args={max_model_len: 4}"]
    paths = [problem.path for problem in dry_run(load(PolicyConfig, overrides=words)).problems]
    assert "generator.engine_args.max_model_len" in paths


def test_a_shard_of_minus_one_is_what_the_ranks_make_of_it(tmp_path: Path) -> None:
    chosen = sft(tmp_path)
    assert for_ranks(chosen, None) is chosen
    assert for_ranks(chosen, 4).distributed.shard == 4
    assert for_ranks(sft(tmp_path, "distributed.tensor=2"), 4).distributed.shard == 2
    assert for_ranks(sft(tmp_path, "distributed.shard=2"), 4).distributed.shard == 2
    assert for_ranks(sft(tmp_path, "distributed.strategy=replicate"), 4).distributed.shard == -1


def test_ranks_that_do_not_fit_the_degrees_are_refused(tmp_path: Path) -> None:
    assert [problem.path for problem in dry_run(sft(tmp_path, "distributed.shard=2"), num_ranks=3).problems] == [
        "distributed"
    ]


def test_a_source_that_cannot_be_read_is_tried_once(tmp_path: Path) -> None:
    tried: list[object] = []

    class Counted(_Found):
        def attempt(self, check: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
            tried.append(check)
            return super().attempt(check, *args, **kwargs)

    absent, other = str(tmp_path / "absent.jsonl"), str(tmp_path / "other.jsonl")
    asked = config(tmp_path / "run", f"prompts.sources=[{{path: {absent}}}, {{path: {other}}}]")
    found = Counted()
    found.add(DataError("it cannot be read", path=absent, rule="a file", repair="write it"))
    _find_prompts(asked, found)
    assert tried == [open_prompts]
    assert [problem.path for problem in found.problems] == [absent, other]


def test_the_keys_that_keep_a_run_off_gpus_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    on_gpu = ("distributed.with_gpus=true", "generator.with_gpus=true")
    (problem,) = [
        problem for problem in dry_run(config(tmp_path / "run", *on_gpu)).problems if "needs GPUs" in problem.rule
    ]
    added = problem.repair.rpartition("or add ")[2].split()
    assert added == ["distributed.with_gpus=false", "generator.with_gpus=false"]
    assert dry_run(config(tmp_path / "run", *on_gpu, *added)).problems == ()


def test_a_run_of_episodes_says_which_program_it_plays_and_all_problems_with_it(tmp_path: Path) -> None:
    base = ("rewards.functions=[]", "episode.kind=own_episodes:dialogue")
    found = dry_run(config(tmp_path / "run", *base, "episode.num_replicas=2"))
    assert found.problems == ()
    facts = dict(found.facts)
    assert facts["episode"] == "own_episodes:dialogue(), in 2 process(es)"
    assert "groups of 3 episodes" in facts["steps"]
    assert "rewards" not in facts
    wrong = ("episode.args={num_turn: 3}", "episode.group_reward=own_episodes:nobody")
    paths = [problem.path for problem in dry_run(config(tmp_path / "wrong", *base, *wrong)).problems]
    assert paths == ["episode.args", "episode.group_reward"]
