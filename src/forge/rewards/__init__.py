"""Rewards: plain functions of a prompt and a completion, by name or your own.

    reward = forge.rewards.find("number")
    reward(prompt, completion, tolerance=0.01)   # 1.0 or 0.0

A reward is `(prompt: Task, completion: Answer, **arguments) -> float`. It may raise; the reward actor
counts that as a failure. Nothing here loads torch, and each reward loads what it needs when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge._lazy import lazy_names

if TYPE_CHECKING:
    from forge.rewards.answers import answer_in_tags, math, number
    from forge.rewards.catalog import arguments, check, check_args, find, is_served, names
    from forge.rewards.composing import Reward, all_of, any_of, bound, gated, product_of, rescaled
    from forge.rewards.form import length, tags
    from forge.rewards.matching import contains, exact, fuzzy, regex
    from forge.rewards.numbers import last_number, read_number
    from forge.rewards.served import judge_messages, judge_score, model_score

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

__getattr__ = lazy_names(
    __name__,
    {
        "forge.rewards.answers": "answer_in_tags math number",
        "forge.rewards.catalog": "arguments check check_args find is_served names",
        "forge.rewards.composing": "Reward all_of any_of bound gated product_of rescaled",
        "forge.rewards.form": "length tags",
        "forge.rewards.matching": "contains exact fuzzy regex",
        "forge.rewards.numbers": "last_number read_number",
        "forge.rewards.served": "judge_messages judge_score model_score",
    },
)
