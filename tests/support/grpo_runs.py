"""Small runs of reinforcement learning, and what they left behind."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

import forge
from forge.config import GRPOConfig, load
from forge.loops.grpo import GRPOLoop, run_grpo
from forge.loops.planning import episode_options, plan_run
from forge.loops.results import GRPOResult
from forge.loops.rollouts import make_source
from forge.loops.run_paths import run_dir
from forge.loops.workers import PolicyHandle, Workers, start_workers
from forge.observe import read_jsonl
from forge.rollout.ledger import LedgerLine, read_ledger
from forge.trainer.checkpoint_folder import list_checkpoints
from killing_sinks import HOLDING, holding
from leftovers import is_running, processes_of
from local_services import services_here

ROOT = Path(__file__).parents[2]
NUM_STEPS = 6
LIMIT_S = 600

SMALL: Mapping[str, Any] = {
    "model": {"preset": "tiny"},
    "prompts": {"sources": [{"task": "arithmetic", "num_prompts": 40}]},
    "rewards": {"functions": [{"kind": "grpo_rewards:even", "name": "even"}]},
    "rollout": {"batch_groups": 2, "group_size": 3},
    "generator": {"sampling": {"max_tokens": 8}},
    "training": {"max_steps": NUM_STEPS, "max_seq_len": 64, "learning_rate": 1e-3, "schedule": "constant"},
    "checkpointing": {"save_interval": 2},
    "metrics": {"log_interval": 1, "tensorboard": False},
    "record": {"report": False},
}


def config(folder: Path, *overrides: str) -> GRPOConfig:
    """A run of a few steps on the tiny model, which takes seconds; overrides as on the command line."""
    folders = [str(ROOT / "tests" / "support"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(folders))
    path = folder.parent / f"{folder.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**SMALL, "run": {"name": folder.name, "output_dir": str(folder.parent)}}))
    yaml = path.with_suffix(".yaml")
    path.rename(yaml)  # JSON is YAML
    return load(GRPOConfig, files=[yaml], overrides=list(overrides))


def train(chosen: GRPOConfig) -> GRPOResult:
    """Run it with this process as its controller: every worker has its own."""
    return asyncio.run(asyncio.wait_for(run_grpo(chosen), LIMIT_S))


def train_here(chosen: GRPOConfig) -> GRPOResult:
    """Run it in this process, workers included: see `local_services`."""
    with services_here():
        return train(chosen)


def train_watched(chosen: GRPOConfig, watch: Callable[[Workers, int], Any]) -> GRPOResult:
    """Run it with `watch(workers, version)` awaited whenever generators are to take new weights."""

    class Watched(PolicyHandle):
        async def update_weights(self, version: int) -> Any:
            await watch(workers, version)
            return await super().update_weights(version)

    async def body() -> GRPOResult:
        nonlocal workers
        plan = plan_run(chosen)
        async with asyncio.timeout(LIMIT_S), forge.run(plan.config):
            opened = await start_workers(
                plan.config,
                plan.trainer,
                loss=plan.loss,
                run=plan.run,
                episodes=episode_options(plan),
                tokenizer=plan.tokenizer,
            )
            workers = replace(opened, policy=Watched(opened.policy.service))
            loop = GRPOLoop(plan, workers, make_source(plan, workers))
            try:
                return await loop.run()
            finally:
                loop.close()

    workers: Workers
    return asyncio.run(body())


def weights_digest(chosen: GRPOConfig) -> str:
    """Of the exported weights."""
    return hashlib.sha256((run_dir(chosen) / "checkpoints" / "hf" / "model.safetensors").read_bytes()).hexdigest()


def kept_buffer(chosen: GRPOConfig) -> dict[str, Any]:
    """What the newest checkpoint holds of the buffer: which groups are pending."""
    newest = list_checkpoints(run_dir(chosen) / "checkpoints")[-1]
    buffer: dict[str, Any] = newest.extra["caller"]["buffer"]
    return buffer


def ledger(chosen: GRPOConfig) -> list[LedgerLine]:
    return list(read_ledger(run_dir(chosen) / "ledger.jsonl"))


def metrics(chosen: GRPOConfig, name: str) -> list[float]:
    """One figure of every step that has it."""
    lines = read_jsonl(run_dir(chosen) / "metrics.jsonl")
    return [float(line.values[name]) for line in lines if name in line.values]


def episodes(chosen: GRPOConfig) -> Iterator[dict[str, Any]]:
    """The recorded episodes of all steps."""
    for path in sorted((run_dir(chosen) / "rollouts").glob("step_*.jsonl")):
        for line in path.read_text().split("\n")[:-1]:  # text may hold what splitlines() takes for the end of a line
            yield json.loads(line)


def app_command(folder: Path, *overrides: str) -> list[str]:
    """The command line of the same run as a program of its own."""
    config(folder, *overrides)
    app = str(ROOT / "apps" / "grpo" / "main.py")
    return [sys.executable, "-u", app, "--config", str(folder.parent / f"{folder.name}.yaml"), *overrides]


def run_app(folder: Path, *overrides: str, until: int | None = None, send: int = signal.SIGKILL) -> tuple[int, str]:
    """Run the application, and send it a signal when it has written the metrics of a step, where it waits for that:
    steps are shorter than this process may take to notice one. Returns its exit code and its output."""
    pipe = folder.parent / f"{folder.name}-{until}.pipe"
    if until is not None:
        pipe.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(pipe)
        overrides = (*overrides, holding(pipe, at_step=until))
    program = subprocess.Popen(
        app_command(folder, *overrides), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    children: list[psutil.Process] = []
    told = []
    assert program.stdout is not None
    for line in program.stdout:
        told.append(line)
        if until is not None and line.startswith(HOLDING):
            children = processes_of(program.pid)
            os.kill(program.pid, send)
            if send != signal.SIGKILL:
                pipe.write_text("")
            until = None
    code = program.wait(LIMIT_S)
    _, alive = psutil.wait_procs([child for child in children if is_running(child)], timeout=600)
    assert [child.cmdline() for child in alive] == []
    return code, "".join(told)
