"""Groups of made-up episodes, for tests of what comes after rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from forge.types import Completion, Episode, Group, Score, Task, VersionSpan


def make_completion(token_ids: Sequence[int] = (5, 6, 7), *, version: int = 0, **changes: Any) -> Completion:
    fields: dict[str, Any] = {
        "prompt_ids": (1, 2),
        "token_ids": tuple(token_ids),
        "logprobs": tuple(-0.5 - 0.1 * place for place in range(len(token_ids))),
        "full_logprobs": None,
        "text": "text",
        "finish_reason": "stop",
        "versions": (VersionSpan(version, 0, len(token_ids)),),
    }
    return Completion(**{**fields, **changes})


def make_group(number: int, rewards: Sequence[float] = (0.0, 1.0), *, version: int = 0, **changes: Any) -> Group:
    """A group with these rewards, made by these weights; `changes` are those of its completions."""
    prompt = Task(f"made-up:{number}", messages=({"role": "user", "content": "?"},), answer="7")
    episodes = [
        Episode.single(prompt, make_completion(version=version, index=index, **changes), Score(reward))
        for index, reward in enumerate(rewards)
    ]
    return Group(number, 0, tuple(episodes))


def with_turn(episode: Episode, **changes: Any) -> Episode:
    """The episode of one turn with that turn changed."""
    (turn,) = episode.turns
    return replace(episode, turns=(replace(turn, **changes),))
