"""The journal of an episode: its completions, tool results and recorded values, in plain form.

An episode that is declared deterministic can be continued after a crash: it runs again from its start, and whatever the
journal has is returned instead of being done again. Turns must then be asked for with the same tokens as before.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from forge.envs.limits import ReplayMismatch
from forge.envs.tools import ToolResult
from forge.errors import OptionError
from forge.types import LIVE, AdapterUse, Completion, MalformedCall, Timings, ToolCall, VersionSpan

T = TypeVar("T")
Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TurnEntry:
    """A turn that is asked for: its branch (after its agent's name, where agents have names) and number, its whole
    prompt, how it is sampled, and what answers (see `AgentBinding.label`)."""

    key: tuple[str | int, ...]
    prompt_ids: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    policy: str = LIVE

    @property
    def digest(self) -> str:
        """A digest of the prompt's tokens and the sampling options. How long a turn may be is not part of it: that
        depends on the other branches."""
        options = {name: value for name, value in self.options.items() if name != "max_tokens"}
        text = json.dumps(options, sort_keys=True, default=str)
        return hashlib.blake2b(array("q", self.prompt_ids).tobytes() + text.encode(), digest_size=16).hexdigest()


class Journal:
    """Keeps what happened, and replays what an earlier journal has.

    Args:
        entries: the journal of the episode that is continued; none for a fresh one.
        write: gets every new entry, before what it describes is used. Entries are plain (JSON).
    """

    def __init__(self, entries: Iterable[Entry] = (), *, write: Callable[[Entry], None] | None = None) -> None:
        self._known = {(entry["kind"], tuple(entry["key"])): entry for entry in entries}
        self._write = write
        self.num_replayed = 0

    async def turn(self, asked: TurnEntry, ask: Callable[[], Awaitable[Completion]]) -> Completion:
        """Return the completion of a turn: the journal's, if it has one for the same prompt and sampling."""
        known = self._take("turn", asked.key)
        if known is not None:
            if known["prompt"] != asked.digest:
                raise ReplayMismatch(f"turn {asked.key}: its prompt or its sampling differs from the journal's")
            if known.get("policy", asked.policy) != asked.policy:
                raise ReplayMismatch(f"turn {asked.key}: {asked.policy} answers, and in the journal {known['policy']}")
            return _read_completion(known["completion"])
        completion = await ask()
        if self._write is not None:
            plain = {"prompt": asked.digest, "policy": asked.policy, "completion": _plain_completion(completion)}
            self._add("turn", asked.key, **plain)
        return completion

    async def tools(
        self,
        ids: Sequence[str],
        run: Callable[[int], Awaitable[ToolResult]],
        call_of: Callable[[int], ToolCall | MalformedCall],
    ) -> list[ToolResult]:
        """Return the results of the calls of one answer, run at the same time. If one raises, the others are ended."""

        async def one(number: int) -> ToolResult:
            known = self._take("tool", (ids[number],))
            if known is not None:
                return ToolResult(call_of(number), known["text"], known["error"], known["seconds"])
            result = await run(number)
            self._add("tool", (ids[number],), text=result.text, error=result.error, seconds=result.seconds)
            return result

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(number)) for number in range(len(ids))]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def record(self, key: tuple[str | int, ...], make: Callable[[], Awaitable[T] | T]) -> T:
        """Return a recorded value, or make and record it."""
        known = self._take("record", key)
        if known is not None:
            value: T = known["value"]
            return value
        made = make()
        result: T = await made if inspect.isawaitable(made) else made
        try:
            same = json.loads(json.dumps(result)) == result
        except (TypeError, ValueError):
            same = False
        if not same:
            raise OptionError(
                "a recorded value would not be the same after a replay",
                path="agent.record",
                value=result,
                rule="plain values: None, numbers, text, and lists and dicts (with text as keys) of them",
                repair="return plain values from the function, and build objects from them outside of it",
            )
        self._add("record", key, value=result)
        return result

    def close(self) -> None:
        """Write nothing more: the episode is over, whatever it left running."""
        self._write = None

    def _take(self, kind: str, key: tuple[Any, ...]) -> Entry | None:
        known = self._known.pop((kind, key), None)
        self.num_replayed += known is not None
        return known

    def _add(self, kind: str, key: tuple[Any, ...], **values: Any) -> None:
        if self._write is not None:
            self._write({"kind": kind, "key": list(key), **values})


def _plain_completion(completion: Completion) -> dict[str, Any]:
    # The journal has a digest of prompt_ids; a replay brings the tokens.
    plain = {each.name: getattr(completion, each.name) for each in fields(completion) if each.name != "prompt_ids"}
    spans = [asdict(span) for span in completion.versions]
    adapter = None if completion.adapter is None else asdict(completion.adapter)
    return {**plain, "versions": spans, "timings": asdict(completion.timings), "adapter": adapter}


def _read_completion(plain: Mapping[str, Any]) -> Completion:
    full = plain["full_logprobs"]
    return Completion(
        prompt_ids=(),
        token_ids=tuple(plain["token_ids"]),
        logprobs=tuple(plain["logprobs"]),
        full_logprobs=None if full is None else tuple(full),
        text=plain["text"],
        finish_reason=plain["finish_reason"],
        stop_reason=plain["stop_reason"],
        versions=tuple(VersionSpan(**span) for span in plain["versions"]),
        timings=Timings(**plain["timings"]),
        index=plain["index"],
        num_shared=plain["num_shared"],
        adapter=AdapterUse(**plain["adapter"]) if plain.get("adapter") else None,
    )
