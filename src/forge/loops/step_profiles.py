"""Profiles of steps by torch.profiler: of those that the configuration names, or the next one when a command asks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from forge.config.record import ProfileConfig
from forge.loops.step_commands import StepCommands
from forge.observe.torch_profile import ProfileOptions, write_profile
from forge.runtime.profiling import OpenProfiles, finish_profiles, start_profiles

FOLDER: Final = "profiles"
COMMAND: Final = "profile"
_log = logging.getLogger("forge.loops")


class StepProfiles:
    """Profiles the steps of one run. What goes wrong is logged: no profile is worth a run.

    Args:
        config: the section `record.profile`.
        folder: the run's folder.
        commands: may ask for a profile of the next step, and are answered with its files.
        suffix: what the files of this process have at the end of their names; for ranks.
    """

    def __init__(self, config: ProfileConfig, folder: Path, *, commands: StepCommands, suffix: str = "") -> None:
        self._config, self._folder, self._commands, self._suffix = config, folder / FOLDER, commands, suffix
        self._open: OpenProfiles | None = None
        self._step = 0

    async def begin(self, step: int) -> None:
        """Start to profile if a step is to be profiled, which is about to begin."""
        is_asked = self._commands.is_waiting(COMMAND)
        if self._open is not None or not (is_asked or step in self._config.steps):
            return
        section = self._config
        options = ProfileOptions(section.max_seconds, section.shapes, section.memory)
        self._step = step
        try:
            self._open = await start_profiles(section.workers, options)
        except Exception as error:  # noqa: BLE001 - the profiler's own
            _log.warning("step %d is not profiled: %s", step, error)
            self._open = OpenProfiles(failed={"all": str(error)})

    async def end(self) -> None:
        """Write the profiles of the step that has ended, if it was profiled, and answer the commands."""
        if self._open is None:
            return
        profiles, self._open = self._open, None
        await self._commands.carry_out(COMMAND, lambda: self._finish(profiles))
        if profiles.is_pending:  # no command has asked for it
            await self._finish(profiles)

    async def _finish(self, profiles: OpenProfiles) -> Mapping[str, Any]:
        profiles.is_pending = False
        try:
            found = await finish_profiles(profiles)
            files = [self._write(name, data) for name, data in sorted(found.items())]
        except Exception as error:  # noqa: BLE001 - the profiler's own
            profiles.failed["all"] = str(error) or type(error).__name__
            files = []
        for name, why in profiles.failed.items():
            _log.warning("step %d: no profile of %s: %s", self._step, name, why)
        if files:
            _log.info("step %d is profiled: %s", self._step, ", ".join(files))
        return {"profiled_step": self._step, "files": files, "failed": dict(profiles.failed)}

    def _write(self, name: str, data: bytes) -> str:
        label = "".join(each if each.isalnum() else "-" for each in name + self._suffix).strip("-")
        path = self._folder / f"step-{self._step:08d}-{label}.json.gz"
        write_profile(path, data)
        return str(path)
