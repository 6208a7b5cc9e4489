"""Exchanges between clients and the policy: write them to a JSON-lines file, read them, and make samples of them."""

from __future__ import annotations

import fcntl
import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from forge.errors import ConfigError, DataError, ForgeError
from forge.generator.openai.prompts import PrefixIndex
from forge.types import Completion, FinishReason, Sample, VersionSpan

_REASONS: Final = ("stop", "length", "abort")


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt and one completion of it. Several completions of one prompt are several exchanges.

    Attributes:
        id: its name: the id of the response, and which of its choices.
        conversation: what the client called the conversation; else a name that exchanges share which continue another.
        continues: the earlier exchange whose prompt and tokens this prompt begins with, token by token; None where it
            begins with none, as when a client's text came back and has other tokens than were sampled.
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
        """The prompt and the tokens sampled after it."""
        return self.prompt_ids + self.token_ids

    def to_line(self) -> bytes:
        """Return the exchange as a line of JSON."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields["versions"] = [[span.version, span.start, span.end] for span in self.versions]
        return json.dumps(fields, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Exchange:
        """Read an exchange from the object on a line, or raise `ValueError`."""
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
        """Return the exchange of a completion."""
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
    """Yield the exchanges of a file, in order. A line that is not an exchange raises `DataError` with path FILE:LINE.

    A last line without an end is still being written, or was cut off by a crash: it is skipped.
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
    """Return samples of whole conversations: turns are joined where the later prompt starts with exactly the tokens of
    the earlier turn.

    Every token that was sampled counts once. Where a conversation branches (several answers to one prompt were each
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
    """Return for each exchange the earlier one of its conversation that it continues, by index."""
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
        sampled = slice(len(turn.prompt_ids), len(turn.all_ids))
        weights[sampled] = float(counts)
        logprobs[sampled] = torch.tensor(turn.logprobs, dtype=torch.float32)
    return Sample(token_ids, weights, {"logprobs": logprobs}, identity=f"exchange {last.id}")


def join_ids(parts: Iterable[Sequence[int]]) -> bytes:
    """Return token ids as bytes, such that a sequence that continues another has the other as its prefix."""
    return b"".join(token.to_bytes(4, "little") for token in chain.from_iterable(parts))


# ---- Recording -------------------------------------------------------------------------------------------------------


class RecordError(ForgeError, RuntimeError):
    """An exchange could not be recorded. The client gets this error, never an answer that the record lacks."""


class Recorder:
    """Appends each exchange to a file, whole: one write to a line, with nothing held back in memory.

    A file belongs to one server at a time. What an earlier one wrote is kept.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self._clock = clock
        self._ends: PrefixIndex[bytes, Exchange] = PrefixIndex()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise self._unusable(
                f"a file that can be written: {error.strerror}", "check the path and its rights"
            ) from None
        try:
            self._take()
        except BaseException:
            self._file.close()
            raise

    def write(
        self, completion: Completion, *, id: str, request: Mapping[str, Any], conversation: str | None = None
    ) -> Exchange:
        """Write down an exchange. When this returns, the system has the line; what cannot be written raises
        `RecordError`, and the file is as it was."""
        scope = f"{conversation or ''}\0".encode("utf-8", "backslashreplace")
        found = self._ends.find(scope + join_ids([completion.prompt_ids]))
        earlier = None if found is None else found[1]
        if conversation is None:
            conversation = f"conv-{uuid.uuid4().hex}" if earlier is None else earlier.conversation
        exchange = Exchange.of(
            completion,
            id=id,
            conversation=conversation,
            continues=None if earlier is None else earlier.id,
            time=self._clock(),
            request=request,
        )
        self._append(exchange)
        self._ends.put(scope + join_ids([completion.prompt_ids, completion.token_ids]), exchange)
        return exchange

    def close(self) -> None:
        self._file.close()

    def _append(self, exchange: Exchange) -> None:
        start = os.fstat(self._file.fileno()).st_size
        try:
            line = exchange.to_line()
            num_written = self._file.write(line) or 0
            if num_written < len(line):
                os.ftruncate(self._file.fileno(), start)
                raise OSError(f"only {num_written} of {len(line)} bytes were taken: is the disk full?")
        except (OSError, ValueError) as error:
            raise RecordError(
                "an exchange could not be recorded, so it is not returned",
                path=str(self.path),
                value=exchange.id,
                rule=f"every exchange is recorded: {error}",
                repair="make room, or serve without serve.record",
            ) from error

    def _take(self) -> None:
        """Make the file ours, and see that it ends with a whole line."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise self._unusable("one server writes to a file", "give another file, or end the other server") from None
        last = _last_line(self._file)
        if last and not last.endswith(b"\n"):
            if not _is_json(last):
                raise self._unusable(
                    f"ends with a whole line; its last one is cut off: {last[:80]!r}",
                    "remove that line, or give another file",
                )
            self._file.write(b"\n")

    def _unusable(self, rule: str, repair: str) -> ConfigError:
        return ConfigError(
            "the record of exchanges cannot be written",
            path="serve.record",
            value=str(self.path),
            rule=rule,
            repair=repair,
        )


def _last_line(file: BinaryIO) -> bytes:
    """What stands after the last end of a line but one, read from the end in blocks."""
    if not file.seekable() or (end := file.seek(0, os.SEEK_END)) == 0:
        return b""
    start, found = end, b""
    while start > 0 and b"\n" not in found[:-1]:
        size = min(start, 1 << 16)
        start -= size
        file.seek(start)
        found = file.read(size) + found
    return found[found.rfind(b"\n", 0, len(found) - 1) + 1 :]


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
