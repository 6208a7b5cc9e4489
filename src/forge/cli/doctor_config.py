"""`forge doctor --config`: what one configuration needs of the machine and of what is installed.

The verdict on the configuration itself is that of `forge run --dry-run`. Beside it are the needs that a run finds out
only once its workers start: extras of the right version, drivers, limits, tools, certificates and room on the disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge import _amx
from forge.cli.doctor_check import Check, make_check

if TYPE_CHECKING:
    from forge.config import ForgeConfig
    from forge.memory import ResolvedRun
    from forge.recipes.stand_ins import StandIns


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine has, as far as a configuration may need it.

    Attributes:
        environ: the environment variables.
        shared_free: bytes free in shared memory.
        locked_limit: bytes that a process may lock in memory; None for any.
        num_gpus: GPUs that the driver shows.
        driver: version of NVIDIA's driver; None without one.
        capability: major compute capability of the first GPU; None without one.
        has_nccl: whether this build of torch has NCCL.
        rdma: its RDMA devices.
        amx: whether AMX works.
        version_of: returns the version of an installed distribution, None where it is not installed.
        requirements_of: returns what an extra of this library installs.
        disk_free: returns the bytes free where a folder is.
    """

    environ: Mapping[str, str]
    shared_free: int
    locked_limit: int | None
    num_gpus: int
    driver: str | None
    capability: int | None
    has_nccl: bool
    rdma: Sequence[str]
    amx: _amx.Verdict
    version_of: Callable[[str], str | None]
    requirements_of: Callable[[str], Sequence[str]]
    disk_free: Callable[[Path], int]

    @classmethod
    def this(cls, facts: Mapping[str, Any]) -> Machine:
        """Return this machine, from the facts of `forge.runtime.machine.describe`."""
        from forge.runtime.machine import extra_requirements

        graphics = facts["gpus"]
        capabilities = [text.partition(".")[0] for text in graphics["capabilities"]]
        return cls(
            environ=os.environ,
            shared_free=facts["memory"]["shared_free"],
            locked_limit=facts["locked_memory_limit"],
            num_gpus=graphics["present"],
            driver=graphics["driver"][0] if graphics["driver"] else None,
            capability=int(capabilities[0]) if capabilities and capabilities[0].isdecimal() else None,
            has_nccl=bool(graphics["nccl"]),
            rdma=facts["rdma"],
            amx=_amx.verdict(),
            version_of=_version,
            requirements_of=extra_requirements,
            disk_free=_disk_free,
        )


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _disk_free(folder: Path) -> int:
    import shutil

    place = folder.absolute()
    return shutil.disk_usage(next(each for each in (place, *place.parents) if each.exists())).free


@dataclass(frozen=True, slots=True)
class OpenedConfig:
    """A configuration whose needs are checked, with stand-ins for what a recipe's run would make first."""

    config: ForgeConfig
    found: StandIns

    def checks(self, facts: Mapping[str, Any]) -> list[Check]:
        """Return its checks on this machine, from the facts of `forge.runtime.machine.describe`."""
        checks = config_checks(self.config, Machine.this(facts))
        return [{key: self.found.named(text) for key, text in check.items()} for check in checks]


@contextmanager
def opened_config(files: Sequence[str], words: Sequence[str]) -> Iterator[OpenedConfig | None]:
    """Load the configuration of a command line; None where it names none. Raises `ConfigError` for a wrong one."""
    from forge.cli.dry_run import choose_schema
    from forge.config import add_module_folders, load
    from forge.errors import ConfigError
    from forge.recipes import read_command
    from forge.recipes.stand_ins import stand_ins

    if not files:
        if words:
            raise ConfigError(
                "there is no configuration that this could change",
                path="a.b=c",
                value=words[0],
                rule="overrides with --config only",
                repair=f"forge doctor --config FILE {words[0]}",
            )
        yield None
        return
    command = read_command(files, words)
    add_module_folders(command.files)
    schema = choose_schema(command.files, command.words).schema
    with stand_ins(command.settings) as found:
        yield OpenedConfig(load(schema, files=command.files, overrides=[*command.words, *found.overrides]), found)


def config_checks(config: ForgeConfig, machine: Machine) -> list[Check]:
    """Return every check of one configuration, the needs first and the verdict last."""
    needs: list[Check] = []
    try:
        from forge.cli import doctor_extras, doctor_places, doctor_system

        run = _resolved(config)
        for module in (doctor_extras, doctor_system, doctor_places):
            needs += module.checks(config, machine, run)
        told = {check["name"] for check in needs if check["status"] == "FAIL"}
        return [*needs, *_verdict(config, told)]
    except Exception as error:  # noqa: BLE001 - a failed check is a finding, not a crash
        return [
            *needs,
            make_check("configuration", False, f"{type(error).__name__}: {error}", repair="see the message"),
        ]


def _resolved(config: ForgeConfig) -> ResolvedRun | None:
    """Return the run with all that it leaves open decided; None for one that cannot be, as the verdict then says."""
    from forge.errors import ForgeError
    from forge.memory import find_card, resolve_run

    try:
        return resolve_run(config, card=find_card())
    except ForgeError:
        return None


def _verdict(config: ForgeConfig, told: set[str]) -> Iterator[Check]:
    """Yield what the run would refuse, without the keys that were reported already."""
    from forge.loops.dry_run import dry_run

    found = dry_run(config)
    left = [problem for problem in found.problems if problem.path not in told]
    for problem in left:
        name = problem.path or "configuration"
        yield make_check(name, False, problem.rule, repair=problem.repair)
    for text in found.warnings:
        yield make_check("configuration", False, text, repair="see the message", needed=False)
    if not found.problems:
        yield make_check("configuration", True, "the run would start: forge run … --dry-run says what it would do")
