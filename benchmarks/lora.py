"""What does a LoRA adapter save? Steps of training, what is kept, and what a weight update moves.

The same model, data and row lengths with all weights and with an adapter, in one process and in turns: tokens per
second of a training step, bytes of optimizer states, and for the store the bytes of a version and the seconds from
`publish` to a reader that has it (medians). With `--peft`, which needs `peft` beside transformers, a PEFT adapter of
the same rank on transformers' model takes the same steps in the same run. With `--vllm`, which needs vLLM, two vLLM
engines update their weights from those versions: one all weights, one the adapter.

    python benchmarks/lora.py [--rank 16] [--rounds 7] [--peft] [--vllm]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import forge
from forge.config import AdapterConfig, GeneratorConfig, ModelConfig, TrainerConfig, TrainingConfig
from forge.generator.engine import UpdateReport
from forge.generator.vllm.engine import VllmEngine
from forge.models.locate import resolve
from forge.models.tiny import VOCAB_SIZE, make_tiny
from forge.models.tokenizer import ChatTokenizer
from forge.store import Weights
from forge.trainer.engine import Engine
from forge.types import Batch, Sample

SIZES = {"num_layers": 4, "hidden_size": 512, "intermediate_size": 1536}
HEADS = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 64}
LENGTH, SAMPLES = 128, 4


def main() -> None:
    parser = argparse.ArgumentParser(description="What a LoRA adapter saves.")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peft", action="store_true", help="also measure PEFT on transformers' model")
    parser.add_argument("--vllm", action="store_true", help="also measure weight updates of vLLM")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny(folder, **SIZES, **HEADS)
        print(json.dumps(asyncio.run(measure(Path(folder), options)), indent=2))


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all sides in turns."""
    engines = {"full": engine_of(folder, None)}
    engines["adapter"] = engine_of(folder, AdapterConfig(rank=options.rank, alpha=2 * options.rank))
    steps = {name: lambda engine=engine: engine.train_step(batch()) for name, engine in engines.items()}
    if options.peft:
        steps["peft"] = peft_step(folder, rank=options.rank)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(options.rounds + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if round_number:  # the first one warms up
                seconds[name].append(time.perf_counter() - began)
    found: dict[str, Any] = {
        name: {"tokens_per_s": round(SAMPLES * LENGTH / statistics.median(taken), 1)} for name, taken in seconds.items()
    }
    async with forge.run():
        for name, engine in engines.items():
            found[name] |= held(engine) | await synced(name, engine, rounds=options.rounds)
        if options.vllm:
            for name, taken in (await vllm_updates(folder, engines, rounds=options.rounds)).items():
                found[name] |= taken
    for engine in engines.values():
        engine.close()
    found["ratios"] = {
        "tokens_per_s, adapter / full": round(found["adapter"]["tokens_per_s"] / found["full"]["tokens_per_s"], 2),
        "version bytes, full / adapter": round(found["full"]["version_bytes"] / found["adapter"]["version_bytes"], 1),
        "sync seconds, full / adapter": round(found["full"]["sync_s"] / found["adapter"]["sync_s"], 1),
    }
    if options.vllm:
        for key in ("vllm_update_s", "vllm_stall_s"):
            found["ratios"][f"{key}, full / adapter"] = round(found["full"][key] / found["adapter"][key], 1)
    if options.peft:
        ratio = found["adapter"]["tokens_per_s"] / found["peft"]["tokens_per_s"]
        found["ratios"]["tokens_per_s, adapter / peft"] = round(ratio, 2)
    return found


def engine_of(folder: Path, adapter: AdapterConfig | None) -> Engine:
    training = TrainingConfig(max_steps=1000, max_seq_len=LENGTH, microbatch_tokens=SAMPLES * LENGTH)
    return Engine(TrainerConfig(model=ModelConfig(path=str(folder)), adapter=adapter, training=training))


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))


def batch() -> Batch:
    weights = torch.ones(LENGTH)
    weights[0] = 0
    return Batch.of([Sample(row, weights, identity=str(number)) for number, row in enumerate(tokens())])


def held(engine: Engine) -> dict[str, int]:
    assert engine.optimizer is not None
    states = engine.optimizer.state_dict()
    kept = [tensor for kind in ("exp_avg", "exp_avg_sq") for tensor in states[kind].values()]
    return {"optimizer_bytes": sum(tensor.nbytes for tensor in kept)}


async def synced(name: str, engine: Engine, *, rounds: int) -> dict[str, Any]:
    """Publish versions, and fetch each into memory of a reader's own."""
    weights = Weights(name, rank=0, world_size=1)
    state = engine.trained_parameters()
    into = {key: torch.empty_like(tensor) for key, tensor in state.items()}
    taken = []
    for version in range(rounds + 1):
        began = time.perf_counter()
        await weights.publish(state, version=version)
        fetched = await Weights(name).fetch(into, version=version)
        taken.append(time.perf_counter() - began)
        fetched.release()
    versions = await weights.versions()
    return {"version_bytes": versions[-1].num_bytes, "sync_s": round(statistics.median(taken[1:]), 5)}


async def vllm_updates(folder: Path, trainers: dict[str, Engine], *, rounds: int) -> dict[str, dict[str, float]]:
    """Update a vLLM engine of each kind from new versions, in turns: from the call to the report, and the stall."""
    served = {name: vllm_engine(folder, name, trainer) for name, trainer in trainers.items()}
    reports: dict[str, list[UpdateReport]] = {name: [] for name in served}
    try:
        for engine in served.values():
            await engine.start()
        for version in range(rounds + 1, 2 * rounds + 2):
            for name, engine in served.items():
                store = Weights(name, rank=0, world_size=1)
                await store.publish(trainers[name].trained_parameters(), version=version)
                reports[name].append(await engine.update_weights(version, "keep"))
    finally:
        for engine in served.values():
            await engine.close()
    return {
        name: {
            "vllm_update_s": round(statistics.median(report.seconds for report in made[1:]), 5),
            "vllm_stall_s": round(statistics.median(report.stall_s for report in made[1:]), 5),
        }
        for name, made in reports.items()
    }


def vllm_engine(folder: Path, name: str, trainer: Engine) -> VllmEngine:
    """Return a vLLM engine that updates from what a trainer publishes under a name."""
    config = GeneratorConfig(
        engine="vllm",
        weights=name,
        model=ModelConfig(path=str(folder)),
        adapter=trainer.config.adapter,
        max_seq_len=LENGTH,
        max_batch=4,
        kv_cache_gb=0.05,
    )
    return VllmEngine(config, model=resolve(config.model), tokenizer=ChatTokenizer.load(folder))


def peft_step(folder: Path, *, rank: int) -> Any:
    """Return a training step of PEFT's adapter on transformers' model: the same tokens, AdamW, clipping."""
    import transformers
    from peft import LoraConfig, get_peft_model

    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(plain, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=linear, task_type="CAUSAL_LM"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    ids = tokens()

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
