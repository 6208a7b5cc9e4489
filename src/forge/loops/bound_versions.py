"""Versions of the policy that a run keeps: which ones agents may name, and where they and a league's members are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.config import AgentConfig, GRPOConfig
from forge.errors import ConfigError
from forge.loops.run_paths import run_dir
from forge.store.records import pinned_name
from forge.store.version_file import missing_file, version_path, versions_in

if TYPE_CHECKING:
    from forge.loops.workers import Workers
    from forge.store import PinnedVersions
    from forge.trainer.checkpoint_folder import CheckpointInfo


def starts_generators(config: GRPOConfig, agent: AgentConfig) -> bool:
    """Return whether generators are started for an agent: for a version only where the policy's cannot serve it."""
    if agent.version is not None:
        return not config.generator.capabilities.pinned_versions
    return agent.has_own_generators


def versions_dir(config: GRPOConfig) -> Path:
    """Return the folder of the versions that agents are bound to."""
    return run_dir(config) / "agents" / "versions"


def members_dir(config: GRPOConfig) -> Path:
    """Return the folder of the versions that are members of the league."""
    return run_dir(config) / "pinned"


def check_members(config: GRPOConfig, state: Mapping[str, Any], *, most: int) -> None:
    """Refuse to resume a league without the files of its members. `state` is what the loop stored with the checkpoint,
    `most` how many versions may be members: where there were more, some are not needed."""
    kept = state.get("league", {}).get("digests", {}) if config.episode.league is not None else {}
    folder = members_dir(config)
    missing = [version_path(folder, int(version)) for version in kept]
    missing = [path for path in missing if not path.is_file()]
    if missing and len(kept) <= most:
        error = missing_file(missing[0])
        error.repair = member_repair(folder)
        raise error


def member_repair(folder: Path | None) -> str:
    """Return what to do about a member's file that is missing or damaged."""
    return f"copy {folder} from the run that made the checkpoint, or remove episode.league"


def version_errors(config: GRPOConfig, *, resume_step: int | None) -> Iterator[ConfigError]:
    """Yield an error for every agent whose version the run cannot have when it starts.

    `resume_step` is the step that it resumes after; None for a new run.
    """
    first = resume_step or 0
    kept = [] if resume_step is None else list(versions_in(versions_dir(config)))
    possible = sorted({first, *kept})
    for name, agent in config.episode.agents.items():
        if agent.version is None or agent.version in possible:
            continue
        what = f"{first}, the initial weights" if resume_step is None else f"{first}, the weights it resumes with"
        others = [version for version in kept if version != first]
        yield ConfigError(
            "the policy has no such version when the run starts",
            path=f"episode.agents.{name}.version",
            value=agent.version,
            rule=what + (f", or one that the run has kept: {others}" if others else ""),
            repair=f"set {first}; for the weights of another step name a checkpoint: episode.agents.{name}.checkpoint",
        )


def resumed_step(checkpoint: CheckpointInfo | None) -> int | None:
    """Return the step that a run resumes after; None for a new run, and for a checkpoint that does not say."""
    state = {} if checkpoint is None else checkpoint.extra.get("caller")
    step = state.get("step") if isinstance(state, Mapping) else None
    return step if isinstance(step, int) else None


def check_bound_versions(config: GRPOConfig, checkpoint: CheckpointInfo | None) -> None:
    """Raise the first of `version_errors`."""
    for error in version_errors(config, resume_step=resumed_step(checkpoint)):
        raise error


class BoundVersions:
    """Pins the versions that agents are bound to, for as long as the run lasts, and keeps them in its folder.

    Args:
        config: the run's.
        workers: its services.
    """

    def __init__(self, config: GRPOConfig, workers: Workers) -> None:
        self._config, self._workers = config, workers
        self.pins: PinnedVersions | None = None

    async def pin(self, step: int, *, is_resumed: bool) -> None:
        """Pin them when version `step` is published. A resumed run takes those that it has kept from their files."""
        versions = self._config.episode.bound_versions
        if not versions:
            return
        from forge.store import PinnedVersions

        folder, name = versions_dir(self._config), self._config.generator.weights
        self.pins = PinnedVersions(name, folder=folder)
        kept = [version for version in versions if is_resumed and version in versions_in(folder)]
        await self.pins.restore(kept)
        if step in versions and step not in kept:
            await self.pins.add(step)
        await self.pins.restore(versions)  # says which file is missing, if a version is left
        await self.pins.delete_files()
        await self._serve(name)

    async def _serve(self, name: str) -> None:
        """Let generators that were started for an agent load its version."""
        for agent_name, agent in self._config.episode.agents.items():
            if agent.version is not None and agent_name in self._workers.agents:
                await self._workers.agents[agent_name].service.update_weights.fanout(agent.version)


def own_weights_name(config: GRPOConfig, agent: AgentConfig, *, name: str) -> str:
    """Return the name of the weights that an agent's own generators load: those of its pinned version, or one that
    nothing is published under."""
    return f"agent_{name}" if agent.version is None else pinned_name(config.generator.weights, agent.version)
