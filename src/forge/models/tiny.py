"""A model small enough for a laptop's CPU, made on the spot: no download, and the same bytes every time.

It is a whole Hugging Face folder (configuration, weights, tokenizer, chat template): whatever works with a real model
can be run and tested with this one. Its weights are random, so it knows nothing until it is trained.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from forge.config import ModelConfig
from forge.config.layers import read_preset
from forge.errors import ModelError
from forge.models.architecture import complete
from forge.models.families import find_family
from forge.models.hf_config import SpecialIds, write_hf_config, write_json
from forge.models.long_text import byte_letters
from forge.models.weight_names import weight_map

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

VOCAB_SIZE: Final = 512
"""Tokens of the tiny tokenizer: 256 bytes, 253 merges and 3 special ones, in this order."""

SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPECIAL_IDS: Final = SpecialIds(bos=None, eos=VOCAB_SIZE - 1, pad=VOCAB_SIZE - 3)

TINY_FILES: Final = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

CHAT_TEMPLATE: Final = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}
{{- message['content'] + '<|im_end|>' }}
{%- endgeneration %}
{{- '\\n' }}
{%- else %}
{{- message['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_STD: Final = 0.04
# Words keep the space before them, every digit is alone, and no piece holds both letters and other characters.
_PIECES: Final = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ASCII_PIECES: Final = re.compile(r" ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")


def make_tiny(folder: str | Path, *, seed: int = 0, family: str = "qwen3", **shape: Any) -> ModelConfig:
    """Write a tiny model of a family into a folder, and return its configuration.

    `shape` overrides keys of `ModelConfig`, such as num_layers=2. With none, the family qwen3 is the preset `tiny`. A
    tensor depends on the seed, its name and its shape alone: two models that differ in the number of layers agree in
    the layers that both have.
    """
    asked = {**read_preset("tiny").data["model"], **find_family(family).tiny, "family": family, **shape}
    try:
        config = ModelConfig.model_validate(asked)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or first.get("ctx", {}).get("key")
        raise ModelError(
            "A tiny model of this shape cannot be made.",
            path=key,
            value=asked.get(key),
            rule=first["msg"],
            repair="give keys of ModelConfig, with values that it allows",
        ) from None
    return write_tiny(config, folder, seed=seed)


def write_tiny(config: ModelConfig, folder: str | Path, *, seed: int = 0) -> ModelConfig:
    """Write a tiny model as `make_tiny` does, from a configuration that is complete."""
    from safetensors.numpy import save_file

    config = complete(config)
    vocab, max_length = config.vocab_size or 0, config.max_seq_len or 0
    if vocab < VOCAB_SIZE:
        raise ModelError(
            "The tiny tokenizer has more tokens than the model would have.",
            path="model.vocab_size",
            value=vocab,
            rule=f"at least {VOCAB_SIZE}",
            repair="leave it out",
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: _draw(name, shape, seed) for name, shape in tensor_shapes(config)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder, max_length=max_length)
    write_json(
        folder / "generation_config.json",
        {"do_sample": True, "eos_token_id": SPECIAL_IDS.eos, "pad_token_id": SPECIAL_IDS.pad, "temperature": 1.0},
    )
    write_hf_config(config, folder, dtype="float32", special_ids=SPECIAL_IDS)
    return config


def tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of a Hugging Face checkpoint: name and shape."""
    for slot in weight_map(config):
        for name in slot.hf_names:
            yield name, slot.hf_shape


def _draw(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """Draw evenly distributed values from raw bits, whose stream numpy promises never to change; norms are 1."""
    import numpy as np

    if len(shape) == 1 and not name.endswith(".bias"):
        return np.ones(shape, np.float32)
    bits = np.random.PCG64([seed, zlib.crc32(name.encode())]).random_raw(math.prod(shape))
    unit = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
    values: NDArray[np.float32] = (unit * np.float32(_STD * 3**0.5)).reshape(shape)
    return values


def _write_tokenizer(folder: Path, *, max_length: int) -> None:
    specials = [
        {
            "id": VOCAB_SIZE - len(SPECIAL_TOKENS) + index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, token in enumerate(SPECIAL_TOKENS)
    ]
    tokens, merges = _learn_merges()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": _PIECES}, "behavior": "Isolated", "invert": False}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": [list(pair) for pair in merges],
    }
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": specials,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    write_json(folder / "tokenizer.json", content)
    settings = {
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL_TOKENS[2],
        "extra_special_tokens": [SPECIAL_TOKENS[1]],
        "model_max_length": max_length,
        "pad_token": SPECIAL_TOKENS[0],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


@cache
def _learn_merges() -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Learn byte-pair encoding of a small text: return the tokens by id, and the merges that make them.

    The most frequent pair is merged first, and of equally frequent ones the first in the order of Unicode: the outcome
    does not depend on any library's way of breaking ties.
    """
    letters = byte_letters()
    alphabet = tuple(letters[byte] for byte in range(256))
    tokens = list(alphabet)
    counts = Counter(_ASCII_PIECES.findall(_training_text()))
    words = {tuple(alphabet[byte] for byte in piece.encode()): number for piece, number in counts.items()}
    merges: list[tuple[str, str]] = []
    while len(tokens) < VOCAB_SIZE - len(SPECIAL_TOKENS):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, number in words.items():
            for pair in pairwise(word):
                pairs[pair] += number
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        if "".join(best) not in tokens:
            tokens.append("".join(best))
        words = {_join(word, best): number for word, number in words.items()}
    return tuple(tokens), tuple(merges)


def _join(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    if pair[0] not in word:
        return word
    joined: list[str] = []
    index = 0
    while index < len(word):
        if word[index : index + 2] == pair:
            joined.append("".join(pair))
            index += 2
        else:
            joined.append(word[index])
            index += 1
    return tuple(joined)


def _training_text() -> str:
    """Make arithmetic and simple English, in about the proportions of what a tiny model is trained on."""
    lines = ["system\nYou are a helpful assistant.", "user\nHello!", "assistant\nHello! How can I help you today?"] * 9
    for left in range(1, 21):
        right = left * 7 % 13 + 1
        lines.append(f"What is {left} + {right}? The answer is {left + right}.")
        lines.append(f"Question: compute {left} * {right} = {left * right}. Let us think step by step.")
        lines.append(f"If there are {left + right} apples and {right} are taken away, then {left} of them are left.")
    people = ("The teacher", "A friend", "My mother", "The little child", "Our neighbour", "That man", "This woman")
    deeds = ("reads", "likes", "wants to see", "writes about", "looks for", "would have", "could not find", "makes")
    things = ("a good book.", "the old house.", "some water and bread.", "the way home.", "her first letter.")
    times = ("in the morning", "when it was time", "every day", "because they know", "which is more than before")
    for index, person in enumerate(people):
        for place, deed in enumerate(deeds):
            thing, time = things[(index + place) % len(things)], times[(index * 3 + place) % len(times)]
            lines.append(f"{person} {deed} {thing} {time.capitalize()}, {person.lower()} {deed} {thing}")
    lines += ["Name the capital of the country.", "Yes, that is right.", "No, it is not.", json.dumps({"key": "value"})]
    return "\n".join(lines)
