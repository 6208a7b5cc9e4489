"""Commands for live supervised runs: in one process with their trainer, and as ranks of their own program."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import forge
from commanding_sinks import commanding
from forge.config import PreferenceConfig, RewardTrainingConfig, SFTConfig, SupervisedConfig, load
from forge.loops.preflight import prepare_supervised
from forge.loops.run_client import RunClient
from forge.loops.run_control import RunRefused
from forge.loops.run_paths import run_dir
from forge.loops.runtime_changes import read_changes
from forge.loops.stopping import Stop
from forge.loops.supervised import SupervisedLoop, SupervisedResult, run_supervised
from forge.observe import read_jsonl
from forge.trainer.checkpoint_folder import list_checkpoints
from forge.trainer.handles import open_trainer
from grpo_runs import weights_digest
from live_commands import num_waiting
from local_services import services_here

ROOT = Path(__file__).parents[2]
LIMIT_S = 600
RATE = "training.learning_rate"
PAIRS = "apps/dpo/orders.jsonl"
DATA = {SFTConfig: "apps/sft/sums.jsonl", PreferenceConfig: PAIRS, RewardTrainingConfig: PAIRS}


def words(folder: Path, data: str, *overrides: str) -> list[str]:
    return [
        f"run.output_dir={folder.parent}",
        f"run.name={folder.name}",
        "model.preset=tiny",
        f"data.sources=[{{path: {ROOT / data}}}]",
        *("training.max_seq_len=128", "training.batch_size=4", "training.schedule=linear", "training.max_steps=6"),
        *(f"{RATE}=1e-3", "validation.fraction=0.01", "checkpointing.save_interval=2", "checkpointing.keep=9"),
        *("metrics.tensorboard=false", "metrics.log_interval=1", "distributed.with_gpus=false"),
        *overrides,
    ]


def config(folder: Path, *overrides: str, kind: type[SupervisedConfig] = SFTConfig) -> SupervisedConfig:
    return load(kind, overrides=words(folder, DATA[kind], *overrides))


def train_here(chosen: SupervisedConfig) -> SupervisedResult:
    with services_here():
        return asyncio.run(asyncio.wait_for(run_supervised(chosen), LIMIT_S))


def train_commanded(
    chosen: SupervisedConfig, on: Mapping[int, Callable[[RunClient], Any]]
) -> tuple[SupervisedResult, dict[int, Any]]:
    """Run it, and give commands before the step after those that `on` names; the result and the answers. What waits for
    the end of a step is carried out after that step."""

    async def body() -> tuple[SupervisedResult, dict[int, Any]]:
        asked: dict[int, asyncio.Future[Any]] = {}
        with prepare_supervised(chosen) as prepared:
            loop = SupervisedLoop(chosen, prepared, stop=Stop())

            async def complete(batch: Any) -> Any:
                batch = await completed(batch)
                if loop.step in on and loop.step not in asked:
                    run = RunClient(run_dir(chosen), timeout_s=LIMIT_S)
                    asked[loop.step] = task = asyncio.ensure_future(asyncio.to_thread(on[loop.step], run))
                    while not task.done() and not await asyncio.to_thread(num_waiting, run):
                        pass
                return batch

            async with asyncio.timeout(LIMIT_S), forge.run():
                trainer = await open_trainer(prepared.trainer, prepared.loss)
                reference = prepared.kind.open_reference(chosen, prepared, trainer, should_stop=lambda: False)
                try:
                    async with reference as completed:
                        result = await loop.run(trainer, complete)
                finally:
                    loop.close()
                    await trainer.close()
        found = await asyncio.gather(*asked.values(), return_exceptions=True)
        return result, dict(zip(asked, found, strict=True))

    with services_here():
        return asyncio.run(body())


def rates(chosen: SupervisedConfig) -> list[float]:
    lines = read_jsonl(run_dir(chosen) / "metrics.jsonl")
    return [float(line.values["train/learning_rate"]) for line in lines if "train/learning_rate" in line.values]


def test_a_learning_rate_holds_from_the_next_step_on_and_a_resume_repeats_the_change(tmp_path: Path) -> None:
    chosen = config(tmp_path / "run")
    answers = train_commanded(chosen, {2: lambda run: run.set({RATE: 4e-4})})[1]
    assert answers[2].from_step == 4
    whole = rates(chosen)
    factors = [rate / most for rate, most in zip(whole, [1e-3] * 3 + [4e-4] * 3, strict=True)]
    assert factors == sorted(factors, reverse=True), "the schedule goes on"
    assert factors[0] == 1
    assert factors[2] == pytest.approx(factors[1] - 0.2, rel=1e-6)
    assert factors[3] == pytest.approx(factors[2] - 0.2, rel=1e-6)
    digest = weights_digest(chosen)  # type: ignore[arg-type]
    for step in (2, 4):  # before the change, and after it
        again = config(tmp_path / "run", f"checkpointing.resume={tmp_path}/run/checkpoints/step-{step:08d}")
        train_here(again)
        assert weights_digest(again) == digest  # type: ignore[arg-type]
        assert rates(again) == whole
    (change,) = read_changes(run_dir(chosen))
    assert (change.step, change.key, change.before, change.after) == (3, RATE, 1e-3, 4e-4)


@pytest.mark.parametrize("kind", list(DATA), ids=lambda kind: kind.__name__)
def test_a_live_run_saves_validates_shows_and_stops(tmp_path: Path, kind: type[SupervisedConfig]) -> None:
    options = ("checkpointing.save_interval=null", "training.max_steps=50", "checkpointing.keep_best=false")
    chosen = config(tmp_path / "run", *options, kind=kind)
    result, answers = train_commanded(
        chosen,
        {
            1: lambda run: run.save(),
            2: lambda run: run.evaluate(),
            3: lambda run: run.show(),
            4: lambda run: run.stop(),
        },
    )
    assert (answers[1].step, answers[1].path) == (2, run_dir(chosen) / "checkpoints" / "step-00000002")
    assert answers[2].step == 3
    assert answers[2].values["loss"] > 0
    assert (answers[3].step, answers[3].max_steps, answers[3].workers) == (3, 50, None)
    assert list(answers[3].settings) == [RATE]
    assert (answers[4], result.exit_code, result.is_stopped, result.step) == (130, 130, True, 5)
    assert [each.step for each in list_checkpoints(run_dir(chosen) / "checkpoints")] == [2, 5]


def test_what_a_supervised_run_refuses(tmp_path: Path) -> None:
    chosen = config(tmp_path / "run", "validation.fraction=0", "training.max_steps=4")

    def refused(run: RunClient) -> list[RunRefused]:
        found = []
        for ask in (
            lambda: run.evaluate(),
            lambda: run.set({"rollout.staleness": 1}),
            lambda: run.ask("scale", workers={"generators": 2}),
            lambda: run.set({RATE: -1.0}),
        ):
            with pytest.raises(RunRefused) as raised:
                ask()
            found.append(raised.value)
        return found

    answers = train_commanded(chosen, {1: refused})[1][1]
    assert [error.path for error in answers] == ["validation.sources", "rollout.staleness", "command", RATE]
    assert answers[1].rule == f"one of {RATE}"
    assert answers[2].rule == "one of show, stop, set, evaluate, save, profile"
    assert "greater than 0" in answers[3].rule


def test_ranks_carry_commands_out_together(tmp_path: Path) -> None:
    folder, answers = tmp_path / "ranks", tmp_path / "answers"
    answers.mkdir()
    sink = commanding(
        answers,
        step_1={"command": "set", "values": {RATE: 4e-4}},
        step_2={"command": "evaluate"},
        step_3={"command": "save"},
        step_4={"command": "stop"},
    )
    command = [sys.executable, "-m", "forge.cli", "run", "--nproc_per_node", "2", "apps/sft/main.py"]
    quiet = ("checkpointing.save_interval=null", "checkpointing.keep_best=false")
    path = os.pathsep.join([str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [*command, *words(folder, DATA[SFTConfig], sink, *quiet)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    found = {file.stem: json.loads(file.read_text()) for file in answers.iterdir()}
    assert found["step_1"] | {"ok": True} == found["step_1"], ended.stderr
    assert (found["step_1"]["from_step"], found["step_2"]["step"], found["step_3"]["step"]) == (2, 2, 3)
    assert found["step_2"]["evaluation"]["loss"] > 0
    assert found["step_3"]["checkpoint"] == str(folder / "checkpoints" / "step-00000003")
    assert found["step_4"]["exit_code"] == 130
    assert "stopped after step 4; --resume continues after step 4" in ended.stderr
    assert ended.returncode == 130, ended.stderr
    of_steps = rates(config(folder))
    assert of_steps[1] < 0.5 * of_steps[0]
