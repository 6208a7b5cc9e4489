"""`forge env check`: run agents that need no model in an environment, and report what is wrong with it."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forge.errors import ConfigError
from forge.log_levels import add_log_flags

if TYPE_CHECKING:
    from forge.cli.episode_inputs import ChosenProgram
    from forge.envs.check_agents import Oracle
    from forge.envs.check_records import EnvReport
    from forge.types import Task

_MADE_UP = "What is the answer to question {number}?"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `env check`."""
    from forge.cli.config import AnyOrderParser
    from forge.cli.episode_inputs import add_program_arguments

    env = subparsers.add_parser("env", help="check an environment or an episode's program without a model")
    commands = env.add_subparsers(dest="env_command", metavar="check", required=True, parser_class=AnyOrderParser)
    check = commands.add_parser(
        "check",
        help="report determinism, timing, leaks, rewards and errors",
        description="Run an agent that does nothing, a random one and, if there is one, a scripted oracle. Each "
        "episode runs twice with the same seed, in this process. Exit code 1 if a check fails; warnings do not count.",
        epilog="example: forge env check my_module:solve --tasks tasks.jsonl --oracle my_module:solutions",
    )
    add_program_arguments(check)
    check.add_argument(
        "--tasks",
        metavar="TASKS",
        help="a file of records, or JSON of one record or a list of them; default: the configuration's prompts",
    )
    check.add_argument("--num-tasks", metavar="N", type=int, default=8, help="how many tasks to try; default: 8")
    check.add_argument(
        "--oracle",
        metavar="MODULE:ATTRIBUTE",
        help="a function (task) -> list of answers, or (task, messages) -> the next answer; default: the program's own",
    )
    check.add_argument("--max-reward", metavar="X", type=float, help="the reward that the oracle must reach")
    check.add_argument(
        "--timeout", metavar="S", type=float, default=60.0, help="seconds that one episode may take; default: 60"
    )
    check.add_argument("--seed", metavar="N", help="what random choices derive from; default: run.seed")
    check.add_argument("--max-turns", metavar="N", help="the most turns of an episode")
    check.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_log_flags(check)
    check.set_defaults(handler=_check)


def _check(arguments: argparse.Namespace) -> int:
    import asyncio

    from forge.cli.chat import parse_number
    from forge.cli.episode_inputs import read_program
    from forge.envs.check import check_env

    options = {"run.seed": arguments.seed, "episode.limits.max_turns": arguments.max_turns}
    numbers = {key: parse_number(value) for key, value in options.items()}
    chosen = read_program(arguments, numbers, command="forge env check")
    _check_numbers(arguments)
    tasks, note = _tasks(arguments, chosen)
    limits = chosen.config.episode.limits
    timeout_s = arguments.timeout if limits.timeout_s is None else min(arguments.timeout, limits.timeout_s)
    report = asyncio.run(
        check_env(
            chosen.program,
            tasks,
            oracle=_oracle(arguments, chosen),
            limits=limits.model_copy(update={"timeout_s": timeout_s}),
            seed=chosen.config.run.seed,
            max_reward=arguments.max_reward,
        )
    )
    if arguments.json:
        notes = [] if note is None else [note]
        print(json.dumps({**report.as_dict(), "program": chosen.kind, "notes": notes}, indent=2, ensure_ascii=False))
    else:
        print(_shown(chosen.kind, report, note))
    return 0 if report.is_ok else 1


def _check_numbers(arguments: argparse.Namespace) -> None:
    for name, is_valid, rule in (
        ("num-tasks", arguments.num_tasks >= 1, "a whole number >= 1"),
        ("timeout", arguments.timeout > 0, "a number of seconds above 0"),
    ):
        if not is_valid:
            raise ConfigError(
                "this number is out of range",
                path=f"--{name}",
                value=getattr(arguments, name.replace("-", "_")),
                rule=rule,
                repair="leave it out for the default",
            )


def _tasks(arguments: argparse.Namespace, chosen: ChosenProgram) -> tuple[list[Task], str | None]:
    """Return the tasks to try, and a note about them."""
    from forge.cli.episode_inputs import read_file, read_numbered, read_task

    config, most, given = chosen.config, arguments.num_tasks, arguments.tasks
    if given is None and config.prompts.sources:
        return read_numbered(config, range(most)), None
    if given is None:
        texts = [_MADE_UP.format(number=number) for number in range(most)]
        tasks = [
            read_task(json.dumps({"prompt": text, "prompt_id": f"made-up:{n}"}), config) for n, text in enumerate(texts)
        ]
        return tasks, "the tasks are made up, without answers: give --tasks FILE, or --config FILE with prompts"
    if given.lstrip().startswith(("{", "[")):
        return [read_task(text, config, path="--tasks") for text in _records(given)[:most]], None
    return read_file(given.removeprefix("@"), config, path="--tasks", most=most), None


def _records(text: str) -> list[str]:
    try:
        found: Any = json.loads(text)
    except ValueError as error:
        found = error
    records = [found] if isinstance(found, dict) else found
    if not isinstance(records, list) or not records or not all(isinstance(each, dict) for each in records):
        raise ConfigError(
            "the tasks cannot be read",
            path="--tasks",
            value=text,
            rule="a JSON object or a list of them" + (f": {found}" if isinstance(found, ValueError) else ""),
            repair="""write them like '[{"prompt": "2 + 2?", "answer": "4"}]', or name a file""",
        )
    return [json.dumps({"prompt_id": f"--tasks:{number}", **each}) for number, each in enumerate(records)]


def _oracle(arguments: argparse.Namespace, chosen: ChosenProgram) -> Oracle | None:
    from forge.registry import import_attribute

    if arguments.oracle is None:
        return chosen.program.oracle
    found = import_attribute(arguments.oracle, path="--oracle") if ":" in arguments.oracle else None
    if not callable(found):
        raise ConfigError(
            "the oracle cannot be used",
            path="--oracle",
            value=arguments.oracle,
            rule="`module:attribute` of a function (task) -> list of answers, or (task, messages) -> the next answer",
            repair="write it like my_module:solutions",
        )
    return found  # type: ignore[no-any-return]


# ---- Text ------------------------------------------------------------------------------------------------------------

_MARKS = {"pass": "PASS", "warn": "WARN", "fail": "FAIL", "skip": "SKIP"}


def _shown(kind: str, report: EnvReport, note: str | None) -> str:
    lines = [f"{kind}, {report.num_tasks} tasks, each twice", *([] if note is None else [f"note: {note}"]), ""]
    lines += [_row(row) for row in _rows(report)]
    lines.append("")
    for check in report.checks:
        lines.append(f"{_MARKS[check.status]}  {check.name:<12} {check.message}")
        lines += [textwrap.indent(text, " " * 6) for text in check.detail]
    num_failed = sum(check.status == "fail" for check in report.checks)
    num_warned = sum(check.status == "warn" for check in report.checks)
    lines += ["", f"{num_failed} failed, {num_warned} warned." if num_failed or num_warned else "All checks passed."]
    return "\n".join(lines)


def _rows(report: EnvReport) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("agent", "reward", "range", "turns", "ms/turn", "ms/episode", "outcomes")]
    for agent in report.agents:
        facts = agent.as_dict()
        is_scored = facts["reward_mean"] is not None
        rows.append(
            (
                agent.name,
                f"{facts['reward_mean']:.3g}" if is_scored else "-",
                f"{facts['reward_min']:g} to {facts['reward_max']:g}" if is_scored else "-",
                f"{facts['turns_mean']:.1f}",
                _milliseconds(facts["seconds_per_turn"]),
                _milliseconds(facts["seconds_median"]),
                ", ".join(f"{name} {count}" for name, count in facts["outcomes"].items()),
            )
        )
    return rows


def _row(cells: Sequence[str]) -> str:
    widths = (9, 8, 16, 6, 9, 11, 0)
    return "".join(
        f"{cell:<{width}}" if len(cell) < width else f"{cell} " for cell, width in zip(cells, widths, strict=True)
    ).rstrip()


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"
