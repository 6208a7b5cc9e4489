"""What a configuration needs around the run: room on the disk, launchers and their tools, certificates, ports."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from forge.cli.doctor_check import Check, failed_check, make_check, size_text
from forge.config import ForgeConfig, GRPOConfig, PolicyConfig, SupervisedConfig
from forge.errors import ForgeError

if TYPE_CHECKING:
    from forge.cli.doctor_config import Machine
    from forge.memory import ResolvedRun

_CONNECT_S = 3.0


def checks(config: ForgeConfig, machine: Machine, run: ResolvedRun | None) -> Iterator[Check]:
    """Yield a check for every place and tool that the configuration uses."""
    if run is not None and isinstance(config, GRPOConfig | SupervisedConfig):
        yield _disk(config, machine, run)
    if config.launcher.kind != "local":
        yield from _launcher(config)
    yield from _certificates(machine)
    if isinstance(config, PolicyConfig):
        yield _port(config)


def _disk(config: GRPOConfig | SupervisedConfig, machine: Machine, run: ResolvedRun) -> Check:
    """Compare what the run's checkpoints will take with what is free."""
    from forge.loops.run_paths import checkpoint_dir
    from forge.memory import checkpoint_bytes

    saving = config.checkpointing
    each, folder = checkpoint_bytes(run), checkpoint_dir(config)
    is_repeated = saving.save_interval is not None or saving.save_interval_s is not None
    kept = saving.keep + 1 if is_repeated else 1  # one more while the next is written
    needed, free = kept * each, machine.disk_free(Path(folder))
    return make_check(
        "disk",
        free >= needed,
        f"{kept} checkpoint(s) of {size_text(each)} in {folder}, where {size_text(free)} are free",
        repair="free some, set checkpointing.output_dir to a larger disk, or lower checkpointing.keep",
        needed=free < each,
    )


def _launcher(config: ForgeConfig) -> Iterator[Check]:
    """Try everything that the launcher checks on this machine before it starts anything, and look for its hosts."""
    from forge.runtime.launchers import launch_checks

    errors = []
    for check in launch_checks(config.launcher):
        try:
            check()
        except ForgeError as error:
            errors.append(failed_check(f"launcher {error.path or ''}".strip(), error))
    yield from errors
    if not errors:
        yield make_check("launcher", True, f"`{config.launcher.kind}` has what it needs on this machine")
    for address in config.launcher.hosts:
        yield _host(address)


def _host(address: str) -> Check:
    place = urlsplit(address)
    try:
        with socket.create_connection((place.hostname or "", place.port or 0), timeout=_CONNECT_S):
            return make_check(f"host {address}", True, "something listens there")
    except OSError as error:
        repair = f"start `forge worker --address {address}` there, or correct launcher.hosts"
        return make_check(f"host {address}", False, f"cannot be reached: {error.strerror or error}", repair=repair)


def _certificates(machine: Machine) -> Iterator[Check]:
    from forge.runtime.sockets import TLS_VARIABLES, tls_context

    if not any(machine.environ.get(name) for name in TLS_VARIABLES):
        return
    try:
        tls_context(server_side=True)
    except ForgeError as error:
        yield failed_check("tls", error)
    else:
        yield make_check("tls", True, "the certificates that HYPERACTOR_TLS_* name can be read")


def _port(config: PolicyConfig) -> Check:
    """Try the port of `forge serve`; a program that only chats does not need it."""
    host, port = config.serve.host, config.serve.port
    reason = ""
    with contextlib.closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            reason = error.strerror or str(error)
    detail = f"{host}:{port} is in use: {reason}" if reason else f"{host}:{port} is free for forge serve"
    return make_check("serve.port", not reason, detail, repair="choose another: serve.port=0 is any", needed=False)
