"""`forge chaos`: run a configuration while faults are injected, and check that it kept every guarantee."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forge.cli.config import AnyOrderParser
from forge.errors import ConfigError
from forge.log_levels import add_log_flags

if TYPE_CHECKING:
    from forge.chaos.experiment import RunCommand, Trial
    from forge.chaos.script import Fault
    from forge.chaos.verdict import Verdict
    from forge.recipes import Command


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `chaos`."""
    parser = subparsers.add_parser(
        "chaos",
        help="run a configuration while faults are injected, and check what became of it",
        description="Run a configuration of reinforcement learning twice, undisturbed and with faults from a seeded "
        "script, and compare: groups lost or trained twice, torn reads, leaked processes, memory and files, equal "
        "weights, and goodput. The exit code is 1 if a guarantee was broken.",
        epilog="example: forge chaos grpo/tiny --seed 1 --rate 4 --faults kill,stop",
    )
    parser.__class__ = AnyOrderParser  # overrides may stand between options
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or a recipe")
    parser.add_argument(
        "--program", metavar="FILE", type=Path, help="the Python file that runs CONFIG; default: that of the recipes"
    )
    parser.add_argument("--output", metavar="DIR", type=Path, default=Path("runs/chaos"), help="folder of both runs")
    parser.add_argument("--script", metavar="FILE", type=Path, help="replay this script instead of making one")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the script (default: 0)")
    parser.add_argument("--rate", metavar="R", type=float, default=4.0, help="faults per minute (default: 4)")
    parser.add_argument("--for", dest="for_s", metavar="S", type=float, default=600.0, help="seconds of faults (600)")
    parser.add_argument("--faults", metavar="KIND,…", help="kinds of faults (default: kill,stop,slow)")
    parser.add_argument("--roles", metavar="ROLE,…", help="workers that are hit (default: generator,trainer,reward)")
    parser.add_argument(
        "--every", metavar="ROLE=S", action="append", default=[], help="kill this worker every S seconds instead"
    )
    parser.add_argument("--disk-gb", metavar="X", type=float, help="run on a disk of this size, for `disk_full`")
    parser.add_argument("--limit", dest="limit_s", metavar="S", type=float, default=3600.0, help="seconds for each run")
    parser.add_argument("--no-baseline", action="store_true", help="do not run undisturbed: no goodput, no comparison")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the verdict to this file")
    parser.add_argument("overrides", metavar="OVERRIDE", nargs="*", help="a.b=c, for both runs")
    add_log_flags(parser)
    parser.set_defaults(handler=_chaos)


def _chaos(arguments: argparse.Namespace) -> int:
    import asyncio

    from forge.chaos.experiment import own_disk
    from forge.chaos.script import write_script
    from forge.chaos.verdict import verdict_lines
    from forge.recipes import make_inputs

    config, faults = _read_config(arguments), _script(arguments)
    command = _run_command(config, arguments.program)
    output: Path = arguments.output
    if output.exists() and any(output.iterdir()):
        raise ConfigError(
            "the folder for the two runs is not empty",
            path="--output",
            value=str(output),
            rule="an empty folder, or one that does not exist",
            repair="choose another one, or delete it",
        )
    if (status := make_inputs(config.settings, command="forge chaos")) != 0:
        return status
    output.parent.mkdir(parents=True, exist_ok=True)
    script = output.parent / f"{output.name}-script.jsonl"
    write_script(faults, script)
    print(f"{len(faults)} faults; the script is in {script}", flush=True)
    with own_disk(output, arguments.disk_gb):
        verdict = asyncio.run(_both(command, faults, arguments))
    print("\n".join(verdict_lines(verdict)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(verdict.plain(), indent=2) + "\n", encoding="utf-8")
    return 0 if verdict.is_good else 1


async def _both(command: RunCommand, faults: Sequence[Fault], arguments: argparse.Namespace) -> Verdict:
    from forge.chaos.experiment import run_trial
    from forge.chaos.verdict import judge

    undisturbed: Trial | None = None
    if not arguments.no_baseline:
        print("1. undisturbed", flush=True)
        undisturbed = await run_trial(command, arguments.output, name="undisturbed", limit_s=arguments.limit_s)
        if undisturbed.status != 0:
            raise ConfigError(
                "the configuration does not run even without faults",
                path="CONFIG",
                value=f"exit status {undisturbed.status}",
                rule="a run that ends within --limit",
                repair=f"see {arguments.output}-undisturbed.log",
            )
    print("2. with faults", flush=True)
    disturbed = await run_trial(
        command,
        arguments.output,
        name="disturbed",
        faults=faults,
        limit_s=arguments.limit_s,
        on_event=lambda text: print(f"   {text}", flush=True),
    )
    return judge(disturbed, undisturbed, is_deterministic=_is_deterministic(command))


def _is_deterministic(command: RunCommand) -> bool:
    """Return whether a resumed run must end with the same weights: synchronous ones on a CPU do."""
    from forge.config import GRPOConfig, load

    config = load(GRPOConfig, files=command.configs, overrides=command.overrides)
    return config.rollout.staleness == 0 and not Path("/dev/nvidia0").exists()


def _read_config(arguments: argparse.Namespace) -> Command:
    from forge.config.command_line import detect_kind
    from forge.recipes import read_command

    command = read_command([arguments.config], arguments.overrides)
    (config,) = command.files
    if not Path(config).is_file():
        raise ConfigError(
            "there is no such configuration file",
            path="CONFIG",
            value=config,
            rule="a YAML file that exists, or a recipe",
            repair="check the path; it is relative to the working directory",
        )
    kind = detect_kind(command.files, command.words).kind
    if kind != "grpo":
        raise ConfigError(
            "faults are injected into runs of reinforcement learning only",
            path="CONFIG",
            value=f"a configuration of {kind}",
            rule="a configuration of grpo",
            repair="name another file",
        )
    return command


def _run_command(command: Command, program: Path | None) -> RunCommand:
    from forge.chaos.experiment import RunCommand
    from forge.recipes import programs

    program = program or programs()["grpo"]
    if not program.is_file():
        raise ConfigError(
            "there is no such program",
            path="--program",
            value=str(program),
            rule="a Python file that runs CONFIG",
            repair="name it with --program, as the SCRIPT of forge run",
        )
    return RunCommand(program, command.files, command.words)


def _script(arguments: argparse.Namespace) -> list[Fault]:
    from forge.chaos.script import DEFAULT_KINDS, DEFAULT_ROLES, FAULT_KINDS, make_script, periodic_kills, read_script

    if arguments.script is not None:
        return read_script(arguments.script)
    if arguments.rate <= 0 or arguments.for_s <= 0:
        name, value = ("--rate", arguments.rate) if arguments.rate <= 0 else ("--for", arguments.for_s)
        raise ConfigError("this number must be above 0", path=name, value=value, rule="> 0", repair="leave it out")
    kinds = DEFAULT_KINDS if arguments.faults is None else tuple(arguments.faults.split(","))
    for kind in kinds:
        if kind not in FAULT_KINDS:
            raise ConfigError(
                "there is no such fault",
                path="--faults",
                value=kind,
                rule=f"one of {', '.join(FAULT_KINDS)}",
                repair="correct the name",
            )
    if arguments.every:
        return periodic_kills(dict(map(_period, arguments.every)), duration_s=arguments.for_s)
    roles = DEFAULT_ROLES if arguments.roles is None else tuple(arguments.roles.split(","))
    return make_script(
        arguments.seed, rate_per_min=arguments.rate, duration_s=arguments.for_s, kinds=kinds, roles=roles
    )


def _period(word: str) -> tuple[str, float]:
    role, _, text = word.partition("=")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not role or seconds <= 0:
        raise ConfigError(
            "this is not a worker with a period",
            path="--every",
            value=word,
            rule="ROLE=SECONDS, with seconds above 0",
            repair="write generator=30",
        )
    return role, seconds
