"""A policy whose answers are given: it tokenises them, and remembers what it was sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge.envs.journal import Journal
from forge.envs.limits import EpisodeLimits
from forge.envs.state import EpisodeKey, EpisodeState
from forge.models.tokenizer import ChatTokenizer
from forge.types import Completion, Task, VersionSpan

END = "<|im_end|>"


@dataclass
class ScriptedPolicy:
    """Answers in order, or as a function of the text of the prompt. An answer without an end was cut off by length."""

    codec: ChatTokenizer
    answers: Sequence[str] | Callable[[str], str]
    max_seq_len: int = 100_000
    version: int = 3
    delay: Callable[[str], float] | None = None
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    options: list[Mapping[str, Any]] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)

    async def sample(self, token_ids: Sequence[int], *, options: Mapping[str, Any], session: str) -> Completion:
        number = len(self.prompts)
        self.prompts.append(tuple(token_ids))
        self.options.append(options)
        self.sessions.append(session)
        text = self.codec.decode(token_ids)
        if self.delay is not None:
            await asyncio.sleep(self.delay(text))
        answer = self.answers(text) if callable(self.answers) else self.answers[number]
        ids = tuple(self.codec.encode_rendered(answer))
        is_cut = len(ids) > options["max_tokens"] or not answer.endswith(END)
        ids = ids[: options["max_tokens"]]
        return Completion(
            prompt_ids=tuple(token_ids),
            token_ids=ids,
            logprobs=tuple(-0.01 * (place + 1) for place in range(len(ids))),
            full_logprobs=None,
            text=self.codec.decode(ids, skip_special=True),
            finish_reason="length" if is_cut else "stop",
            versions=(VersionSpan(self.version, 0, len(ids)),),
        )


def state_of(policy: ScriptedPolicy, **changes: Any) -> EpisodeState:
    """Return the state of a fresh episode."""
    values: dict[str, Any] = {
        "task": Task("task:0", messages=({"role": "user", "content": "How many?"},), answer="4"),
        "key": EpisodeKey(1, 2, 3),
        "limits": EpisodeLimits(),
        "policy": policy,
        "codec": policy.codec,
        "tool_format": "hermes",
        "sampling": {"temperature": 1.0, "max_tokens": 256},
        "journal": Journal(),
    }
    return EpisodeState(**{**values, **changes})
