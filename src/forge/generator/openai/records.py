"""What passed between a client and the policy, one exchange to a line of a JSON-lines file, and samples made of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final, cast

from forge.errors import DataError
from forge.types import Completion, FinishReason, Sample, VersionSpan

_REASONS: Final = ("stop", "length", "abort")


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt and one completion of it. Several completions of one prompt are several exchanges.

    Attributes:
        id: its name: the id of the response, and which of its choices.
        conversation: what the client called the conversation; else a name that exchanges share which continue another.
        continues: the earlier exchange whose prompt and tokens this prompt begins with, token by token; None where it
            begins with none, as when a client's text came back and has other tokens than were drawn.
        time: when it ended, in seconds since 1970.
        request: what was asked: messages or prompt, tools, template and sampling.
        prompt_ids, token_ids, logprobs, full_logprobs, text, finish_reason, stop_reason, versions: as in `Completion`.
    """

    id: str
    conversation: str
    continues: str | None
    time: float
    request: Mapping[str, Any]
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    full_logprobs: tuple[float, ...] | None
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    versions: tuple[VersionSpan, ...] = field(default=())

    @property
    def all_ids(self) -> tuple[int, ...]:
        """The prompt and what was drawn after it."""
        return self.prompt_ids + self.token_ids

    def to_line(self) -> bytes:
        """The exchange as a line of JSON."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields["versions"] = [[span.version, span.start, span.end] for span in self.versions]
        return json.dumps(fields, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Exchange:
        """The exchange that the object on a line means. What is missing or does not fit raises `ValueError`."""
        missing = [name for name in cls.__slots__ if name not in fields]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        values = {name: fields[name] for name in cls.__slots__}
        values["prompt_ids"] = _numbers(fields, "prompt_ids", int)
        values["token_ids"] = _numbers(fields, "token_ids", int)
        values["logprobs"] = _numbers(fields, "logprobs", float)
        if fields["full_logprobs"] is not None:
            values["full_logprobs"] = _numbers(fields, "full_logprobs", float)
        values["versions"] = tuple(VersionSpan(*_span(span)) for span in fields["versions"])
        for name in ("id", "conversation", "text"):
            if not isinstance(fields[name], str):
                raise ValueError(f"{name} is not a text")
        if fields["finish_reason"] not in _REASONS:
            raise ValueError(f"finish_reason is not one of {', '.join(_REASONS)}")
        exchange = cls(**values)
        if not exchange.prompt_ids:
            raise ValueError("prompt_ids is empty")
        full = exchange.full_logprobs
        if len(exchange.logprobs) != len(exchange.token_ids) or (
            full is not None and len(full) != len(exchange.logprobs)
        ):
            raise ValueError("there is not one logprob for each token")
        return exchange

    @classmethod
    def of(
        cls,
        completion: Completion,
        *,
        id: str,
        conversation: str,
        continues: str | None,
        time: float,
        request: Mapping[str, Any],
    ) -> Exchange:
        """The exchange in which a completion was made."""
        shared = ("prompt_ids", "token_ids", "logprobs", "full_logprobs", "text", "finish_reason", "stop_reason")
        values: dict[str, Any] = {name: getattr(completion, name) for name in (*shared, "versions")}
        return cls(id=id, conversation=conversation, continues=continues, time=time, request=request, **values)


def _numbers(fields: Mapping[str, Any], name: str, kind: type) -> tuple[Any, ...]:
    values = fields[name]
    allowed = (int, float) if kind is float else (int,)
    if not isinstance(values, list) or any(type(value) not in allowed for value in values):
        raise ValueError(f"{name} is not a list of {'numbers' if kind is float else 'token ids'}")
    return tuple(kind(value) for value in values)


def _span(span: Any) -> Sequence[int]:
    if not isinstance(span, list) or len(span) != 3 or any(type(number) is not int for number in span):
        raise ValueError("versions is not a list of [version, start, end]")
    return cast(Sequence[int], span)


def read_exchanges(path: str | os.PathLike[str]) -> Iterator[Exchange]:
    """The exchanges of a file, in order. A line that is none raises `DataError`, whose path is FILE:LINE.

    A last line without an end is being written, or was cut off by a crash: it is left out.
    """
    place = Path(path)
    try:
        file = open(place, "rb")  # noqa: SIM115 - closed below; only the opening may fail here
    except OSError as error:
        raise DataError(
            "the exchanges cannot be read",
            path=str(place),
            rule=f"a file that can be read: {error.strerror}",
            repair="check the path; it is what serve.record named",
        ) from None
    with file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield _read_line(line, place=f"{place}:{number}")


def _read_line(line: bytes, *, place: str) -> Exchange:
    try:
        fields = json.loads(line)
        if not isinstance(fields, dict):
            raise ValueError("it is not an object")
        return Exchange.from_fields(fields)
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(
            "a line of a record of exchanges cannot be read",
            path=place,
            value=line.decode("utf-8", "backslashreplace").rstrip("\n"),
            rule=f"a JSON object as `forge serve --record` writes it: {error}",
            repair="remove that line",
        ) from None


def exchanges_to_samples(exchanges: Iterable[Exchange]) -> list[Sample]:
    """Samples of whole conversations: turns become one where the prompt of the later begins with the tokens of the
    earlier, exactly.

    Every token that was drawn counts once. Where a conversation branches (several answers to one prompt were each
    continued) each branch is a sample, and what they share counts in the first of them only. The samples are in the
    order of their last turns, and `identity` names the last turn.
    """
    nodes = list(exchanges)
    parents = _find_parents(nodes)
    counted: set[int] = set()
    samples = []
    for leaf in sorted(set(range(len(nodes))) - set(parents.values())):
        turns = [leaf]
        while turns[-1] in parents:
            turns.append(parents[turns[-1]])
        turns.reverse()
        samples.append(_join([(nodes[turn], turn not in counted) for turn in turns]))
        counted.update(turns)
    return samples


def _find_parents(nodes: Sequence[Exchange]) -> dict[int, int]:
    """For each exchange the earlier one of its conversation that it goes on from, by index."""
    parents: dict[int, int] = {}
    earlier: dict[str, list[tuple[int, tuple[int, ...]]]] = {}
    for index, node in enumerate(nodes):
        seen = earlier.setdefault(node.conversation, [])
        best = 0
        for other, ids in seen:
            if best < len(ids) <= len(node.prompt_ids) and node.prompt_ids[: len(ids)] == ids:
                best, parents[index] = len(ids), other
        seen.append((index, node.all_ids))
    return parents


def _join(turns: Sequence[tuple[Exchange, bool]]) -> Sample:
    import torch

    last = turns[-1][0]
    token_ids = torch.tensor(last.all_ids, dtype=torch.int64)
    weights = torch.zeros(len(token_ids), dtype=torch.float32)
    logprobs = torch.zeros(len(token_ids), dtype=torch.float32)
    for turn, counts in turns:
        drawn = slice(len(turn.prompt_ids), len(turn.all_ids))
        weights[drawn] = float(counts)
        logprobs[drawn] = torch.tensor(turn.logprobs, dtype=torch.float32)
    return Sample(token_ids, weights, {"logprobs": logprobs}, identity=f"exchange {last.id}")


def join_ids(parts: Iterable[Sequence[int]]) -> bytes:
    """Token ids as bytes, of which the one that continues another begins with the other."""
    return b"".join(token.to_bytes(4, "little") for token in chain.from_iterable(parts))
