"""Launchers: where hosts come from. `local` needs none; the others end with workers to attach to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge.runtime.launchers.attach import Allocation, HostsLauncher, Launcher

if TYPE_CHECKING:
    from forge.config import LauncherConfig

__all__ = ["Allocation", "HostsLauncher", "Launcher", "launch", "make_launcher"]


def make_launcher(config: LauncherConfig) -> Launcher:
    """The launcher that a configuration names."""
    if config.kind == "slurm":
        from forge.runtime.launchers.slurm import SlurmLauncher

        return SlurmLauncher(config)
    if config.kind == "kubernetes":
        from forge.runtime.launchers.kubernetes import KubernetesLauncher

        return KubernetesLauncher(config)
    return HostsLauncher(config)


async def launch(config: LauncherConfig) -> Allocation:
    """Get the hosts that a configuration asks for."""
    return await make_launcher(config).launch()
