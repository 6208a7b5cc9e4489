"""Episodes for a terminal, turn by turn, and as plain values."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TextIO

from forge.cli.episode_policies import OpenedPolicy
from forge.envs.episode import EpisodeRun
from forge.envs.state import EpisodeKey, EpisodeState
from forge.envs.trace import path_to
from forge.types import DEFAULT_AGENT, MalformedCall, ToolCall, Turn

_COLOURS: Final = {"system": "35", "developer": "35", "user": "36", "assistant": "32", "tool": "33"}
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One episode that was tried.

    Attributes:
        kind: the program's name.
        args: its arguments.
        state: what it left behind.
        run: the finished episode; None where it failed.
        error: why it failed, in full; None where it did not.
        seconds: how long it took.
    """

    kind: str
    args: Mapping[str, Any]
    opened: OpenedPolicy
    state: EpisodeState
    run: EpisodeRun | None
    error: str | None
    seconds: float

    @property
    def turns(self) -> Sequence[Turn]:
        """The turns, also those of an episode that failed."""
        return self.state.turns if self.run is None else self.run.turns

    @property
    def turn_rewards(self) -> Mapping[int, float]:
        return self.state.turn_rewards if self.run is None else self.run.turn_rewards

    @property
    def key(self) -> EpisodeKey:
        return self.state.key

    def num_prompt(self, turn: Turn) -> int | None:
        """Return the tokens of a turn's whole prompt; None where they are not known."""
        if self.opened.is_exact:
            before = path_to(self.turns, turn.parent)
            return sum(len(each.context_ids) + len(each) for each in before) + len(turn.context_ids)
        usage = self.opened.usage.get(turn.seed)
        return None if usage is None else usage.num_prompt

    def num_sampled(self, turn: Turn) -> int | None:
        """Return the tokens that were sampled for a turn; None where they are not known."""
        if self.opened.is_exact:
            return len(turn)
        usage = self.opened.usage.get(turn.seed)
        return None if usage is None else usage.num_sampled


class EpisodePrinter:
    """Writes an attempt, or messages, as text. Roles have colours on a terminal; control characters become �."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._has_colours = self._is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def show(self, attempt: Attempt) -> None:
        """Write the whole attempt."""
        for line in _head(attempt):
            self._line(line)
        for turn in attempt.turns:
            self._turn(attempt, turn)
        self._line("")
        for label, text in _summary(attempt):
            self._line(f"{label:<14}{text}")
        if attempt.error is not None:
            self._line("")
            self._line(attempt.error.rstrip())

    def _turn(self, attempt: Attempt, turn: Turn) -> None:
        self._line("")
        agent = "" if turn.agent == DEFAULT_AGENT else f", {turn.agent}"
        branch = f"{agent}, branch {'.'.join(map(str, turn.path))}" if turn.path else agent
        self._line(self._coloured(f"── turn {turn.index}{branch}, seed {turn.seed}", "2"))
        if turn.prefix_break is not None:
            self._line(f"prefix break ({turn.prefix_break}): the whole history was sent again, as a new branch")
        for message in turn.messages:
            self.message(str(message.get("role")), message_text(message), name=message.get("name"))
        self.message("assistant", turn.text)
        for call in turn.calls:
            self._line(self._coloured("  calls ", _COLOURS["tool"]) + self._clean(call_text(call)))
        self._line(self._coloured("  " + _turn_facts(attempt, turn), "2"))

    def rule(self, text: str) -> None:
        """Write a line that separates what follows."""
        self._line(self._coloured(f"── {text}", "2"))

    def message(self, role: str, text: str, *, name: object = None) -> None:
        """Write one message of a conversation."""
        label = role if name is None else f"{role} {name}"
        self._line(self._coloured(label, f"1;{_COLOURS.get(role, '37')}"))
        for line in self._clean(text).split("\n"):
            self._line(f"  {line}")

    def _coloured(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._has_colours else text

    def _clean(self, text: str) -> str:
        return _CONTROL.sub("�", text) if self._is_terminal else text

    def _line(self, text: str) -> None:
        print(text.rstrip(), file=self._stream)


def message_text(message: Mapping[str, Any]) -> str:
    """Return what a message says: its text, or its content as JSON, and its tool calls."""
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
    calls = message.get("tool_calls")
    return text + (("\n" if text else "") + json.dumps(calls, ensure_ascii=False) if calls else "")


def call_text(call: ToolCall | MalformedCall) -> str:
    """Return a call as one line."""
    if isinstance(call, MalformedCall):
        return f"(malformed: {call.reason})"
    words = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.arguments.items())
    return f"{call.name}({', '.join(words)})"


def plain_attempt(attempt: Attempt) -> dict[str, Any]:
    """Return an attempt as plain values, for JSON."""
    run, state = attempt.run, attempt.state
    return {
        "program": attempt.kind,
        "args": dict(attempt.args),
        "policy": attempt.opened.about,
        "tokens_are_exact": attempt.opened.is_exact,
        "notes": list(attempt.opened.notes),
        "run_seed": attempt.key.run_seed,
        "group": attempt.key.group,
        "member": attempt.key.member,
        "task": {
            "id": state.task.id,
            "messages": [dict(message) for message in state.task.messages],
            "text": state.task.text,
            "answer": state.task.answer,
            "metadata": dict(state.task.metadata),
        },
        "turns": [_plain_turn(attempt, turn) for turn in attempt.turns],
        "outcome": None if run is None else run.outcome,
        "reward": None if run is None else run.score.reward,
        "rewards": dict(state.rewards) if run is None else dict(run.score.parts),
        "stats": state.counts.as_stats(),
        "seconds": attempt.seconds,
        "error": attempt.error,
    }


def _plain_turn(attempt: Attempt, turn: Turn) -> dict[str, Any]:
    return {
        "index": turn.index,
        **({} if turn.agent == DEFAULT_AGENT else {"agent": turn.agent}),
        "parent": turn.parent,
        "branch": list(turn.path),
        "seed": turn.seed,
        "messages": [dict(message) for message in turn.messages],
        "text": turn.text,
        "calls": [
            {"malformed": call.text, "reason": call.reason}
            if isinstance(call, MalformedCall)
            else {"name": call.name, "arguments": dict(call.arguments)}
            for call in turn.calls
        ],
        "finish_reason": turn.finish_reason,
        "prefix_break": turn.prefix_break,
        "num_prompt_tokens": attempt.num_prompt(turn),
        "num_observed_tokens": len(turn.context_ids) if attempt.opened.is_exact else None,
        "num_sampled_tokens": attempt.num_sampled(turn),
        "num_cached_tokens": turn.num_cached,
        "weight_version": turn.version if attempt.opened.is_exact else None,
        "seconds": turn.timings.total_s,
        "reward": attempt.turn_rewards.get(turn.index),
    }


def _head(attempt: Attempt) -> Iterator[str]:
    key, args = attempt.key, "".join(f" {name}={value!r}" for name, value in attempt.args.items())
    yield f"{attempt.kind}{args}"
    yield f"task {attempt.state.task.id}, run seed {key.run_seed}, group {key.group}, member {key.member}"
    yield attempt.opened.about
    yield from (f"note: {text}" for text in attempt.opened.notes)


def _turn_facts(attempt: Attempt, turn: Turn) -> str:
    num_prompt, num_sampled = attempt.num_prompt(turn), attempt.num_sampled(turn)
    facts = []
    if num_prompt is not None:
        facts.append(f"prompt {num_prompt} tokens ({turn.num_cached} cached)")
    facts += [] if num_sampled is None else [f"sampled {num_sampled}"]
    facts += [turn.finish_reason, f"{turn.timings.total_s:.2f} s"]
    if turn.index in attempt.turn_rewards:
        facts.append(f"reward {attempt.turn_rewards[turn.index]:+g}")
    return ", ".join(facts)


def _summary(attempt: Attempt) -> Iterator[tuple[str, str]]:
    run, counts = attempt.run, attempt.state.counts
    yield "outcome", "failed" if run is None else run.outcome
    if run is not None:
        parts = ", ".join(f"{name} {value:g}" for name, value in run.score.parts.items())
        yield "reward", f"{run.score.reward:g} ({parts})"
    elif attempt.state.rewards:
        yield "rewards", ", ".join(f"{name} {value:g}" for name, value in attempt.state.rewards.items())
    yield "turns", f"{counts.num_turns} in {attempt.seconds:.2f} s"
    sampled = [attempt.num_sampled(turn) for turn in attempt.turns]
    if attempt.opened.is_exact:
        num_cached = sum(turn.num_cached for turn in attempt.turns)
        yield "tokens", f"{counts.num_sampled} sampled, {counts.num_observed} observed, {num_cached} cached"
    elif sampled and None not in sampled:
        yield "tokens", f"{sum(each or 0 for each in sampled)} sampled, as the endpoint reports"
    else:
        yield "tokens", "not known: the endpoint reports none"
    if counts.num_tool_calls:
        errors = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.tool_errors.items())) or "no errors"
        yield "tool calls", f"{counts.num_tool_calls} in {counts.tools_s:.2f} s, {errors}"
    if attempt.opened.is_exact:
        breaks = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.prefix_breaks.items()))
        yield "prefix breaks", breaks or "none"
