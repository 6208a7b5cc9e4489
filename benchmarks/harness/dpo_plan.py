"""What `dpo.py` trains, for how long, and the pairs that both sides read."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.sft_plan import TEXT


@dataclass(frozen=True)
class DPOPlan:
    """What is trained, and for how long.

    Attributes:
        shape: facts of the model that differ from the tiny one's.
        shortest, longest: tokens of a prompt with its longer answer.
        num_pairs: pairs of a step; 8 are TRL's default.
        num_rounds: windows of each side; `num_warm` windows before them are not counted.
    """

    shape: Mapping[str, int]
    shortest: int = 40
    longest: int = 512
    num_pairs: int = 8
    num_rounds: int = 12
    num_warm: int = 2
    window: int = 1
    threads: int = 1
    learning_rate: float = 1e-5
    beta: float = 0.1
    settings: tuple[str, ...] = ()

    @property
    def num_steps(self) -> int:
        return (self.num_rounds + self.num_warm) * self.window


def prepare(folder: Path, plan: DPOPlan) -> dict[str, Any]:
    """Write the model, the pairs, and the same as tokens; and say what they are."""
    from forge.models.tiny import make_tiny, tensor_shapes
    from forge.models.tokenizer import ChatTokenizer

    facts = make_tiny(folder / "model", **plan.shape)
    tokenizer = ChatTokenizer.load(folder / "model")
    draw, lengths, prompts = random.Random(0), [], []
    with (folder / "pairs.jsonl").open("w") as pairs, (folder / "pairs.ids.jsonl").open("w") as tokens:
        while len(lengths) < 2 * plan.num_steps * plan.num_pairs:
            wanted = plan.shortest * (plan.longest / plan.shortest) ** draw.random()
            question, *answers = _pair(draw, wanted)
            chats = [
                [{"role": "user", "content": question}, {"role": "assistant", "content": answer}] for answer in answers
            ]
            (chosen, mask), (rejected, _) = (tokenizer.encode_chat(chat) for chat in chats)
            start = mask.index(True)
            if max(len(chosen), len(rejected)) > plan.longest or chosen[:start] != rejected[:start]:
                continue
            pairs.write(json.dumps({"prompt": question, "chosen": answers[0], "rejected": answers[1]}) + "\n")
            # What a template puts after the last word of an answer belongs to no answer.
            ends = [
                len(ids) - _num_behind(tokenizer, chat) for ids, chat in zip((chosen, rejected), chats, strict=True)
            ]
            record = {
                "prompt_ids": chosen[:start],
                "chosen_ids": chosen[start : ends[0]],
                "rejected_ids": rejected[start : ends[1]],
            }
            tokens.write(json.dumps(record) + "\n")
            lengths += [len(chosen), len(rejected)]
            prompts.append(start)
    num_weights = sum(math.prod(shape) for _, shape in tensor_shapes(facts))
    return {
        "parameters": num_weights,
        "pairs": len(prompts),
        "mean_length": statistics.mean(lengths),
        "prompts": 2 * sum(prompts) / sum(lengths),
    }


def _num_behind(tokenizer: Any, chat: list[dict[str, str]]) -> int:
    mask = tokenizer.encode_chat(chat)[1]
    return mask[::-1].index(True)


def _pair(draw: random.Random, wanted: float) -> tuple[str, str, str]:
    """A question and two answers of different lengths, of about so many tokens in all."""
    words = draw.choices(TEXT.split(), k=max(2, round((wanted - 20) / 2.9)))
    middle = max(1, round(len(words) * draw.uniform(0.2, 0.5)))
    asked, answer = words[:middle], words[middle:] or words[:1]
    other = draw.choices(TEXT.split(), k=max(1, round(len(answer) * draw.uniform(0.5, 1.0))))
    return f"Continue: {' '.join(asked)}", " ".join(answer), " ".join(other)
