"""The self-play league of a run: its members in the store, its place in checkpoints, and the file of its table."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.errors import CheckpointError
from forge.loops.agents import league_agents
from forge.loops.bound_versions import member_repair, members_dir
from forge.loops.planning import GRPOPlan
from forge.loops.run_paths import checkpoint_dir, run_dir
from forge.observe.league_table import LEAGUE_TABLE
from forge.rollout.league import League
from forge.rollout.ledger import recording
from forge.trainer.checkpoint_folder import readable_checkpoints

if TYPE_CHECKING:
    from forge.loops.workers import PolicyHandle
    from forge.rollout.taken_batch import TakenBatch
    from forge.store.pins import PinnedVersions


def make_league(plan: GRPOPlan) -> League | None:
    """Return the league of a run as it starts; None without one."""
    section = plan.config.episode.league
    if section is None or plan.program is None:
        return None
    return League(
        section,
        league_agents(section, plan.program),
        seed=plan.config.run.seed,
        max_versions=plan.run.num_members,
        version_bytes=plan.run.published_item * plan.run.published_weights,
    )


class RunLeague:
    """The league of a run, with the weights of its members. Without a league it does nothing.

    Members are pinned in the store. Their files in the run's folder stay as long as a checkpoint needs them: a run that
    resumes from any of its checkpoints has the same members, the same table and the same opponents.

    Args:
        league: the league; None for none.
        pins: pins its members.
        unload: lets generators forget a version that is no longer one.
        folder, checkpoints: the folders of the run and of its checkpoints.
    """

    def __init__(
        self,
        league: League | None,
        pins: PinnedVersions | None,
        *,
        unload: Callable[[int], Awaitable[None]],
        folder: Path,
        checkpoints: Path,
    ) -> None:
        self._league, self._pins, self._unload = league, pins, unload
        self._folder, self._checkpoints = folder, checkpoints
        self._saved: deque[dict[str, Any]] = deque(maxlen=2)  # what checkpoints have that may not be on the disk yet

    def commit(self, taken: TakenBatch) -> None:
        """Count the games of a batch that was learned from."""
        if self._league is not None:
            self._league.commit((group.number for group in taken.groups), taken.drops)

    async def grow(self, step: int) -> None:
        """Change the members after a step, whose weights are published. A step's change is made once."""
        change = None if self._league is None else self._league.next_change(step)
        if change is None:
            return
        assert self._league is not None
        assert self._pins is not None
        if change.remove is not None:
            await self._pins.remove(change.remove, keep_file=True)
            await self._unload(change.remove)
        pinned = await self._pins.add(change.add)
        self._league.apply(change, digest=pinned.digest)
        await self._delete_files()

    async def _delete_files(self) -> None:
        """Delete the files of versions that are members neither now nor in a checkpoint, complete or being written."""
        assert self._pins is not None
        states = [info.extra.get("caller", {}).get("league") for info in readable_checkpoints(self._checkpoints)]
        kept = {int(version) for state in (*states, *self._saved) if state for version in state["digests"]}
        await self._pins.delete_files(keep=kept)

    def state(self, pending: Sequence[int]) -> dict[str, Any]:
        """Return what a checkpoint keeps; nothing without a league."""
        if self._league is None:
            return {}
        self._saved.append(self._league.state(pending))
        return {"league": self._saved[-1]}

    async def restore(self, extra: Mapping[str, Any]) -> None:
        """Resume from what a checkpoint kept. A run that had no league before starts one."""
        state = extra.get("league")
        if self._league is None or state is None:
            return
        assert self._pins is not None
        self._league.load(state)
        try:
            await self._pins.restore(self._league.versions)
        except CheckpointError as error:
            error.repair = member_repair(self._pins.folder)
            raise
        for version in self._league.versions:
            found, kept = self._pins[version].digest, state["digests"][str(version)]
            if found != kept:
                raise CheckpointError(
                    "a member of the league is not what it was when the checkpoint was made",
                    path=str(self._pins.folder),
                    value=f"version {version} with digest {found[:16]}",
                    rule=f"digest {kept[:16]}",
                    repair="resume from a later checkpoint, or start a new run under another run.name",
                )

    def write(self, step: int) -> None:
        """Write the table after a step."""
        if self._league is None:
            return
        path = self._folder / LEAGUE_TABLE
        text = json.dumps({"step": step, "rating": self._league.rating, "members": self._league.table()}, indent=1)
        part = path.with_name(f".{path.name}.part")
        with recording(path):
            part.write_text(text + "\n", encoding="utf-8")
            os.replace(part, path)


def run_league(plan: GRPOPlan, league: League | None, policy: PolicyHandle) -> RunLeague:
    """Return the league of a run with the weights of its members."""
    folder, pins = run_dir(plan.config), None
    if league is not None:
        from forge.store.pins import PinnedVersions

        pins = PinnedVersions(plan.config.generator.weights, folder=members_dir(plan.config))
    checkpoints = checkpoint_dir(plan.config)
    return RunLeague(
        league, pins, unload=lambda version: policy.unload_version(version), folder=folder, checkpoints=checkpoints
    )
