"""Scripts of faults: the same seed gives the same faults, and a file replays them."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.chaos.script import FAULT_KINDS, Fault, make_script, periodic_kills, read_script, write_script
from forge.cli import main
from forge.errors import DataError


def test_a_seed_gives_one_script() -> None:
    made = make_script(3, rate_per_min=30, duration_s=600, kinds=FAULT_KINDS, roles=("generator", "trainer"))
    assert made == make_script(3, rate_per_min=30, duration_s=600, kinds=FAULT_KINDS, roles=("generator", "trainer"))
    assert made != make_script(4, rate_per_min=30, duration_s=600, kinds=FAULT_KINDS, roles=("generator", "trainer"))
    assert {fault.kind for fault in made} == set(FAULT_KINDS)
    assert {fault.role for fault in made} == {"generator", "trainer"}
    times = [fault.at_s for fault in made if fault.at_s is not None]
    assert times == sorted(times)
    assert len(times) == len(made)
    assert 200 < len(made) < 400  # 300 on average
    assert 0 < times[0] < times[-1] < 600


def test_kills_at_fixed_times() -> None:
    assert [(fault.at_s, fault.role) for fault in periodic_kills({"trainer": 40, "generator": 30}, duration_s=95)] == [
        (30, "generator"),
        (40, "trainer"),
        (60, "generator"),
        (80, "trainer"),
        (90, "generator"),
    ]


def test_a_file_holds_a_script(tmp_path: Path) -> None:
    faults = [Fault("kill", at_step=3), Fault("stop", "trainer", at_s=1.5, pick=2, duration_s=4.0)]
    write_script(faults, tmp_path / "script.jsonl")
    assert read_script(tmp_path / "script.jsonl") == faults


@pytest.mark.parametrize(
    "line", ["{", '{"kind": "kill"}', '{"kind": "explode", "at_s": 1}', '{"kind": "kill", "at_s": 1, "what": 2}']
)
def test_a_line_that_is_not_a_fault(tmp_path: Path, line: str) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text(f'{{"kind": "kill", "at_s": 1}}\n{line}\n')
    with pytest.raises(DataError, match="not a fault") as caught:
        read_script(path)
    assert caught.value.path == f"{path}:2"


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (["missing.yaml"], "CONFIG"),
        (["--program", "missing.py"], "--program"),
        (["--faults", "kill,explode"], "--faults"),
        (["rollout.staleness=1", "--faults", "kill", "rollout.group_size=2", "--rate", "0", "run.seed=1"], "--rate"),
        (["--rate", "0"], "--rate"),
        (["--for", "-1"], "--for"),
        (["--every", "generator"], "--every"),
        (["--every", "generator=0"], "--every"),
        (["--script", "missing.jsonl"], "--script"),
        (["--output", "."], "--output"),
        (["sft.yaml"], "CONFIG"),
    ],
)
def test_bad_input_names_its_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.py").touch()
    (tmp_path / "grpo.yaml").write_text("rollout: {staleness: 1}\nprompts: {sources: [{task: arithmetic}]}\n")
    (tmp_path / "sft.yaml").write_text("data: {sources: [{path: x.jsonl}]}\n")
    config = [] if any(word.endswith(".yaml") for word in words) else ["grpo.yaml"]
    program = [] if "--program" in words else ["--program", "run.py"]
    assert main(["chaos", *config, *program, *words]) == 2
    assert f"path:   {path}\n" in capsys.readouterr().err
