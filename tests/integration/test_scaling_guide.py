"""The configurations of docs/guides/scaling.md: checked, planned, and run with the tiny model on CPUs.

The runs of the SLURM layout are in `test_slurm_cluster.py`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from forge.cli import main
from forge.config import GRPOConfig, load
from forge.observe import read_jsonl
from grpo_runs import train, train_here
from scaled_runs import APPS, MAIN, ROOT, TINY, check_run

GUIDE = (ROOT / "docs" / "guides" / "scaling.md").read_text(encoding="utf-8")
STEPS = {
    "qwen3_1_7b": 1,
    "qwen3_8b": 8,
    "qwen3_32b_64gpu_slurm": 64,
    "qwen3_32b_64gpu_kubernetes": 64,
}
"""The file of each step, and its GPUs."""
DATA = ("prompts.sources=[{task: arithmetic, num_prompts: 40}]", "evaluation.sources=[]")
CPU = ("distributed.with_gpus=false", "generator.with_gpus=false", "generator.engine=native")
"""The machine of the tests has no GPU."""


@pytest.mark.parametrize("name", STEPS)
def test_the_guide_shows_the_plan_of_each_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"forge plan apps/grpo/{name}.yaml --gpu-memory 80GB --gpus {STEPS[name]}"
    assert command in GUIDE
    words = command.split()[1:]
    assert main([*words[:1], str(ROOT / words[1]), *words[2:], "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"]
    peaks = [round(device["peak_bytes"] / 2**30) for device in plan["gpus"]]
    row = re.search(rf"^\| `{name}\.yaml` \|.*\| (.*) \|$", GUIDE, re.MULTILINE)
    assert row is not None
    assert [int(number) for number in re.findall(r"\d+", row[1])] == peaks


@pytest.mark.parametrize(("degrees", "peak"), [("replicate=2 shard=16", 64), ("replicate=4 shard=8", 99)])
def test_the_guide_says_what_copies_take(degrees: str, peak: int, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(APPS / "qwen3_32b_64gpu_slurm.yaml")
    keys = ["distributed.strategy=hsdp", *(f"distributed.{degree}" for degree in degrees.split())]
    fits = main(["plan", file, "--gpu-memory", "80GB", "--gpus", "64", "--json", *keys]) == 0
    assert fits == (peak < 79)
    plan = json.loads(capsys.readouterr().out)
    assert round(plan["gpus"][0]["peak_bytes"] / 2**30) == peak
    assert degrees.replace(" ", " distributed.") in GUIDE or degrees in GUIDE
    assert re.search(rf"takes? {peak}\b", GUIDE)


@pytest.mark.parametrize("name", STEPS)
def test_each_file_passes_its_checks(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the tiny model and a task that is made here: the rest is what the file says."""
    file = str(APPS / f"{name}.yaml")
    small = ("model.preset=tiny", "model.path=null", "model.max_seq_len=8192", f"run.output_dir={tmp_path}", *DATA)
    overrides = (*small, *(CPU if STEPS[name] <= 8 else ()))
    assert main(["config", "check", file, *overrides]) == 0, capsys.readouterr().err
    assert main(["run", str(MAIN), "--config", file, "--dry-run", *overrides]) == 0
    shown = capsys.readouterr().out
    config = load(GRPOConfig, files=[file])
    assert f"{config.distributed.num_ranks} rank" in shown
    if config.launcher.kind != "local":
        assert f"{config.launcher.kind}; its hosts were not contacted" in shown


def test_one_gpu(tmp_path: Path) -> None:
    config = load(GRPOConfig, files=[APPS / "qwen3_1_7b.yaml"], overrides=[*TINY, f"run.output_dir={tmp_path}"])
    assert config.placement == "shared"
    train_here(config)
    check_run(tmp_path / config.run.name, num_ranks=1)


def test_eight_gpus(tmp_path: Path) -> None:
    """Four ranks of FSDP and four generators become two each. The reference of a KL penalty is one process."""
    sizes = ("distributed.shard=2", "generator.num_replicas=2", f"run.output_dir={tmp_path}")
    sizes += ("algorithm.kl.coefficient=0.1",)
    config = load(GRPOConfig, files=[APPS / "qwen3_8b.yaml"], overrides=[*TINY, *sizes])
    assert (config.placement, config.distributed.strategy) == ("apart", "fsdp")
    train(config)
    folder = tmp_path / config.run.name
    check_run(folder, num_ranks=2)
    divergence = [line.values["train/kl"] for line in read_jsonl(folder / "metrics.jsonl") if "train/kl" in line.values]
    assert abs(divergence[0]) < 1e-5, "the reference has the weights of the start"


def test_the_guide_shows_what_changes_between_the_files() -> None:
    """The YAML blocks of the guide are parts of the files, and the order of steps is that of the page."""
    for name in STEPS:
        assert f"apps/grpo/{name}.yaml" in GUIDE
    parts = re.findall(r"```yaml\n# (\w+)\.yaml\n(.*?)```", GUIDE, re.DOTALL)
    assert {name for name, _ in parts} == set(STEPS)
    for name, text in parts:
        whole = yaml.safe_load((APPS / f"{name}.yaml").read_text(encoding="utf-8"))
        check_part(yaml.safe_load(text), whole, name)


def check_part(part: object, whole: object, path: str) -> None:
    """Check that a mapping has the same values as the whole one, for all that it has."""
    if isinstance(part, dict) and isinstance(whole, dict):
        for key, value in part.items():
            assert key in whole, f"{path}.{key}"
            check_part(value, whole[key], f"{path}.{key}")
    else:
        assert part == whole, path
