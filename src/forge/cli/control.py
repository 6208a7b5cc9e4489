"""`forge control RUN [show | stop | save | evaluate | profile | set KEY=VALUE …]`: commands for a live run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from forge.loops.run_client import RunClient

_WRONG_INPUT: Final = ("OptionError", "ConfigError", "InvalidConfig")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `control`."""
    parser = subparsers.add_parser(
        "control",
        help="show, stop, save, evaluate, profile or change a run that is running",
        description="Show where a running run is, let it stop, save or evaluate after the step in progress, profile "
        "the step after it, or change its learning rate, and in reinforcement learning its sampling temperature, "
        "staleness and groups per batch. "
        "Changes are recorded: a resume, and forge replay, make them again at the same steps.",
        epilog="example: forge control runs/first set training.learning_rate=5e-6 generator.sampling.temperature=0.8",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument(
        "action",
        metavar="ACTION",
        nargs="?",
        default="show",
        choices=tuple(_ACTIONS),
        help="show (default), stop, save, evaluate, profile or set",
    )
    parser.add_argument("words", metavar="KEY=VALUE", nargs="*", help="for set: the keys with their new values")
    parser.add_argument(
        "--timeout", metavar="S", type=float, default=None, help="seconds to wait for the answer; default: no limit"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(handler=_control)


def _control(arguments: argparse.Namespace) -> int:
    from forge.loops.run_client import RunClient
    from forge.loops.run_control import RunRefused

    values = _read_values(arguments.action, arguments.words)
    run = RunClient(arguments.run_dir, timeout_s=arguments.timeout)
    try:
        reply, lines = _ACTIONS[arguments.action](run, values)
    except RunRefused as error:
        print(f"forge control: {error}", file=sys.stderr)
        return 2 if error.type_name in _WRONG_INPUT else 1
    if arguments.json:
        plain = {name: value for name, value in reply.items() if name != "ok"}
        print(json.dumps(plain, indent=2))
    else:
        print("\n".join(lines))
    return 0


Found = tuple[Mapping[str, Any], list[str]]


def _show(run: RunClient, values: Mapping[str, Any]) -> Found:
    from forge.loops.run_client import RunStatus

    reply = run.ask("show")
    status = RunStatus.read(reply)
    of = "" if status.max_steps is None else f" of {status.max_steps}"
    doing = "; ".join(status.waits_for) or "between two steps"
    lines = [f"after step {status.step}{of}{', stopping' if status.is_stopping else ''}: {doing}"]
    width = max((len(key) for key in status.settings), default=0)
    for key, setting in status.settings.items():
        differs = "" if setting.value == setting.configured else f"  (configured: {setting.configured})"
        lines.append(f"  {key:<{width}}  {setting.value}{differs}")
    lines += [f"  from step {each.from_step} on: {each.key}={each.after}" for each in status.planned]
    if status.commands:
        lines.append("  for the end of the step: " + ", ".join(f"{n} {name}" for name, n in status.commands.items()))
    if status.workers is not None:
        lines.append("  workers: " + ", ".join(f"{kind}={count}" for kind, count in status.workers.items()))
    return reply, lines


def _stop(run: RunClient, values: Mapping[str, Any]) -> Found:
    reply = run.ask("stop")
    return reply, [f"after step {reply['step']}: the run finishes its step, saves, and exits with {reply['exit_code']}"]


def _save(run: RunClient, values: Mapping[str, Any]) -> Found:
    saved = run.save()
    reply = {"step": saved.step, "checkpoint": str(saved.path)}
    return reply, [f"after step {saved.step}: {saved.path}"]


def _evaluate(run: RunClient, values: Mapping[str, Any]) -> Found:
    found = run.evaluate()
    shown = ", ".join(f"{name} {_short(value)}" for name, value in _numbers(found.values))
    return {"step": found.step, "evaluation": dict(found.values)}, [f"after step {found.step}: {shown}"]


def _profile(run: RunClient, values: Mapping[str, Any]) -> Found:
    profiled = run.profile()
    lines = [f"step {profiled.step}: {path}" for path in profiled.files]
    lines += [f"no profile of {name}: {why}" for name, why in profiled.failed.items()]
    reply = {"step": profiled.step, "files": [str(path) for path in profiled.files], "failed": dict(profiled.failed)}
    return reply, lines


def _numbers(values: Mapping[str, Any]) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += [(f"{name} {key}", each) for key, each in _numbers(value)]
        elif isinstance(value, int | float):
            found.append((name, value))
    return found


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4f}"


def _set(run: RunClient, values: Mapping[str, Any]) -> Found:
    reply = run.ask("set", values=dict(values), by="forge control")
    changed = [f"{each['key']} {each['before']} -> {each['after']}" for each in reply["changes"]]
    return reply, [f"from step {reply['from_step']} on: {', '.join(changed) or 'nothing changes'}"]


_ACTIONS: Final[Mapping[str, Callable[[RunClient, Mapping[str, Any]], Found]]] = {
    "show": _show,
    "stop": _stop,
    "save": _save,
    "evaluate": _evaluate,
    "profile": _profile,
    "set": _set,
}


def _read_values(action: str, words: list[str]) -> dict[str, Any]:
    from forge.config.layers import Assignment, parse_override
    from forge.errors import ConfigError

    if bool(words) != (action == "set"):
        raise ConfigError(
            "`set` needs keys with their values" if action == "set" else f"`{action}` takes no keys",
            path="KEY=VALUE",
            value=" ".join(words),
            rule="one or more keys after `set`, and none after another action",
            repair="write it like: set training.learning_rate=5e-6",
        )
    values: dict[str, Any] = {}
    for word in words:
        parsed = parse_override(word)
        if not isinstance(parsed, Assignment):
            raise ConfigError(
                "this does not say which key gets which value",
                path="KEY=VALUE",
                value=word,
                rule="a dotted key, `=`, and a value in YAML",
                repair="write it like training.learning_rate=5e-6",
            )
        values[".".join(parsed.path)] = parsed.value
    return values
