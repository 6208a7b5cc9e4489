"""Prompts and completions for the tests of rewards."""

from __future__ import annotations

from typing import Any

from forge.types import Completion, Task


def asked(answer: str | None = None, **metadata: Any) -> Task:
    return Task(id="task:7", text="What is it?", answer=answer, metadata=metadata)


def said(text: str, *, num_tokens: int = 3) -> Completion:
    return Completion((1,), (5,) * num_tokens, (-0.5,) * num_tokens, None, text, "stop")
