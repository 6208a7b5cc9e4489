"""What does it cost to serve several LoRA adapters in one batch?

The same requests on one native engine, in turns: a quarter of them on each of four adapters, all together (`mixed`);
all of them on one adapter (`one`); and, as a server does that merges an adapter into the weights to serve it, one
adapter's requests after another's, with a swap of the merged weights in between (`swapped`; the merged weights are in
memory beforehand, so that only the copy counts). Sampled tokens per second, medians. With `--peft`, which needs `peft`
beside transformers, PEFT generates the mixed batch on transformers' model in the same run.

    python benchmarks/multi_adapter.py [--rank 16] [--requests 16] [--tokens 64] [--rounds 5] [--peft]
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
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge.config import GeneratorConfig, ModelConfig, Sampling
from forge.config.adapter import TARGET_NAMES
from forge.generator.engine import Request
from forge.generator.native.engine import NativeEngine
from forge.models.adapter_names import AdapterSpec, adapter_map
from forge.models.locate import resolve
from forge.models.peft_files import read_adapter_folder, write_adapter
from forge.models.tiny import VOCAB_SIZE, make_tiny

SIZES = {"num_layers": 4, "hidden_size": 512, "intermediate_size": 1536}
HEADS = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 64}
NAMES = ("first", "second", "third", "fourth")
PROMPT = 32


def main() -> None:
    parser = argparse.ArgumentParser(description="Several adapters in one batch.")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peft", action="store_true", help="also measure PEFT's mixed batches")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        base = Path(place, "base")
        make_tiny(base, **SIZES, **HEADS)
        folders = [write(Path(place, name), base, rank=options.rank, seed=seed) for seed, name in enumerate(NAMES)]
        print(json.dumps(asyncio.run(measure(base, folders, options)), indent=2))


async def measure(base: Path, folders: Sequence[Path], options: argparse.Namespace) -> dict[str, Any]:
    """Measure all sides in turns."""
    served, swapped = engine_of(base, options), engine_of(base, options)
    for engine in (served, swapped):
        await engine.start()
    for name, folder in zip(NAMES, folders, strict=True):
        await served.load_adapter(name, str(folder))
    merged = [merge(swapped, folder) for folder in folders]
    mix = [NAMES[number % len(NAMES)] for number in range(options.requests)]

    async def generate(engine: NativeEngine, adapters: Sequence[str | None]) -> None:
        await asyncio.gather(*(engine.generate(ask(place, name, options)) for place, name in enumerate(adapters)))

    async def swap() -> None:
        for number, name in enumerate(NAMES):
            async with swapped.paused(number):
                swapped.copy_weights(merged[number])
            await generate(swapped, [None] * mix.count(name))

    sides: dict[str, Callable[[], Awaitable[None]]] = {
        "mixed": lambda: generate(served, mix),
        "one": lambda: generate(served, [NAMES[0]] * options.requests),
        "none": lambda: generate(served, [None] * options.requests),
        "swapped": swap,
    }
    if options.peft:
        by_peft = peft_batch(base, folders, mix, options)
        sides["peft"] = lambda: asyncio.to_thread(by_peft)
    seconds = await timed(sides, options.rounds)
    for engine in (served, swapped):
        await engine.close()
    speed = {name: options.requests * options.tokens / statistics.median(taken) for name, taken in seconds.items()}
    ratios = {f"mixed / {name}": round(speed["mixed"] / each, 2) for name, each in speed.items() if name != "mixed"}
    return {"tokens_per_s": {name: round(each, 1) for name, each in speed.items()}, "ratios": ratios}


async def timed(sides: dict[str, Callable[[], Awaitable[None]]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(rounds + 1):
        for name, side in sides.items():
            began = time.perf_counter()
            await side()
            if round_number:  # the first one warms up
                seconds[name].append(time.perf_counter() - began)
    return seconds


def engine_of(base: Path, options: argparse.Namespace) -> NativeEngine:
    model = ModelConfig(path=str(base))
    config = GeneratorConfig(
        model=model, max_seq_len=256, max_batch=options.requests, with_gpus=False, prefix_sharing=False
    )
    return NativeEngine(config, model=resolve(model))


def write(folder: Path, base: Path, *, rank: int, seed: int) -> Path:
    facts, spec = resolve(ModelConfig(path=str(base))).architecture, AdapterSpec(rank, 2.0 * rank, TARGET_NAMES)
    draw = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=draw) * 0.02
        for slot in adapter_map(facts, spec)
        for name, shape in zip(slot.names, slot.shapes, strict=True)
    }
    write_adapter(folder, tensors, model=facts, spec=spec)
    return folder


def merge(engine: NativeEngine, folder: Path) -> dict[str, Tensor]:
    """Return the engine's weights with an adapter merged into them."""
    facts = engine.model.architecture
    adapter = read_adapter_folder(folder, facts)
    weights = {name: each.detach().clone() for name, each in engine.thread.serving().runner.parameters.items()}
    for slot in adapter_map(facts, adapter.spec):
        a, b = (adapter.tensors[name] for name in slot.names)
        weights[slot.base.name] += adapter.spec.scale * (b @ a)
    return weights


def prompt(place: int) -> tuple[int, ...]:
    drawn = torch.randint(0, VOCAB_SIZE - 3, (PROMPT,), generator=torch.Generator().manual_seed(place))
    return tuple(drawn.tolist())


def ask(place: int, adapter: str | None, options: argparse.Namespace) -> Request:
    sampling = Sampling(temperature=0.0, max_tokens=options.tokens, ignore_eos=True, adapter=adapter)
    return Request(str(place), prompt(place), sampling)


def peft_batch(
    base: Path, folders: Sequence[Path], mix: Sequence[str], options: argparse.Namespace
) -> Callable[[], None]:
    """Return what generates the mixed batch by PEFT on transformers' model."""
    import transformers
    from peft import PeftModel

    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    model = PeftModel.from_pretrained(plain, folders[0], adapter_name=NAMES[0])
    for name, folder in zip(NAMES[1:], folders[1:], strict=True):
        model.load_adapter(folder, adapter_name=name)
    ids = torch.tensor([prompt(place) for place in range(options.requests)])
    length = {"max_new_tokens": options.tokens, "min_new_tokens": options.tokens}

    def run() -> None:
        with torch.inference_mode():
            found = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), adapter_names=list(mix), do_sample=False, **length
            )
        assert found.shape[1] == PROMPT + options.tokens

    return run


if __name__ == "__main__":
    main()
