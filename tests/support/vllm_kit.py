"""What the tests of the vLLM engine share: a configuration, other weights, and transformers as the judge."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from forge.config import GeneratorConfig, ModelConfig, Sampling
from forge.generator.engine import Request
from forge.models.locate import ResolvedModel, resolve
from forge.models.weight_names import hf_views
from hf_state import to_ours

PROMPT = tuple((7 * place + 3) % 400 + 20 for place in range(24))
GREEDY = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)


def config(**changes: Any) -> GeneratorConfig:
    """A small engine on the CPU."""
    fields: dict[str, Any] = {"max_seq_len": 512, "max_batch": 8, "max_queue": 8, "kv_cache_gb": 0.05} | changes
    return GeneratorConfig(engine="vllm", model=ModelConfig(preset="tiny"), **fields)


def request(prompt: Sequence[int] = PROMPT, sampling: Sampling = GREEDY, **changes: Any) -> Request:
    return Request("test", tuple(prompt), sampling.model_copy(update=changes))


@functools.cache
def tiny() -> ResolvedModel:
    return resolve(ModelConfig(preset="tiny"))


def weights(seed: int) -> dict[str, Tensor]:
    """All parameters of the tiny model under our names; seed 0 gives its own, others give others."""
    assert tiny().folder is not None
    ours = to_ours(load_file(Path(tiny().folder) / "model.safetensors"), tiny().architecture)
    generator = torch.Generator().manual_seed(seed)
    if seed:
        for name, tensor in ours.items():
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
            ours[name] = (tensor + 0.7 * noise if tensor.dim() > 1 else tensor).to(tensor.dtype)
    return ours


@functools.cache
def judge(seed: int) -> Any:
    """The same weights in transformers."""
    model = AutoModelForCausalLM.from_pretrained(tiny().folder, dtype=torch.float32)
    model.load_state_dict(dict(hf_views(weights(seed), tiny().architecture)), strict=False)
    return model.eval()


@torch.no_grad()
def judged(seed: int, ids: Sequence[int], *, temperature: float = 1.0) -> Tensor:
    """The logprobs [L, V] that transformers has for what follows each token."""
    logits = judge(seed)(torch.tensor([list(ids)])).logits[0].double()
    return (logits / temperature).log_softmax(-1)


def greedy(seed: int, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers generates, the likeliest token each time."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(judged(seed, ids)[-1].argmax()))
    return ids[len(prompt) :]


def token_logprobs(seed: int, prompt: Sequence[int], tokens: Sequence[int], *, temperature: float = 1.0) -> list[float]:
    """What transformers gives for tokens after a prompt."""
    table = judged(seed, [*prompt, *tokens], temperature=temperature)
    first = len(prompt)
    return [float(table[first + place - 1, token]) for place, token in enumerate(tokens)]
