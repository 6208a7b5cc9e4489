"""What `sft.py` trains, for how long, and the files that both sides read."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEXT = "the teacher reads a good book every day and my mother likes her old house which is more than water"


@dataclass(frozen=True)
class Plan:
    """What is trained, and for how long.

    Attributes:
        shape: facts of the model that differ from the tiny one's.
        shortest, longest: tokens of a conversation; a packed row is as long as the longest may be.
        num_rows: packed rows of a step, which is about as many tokens as a padded step of TRL's has.
        num_rounds: windows of each side; `num_warm` windows before them are not counted.
        num_marks: how often each side validates on its way.
        num_held_out: conversations to validate on.
        lora_rank: of an adapter on all linear layers, which is trained instead of the weights.
    """

    shape: Mapping[str, int]
    shortest: int = 30
    longest: int = 512
    num_rows: int = 5
    num_rounds: int = 12
    num_warm: int = 2
    window: int = 1
    num_marks: int = 5
    num_held_out: int = 24
    threads: int = 1
    lora_rank: int | None = None
    settings: tuple[str, ...] = ()

    @property
    def num_steps(self) -> int:
        return (self.num_rounds + self.num_warm) * self.window

    @property
    def tokens_per_step(self) -> int:
        return self.num_rows * self.longest

    @property
    def validate_every_tokens(self) -> int:
        return self.num_steps * self.tokens_per_step // (self.num_marks + 1)


def prepare(folder: Path, plan: Plan) -> dict[str, Any]:
    """Write the model, the conversations, and the same as tokens; and say what they are."""
    from forge.models.tiny import make_tiny, tensor_shapes
    from forge.models.tokenizer import ChatTokenizer

    facts = make_tiny(folder / "model", **plan.shape)
    tokenizer = ChatTokenizer.load(folder / "model")
    draw = random.Random(0)
    held_out = _write(folder / "held_out", tokenizer, draw, plan, num_records=plan.num_held_out)
    enough = math.ceil(1.25 * plan.num_steps * plan.tokens_per_step)
    train = _write(folder / "train", tokenizer, draw, plan, num_tokens=enough)
    num_weights = sum(math.prod(shape) for _, shape in tensor_shapes(facts))
    return {"parameters": num_weights, "train": train, "held_out": held_out}


def _write(
    path: Path, tokenizer: Any, draw: random.Random, plan: Plan, *, num_records: int = 0, num_tokens: int = 0
) -> dict[str, Any]:
    lengths: list[int] = []
    num_counted = 0
    with path.with_suffix(".chat.jsonl").open("w") as chats, path.with_suffix(".ids.jsonl").open("w") as tokens:
        while len(lengths) < num_records or sum(lengths) < num_tokens:
            wanted = plan.shortest * (plan.longest / plan.shortest) ** draw.random()
            messages = _conversation(draw, wanted)
            ids, is_answer = tokenizer.encode_chat(messages)
            if not plan.shortest <= len(ids) <= plan.longest:
                continue
            labels = [token if counts else -100 for token, counts in zip(ids, is_answer, strict=True)]
            chats.write(json.dumps({"messages": messages}) + "\n")
            tokens.write(json.dumps({"input_ids": ids, "labels": labels}) + "\n")
            lengths.append(len(ids))
            num_counted += sum(is_answer)
    return {
        "records": len(lengths),
        "tokens": sum(lengths),
        "mean_length": statistics.mean(lengths),
        "answers": num_counted / sum(lengths),
    }


def _conversation(draw: random.Random, wanted: float) -> list[dict[str, str]]:
    """Something to learn in about so many tokens: counting on, or saying words again."""
    if draw.random() < 0.5:
        start, count = draw.randrange(100), max(1, round((wanted - 30) / 4.4))
        answer = ", ".join(str(number) for number in range(start, start + count))
        question = f"Count from {start} to {start + count - 1}."
    else:
        answer = " ".join(draw.choices(TEXT.split(), k=max(1, round((wanted - 20) / 2.9))))
        question = f"Say it again: {answer}"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
