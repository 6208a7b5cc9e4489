"""`EpisodeWorker`: runs episodes, hundreds at once in a process, against the policy service."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.envs.agent import EpisodeKey, EpisodeState
from forge.envs.episode import EpisodeProgram, EpisodeRun, run_episode
from forge.envs.journal import Entry, Journal, ReplayMismatch
from forge.envs.limits import EpisodeLimits, Fault
from forge.envs.tool_calls import ToolFormat
from forge.errors import ActorFailure, CallTimeout, EngineDead, PromptError
from forge.observe import span
from forge.runtime.endpoints import endpoint
from forge.service.actor import ForgeActor
from forge.types import Completion, Task

if TYPE_CHECKING:
    from forge.envs.history import ChatCodec
    from forge.generator.actor import Generator
    from forge.service import Service

_log = logging.getLogger("forge.episodes")


@dataclass(frozen=True, slots=True)
class EpisodeOptions:
    """What all episodes of a run share.

    Attributes:
        program: the episode.
        limits: what one episode may use.
        sampling: options of every completion.
        max_seq_len: the policy's context.
        tool_format: how the policy writes tool calls.
        run_seed: what all seeds derive from.
        journal_dir: where journals of deterministic episodes are kept until their group is done with; None for none.
    """

    program: EpisodeProgram
    limits: EpisodeLimits
    sampling: Mapping[str, Any]
    max_seq_len: int
    tool_format: ToolFormat
    run_seed: int
    journal_dir: str | None = None


class ServicePolicy:
    """The generators as an agent's policy: completions that an update of the weights cut short are continued."""

    def __init__(self, service: Service[Generator], *, max_seq_len: int) -> None:
        self._service, self.max_seq_len = service, max_seq_len

    async def sample(self, token_ids: Sequence[int], *, options: Mapping[str, Any], session: str) -> Completion:
        """See `forge.envs.agent.Policy.sample`. The session is that of the task: see `EpisodeWorker.run`."""
        try:
            completion = await self._ask(token_ids, options)
            while completion.finish_reason == "abort":
                left = options["max_tokens"] - len(completion)
                if left <= 0:
                    return replace(completion, finish_reason="length")
                seed = _seed_of(options["seed"], len(completion))
                changed = {**options, "seed": seed, "max_tokens": left, "min_tokens": 0}
                later = await self._ask((*completion.prompt_ids, *completion.token_ids), changed)
                completion = completion.continued(later)
        except (ActorFailure, EngineDead, CallTimeout) as error:
            raise Fault(f"a generator was lost: {error.message}", kind="generator") from error
        return completion

    async def _ask(self, token_ids: Sequence[int], options: Mapping[str, Any]) -> Completion:
        (completion,) = await self._service.generate.route(token_ids=list(token_ids), sampling=dict(options))
        return completion


class EpisodeWorker(ForgeActor):
    """Runs episodes. As a service, several processes share them.

    Args:
        options: what all episodes share.
        codec: the policy's tokenizer.
        policy: the generators.
    """

    def __init__(self, options: EpisodeOptions, codec: ChatCodec, policy: Service[Generator]) -> None:
        self._options, self._codec = options, codec
        self._service = policy
        self._policy = ServicePolicy(policy, max_seq_len=options.max_seq_len)
        self._running: set[asyncio.Task[Any]] = set()

    @endpoint(concurrent=True)
    async def run(self, task: Task, group: int, member: int, oldest_version: int = -1) -> EpisodeRun:
        """Run one episode to its end. `Fault` says that it must be run again.

        A journal from before is replayed where the program is deterministic and no turn of it was sampled by weights
        older than `oldest_version`; otherwise the episode starts over.
        """
        key = EpisodeKey(self._options.run_seed, group, member)
        file = JournalFile.of(self._options, key)
        entries = file.read(oldest_version=oldest_version)
        with span("episode", group=group, member=member):
            async with self._service.session():
                try:
                    return await self._run(task, key, file, entries)
                except ReplayMismatch as mismatch:
                    _log.warning("episode %s starts over: %s", key, mismatch)
                    file.clear()
                    return await self._run(task, key, file, [])

    async def _run(self, task: Task, key: EpisodeKey, file: JournalFile, entries: Sequence[Entry]) -> EpisodeRun:
        options = self._options
        state = EpisodeState(
            task=task,
            key=key,
            limits=options.limits,
            policy=self._policy,
            codec=self._codec,
            tool_format=options.tool_format,
            sampling=options.sampling,
            journal=Journal(entries, write=file.write),
        )
        try:
            return await run_episode(options.program, state)
        except PromptError as error:
            raise Fault(f"the policy refused a prompt: {error}", kind="prompt") from error
        finally:
            file.close()

    @endpoint(concurrent=True)
    async def forget(self, groups: Sequence[int]) -> None:
        """Remove the journals of groups that are done with."""
        if self._options.journal_dir is not None:
            await asyncio.to_thread(_remove_journals, Path(self._options.journal_dir), groups)


@dataclass(slots=True)
class JournalFile:
    """The journal of one episode on disk: one JSON object per line. A torn last line is left out."""

    path: Path | None = None
    _file: Any = field(default=None, init=False)

    @classmethod
    def of(cls, options: EpisodeOptions, key: EpisodeKey) -> JournalFile:
        """Return the file of an episode; none where its program is not deterministic or no folder is given."""
        if options.journal_dir is None or not options.program.deterministic:
            return cls()
        return cls(Path(options.journal_dir) / f"{key.group}-{key.member}.jsonl")

    def read(self, *, oldest_version: int) -> list[Entry]:
        """Return the entries; none, and the file is cleared, if a turn is older than `oldest_version`."""
        if self.path is None or not self.path.exists():
            return []
        entries: list[Entry] = []
        size = 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            try:
                entries.append(json.loads(line))
            except ValueError:
                break
            size += len(line)
        spans = (part for entry in entries if entry["kind"] == "turn" for part in entry["completion"]["versions"])
        if any(part["version"] < oldest_version for part in spans):
            _log.warning("%s: its turns are too old; the episode starts over", self.path)
            self.clear()
            return []
        os.truncate(self.path, size)
        return entries

    def write(self, entry: Entry) -> None:
        """Append an entry. It is in the file when this returns, also if the process is killed afterwards."""
        if self.path is None:
            return
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
        self._file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")

    def clear(self) -> None:
        """Remove what is in the file."""
        self.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _remove_journals(folder: Path, groups: Sequence[int]) -> None:
    for group in groups:
        for path in folder.glob(f"{group}-*.jsonl"):
            path.unlink(missing_ok=True)


def _seed_of(seed: int, position: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
