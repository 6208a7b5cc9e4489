"""Runs of preference optimisation: they learn, resume bit for bit, and compare with the reference they started from."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forge.config import ModelConfig, PreferenceConfig, load
from forge.errors import CheckpointError
from forge.loops.preference import PreferenceResult, run_preference
from forge.loops.run_paths import run_dir
from forge.models.locate import resolve
from forge.observe import read_jsonl
from local_services import services_here

ROOT = Path(__file__).parents[2]
LIMIT_S = 600
NUM_STEPS = 4

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def words(folder: Path, *overrides: str) -> list[str]:
    return [
        f"run.output_dir={folder.parent}",
        f"run.name={folder.name}",
        "model.preset=tiny",
        f"data.sources=[{{path: {ROOT / 'apps/dpo/orders.jsonl'}}}]",
        *("training.max_seq_len=128", "training.batch_size=4", "training.schedule=constant"),
        *(f"training.max_steps={NUM_STEPS}", "training.learning_rate=1e-3"),
        *("validation.fraction=0.01", "checkpointing.save_interval=2"),
        *("metrics.tensorboard=false", "metrics.log_interval=1", "distributed.with_gpus=false"),
        *overrides,
    ]


def config(folder: Path, *overrides: str) -> PreferenceConfig:
    return load(PreferenceConfig, overrides=words(folder, *overrides))


def train_here(chosen: PreferenceConfig) -> PreferenceResult:
    with services_here():
        return asyncio.run(asyncio.wait_for(run_preference(chosen), LIMIT_S))


def weights_digest(folder: Path) -> str:
    return hashlib.sha256((folder / "checkpoints" / "hf" / "model.safetensors").read_bytes()).hexdigest()


def values(folder: Path, name: str) -> dict[int, float]:
    lines = read_jsonl(folder / "metrics.jsonl")
    return {line.step: float(line.values[name]) for line in lines if name in line.values}


def start(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing stopped."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    result = train_here(config(folder))
    assert result.step == NUM_STEPS
    return folder


def test_it_learns_which_answer_is_preferred(tmp_path: Path) -> None:
    """Of two orders of numbers the ascending one."""
    records = []
    for line in (ROOT / "apps/dpo/orders.jsonl").read_text().splitlines()[:200]:
        record = json.loads(line)
        up, down = sorted((record["chosen"], record["rejected"]), key=lambda text: int(text.split(",")[0]))
        records.append({"prompt": "Order them.", "chosen": up, "rejected": down})
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    chosen = config(
        tmp_path / "learns",
        f"data.sources=[{{path: {tmp_path / 'pairs.jsonl'}}}]",
        *("training.max_steps=16", "training.batch_size=10", "training.warmup_steps=3"),
        *("validation.fraction=0.2", "checkpointing.save_interval=null"),
    )
    result = train_here(chosen)
    folder = run_dir(chosen)
    assert values(folder, "train/loss")[1] == pytest.approx(math.log(2), abs=1e-6), "policy and reference are the same"
    assert values(folder, "train/reward_margin")[1] == pytest.approx(0.0, abs=1e-6)
    assert result.validation_metrics["accuracy"] > 0.7
    assert result.validation_metrics["ranking_accuracy"] > 0.7
    assert result.validation_metrics["reward_margin"] > 0.3
    assert values(folder, "validation/accuracy") == {16: result.validation_metrics["accuracy"]}
    assert result.validation_loss is not None
    assert result.validation_loss < 0.6


@pytest.mark.parametrize("kind", ["ipo", "kto", "orpo", "simpo"])
def test_every_loss_runs_and_continues_bit_for_bit(kind: str, tmp_path: Path) -> None:
    chosen, folder = f"preference.kind={kind}", tmp_path / kind
    train_here(config(folder, chosen))
    has_reference = kind in ("ipo", "kto")
    assert (folder / "reference" / "table.json").exists() == has_reference
    halves = tmp_path / "halves"
    assert train_here(config(halves, chosen, "training.max_steps=2")).step == 2
    result = train_here(config(halves, chosen, "checkpointing.resume=must"))
    assert result.step == NUM_STEPS
    assert weights_digest(halves) == weights_digest(folder)
    names = ["train/loss", "train/accuracy", "train/reward_margin", "train/logprob_chosen", "train/nll"]
    for name in [*names, *(["train/kl"] if kind == "kto" else []), "train/grad_norm"]:
        assert values(halves, name) == values(folder, name), name
        assert len(values(folder, name)) == NUM_STEPS
    if kind == "kto":
        assert any(value > 0 for value in values(folder, "train/kl").values())


def test_a_run_that_is_killed_continues_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    killer = "metrics.sinks=[{kind: 'killing_sinks:KillController', args: {at_step: 3}}]"
    saved = "checkpointing.asynchronous=false"  # the checkpoint of step 2 is complete when step 3 is written
    ended = start(sys.executable, "apps/dpo/main.py", *words(folder, killer, saved))
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert not (folder / "checkpoints" / "hf").exists()
    table = {path.name: path.stat().st_mtime_ns for path in (folder / "reference").iterdir()}
    train_here(config(folder, "checkpointing.resume=must"))
    assert {path.name: path.stat().st_mtime_ns for path in (folder / "reference").iterdir()} == table, "used again"
    assert weights_digest(folder) == weights_digest(whole)
    assert values(folder, "train/loss") == values(whole, "train/loss")


def test_ranks_of_the_program_and_a_reference_in_its_own_process_learn_the_same(whole: Path, tmp_path: Path) -> None:
    few = ("training.max_steps=2", "checkpointing.save_interval=null", "checkpointing.export_hf=false")
    online = ("reference.mode=online", f"reference.path={resolve(ModelConfig(preset='tiny')).folder}")
    command = [sys.executable, "-m", "forge.cli", "run"]
    for name, ways in {
        "ranks": [*command, "--nproc_per_node", "2", "apps/dpo/main.py", *words(tmp_path / "ranks", *few)],
        "online": [*command, "apps/dpo/main.py", *words(tmp_path / "online", *few, *online)],
    }.items():
        ended = start(*ways)
        assert ended.returncode == 0, ended.stderr
        assert "Done after 2 steps: loss" in ended.stdout
        assert (tmp_path / name / "reference").exists() == (name == "ranks")
        for metric in ("train/loss", "train/reward_margin", "train/logprob_chosen", "train/grad_norm"):
            expected = {step: value for step, value in values(whole, metric).items() if step <= 2}
            assert values(tmp_path / name, metric) == pytest.approx(expected, rel=1e-4, abs=1e-6), (name, metric)


@pytest.mark.parametrize("base_dtype", ["null", "nf4"])
def test_an_adapter_is_compared_with_the_model_that_it_is_for(base_dtype: str, tmp_path: Path) -> None:
    if base_dtype != "null":
        pytest.importorskip("bitsandbytes", reason="the extra `quantized` is not installed")
    adapter = ("adapter.rank=4", "training.max_steps=3", "training.learning_rate=1e-2")
    adapter += (f"adapter.base_dtype={base_dtype}",)
    train_here(config(tmp_path / "kept", *adapter))
    identity = json.loads((tmp_path / "kept" / "reference" / "table.json").read_text())["identity"]
    assert identity.get("adapter.base_dtype", "null") == base_dtype
    train_here(config(tmp_path / "base", *adapter, "reference.mode=online"))
    assert not (tmp_path / "base" / "reference").exists()
    for metric in ("train/loss", "train/reward_margin"):
        found, expected = (values(tmp_path / name, metric) for name in ("base", "kept"))
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert values(tmp_path / "base", "train/reward_margin")[1] == pytest.approx(0.0, abs=1e-5), "it starts as its base"
    assert values(tmp_path / "base", "train/reward_margin")[3] != 0


def test_another_reference_is_refused_on_resume_and_computed_again_otherwise(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "changed"
    train_here(config(folder, "training.max_steps=2"))
    state = json.loads((folder / "reference" / "table.json").read_text())
    state["identity"]["model"] = "another"
    (folder / "reference" / "table.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError) as caught:
        train_here(config(folder, "checkpointing.resume=must"))
    assert (caught.value.path, caught.value.value) == (str(folder / "reference"), "model")
    for path in sorted((folder / "checkpoints").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    train_here(config(folder))
    assert "are of another reference (model): they are computed again" in caplog.text
    assert weights_digest(folder) == weights_digest(whole)
