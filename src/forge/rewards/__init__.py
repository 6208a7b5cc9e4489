"""Rewards: plain functions of a prompt and a completion, by name or your own.

    reward = forge.rewards.find("number")
    reward(prompt, completion, tolerance=0.01)   # 1.0 or 0.0

A reward is `(prompt: Prompt, completion: Completion, **arguments) -> float`. It may raise: whoever runs rewards counts
that as a failure. Nothing here loads torch, and each reward loads what it needs when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.rewards.answers import answer_in_tags, math, number
    from forge.rewards.catalog import arguments, check, check_args, find, is_served, names
    from forge.rewards.composing import Reward, all_of, any_of, bound, gated, product_of, rescaled
    from forge.rewards.form import length, tags
    from forge.rewards.matching import contains, exact, fuzzy, regex
    from forge.rewards.numbers import last_number, read_number
    from forge.rewards.served import judge_messages, judge_score, model_score

_HOMES = {
    **dict.fromkeys(("answer_in_tags", "math", "number"), "answers"),
    **dict.fromkeys(("arguments", "check", "check_args", "find", "is_served", "names"), "catalog"),
    **dict.fromkeys(("Reward", "all_of", "any_of", "bound", "gated", "product_of", "rescaled"), "composing"),
    **dict.fromkeys(("length", "tags"), "form"),
    **dict.fromkeys(("contains", "exact", "fuzzy", "regex"), "matching"),
    **dict.fromkeys(("last_number", "read_number"), "numbers"),
    **dict.fromkeys(("judge_messages", "judge_score", "model_score"), "served"),
}

__all__ = [
    "Reward",
    "all_of",
    "answer_in_tags",
    "any_of",
    "arguments",
    "bound",
    "check",
    "check_args",
    "contains",
    "exact",
    "find",
    "fuzzy",
    "gated",
    "is_served",
    "judge_messages",
    "judge_score",
    "last_number",
    "length",
    "math",
    "model_score",
    "names",
    "number",
    "product_of",
    "read_number",
    "regex",
    "rescaled",
    "tags",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'forge.rewards' has no attribute {name!r}")
    value = getattr(import_module(f"forge.rewards.{home}"), name)
    globals()[name] = value
    return value
