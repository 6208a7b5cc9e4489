"""How far are the sampler's logprobs from the trainer's, in float32, bfloat16 and float16?

The native engine samples completions from a model (Qwen3's shape, random weights, made here), and the trainer computes
the logprobs of the same tokens with the same weights, both in one precision. Both run the same model definition, so
what differs is rounding alone: the trainer takes a sequence as a whole, the engine a prompt and then token by token.
The mean and the largest difference over all sampled tokens are printed, and how far each side is from the trainer in
float32: with the same rounding errors on both sides they would agree and still be wrong.

Random weights are scaled up (`--gain`), so that logprobs are as spread as those of a trained model and not all alike.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from forge.config import DistributedConfig, GeneratorConfig, ModelConfig, Sampling, TrainerConfig, TrainingConfig
from forge.generator.engine import Request, engine_class
from forge.models.locate import resolve
from forge.models.tiny import make_tiny
from forge.models.tokenizer import ChatTokenizer
from forge.trainer.engine import Engine
from forge.types import Batch, Sample
from harness.report import machine, table

SHAPE = {
    "num_layers": 8,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 32,
    "vocab_size": 4096,
    "max_seq_len": 512,
    "tie_embeddings": True,
}
QUICK_SHAPE = SHAPE | {"num_layers": 2, "vocab_size": 512}
PRECISIONS = ("float32", "bfloat16", "float16")
PROMPT_TOKENS, COMPLETION_TOKENS = 48, 64


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer samples")
    parser.add_argument("--samples", type=int, help="how many completions")
    parser.add_argument("--gain", type=float, default=4.0, help="what random weights are multiplied by")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny(folder, **(QUICK_SHAPE if given.quick else SHAPE))
        _scale_weights(Path(folder), given.gain)
        figures = measure(folder, num_samples=given.samples or (4 if given.quick else 16))
    print(", ".join(f"{key} {value}" for key, value in machine().items()), end="\n\n")
    header = [
        "precision",
        "sampler to trainer, mean",
        "largest",
        "trainer to float32, mean",
        "sampler to float32, mean",
    ]
    print(table(header, [[name, *(f"{value:.2e}" for value in row.values())] for name, row in figures.items()]))
    ratio = figures["bfloat16"]["mean"] / figures["float16"]["mean"]
    print(f"\nfloat16 is {ratio:.1f} times closer than bfloat16.")
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=2), encoding="utf-8")
    return 0


def _scale_weights(folder: Path, gain: float) -> None:
    for file in folder.glob("*.safetensors"):
        weights = {name: each * gain if each.ndim > 1 else each for name, each in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})


def measure(folder: str, *, num_samples: int) -> dict[str, dict[str, float]]:
    """Return for each precision the mean and the largest difference, and both sides' mean distance from float32."""
    vocab = int(resolve(ModelConfig(path=folder)).architecture.vocab_size or 0)
    maker = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, vocab, (num_samples, PROMPT_TOKENS), generator=maker).tolist()
    found: dict[str, dict[str, float]] = {}
    for precision in PRECISIONS:
        sequences, sampled = asyncio.run(sample(folder, prompts, precision=precision))
        trained = train_logprobs(folder, sequences, precision=precision)
        exact = trained if precision == "float32" else train_logprobs(folder, sequences, precision="float32")
        gap = (sampled - trained).abs()
        found[precision] = {
            "mean": float(gap.mean()),
            "largest": float(gap.max()),
            "trainer": float((trained - exact).abs().mean()),
            "sampler": float((sampled - exact).abs().mean()),
        }
    return found


async def sample(folder: str, prompts: list[list[int]], *, precision: Any) -> tuple[list[list[int]], torch.Tensor]:
    """Return the sequences of prompts and completions, and the sampler's logprobs of all completions' tokens."""
    config = GeneratorConfig(
        model=ModelConfig(path=folder), precision=precision, with_gpus=False, max_batch=8, kv_cache_gb=0.2
    )
    model = resolve(config.model)
    assert model.folder is not None
    engine = engine_class("native")(config, model=model, tokenizer=ChatTokenizer.load(model.folder))
    await engine.start()
    try:
        sampling = Sampling(max_tokens=COMPLETION_TOKENS, temperature=1.0)
        requests = [
            Request(str(place), tuple(prompt), sampling.model_copy(update={"seed": place}))
            for place, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*(engine.generate(request) for request in requests))
    finally:
        await engine.close()
    sequences = [[*prompt, *answer[0].token_ids] for prompt, answer in zip(prompts, answers, strict=True)]
    return sequences, torch.cat([torch.as_tensor(answer[0].logprobs) for answer in answers])


def train_logprobs(folder: str, sequences: list[list[int]], *, precision: Any) -> torch.Tensor:
    """Return the trainer's logprobs of all completions' tokens."""
    config = TrainerConfig(
        model=ModelConfig(path=folder),
        training=TrainingConfig(max_seq_len=256, schedule="constant", max_steps=1),
        distributed=DistributedConfig(with_gpus=False, shard=1, precision=precision),
        frozen=True,
    )
    engine = Engine(config)
    try:
        samples = [Sample(torch.tensor(each), torch.zeros(len(each))) for each in sequences]
        logprobs = engine.forward_logprobs(Batch.of(samples))
    finally:
        engine.close()
    return torch.cat([each[PROMPT_TOKENS:] for each in logprobs])


if __name__ == "__main__":
    raise SystemExit(main())
