"""How fast does a trainer step, against what the device can do?

One rank trains a model of a preset's shape, with random weights, on packed batches of documents of mixed lengths. The
peer is the device itself: its datasheet's peak (which gives the MFU) and the fastest square product of matrices that
is measured in the same run. `--preset tiny --device cpu` runs the same program without a GPU, to try it out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from forge.config import ForgeConfig, TrainerConfig, load
from forge.models.sizes import flops_per_token, mean_context, model_flops_utilization
from forge.observe import device_peak_flops
from forge.trainer.engine import Engine
from forge.types import Batch, Sample

GOAL_MFU = 0.45


def make_batch(num_tokens: int, *, longest: int, vocab: int, seed: int) -> Batch:
    """Documents whose lengths are log-uniform from 64 tokens on, filled up to exactly `num_tokens`."""
    generator = torch.Generator().manual_seed(seed)
    samples, left = [], num_tokens
    while left > 0:
        draw = torch.rand((), generator=generator).item()
        length = min(left, longest, round(64 * (longest / 64) ** draw))
        weights = torch.ones(length)
        weights[0] = 0
        samples.append(Sample(torch.randint(0, vocab, (length,), generator=generator), weights))
        left -= length
    return Batch.of(samples)


def matmul_flops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Operations per second of a square product, the median of ten."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(12):
        began = _now(device)
        torch.mm(a, b)
        seconds.append(_now(device) - began)
    return 2 * size**3 / statistics.median(seconds[2:])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="qwen3_1_7b", help="default: %(default)s")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, default=16384, help="of a batch; default: %(default)s")
    parser.add_argument("--longest", type=int, default=4096, help="document, in tokens; default: %(default)s")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("overrides", nargs="*", help="such as training.activation_checkpointing=full")
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    precision = "bfloat16" if arguments.device == "cuda" else "float32"
    loaded = load(_Config, overrides=[f"model.preset={arguments.preset}"])
    plain = {
        "max_seq_len": max(arguments.longest, 2),
        "microbatch_tokens": arguments.tokens,
        "schedule": "constant",
    }
    training: dict[str, object] = dict(plain)
    distributed: dict[str, object] = {"precision": precision, "with_gpus": arguments.device == "cuda"}
    for word in arguments.overrides:
        path, _, value = word.partition("=")
        section, _, key = path.partition(".")
        {"training": training, "distributed": distributed}[section][key] = (
            json.loads(value) if _is_json(value) else value
        )
    config = TrainerConfig.model_validate(
        {"model": loaded.model.model_copy(update={"preset": None}), "training": training, "distributed": distributed}
    )
    engine = Engine(config)
    batch = make_batch(arguments.tokens, longest=arguments.longest, vocab=config.model.vocab_size or 2, seed=0)
    for _ in range(arguments.warmup):
        engine.train_step(batch)
    if arguments.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(arguments.steps):
        began = _now(engine.ranks.device)
        result = engine.train_step(batch)
        seconds.append(_now(engine.ranks.device) - began)
    step_s = statistics.median(seconds)
    per_token = flops_per_token(config.model, mean_context(batch.lengths))
    state = engine.describe()
    achieved = arguments.tokens / step_s * per_token
    memory = torch.cuda.max_memory_allocated() / 2**30 if arguments.device == "cuda" else None
    engine.close()
    del engine
    product = matmul_flops(
        torch.device(arguments.device),
        torch.bfloat16 if arguments.device == "cuda" else torch.float32,
        8192 if arguments.device == "cuda" else 1024,
    )
    return {
        "preset": arguments.preset,
        "device": state["device_name"],
        "precision": config.distributed.precision,
        "overrides": arguments.overrides,
        "tokens_per_step": arguments.tokens,
        "documents": len(batch),
        "loss": result.loss,
        "step_ms": 1e3 * step_s,
        "slowest_step_ms": 1e3 * max(seconds),
        "tokens_per_s": arguments.tokens / step_s,
        "model_tflops": achieved / 1e12,
        "mfu": model_flops_utilization(
            arguments.tokens / step_s,
            flops_per_token=per_token,
            peak_flops=device_peak_flops(state["device_name"], state["compute_dtype"]),
        ),
        "goal_mfu": GOAL_MFU,
        "matmul_tflops": product / 1e12,
        "ratio_to_matmul": achieved / product,
        "peak_memory_gib": memory,
        "torch": torch.__version__,
    }


class _Config(ForgeConfig):
    """The presets' keys, and nothing else."""


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def main() -> int:
    arguments = parse()
    torch.set_num_threads(1)
    figures = measure(arguments)
    for name, value in figures.items():
        print(f"{name:18} {value:.4g}" if isinstance(value, float) else f"{name:18} {value}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
