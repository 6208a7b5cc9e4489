"""What is wrong with a configuration: one record for each fault, and the error that carries them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forge.errors import MISSING, ConfigError


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One fault. `path` is the dotted key, or the file or override that could not be read."""

    path: str
    rule: str
    repair: str
    value: object = MISSING
    origin: str | None = None
    """Who set it, such as `base.yaml:12`; None for what nobody set."""

    def __str__(self) -> str:
        lines = [self.path or "(the whole configuration)"]
        if self.value is not MISSING:
            lines.append(f"    value:  {shorten(self.value)}")
        lines.append(f"    rule:   {self.rule}")
        lines.append(f"    repair: {self.repair}")
        if self.origin is not None:
            lines.append(f"    set by: {self.origin}")
        return "\n".join(lines)


class InvalidConfig(ConfigError):
    """Everything found wrong in one go: `problems` has each; path, value, rule and repair are those of the first."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        first = problems[0]
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        text = "\n".join([f"The configuration has {count}:", *(f"  {problem}" for problem in problems)])
        super().__init__(text, path=first.path, value=first.value, rule=first.rule, repair=first.repair)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return self.message


def shorten(value: object, limit: int = 120) -> str:
    """The value's repr, cut so that one huge value cannot hide the rest of a message."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
