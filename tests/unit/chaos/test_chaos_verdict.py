"""The verdict on a disturbed run names what must not happen. The folders are written here, not by a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from forge.chaos import experiment
from forge.chaos.experiment import Injection, Trial
from forge.chaos.script import Fault
from forge.chaos.verdict import judge, verdict_lines


def run(folder: Path, *, seconds: float, weights: bytes = b"w", logprob: float = -1.0) -> Trial:
    """A run of two steps of one group with two samples each, so many seconds apart."""
    files: dict[str, list[dict[str, Any]]] = {"ledger.jsonl": [], "metrics.jsonl": []}
    for step in (1, 2):
        line = {"step": step, "group": step - 1, "epoch": 0, "prompt": "p", "outcome": "trained"}
        files["ledger.jsonl"].append(line)
        episode = {"group": step - 1, "versions": [[step - 1, 0, 2]], "logprobs": [-1.0, logprob]}
        files[f"rollouts/step_00000{step}.jsonl"] = [episode | {"trainer_logprobs": [-1.0, -1.0]}] * 2
    for name, lines in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in (1, 2):
        os.utime(folder / f"rollouts/step_00000{step}.jsonl", (0, 1000 + step * seconds))
    (folder / "config.yaml").write_text("rollout: {staleness: 0}\n")
    (folder / "checkpoints/hf").mkdir(parents=True)
    (folder / "checkpoints/hf/model.safetensors").write_bytes(weights)
    return Trial(folder, status=0)


def test_goodput_is_relative_to_the_undisturbed_run(tmp_path: Path) -> None:
    plain, hit = run(tmp_path / "plain", seconds=4.0), run(tmp_path / "hit", seconds=5.0)
    hit.injections = [
        Injection(Fault("kill", "trainer", at_s=1), 1.0, done="killed"),
        Injection(Fault("kill", "trainer", at_s=2), 2.0, skipped="there was no trainer"),
        Injection(Fault("clock", at_s=3, duration_s=60), 3.0, done="moved"),
    ]
    found = judge(hit, plain, is_deterministic=True)
    assert found.problems == []
    assert found.goodput == pytest.approx(0.8)
    assert found.samples_per_s == {"disturbed": pytest.approx(0.4), "undisturbed": pytest.approx(0.5)}
    assert (found.num_faults, found.num_skipped, found.equal) == ({"kill trainer": 1, "clock": 1}, 1, True)
    assert list(verdict_lines(found))[-1] == "verdict: every guarantee was kept"


def test_every_problem_is_named(tmp_path: Path) -> None:
    plain, hit = run(tmp_path / "plain", seconds=4.0), run(tmp_path / "hit", seconds=4.0, weights=b"x", logprob=-2.0)
    hit.status, hit.leaked_processes, hit.leaked_segments = 1, ["generator[0]"], ["psm_1"]
    hit.leaked_files = ["file"]
    with (tmp_path / "hit/ledger.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "group": 0, "epoch": 0, "prompt": "p", "outcome": "trained"}) + "\n")
    found = judge(hit, plain, is_deterministic=True)
    assert found.problems == [
        "the run ended with exit status 1",
        "left behind: 1 processes: generator[0]",
        "left behind: 1 segments of shared memory: psm_1",
        "left behind: 1 temporary files: file",
        "once: ledger.jsonl:3: group 0 is committed in step 1 and in step 2",
        "recorded: step_000002.jsonl: trained on in step 2, but not there: 0",
        "4 tokens were sampled by other weights than recorded",
        "the final weights are not those of the undisturbed run",
    ]
    assert list(verdict_lines(found))[-1] == "verdict: 8 problem(s)"
    hit.status = None
    assert judge(hit, None, is_deterministic=True).problems[0] == "the run did not end in time"


def test_only_an_empty_folder_of_sockets_and_caches_may_stay(tmp_path: Path) -> None:
    for name in (".tmpAbCd12", ".tmpEfGh34", "empty", "torchinductor_root"):
        (tmp_path / name).mkdir()
    (tmp_path / ".tmpEfGh34" / "data").touch()
    (tmp_path / ".tmpIjKl56").touch()
    kept = {path.name for path in tmp_path.iterdir() if not experiment._is_expected(path)}
    assert kept == {".tmpEfGh34", ".tmpIjKl56", "empty"}


def test_a_folder_that_is_left_is_told_with_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "held").mkdir()
    for name in ("b", "a"):
        (tmp_path / "held" / name).touch()
    assert experiment._described(tmp_path / "held") == "held (a, b)"
    assert experiment._described(tmp_path / "held" / "a") == "a"
