"""What `generation.py` asks of every side: the model's files, and the requests. Only the standard library is needed to
read them, since peers do so in environments of their own."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LOADS = ("uniform", "mixed")
PROBE = tuple(range(700, 716))
"""The prompt with which every side makes its first token, and shows that it computes the same model."""


@dataclass(frozen=True)
class Plan:
    """What is generated, and how often.

    Attributes:
        shape: facts of the model that differ from the tiny one's.
        num_requests: prompts of a window, all given at once.
        prompt: tokens of a uniform load's prompts; a mixed load's have from `shortest` to `longest`.
        longest: new tokens of a uniform load; a mixed load's requests want from `shortest` to so many.
        num_rounds: windows of each side and load; `num_warm` requests before them are not counted.
        num_starts: how often each side is started to time its first token.
        num_updates: weights that are loaded while sequences decode.
    """

    shape: Mapping[str, Any]
    num_requests: int = 64
    prompt: int = 64
    shortest: int = 8
    longest: int = 128
    num_rounds: int = 5
    num_warm: int = 16
    num_starts: int = 3
    num_updates: int = 6

    @property
    def max_seq_len(self) -> int:
        return 2 * self.longest

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Plan:
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True)
class Wanted:
    """One request: exactly `num_new` tokens are to be drawn after the prompt."""

    prompt_ids: tuple[int, ...]
    num_new: int


def requests(plan: Plan, load: str, number: int) -> list[Wanted]:
    """The requests of one window. A load's lengths are always the same; its tokens are new in every window, so that
    nobody finds a prompt among those that were read before."""
    lengths, tokens = random.Random(load), random.Random(f"{load} {number}")
    vocab = int(plan.shape["vocab_size"])
    found = []
    for _ in range(plan.num_requests):
        prompt, num_new = plan.prompt, plan.longest
        if load == "mixed":
            prompt, num_new = (lengths.randint(plan.shortest, plan.longest) for _ in range(2))
        found.append(Wanted(tuple(tokens.randrange(600, vocab) for _ in range(prompt)), num_new))
    return found


def prepare(folder: Path, plan: Plan) -> int:
    """Write the model as a Hugging Face folder, and the plan; the number of weights."""
    import math

    from forge.models.tiny import make_tiny, tensor_shapes

    facts = make_tiny(folder / "model", **plan.shape)
    plan.write(folder / "plan.json")
    return sum(math.prod(shape) for _, shape in tensor_shapes(facts))
