"""`forge replay RUN` and `forge bisect RUN`: train recorded steps of a run again, and compare."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.log_levels import add_log_flags

if TYPE_CHECKING:
    from forge.loops.replay.comparing import Replayed
    from forge.loops.replay.recorded import RecordedRun, Start

_EXIT = "Exit code 0: identical, or within the tolerance on other hardware; 1: something differs; 2: wrong input."
_SHOWN = 8


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `replay` and `bisect`."""
    replay = subparsers.add_parser(
        "replay",
        help="train a recorded step of a run again, or sample a group again, and compare bit for bit",
        description="Recompute a step of a run of reinforcement learning from its record (RUN/replay) and the nearest "
        "earlier checkpoint, and compare it bit for bit; or sample a group again, token by token. Without --step and "
        "--group: show what can be replayed, and how large the record is. Nothing in RUN is changed.",
        epilog=_EXIT,
    )
    _add_common(replay)
    what = replay.add_mutually_exclusive_group()
    what.add_argument("--step", metavar="K", type=int, help="the step to train again")
    what.add_argument("--group", metavar="N", type=int, help="the group to sample again: its number in ledger.jsonl")
    add_log_flags(replay)
    replay.set_defaults(handler=_replay)
    bisect = subparsers.add_parser(
        "bisect",
        help="find the first step of a run that cannot be reproduced",
        description="Replay every recorded step of a run, checkpoint by checkpoint, up to the first that differs, and "
        "say which component differs first. Nothing in RUN is changed.",
        epilog=_EXIT,
    )
    _add_common(bisect)
    add_log_flags(bisect)
    bisect.set_defaults(handler=_bisect)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument(
        "--tolerance",
        metavar="X",
        type=float,
        default=1e-3,
        help="how far numbers may be apart on other hardware, relative to the larger one; default: %(default)s",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _replay(arguments: argparse.Namespace) -> int:
    import asyncio

    recorded = _open(arguments)
    if arguments.group is not None:
        from forge.cli.replay_group import replay_group

        return replay_group(recorded, arguments)
    if arguments.step is None:
        return _show_window(recorded, arguments)
    from forge.loops.replay.steps import replay_step

    start, found = asyncio.run(replay_step(recorded, arguments.step, tolerance=arguments.tolerance))
    last = found[-1]
    verdict = "identical" if last.is_same and not last.tolerance else "within tolerance" if last.is_same else "differs"
    if arguments.json:
        asked = {"step": arguments.step, "verdict": verdict, "started_from": start.step}
        print(json.dumps(asked | {"steps": [_plain(each) for each in found]}, indent=2, default=str))
        return 0 if last.is_same else 1
    num_trained = len(found) - 1
    print(f"replayed {num_trained} step{'' if num_trained == 1 else 's'} from {start}")
    _print_hardware(last)
    if last.is_same:
        outcome = recorded.read(arguments.step).outcome
        print(f"step {arguments.step}: {verdict}")
        print(f"  loss {outcome['loss']!r}, gradient norm {outcome['grad_norm']!r}")
        print(f"  weights {last.weights}")
        return 0
    where = f"step {last.step}" if num_trained else str(start)
    before = "" if last.step == arguments.step and num_trained else f", before step {arguments.step} could be compared"
    print(f"{where}: differs{before}")
    _print_differences(last)
    return 1


def _bisect(arguments: argparse.Namespace) -> int:
    import asyncio

    from forge.loops.replay.bisecting import bisect_run

    recorded = _open(arguments)

    def report(start: Start, found: Replayed) -> None:
        if not arguments.json:
            is_start = found.step == start.step
            what = f"{start}" if is_start else f"step {found.step}"
            print(f"{what}: {'same' if found.is_same else 'differs'}", flush=True)

    result = asyncio.run(bisect_run(recorded, report=report, tolerance=arguments.tolerance))
    first = result.first
    if arguments.json:
        fields = {"first": None if first is None else _plain(first), "num_same": len(result.steps)}
        print(json.dumps(fields, indent=2, default=str))
        return 0 if first is None else 1
    if first is None:
        how = f" within {result.tolerance:g}, on other hardware" if result.tolerance else " bit for bit"
        print(f"all {len(result.steps)} steps are reproduced{how}")
        return 0
    print(f"the first step that is not reproduced: {first.step} ({first.component})")
    _print_hardware(first)
    _print_differences(first)
    return 1


def _open(arguments: argparse.Namespace) -> RecordedRun:
    from forge.config.command_line import add_module_folders
    from forge.errors import OptionError
    from forge.loops.replay.recorded import RecordedRun

    if arguments.tolerance < 0:
        raise OptionError(
            "the tolerance is negative", path="--tolerance", value=arguments.tolerance, rule="at least 0", repair="1e-3"
        )
    add_module_folders([])
    return RecordedRun(arguments.run_dir)


def _show_window(recorded: RecordedRun, arguments: argparse.Namespace) -> int:
    from forge.loops.replay.recorded import log_size

    size = log_size(recorded)
    starts = [str(start) for start in recorded.starts.values()]
    if arguments.json:
        print(json.dumps({"steps": list(recorded.window), "starts": list(recorded.starts), **size}, indent=2))
        return 0
    print(f"{recorded.folder}: {recorded.describe_window()} can be replayed")
    print(f"  starting from {', '.join(starts)}")
    print(
        f"  {size['num_steps']} steps recorded: {size['num_bytes'] / 1e6:.3f} MB, {size['bytes_per_step']:.0f} bytes "
        f"per step, {size['bytes_per_token']:.1f} bytes per token of their batches"
    )
    return 0


def _print_hardware(found: Replayed) -> None:
    if found.other_hardware:
        print(f"other hardware: compared within tolerance {found.tolerance:g}, weights not at all")
        for line in found.other_hardware:
            print(f"  {line}")


def _print_differences(found: Replayed) -> None:
    for each in found.differences[:_SHOWN]:
        print(f"  {each}")
    if (left := len(found.differences) - _SHOWN) > 0:
        print(f"  and {left} more")


def _plain(found: Replayed) -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(found), "is_same": found.is_same, "component": found.component}
