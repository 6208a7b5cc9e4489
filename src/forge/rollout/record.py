"""Records what the policy sampled and what became of it, one line for each episode.

    step_000003.jsonl        the groups that step 3 learned from
    fruitless_000003.jsonl   some of the groups that taught nothing while step 3 was being prepared, with the reason
    evaluation_000003.jsonl  the answers to the held-out prompts after step 3

The files are what `forge report` shows, and what a program reads that wants to know why a reward rose. A line has the
sampled tokens, never tokens made from the text again, with every logprob that was computed.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

from forge.config import RecordConfig
from forge.errors import DataError
from forge.rollout.ledger import append, recording
from forge.rollout.signal import REASONS, NoSignalGroup
from forge.types import Episode, Group, MalformedCall, ToolCall, Turn

TrainerLogprobs = Mapping[tuple[int, int], Sequence[float]]
"""For (group's number, place of the episode in it): the trainer's logprobs of the T sampled tokens."""

T = TypeVar("T")

_FILE: Final = re.compile(r"(?:step|fruitless|evaluation)_(\d+)\.jsonl")
_FIRST_FRUITLESS: Final = 8
"""So many groups that taught nothing are written of each step; of later ones those whose count is a power of two."""
_BROKEN: Final = "\ufffd"
_MAX_UNFINISHED: Final = 3
"""An unfinished character has at most three bytes."""
_MAX_WINDOW: Final = 12
"""Tokens of bytes that make no character: what may be unfinished is in the last nine of them."""
_MAX_REMEMBERED: Final = 1 << 17


class RolloutRecorder:
    """Writes `step_000001.jsonl` and so on into a folder. A file appears whole or not at all, except those of groups
    that taught nothing, which grow group by group.

    A folder that is already there is first brought into order: what a run that resumes at `resume_step` will write
    again, the files of later steps, is moved to `discarded/` in it. Without `resume_step` the run is new, and all files
    are moved there. So every step is in the folder once.
    """

    def __init__(
        self, folder: Path, *, decode: Callable[[Sequence[int]], str], config: RecordConfig, resume_step: int | None
    ) -> None:
        """`folder` is the one that the files are in. `decode` makes text of tokens; let it show special tokens, so
        that every token has a piece of text."""
        self.folder = Path(folder)
        self._config = config
        self._writer = EpisodeLines(decode)
        self._no_signal_step, self._num_no_signal = 0, 0
        try:
            _set_aside(self.folder, after=-1 if resume_step is None else resume_step)
            if config.rollouts != "none":
                self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                "the folder of rollouts cannot be used",
                path=str(self.folder),
                rule=f"a folder that can be written: {error.strerror}",
                repair="choose another run.output_dir, correct its permissions, or set record.rollouts to none",
            ) from error

    def write(self, step: int, groups: Sequence[Group], trainer_logprobs: TrainerLogprobs | None = None) -> Path | None:
        """Write the groups that a step learned from; the file, or None where the configuration wants none.

        `trainer_logprobs` has those before the step; episodes that it lacks get null. A step that is written again
        replaces its file. The call blocks for as long as decoding and writing take, and may run in a thread.
        """
        if self._config.rollouts == "none":
            return None
        known = trainer_logprobs if self._config.trainer_logprobs and trainer_logprobs is not None else {}
        return self._replace(f"step_{step:06d}.jsonl", self._lines(step, self._chosen(groups), known=known))

    def write_evaluation(self, step: int, groups: Sequence[Group]) -> Path | None:
        """Write the answers to held-out prompts; a group's number is the prompt's place among them."""
        if self._config.rollouts == "none":
            return None
        lines = self._lines(step, self._chosen(groups), outcome="evaluation")
        return self._replace(f"evaluation_{step:06d}.jsonl", lines)

    def write_no_signal(self, step: int, no_signal: NoSignalGroup) -> Path | None:
        """Write a group that taught nothing while a step was being prepared. The file, or None where it is not written:
        of each step the first few are, and then ever fewer, so that a run that learns nothing does not fill the disk.
        """
        if self._config.rollouts == "none" or no_signal.group is None:
            return None
        if step != self._no_signal_step:
            self._no_signal_step, self._num_no_signal = step, 0
        self._num_no_signal += 1
        first = self._config.num_groups if self._config.rollouts == "some" else _FIRST_FRUITLESS
        if self._num_no_signal > first and self._num_no_signal & (self._num_no_signal - 1):
            return None
        target = self.folder / f"fruitless_{step:06d}.jsonl"
        with recording(target), open(target, "ab", buffering=0) as file:
            reason = REASONS[no_signal.reason]
            append(file, b"".join(self._lines(step, [no_signal.group], outcome=no_signal.outcome, reason=reason)))
        return target

    def _chosen(self, groups: Sequence[Group]) -> list[Group]:
        return spread(groups, self._config.num_groups) if self._config.rollouts == "some" else list(groups)

    def _replace(self, name: str, lines: Iterator[bytes]) -> Path:
        target = self.folder / name
        part = target.with_name(f".{name}.part")
        with recording(target):
            try:
                with open(part, "wb") as file:
                    file.writelines(lines)
                os.replace(part, target)
            finally:
                part.unlink(missing_ok=True)
        return target

    def _lines(
        self,
        step: int,
        groups: Sequence[Group],
        *,
        known: TrainerLogprobs = MappingProxyType({}),
        outcome: str = "trained",
        reason: str | None = None,
    ) -> Iterator[bytes]:
        for group in groups:
            of_group = {"step": step, "group": group.number, "epoch": group.epoch, "temperature": group.temperature}
            for index, episode in enumerate(group.episodes):
                yield self._writer.line(
                    episode,
                    {**of_group, "index": index, "outcome": outcome, "reason": reason},
                    trainer_logprobs=known.get((group.number, index)),
                )


class EpisodeLines:
    """Makes the line of an episode.

    Args:
        decode: makes text of tokens; None where episodes have text and no tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str] | None) -> None:
        self._decode = decode
        self._splitter = None if decode is None else PieceSplitter(decode)

    @property
    def has_tokens(self) -> bool:
        """Whether episodes have tokens."""
        return self._decode is not None

    def line(
        self, episode: Episode, place: Mapping[str, Any], *, trainer_logprobs: Sequence[float] | None = None
    ) -> bytes:
        """Return the line; see `fields`."""
        return encode_line(self.fields(episode, place, trainer_logprobs=trainer_logprobs))

    def fields(
        self, episode: Episode, place: Mapping[str, Any], *, trainer_logprobs: Sequence[float] | None = None
    ) -> dict[str, Any]:
        """Return what the line has. `place` says which episode it is (`step`, `group`, `epoch`, `index`), and what
        became of it (`outcome`, `reason`)."""
        where = f"group {place['group']}, {place['index']}"
        fields = {**place, **_fields(episode, trainer_logprobs, where=where)}
        if episode.stats:  # it was made by a program: see `forge.envs.episode`
            fields |= self._program_fields(episode)
        splitter = self._splitter
        fields["pieces"] = (
            None if splitter is None else [piece for turn in episode.turns for piece in splitter.split(turn.token_ids)]
        )
        return fields

    def _program_fields(self, episode: Episode) -> dict[str, Any]:
        decode = self._decode or (lambda _: "")
        turns = [_turn_fields(episode, turn, start, decode) for turn, start in _starts(episode)]
        agents = {"agents": _agent_fields(episode)} if episode.agents else {}
        return {"ending": episode.outcome, "stats": dict(episode.stats), **agents, "turns": turns}


def encode_line(fields: Mapping[str, Any]) -> bytes:
    """Return fields as a line of JSON."""
    text = json.dumps(fields, ensure_ascii=False, allow_nan=False, default=_plain)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` of the items, evenly over all of them, the first and the last included."""
    if len(items) <= count:
        return list(items)
    if count == 1:
        return [items[0]]
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]


def _fields(episode: Episode, trainer_logprobs: Sequence[float] | None, *, where: str) -> dict[str, Any]:
    task, score = episode.task, episode.score
    given = {
        "trainer_logprobs": trainer_logprobs,
        "ref_logprobs": episode.ref_logprobs,
        "teacher_logprobs": episode.teacher_logprobs,
    }
    for name, values in given.items():
        if values is not None and len(values) != episode.num_tokens:
            raise ValueError(f"{name} of {where} has {len(values)} numbers for {episode.num_tokens} tokens")
    return {
        "prompt_id": task.id,
        "prompt": task.text if task.text is not None else list(task.messages),
        "answer": task.answer,
        "text": episode.text,
        "token_ids": episode.token_ids,
        "logprobs": _numbers([value for turn in episode.turns for value in turn.logprobs]),
        "trainer_logprobs": _numbers(trainer_logprobs),
        "ref_logprobs": _numbers(episode.ref_logprobs),
        **_token_fields(episode),
        **({} if episode.teacher_logprobs is None else {"teacher_logprobs": _numbers(episode.teacher_logprobs)}),
        "versions": [span for turn, start in _starts(episode) for span in _spans(turn, start)],
        "reward": _number(score.reward),
        "unshaped_reward": _number(score.reward if score.unshaped is None else score.unshaped),
        "parts": {name: _number(value) for name, value in score.parts.items()},
        "failures": dict(score.failures),
        "advantage": _number(episode.advantage),
        "finish_reason": episode.turns[-1].finish_reason if episode.turns else None,
        "num_prompt_tokens": len(episode.turns[0].context_ids) if episode.turns else 0,
    }


def _token_fields(episode: Episode) -> dict[str, Any]:
    """Return what a line has of single tokens: a critic's values, and advantages where those of one turn differ."""
    found = {} if episode.values is None else {"values": _numbers(episode.values)}
    own = episode.token_advantages
    if own is None or (
        not found and all(_are_equal(own[start : start + len(turn)]) for turn, start in _starts(episode))
    ):
        return found
    return {**found, "token_advantages": _numbers(own)}


def _are_equal(values: Sequence[float]) -> bool:
    return not values or min(values) == max(values)


def _turn_fields(episode: Episode, turn: Turn, start: int, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Return what a line has of one turn. Its tokens are those from `start` on of the line's. After a prefix break,
    `context` is the whole text that the policy read instead of the history that it had."""
    own = episode.token_advantages
    result = episode.agents.get(turn.agent)
    is_learned = result is None or result.learns
    return {
        "index": turn.index,
        **({} if result is None else {"agent": turn.agent, "order": turn.order}),
        "parent": turn.parent,
        "previous": turn.previous,
        "path": list(turn.path),
        "messages": list(turn.messages),
        "text": turn.text,
        "start": start,
        "end": start + len(turn),
        "num_context_tokens": len(turn.context_ids),
        "num_cached": turn.num_cached,
        "seed": turn.seed,
        "finish_reason": turn.finish_reason,
        "prefix_break": turn.prefix_break,
        "context": None if turn.prefix_break is None else decode(turn.context_ids),
        "is_delivered": turn.is_delivered,
        "is_trained": turn.is_trained,
        "calls": [_call_fields(call) for call in turn.calls],
        "reward": _number(episode.turn_rewards[turn.index]) if turn.index in episode.turn_rewards else None,
        "advantage": None if own is None or not len(turn) or not is_learned else _number(own[start]),
        "seconds": _number(turn.timings.total_s),
    }


def _agent_fields(episode: Episode) -> dict[str, Any]:
    """Return what a line has of the agents: what answered for each, and what it earned."""
    return {
        name: {
            "policy": result.policy,
            "learns": result.learns,
            "reward": None if result.score is None else _number(result.score.reward),
            "parts": {
                part: _number(value) for part, value in ({} if result.score is None else result.score.parts).items()
            },
            "advantage": _number(result.advantage) if result.learns else None,
        }
        for name, result in episode.agents.items()
    }


def _call_fields(call: ToolCall | MalformedCall) -> dict[str, Any]:
    if isinstance(call, MalformedCall):
        return {"id": call.id, "malformed": call.reason}
    return {"id": call.id, "name": call.name, "arguments": dict(call.arguments)}


def _starts(episode: Episode) -> Iterator[tuple[Turn, int]]:
    """Yield each turn with the place of its first token among all sampled tokens."""
    start = 0
    for turn in episode.turns:
        yield turn, start
        start += len(turn)


def _spans(turn: Turn, start: int) -> list[list[int]]:
    return [[span.version, start + span.start, start + span.end] for span in turn.versions]


def _numbers(values: Sequence[float] | None) -> list[float | None] | None:
    return None if values is None else [_number(value) for value in values]


def _number(value: float) -> float | None:
    """JSON has no NaN and no infinity: such a number is null."""
    number = float(value)
    return number if math.isfinite(number) else None


def _plain(value: object) -> object:
    """Messages may hold mappings of other kinds, and whatever else a source put there."""
    return dict(value) if isinstance(value, Mapping) else str(value)


def _set_aside(folder: Path, *, after: int) -> None:
    aside = folder / "discarded"
    for part in folder.glob(".*_*.jsonl.part"):
        part.unlink()  # of a process that was killed while it wrote
    for path in sorted(folder.glob("*_*.jsonl")) if folder.is_dir() else ():
        found = _FILE.fullmatch(path.name)
        if found is not None and int(found[1]) > after:
            aside.mkdir(exist_ok=True)
            os.replace(path, _unused(aside / path.name))


def _unused(path: Path) -> Path:
    """The path, or with a number before its ending where an earlier resume left a file of that name."""
    number, candidate = 0, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.stem}.{number}{path.suffix}")
    return candidate


class PieceSplitter:
    """Cuts the text of a completion into pieces, one for each token.

    The pieces joined are the tokenizer's decoding of all tokens at once. Where a character is spread over several
    tokens, the last of them has it and the others have nothing. Bytes that never become a character are shown as U+FFFD
    at the token by which that is known. Only a vocabulary of SentencePiece that falls back to bytes may give other
    characters for bytes that make no character.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._known: dict[tuple[int | None, int] | None, str] = {}

    def split(self, token_ids: Sequence[int]) -> list[str]:
        """One text for each token. Takes time in proportion to their number; pairs that were met before take none."""
        pieces: list[str] = []
        window: list[int] = []  # the last character's tokens, which those of the next are decoded after
        shown: str | None = ""  # the part of the window's text that is in pieces; None where it was not asked for yet
        begun, is_open = 0, False
        for token in token_ids:
            pair = (window[0] if window else None, token) if len(window) < 2 and not is_open else None
            if pair in self._known:
                pieces.append(self._known[pair])
                window, shown = [token], None
                continue
            begun = begun if is_open else len(window)
            shown = self._decode(window) if shown is None else shown
            window.append(token)
            text = self._decode(window)
            whole = text[: len(text) - _num_unfinished(text)]
            is_open = len(whole) < len(text)
            if is_open and not whole.startswith(shown):
                whole = shown  # bytes that follow may make whole again what these have spoilt
            pieces.append(whole[len(shown) :])
            shown = whole
            if not is_open:
                window, shown = window[begun:], None
                self._remember(pair, pieces[-1])
            elif len(window) > 2 * _MAX_WINDOW:
                window, begun, num_held = window[-_MAX_WINDOW:], 0, len(text) - len(whole)
                text = self._decode(window)
                shown = text[: max(0, len(text) - num_held)]
        if is_open and shown is not None:
            pieces[-1] += self._decode(window)[len(shown) :]
        return pieces

    def _remember(self, pair: tuple[int | None, int] | None, piece: str) -> None:
        if len(self._known) >= _MAX_REMEMBERED:
            self._known.clear()
        if pair is not None:
            self._known[pair] = piece


def _num_unfinished(text: str) -> int:
    """How many characters at the end may be the first bytes of one that is not whole: some decoders show one U+FFFD
    for them, others one for each byte."""
    return min(_MAX_UNFINISHED, len(text) - len(text.rstrip(_BROKEN)))
