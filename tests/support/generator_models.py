"""Tiny models whose greedy completions wander and differ from one another, and transformers as their judge.

A model of `forge.models.tiny` repeats one token for ever, whatever its seed: tests that look for a wrong weight or a
wrong page would not see it. Here its matrices are enlarged, which makes every context choose another token, and by a
clear margin. Folders and judges are made once in a process.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forge.config import GeneratorConfig, ModelConfig
from forge.models.locate import ResolvedModel, resolve
from forge.models.tiny import SPECIAL_IDS, VOCAB_SIZE, make_tiny
from forge.models.tokenizer import ChatTokenizer
from hf_state import to_ours

EOS = SPECIAL_IDS.eos
_LARGER: dict[str, float] = {"layers": 4.0, "others": 8.0}


@dataclass(frozen=True)
class Kind:
    """Which model: two that differ in the seed alone are two checkpoints of one architecture."""

    seed: int = 0
    family: str = "qwen3"
    tied: bool = True


FIRST, SECOND = Kind(0), Kind(1)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Tokens without special ones, the same every time."""
    drawn = torch.randint(0, VOCAB_SIZE - 3, (length,), generator=torch.Generator().manual_seed(1000 * length + seed))
    return tuple(drawn.tolist())


@functools.cache
def model(kind: Kind) -> ResolvedModel:
    """The model, in a folder with a tokenizer that lasts as long as the process."""
    folder = Path(tempfile.mkdtemp(prefix="forge-generator-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make_tiny(folder, seed=kind.seed, family=kind.family, num_layers=2, tie_embeddings=kind.tied)
    file = folder / "model.safetensors"
    tensors = {
        name: tensor * (1.0 if tensor.dim() == 1 else _LARGER["layers" if ".layers." in name else "others"])
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return resolve(ModelConfig(path=str(folder)))


@functools.cache
def tokenizer(kind: Kind) -> ChatTokenizer:
    return ChatTokenizer.load(folder(kind))


def folder(kind: Kind = FIRST) -> Path:
    found = model(kind).folder
    assert found is not None
    return found


def weights(kind: Kind = FIRST) -> dict[str, Tensor]:
    """All parameters under our names, as a trainer publishes them."""
    return to_ours(load_file(folder(kind) / "model.safetensors"), model(kind).architecture)


def config(kind: Kind = FIRST, **changes: Any) -> GeneratorConfig:
    """A small generator of the model, on the CPU."""
    fields: dict[str, Any] = {"max_seq_len": 256, "max_batch": 8, "with_gpus": False} | changes
    return GeneratorConfig(model=ModelConfig(path=str(folder(kind))), **fields)


@functools.cache
def judge(kind: Kind) -> Any:
    """The same weights in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder(kind), dtype=torch.float32).eval()


@torch.no_grad()
def logits(ids: Sequence[int], kind: Kind = FIRST) -> Tensor:
    """What transformers computes after each of the tokens, [L, V]."""
    found: Tensor = judge(kind)(torch.tensor([list(ids)])).logits[0]
    return found


@torch.no_grad()
def greedy(ids: Sequence[int], count: int, kind: Kind = FIRST, **options: Any) -> tuple[int, ...]:
    """What transformers generates without chance, end tokens being ordinary ones."""
    asked = {"do_sample": False, "max_new_tokens": count, "eos_token_id": None, "pad_token_id": 0}
    tokens = torch.tensor([list(ids)])
    found = judge(kind).generate(tokens, attention_mask=torch.ones_like(tokens), **asked, **options)
    return tuple(found[0, len(ids) :].tolist())


def table(ids: Sequence[int], tokens: Sequence[int], kind: Kind = FIRST, *, temperature: float = 1.0) -> Tensor:
    """What transformers gives every token at each place of `tokens`, as logprobs, [T, V]."""
    return (logits([*ids, *tokens], kind)[len(ids) - 1 : -1].double() / temperature).log_softmax(-1)


@torch.no_grad()
def table_on_old_keys(ids: Sequence[int], tokens: Sequence[int], old: Kind, new: Kind) -> Tensor:
    """As `table` of `new`, for the tokens that follow `ids` all but the last of which `old` has read."""
    from transformers import DynamicCache

    cache = DynamicCache(config=judge(old).config)
    judge(old)(torch.tensor([list(ids[:-1])]), past_key_values=cache, use_cache=True)
    found: Tensor = judge(new)(torch.tensor([[ids[-1], *tokens]]), past_key_values=cache, use_cache=True).logits
    return found[0, :-1].double().log_softmax(-1)


def choices(ids: Sequence[int], tokens: Sequence[int], kind: Kind = FIRST) -> tuple[int, ...]:
    """After the prompt and the tokens before it, which token is the likeliest at each place of `tokens`."""
    return tuple(table(ids, tokens, kind).argmax(-1).tolist())


def choices_on_old_keys(ids: Sequence[int], tokens: Sequence[int], old: Kind, new: Kind) -> tuple[int, ...]:
    """As `choices` of `new`, for the tokens that follow `ids` all but the last of which `old` has read."""
    return tuple(table_on_old_keys(ids, tokens, old, new).argmax(-1).tolist())


def logprobs(ids: Sequence[int], tokens: Sequence[int], kind: Kind = FIRST, *, temperature: float = 1.0) -> list[float]:
    """What transformers gives the tokens after the prompt."""
    rows = table(ids, tokens, kind, temperature=temperature)
    return [float(rows[place, token]) for place, token in enumerate(tokens)]


@functools.cache
@torch.no_grad()
def ending_prompt(kind: Kind) -> tuple[int, ...]:
    """A prompt after which the likeliest token is the model's end token."""
    pairs = torch.randint(0, VOCAB_SIZE - 3, (4096, 3), generator=torch.Generator().manual_seed(0))
    for part in pairs.split(512):
        ends = (judge(kind)(part).logits[:, -1].argmax(-1) == EOS).nonzero()
        if len(ends):
            return tuple(part[int(ends[0])].tolist())
    raise AssertionError("no prompt of three tokens makes this model end")
