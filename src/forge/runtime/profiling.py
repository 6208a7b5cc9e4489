"""Profiles of processes of a run: started in all of them at once, and brought to the controller when they end."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from forge.observe.torch_profile import ProfileOptions, finish_profile, start_profile
from forge.observe.tracing import this_process
from forge.runtime.control import control
from forge.runtime.group import RankGroup, live_groups
from forge.runtime.replies import FAILED, OK, Outbox, read_answers, reply_channel
from forge.runtime.serialization import as_remote

_log = logging.getLogger("forge.runtime")
_LIMIT_S: Final = 600.0
"""How long a process may take to write its profile."""


@dataclass(slots=True)
class OpenProfiles:
    """Profiles under way.

    Attributes:
        groups: the processes that are profiled.
        is_own: whether it is this process, because no other has such a name.
        failed: which processes were not profiled, and why.
        is_pending: whether nobody has asked for them yet.
    """

    groups: Collection[RankGroup] = ()
    is_own: bool = False
    failed: dict[str, str] = field(default_factory=dict)
    is_pending: bool = True


async def start_profiles(workers: Collection[str], options: ProfileOptions) -> OpenProfiles:
    """Profile all processes of these workers from now on. Without such a process, profile this one."""
    groups = [group for group in live_groups() if _name_of(group) in workers]
    if not groups:
        await asyncio.to_thread(start_profile, options)
        return OpenProfiles(is_own=True)
    profiles = OpenProfiles(groups)
    await control().submit(_ask_all(profiles, options))
    return profiles


async def finish_profiles(profiles: OpenProfiles) -> Mapping[str, bytes]:
    """Return the profiles by the names of processes. `profiles.failed` says of which there is none, and why."""
    if profiles.is_own:
        data = await asyncio.to_thread(finish_profile)
        return {} if data is None else {this_process().name: data}
    return await control().submit(_ask_all(profiles, None))


def _name_of(group: RankGroup) -> str:
    """Return the name of a worker without the number of its replica."""
    return re.sub(r"\[\d+\]$", "", group.spec.label)


async def _ask_all(profiles: OpenProfiles, options: ProfileOptions | None) -> dict[str, bytes]:
    """Start, or with None finish, the profiles of all groups. Runs on the control loop."""
    found: dict[str, bytes] = {}
    asked = [_ask(group, options) for group in profiles.groups if group.spec.label not in profiles.failed]
    groups = [group for group in profiles.groups if group.spec.label not in profiles.failed]
    for group, answer in zip(groups, await asyncio.gather(*asked, return_exceptions=True), strict=True):
        label = group.spec.label
        if isinstance(answer, BaseException):
            profiles.failed[label] = str(getattr(answer, "message", answer)) or type(answer).__name__
            _log.warning("%s was not profiled: %s", label, profiles.failed[label])
            continue
        for rank, data in enumerate(answer):
            if data is not None:
                found[label if len(answer) == 1 else f"{label} rank {rank}"] = data
    return found


async def _ask(group: RankGroup, options: ProfileOptions | None) -> list[bytes | None]:
    channel = reply_channel()
    call_id, reply = channel.open(len(group.pids))
    died = group.calls
    died.add(reply, asyncio.get_running_loop())  # a death is its answer
    try:
        group.actor._forge_connect.broadcast(channel.caller, channel.port)
        group.actor._forge_profile.broadcast(channel.caller, call_id, options)
        answers = await asyncio.wait_for(reply, _LIMIT_S)
        return list(read_answers(answers))
    finally:
        died.discard(reply)
        channel.close(call_id)


_answers: set[asyncio.Task[None]] = set()


def answer_profile(outbox: Outbox, call_id: int, options: ProfileOptions | None) -> None:
    """Start or finish the profile of this process, on a thread, and answer the controller."""
    task = asyncio.get_running_loop().create_task(_answer(outbox, call_id, options))
    _answers.add(task)
    task.add_done_callback(_answers.discard)


async def _answer(outbox: Outbox, call_id: int, options: ProfileOptions | None) -> None:
    data: Any = None
    try:
        if options is None:
            data = await asyncio.to_thread(finish_profile)
        else:
            await asyncio.to_thread(start_profile, options)
    except Exception as error:  # noqa: BLE001 - the controller gets it
        outbox.send(call_id, FAILED, as_remote(error))
        return
    outbox.send(call_id, OK, data)
