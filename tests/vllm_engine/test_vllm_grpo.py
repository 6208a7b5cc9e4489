"""The whole loop with vLLM as the generator: the same program, another word in its configuration."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from forge.generator.vllm.engine import VllmEngine
from forge.loops.run_paths import run_dir
from forge.loops.workers import Workers
from forge.models.adapter_names import adapter_map, num_adapter_parameters
from forge.models.locate import resolve
from forge.models.peft_files import read_adapter, resolve_adapter
from forge.models.tiny import make_tiny
from forge.observe.startup import read_startup
from forge.store import Weights
from generator_bench import last_of, request, until
from grpo_runs import app_command, config, episodes, ledger, metrics, train_watched
from local_services import services_here


def test_the_loop_runs_on_vllm_and_its_weights_are_the_trainers(tmp_path: Path) -> None:
    overrides = ("generator.engine=vllm", "training.max_steps=3", "rollout.group_size=4")
    done = subprocess.run(
        app_command(tmp_path / "vllm", *overrides), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    chosen = config(tmp_path / "vllm", *overrides)
    assert len(metrics(chosen, "rollout/reward_mean")) == 3
    assert sorted(line.group for line in ledger(chosen)) == list(range(6))
    assert max(metrics(chosen, "sync/canary")) < 1e-3
    for episode in episodes(chosen):
        assert [version for version, _, _ in episode["versions"]] == [episode["step"] - 1]
        assert episode["logprobs"] == pytest.approx(episode["trainer_logprobs"], abs=2e-3)
    startup = read_startup(run_dir(chosen))
    assert startup is not None
    phases = {each["phase"]: each for each in startup["phases"] if each["process"] == "generator-0"}
    assert {"importing vLLM", "starting the engine", "loading weights", "profiling", "warming up"} <= set(phases)
    assert phases["loading weights"]["done"] == pytest.approx(phases["loading weights"]["total"], rel=0.05)
    assert {each["state"] for each in phases.values()} == {"done"}
    assert "generator: loading weights" in done.stderr


async def score_while_it_generates(engine: VllmEngine) -> None:
    """vLLM on the CPU ends with an error here, where there is room for adapters of the output layer."""
    stream = engine.stream(request((1, 2, 3), max_tokens=50))
    await until(stream, num_tokens=2)
    (scores,) = await engine.score([[4, 5, 6, 7]])
    made = await last_of(stream)
    assert (len(scores), len(made)) == (4, 50)


def test_the_loop_trains_an_adapter_that_vllm_updates(tmp_path: Path) -> None:
    """Versions hold the adapter alone, every one is proven, and vLLM samples with the trainer's logprobs."""
    make_tiny(tmp_path / "base")
    adapter = ("adapter.rank=4", "adapter.alpha=8", "training.learning_rate=2e-2")
    overrides = (
        "generator.engine=vllm",
        "training.max_steps=3",
        "model.preset=null",
        f"model.path={tmp_path / 'base'}",
    )
    chosen = config(tmp_path / "lora", *overrides, *adapter)
    sizes: list[int] = []

    async def watch(workers: Workers, version: int) -> None:
        sizes.extend(info.num_bytes for info in await Weights("policy").versions())
        (generator,) = workers.policy.service._replicas
        await score_while_it_generates(generator._engine)

    with services_here():
        train_watched(chosen, watch)
    facts = resolve(chosen.model).architecture
    assert chosen.adapter is not None
    slots = adapter_map(facts, resolve_adapter(chosen.adapter, facts))
    assert max(sizes) < 4 * num_adapter_parameters(slots) + 8192
    found = metrics(chosen, "sync/canary")
    assert found
    assert max(found) < 1e-4
    seen = list(episodes(chosen))
    assert len(seen) == 3 * 2 * 3
    for episode in seen:
        assert [version for version, _, _ in episode["versions"]] == [episode["step"] - 1]
        assert episode["logprobs"] == pytest.approx(episode["trainer_logprobs"], abs=1e-4)
    last = read_adapter(run_dir(chosen) / "checkpoints" / "adapter", facts, resolve_adapter(chosen.adapter, facts))
    assert max(float(tensor.abs().max()) for name, tensor in last.items() if "lora_B" in name) > 1e-2, "it was trained"
