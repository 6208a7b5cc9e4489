"""Which episodes a report shows, and what it keeps of each. Its size is bounded however long the run was."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, Final

from forge.observe.report.turns import (
    CHARACTERS_PER_TOKEN,
    MAX_CHARACTERS,
    TurnTable,
    cut,
    fair_limit,
    number,
    turns_of,
    untrained_spans,
)

_FILE: Final = re.compile(r"(fruitless|step|evaluation)_(\d+)\.jsonl")
_KINDS: Final = ("fruitless", "step", "evaluation")
"""In the order of time: while a step was prepared, what it learned from, what was asked after it."""
MAX_TOKENS: Final = 300_000
"""Tokens of all samples together, which make a page of some 15 MB."""
_FEWEST_TOKENS: Final = 64
"""Tokens that are kept of a long sample at least."""
_MAX_PROMPT: Final = 20_000
_MAX_FIELD: Final = 2_000
_BLOCK: Final = 1 << 20

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SampleSet:
    """The episodes to show.

    Attributes:
        items: one object each, in the order of steps, groups and places in them; keys as in `_item`.
        prompts: the prompts that items point to by number, as text or as messages.
        messages: the messages that the turns of items point to by number.
        num_samples, num_steps: how many the run wrote, those of evaluations and of groups that taught nothing included.
        notes: what was left out, and why.
    """

    items: tuple[Fields, ...] = ()
    prompts: tuple[str | list[Fields], ...] = ()
    messages: tuple[Fields, ...] = ()
    num_samples: int = 0
    num_steps: int = 0
    notes: tuple[str, ...] = field(default=())


def read_samples(folder: Path, *, max_samples: int, max_tokens: int = MAX_TOKENS) -> SampleSet:
    """Choose at most `max_samples` episodes from a folder of rollouts: whole groups, spread over the steps.

    Where not all fit, those of evaluations and those of groups that taught nothing have at most a quarter each. Where
    not even one group would fit, its episodes are spread from the lowest reward to the highest. A folder that is not
    there has none. Lines that cannot be read are counted, not shown. With more than `max_tokens` tokens in all, the
    longest completions are cut to one length.
    """
    return _read(_files(folder), max_samples=max_samples, max_tokens=max_tokens)


def read_evaluation(path: Path, *, max_samples: int, max_tokens: int = MAX_TOKENS) -> SampleSet:
    """Choose at most `max_samples` episodes of one file, which an evaluation wrote: whole tasks, spread over all."""
    return _read([_File("evaluation", 0, path)], max_samples=max_samples, max_tokens=max_tokens)


def _read(files: Sequence[_File], *, max_samples: int, max_tokens: int) -> SampleSet:
    counts = {kind: sum(_count_lines(file.path) for file in files if file.kind == kind) for kind in _KINDS}
    num_samples, num_steps = sum(counts.values()), len({file.step for file in files})
    picks = [
        _pick([file for file in files if file.kind == kind], share, num_samples=counts[kind])
        for kind, share in _shares(counts, max_samples).items()
    ]
    found = sorted((each for pick in picks for each in pick.found), key=lambda each: each[0].place)
    chosen = [episode for _, episodes in found for episode in episodes]
    num_unreadable = sum(pick.num_unreadable for pick in picks)
    steps = _Steps(shown=len({file.step for file, _ in found}), all=num_steps)
    notes = _notes(len(chosen), num_samples, steps, num_unreadable)
    shown = describe_episodes(chosen, max_tokens=max_tokens)
    return replace(shown, num_samples=num_samples, num_steps=num_steps, notes=(*notes, *shown.notes))


def describe_episodes(
    episodes: Sequence[Fields], *, max_tokens: int, max_characters: int = MAX_CHARACTERS
) -> SampleSet:
    """Return what a page shows of episodes. With more than `max_tokens` tokens in all, or `max_characters` characters
    that were read, the longest are cut to one length."""
    table = TurnTable(episodes, max_characters=max_characters)
    items, prompts, limit = _compact(episodes, max_tokens, table)
    notes = [f"Of long completions only the first {limit} tokens are shown."] if limit else []
    return SampleSet(tuple(items), tuple(prompts), tuple(table.messages), len(items), 0, (*notes, *table.notes))


def _shares(counts: Mapping[str, int], max_samples: int) -> dict[str, int]:
    """Return how many samples of each kind are shown."""
    if sum(counts.values()) <= max_samples:
        return dict(counts)
    others = [kind for kind in _KINDS if kind != "step" and counts[kind]]
    room = max_samples // 4 if counts["step"] else max_samples // len(others)
    shares = {kind: min(counts[kind], room) for kind in others}
    return {**shares, "step": max_samples - sum(shares.values())}


@dataclass(frozen=True, slots=True)
class _Pick:
    """The episodes that were chosen of some files, and how many lines of these are none."""

    found: list[tuple[_File, list[Fields]]]
    num_unreadable: int


def _pick(files: Sequence[_File], max_samples: int, *, num_samples: int) -> _Pick:
    if not files or max_samples < 1:
        return _Pick([], 0)
    group_size = _group_size([file.path for file in files])
    fits = num_samples <= max_samples
    fitting = files if fits else _spread(files, max(1, max_samples // group_size))
    found: list[tuple[_File, list[Fields]]] = []
    num_unreadable = 0
    left = max_samples
    for place, file in enumerate(fitting):
        episodes, num_bad = _read_step(file.path)
        chosen = _choose(episodes, len(episodes) if fits else left // (len(fitting) - place))
        num_unreadable += num_bad
        left -= len(chosen)
        found.append((file, chosen))
    return _Pick(found, num_unreadable)


@dataclass(frozen=True, slots=True)
class _Steps:
    shown: int
    all: int


def _notes(shown: int, written: int, steps: _Steps, num_unreadable: int) -> list[str]:
    notes = []
    if shown + num_unreadable < written:
        notes.append(
            f"{shown} of {written} samples are shown, from {steps.shown} of {steps.all} steps; more with --max-samples."
        )
    if num_unreadable:
        notes.append(f"{num_unreadable} lines of rollouts could not be read and are left out.")
    return notes


@dataclass(frozen=True, slots=True)
class _File:
    kind: str
    step: int
    path: Path

    @property
    def place(self) -> tuple[int, int]:
        return self.step, _KINDS.index(self.kind)


def _files(folder: Path) -> list[_File]:
    """Return the files of rollouts in the order of time."""
    matches = [(match, path) for path in folder.glob("*_*.jsonl") if (match := _FILE.fullmatch(path.name))]
    return sorted((_File(match[1], int(match[2]), path) for match, path in matches), key=lambda file: file.place)


def _count_lines(path: Path) -> int:
    with open(path, "rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK), b""))


def _group_size(files: Sequence[Path]) -> int:
    """Return how many episodes the groups of the first step with any have, at most."""
    for path in files:
        episodes, _ = _read_step(path)
        if episodes:
            return max(map(len, _groups(episodes)))
    return 1


def _read_step(path: Path) -> tuple[list[Fields], int]:
    """Return the episodes of a file in order, and how many lines are none."""
    with open(path, "rb") as file:
        lines = list(json_lines(file))
    episodes = [fields for fields in lines if fields is not None and is_episode(fields)]
    episodes.sort(key=lambda fields: (fields["group"], fields["index"]))
    return episodes, len(lines) - len(episodes)


def json_lines(lines: Iterable[bytes]) -> Iterator[Fields | None]:
    """Yield the object on each line, None for a line that has none. A last line without an end, which is being written
    or was cut off by a kill, is left out."""
    for line in lines:
        if not line.endswith(b"\n"):
            return
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        yield fields if isinstance(fields, dict) else None


def is_episode(fields: Fields) -> bool:
    """Return whether the fields of a line are those of an episode."""
    has_place = all(type(fields.get(name)) is int for name in ("step", "group", "index"))
    return has_place and isinstance(fields.get("text"), str) and isinstance(fields.get("token_ids"), list)


def _groups(episodes: Sequence[Fields]) -> list[list[Fields]]:
    groups: dict[int, list[Fields]] = {}
    for episode in episodes:
        groups.setdefault(episode["group"], []).append(episode)
    return list(groups.values())


def _choose(episodes: Sequence[Fields], quota: int) -> list[Fields]:
    """At most `quota` episodes of one step: whole groups where one fits, else a part of one that tells most."""
    if len(episodes) <= quota:
        return list(episodes)
    groups = _groups(episodes)
    size = max(map(len, groups))
    if size <= quota:
        return [episode for group in _spread(groups, quota // size) for episode in group]
    ranked = sorted(groups[len(groups) // 2], key=lambda episode: number(episode.get("reward")) or 0.0)
    return sorted(_spread(ranked, quota), key=lambda episode: int(episode["index"]))


def _spread(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` items, evenly over all, the first and the last included."""
    if count >= len(items):
        return list(items)
    if count < 2:
        return list(items[-1:]) if count else []
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]


def _compact(
    episodes: Sequence[Fields], max_tokens: int, table: TurnTable
) -> tuple[list[Fields], list[str | list[Fields]], int]:
    """Return the items, the prompts that they point to, and to how many tokens long ones were cut; 0 where none was."""
    sizes = [_size(episode) for episode in episodes]
    limit = fair_limit(sizes, max_tokens, fewest=_FEWEST_TOKENS)
    numbers: dict[str, int] = {}
    prompts: list[str | list[Fields]] = []
    items = []
    for episode in episodes:
        prompt = _prompt(episode.get("prompt"))
        place = numbers.setdefault(json.dumps(prompt), len(prompts))
        if place == len(prompts):
            prompts.append(prompt)
        items.append(_item(episode, prompt=place, limit=limit, table=table))
    was_cut = any(size > limit for size in sizes)
    return items, prompts, limit if was_cut else 0


def _size(episode: Fields) -> int:
    """Return how many tokens an episode has. Of text without tokens, as an endpoint's, 8 characters count as one."""
    if episode["token_ids"]:
        return len(episode["token_ids"])
    texts = [episode["text"], *(turn.get("text") for turn in turns_of(episode))]
    longest = max(len(text) for text in texts if isinstance(text, str))
    return -(-longest // CHARACTERS_PER_TOKEN)


def _prompt(prompt: object) -> str | list[Fields]:
    if isinstance(prompt, list):
        return [_message(message) for message in prompt if isinstance(message, dict)]
    return cut(prompt if isinstance(prompt, str) else "", _MAX_PROMPT)


def _message(message: Mapping[str, Any]) -> Fields:
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return {"role": cut(str(message.get("role", "")), 40), "content": cut(text, _MAX_PROMPT)}


def _item(episode: Fields, *, prompt: int, limit: int, table: TurnTable) -> Fields:
    num_tokens = len(episode["token_ids"])
    pieces = episode.get("pieces")
    fits = isinstance(pieces, list) and len(pieces) == num_tokens and all(isinstance(piece, str) for piece in pieces)
    return {
        "step": episode["step"],
        "group": episode["group"],
        "index": episode["index"],
        "epoch": episode.get("epoch"),
        "outcome": cut(str(episode.get("outcome", "trained")), 40),
        "reason": cut(str(episode.get("reason") or ""), _MAX_FIELD),
        "promptId": cut(str(episode.get("prompt_id", "")), _MAX_FIELD),
        "prompt": prompt,
        "answer": None if episode.get("answer") is None else cut(str(episode["answer"]), _MAX_FIELD),
        "text": None if fits else cut(episode["text"], CHARACTERS_PER_TOKEN * limit),
        "pieces": pieces[:limit] if fits and pieces is not None else [],
        "ids": episode["token_ids"][:limit] if fits else [],
        "sampler": _logprobs(episode.get("logprobs"), num_tokens, limit),
        "trainer": _of_trained(_logprobs(episode.get("trainer_logprobs"), num_tokens, limit), episode),
        "reference": _logprobs(episode.get("ref_logprobs"), num_tokens, limit),
        **_of_some_runs(episode, limit),
        "versions": list(_spans(episode.get("versions"))),
        "reward": number(episode.get("reward")),
        "parts": {cut(str(name), 100): number(value) for name, value in _pairs(episode.get("parts"))},
        "failures": {cut(str(name), 100): cut(str(why), _MAX_FIELD) for name, why in _pairs(episode.get("failures"))},
        "advantage": number(episode.get("advantage")),
        "finish": cut(str(episode.get("finish_reason", "")), 40),
        "numPromptTokens": number(episode.get("num_prompt_tokens")),
        "numTokens": num_tokens,
        **table.describe(episode, limit=limit, with_text=not fits),
    }


def _of_some_runs(episode: Fields, limit: int) -> Fields:
    """Return values of tokens that only runs with a teacher, a critic or advantages per token record."""
    names = {"teacher": "teacher_logprobs", "values": "values", "advantages": "token_advantages"}
    found = {name: _logprobs(episode.get(key), len(episode["token_ids"]), limit) for name, key in names.items()}
    return {name: values for name, values in found.items() if values is not None}


def _of_trained(values: list[float | None] | None, episode: Fields) -> list[float | None] | None:
    """Return the trainer's logprobs without those of tokens that it did not get, for which 0 is recorded."""
    if values is not None:
        for start, end in untrained_spans(episode):
            values[start:end] = [None] * len(values[start:end])
    return values


def _pairs(value: object) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()


def _spans(value: object) -> Iterator[list[int]]:
    for span in value if isinstance(value, list) else ():
        if isinstance(span, list) and len(span) == 3 and all(type(number) is int for number in span):
            yield span


def _logprobs(values: object, num_tokens: int, limit: int) -> list[float | None] | None:
    """Return numbers of tokens with four decimals. A list of another length belongs to other tokens."""
    if not isinstance(values, list) or len(values) != num_tokens:
        return None
    return [round(value, 4) if type(value) in (float, int) and isfinite(value) else None for value in values[:limit]]
