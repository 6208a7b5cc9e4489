"""`forge eval show` and `forge eval compare`: what evaluations found, on a terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.errors import OptionError

if TYPE_CHECKING:
    from forge.loops.evals.comparing import EvalComparison

_MAX_TASKS = 20
_MAX_SAMPLES = 10
_MAX_MISSING = 5


def show_parser() -> argparse.ArgumentParser:
    """Return the parser of `forge eval show`."""
    parser = argparse.ArgumentParser(
        prog="forge eval show",
        description="Print the figures of an evaluation and its tasks. With --task, --sample or --failed, print the "
        "samples instead, turn by turn. `forge report EVAL_DIR` makes a page of them.",
    )
    parser.add_argument("folder", metavar="EVAL_DIR", type=Path, help="folder of the evaluation")
    parser.add_argument("--failed", action="store_true", help="print the samples that are not solved")
    parser.add_argument("--task", metavar="N|ID", help="print the samples of one task, by its number or id")
    parser.add_argument("--sample", metavar="N", type=int, help="only this sample of each task")
    parser.add_argument("--limit", metavar="N", type=int, help=f"at most so many; default: {_MAX_TASKS} tasks, "
                        f"{_MAX_SAMPLES} samples")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(handler=_show)
    return parser


def compare_parser() -> argparse.ArgumentParser:
    """Return the parser of `forge eval compare`."""
    parser = argparse.ArgumentParser(
        prog="forge eval compare",
        description="Compare evaluations of the same tasks with the first of them, task by task: the mean difference "
        "with a confidence interval, and the p-value of a paired permutation test.",
    )
    parser.add_argument("folders", metavar="EVAL_DIR", nargs="+", type=Path, help="the evaluations; the first is A")
    parser.add_argument("--confidence", metavar="X", type=float, default=0.95, help="default: 0.95")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(handler=_compare)
    return parser


# ---- Figures ---------------------------------------------------------------------------------------------------------


def summary_lines(results: Mapping[str, Any], *, folder: Path) -> Iterator[str]:
    """Yield what an evaluation found, as a table; `results` as `results.json` has them."""
    figures, target = results["figures"], results["target"]
    confidence = results["counting"]["confidence"]
    num_tasks = figures["num_tasks"] + figures["num_missing"]
    yield f"{target['name']}: {num_tasks} tasks, {_count(figures['num_samples'], 'sample')} each"
    yield from (f"note: {note}" for note in results["notes"])
    yield ""
    yield f"{'':<14}{'value':<9}{confidence:.4g} interval"
    for k, estimate in figures["pass_at"].items():
        yield _row(f"pass@{k}", estimate)
    if figures["reward"] is not None:
        yield _row("reward", figures["reward"])
    parts = figures["parts"]
    if len(parts) > 1 or (parts and next(iter(parts)) != "reward"):
        yield from (f"{'  ' + name:<14}{value:<9.4g}".rstrip() for name, value in parts.items())
    if figures["length"] is not None:
        yield f"{'tokens':<14}{figures['length']:.4g}"
    if figures["turns"] > 1:
        yield f"{'turns':<14}{figures['turns']:.4g}"
    yield f"{'outcomes':<14}{_counts(figures['outcomes'])}"
    yield f"{'faults':<14}{_counts(figures['faults'])}"
    if figures["num_reward_failures"]:
        yield f"{'rewards':<14}failed in {_count(figures['num_reward_failures'], 'sample')}, which count 0"
    yield from _missing_lines(results)
    yield ""
    yield f"{folder} (forge eval show {folder}, forge report {folder})"


def _missing_lines(results: Mapping[str, Any]) -> Iterator[str]:
    num_missing = results["figures"]["num_missing"]
    if not num_missing:
        return
    yield ""
    yield f"{_count(num_missing, 'task')} missing: left out of the figures. The same command tries again."
    missing = results["unresolved"]
    for each in missing[:_MAX_MISSING]:
        reason = (each["fault"] or "not run yet").partition("\n")[0]
        yield f"  task {each['task']}, sample {each['sample']}: {reason[:160]}"
    if len(missing) > _MAX_MISSING:
        yield f"  and {len(missing) - _MAX_MISSING} more"


def _row(label: str, estimate: Mapping[str, Any]) -> str:
    interval = "" if estimate["low"] is None else f"{estimate['low']:.4g} to {estimate['high']:.4g}"
    return f"{label:<14}{estimate['value']:<9.4g}{interval}".rstrip()


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


# ---- Samples ---------------------------------------------------------------------------------------------------------


def _show(arguments: argparse.Namespace) -> int:
    from forge.loops.evals.record import read_results

    results = read_results(arguments.folder)
    if arguments.limit is not None and arguments.limit < 1:
        raise OptionError(
            "this number is out of range", path="--limit", value=arguments.limit, rule="at least 1", repair="raise it"
        )
    if arguments.failed or arguments.task is not None or arguments.sample is not None:
        return _show_samples(arguments, results)
    if arguments.json:
        print(json.dumps(results, indent=2, ensure_ascii=False))
        return 0
    lines = [*summary_lines(results, folder=arguments.folder), "", *_task_lines(results, arguments.limit or _MAX_TASKS)]
    print("\n".join(lines))
    return 0


def _task_lines(results: Mapping[str, Any], limit: int) -> Iterator[str]:
    tasks = results["tasks"]
    yield f"{'task':<7}{'solved':<9}{'reward':<9}id"
    for task in tasks[:limit]:
        mean = sum(task["rewards"]) / len(task["rewards"])
        solved = f"{sum(task['solved'])}/{len(task['solved'])}"
        yield f"{task['index']:<7}{solved:<9}{mean:<9.4g}{task['id']}"
    if len(tasks) > limit:
        yield f"and {_count(len(tasks) - limit, 'task')} more; --limit shows them"


def _show_samples(arguments: argparse.Namespace, results: Mapping[str, Any]) -> int:
    from forge.loops.evals.record import read_lines

    chosen = _chosen_task(arguments.task, results)
    limit = arguments.limit or _MAX_SAMPLES
    solved = {task["index"]: task["solved"] for task in results["tasks"]}
    found = [
        fields
        for fields in read_lines(arguments.folder)
        if (chosen is None or fields["group"] == chosen)
        and (arguments.sample is None or fields["index"] == arguments.sample)
        and not (arguments.failed and _is_solved(fields, solved))
    ]
    found.sort(key=lambda fields: (fields["group"], fields["index"]))
    if arguments.json:
        print(json.dumps(found[:limit], indent=2, ensure_ascii=False))
        return 0
    for fields in found[:limit]:
        _print_sample(fields, is_solved=_is_solved(fields, solved))
    if len(found) > limit:
        print(f"and {_count(len(found) - limit, 'sample')} more; --limit shows them")
    if not found:
        print("No sample is like this.")
    return 0


def _is_solved(fields: Mapping[str, Any], solved: Mapping[int, Sequence[bool]]) -> bool | None:
    """Return whether a sample is solved; None where its task is not complete, and so was not counted."""
    of_task = solved.get(fields["group"])
    return None if of_task is None else of_task[fields["index"]]


def _chosen_task(given: str | None, results: Mapping[str, Any]) -> int | None:
    if given is None:
        return None
    known = {task["id"]: task["index"] for task in results["tasks"]}
    missing = {each["task"] for each in results["unresolved"]}
    if given in known:
        return int(known[given])
    if given.isdecimal() and (int(given) in known.values() or int(given) in missing):
        return int(given)
    raise OptionError(
        "the evaluation has no such task",
        path="--task",
        value=given,
        rule=f"a number or an id that it lists, such as {next(iter(known), 0)}",
        repair="forge eval show EVAL_DIR lists them",
    )


def _print_sample(fields: Mapping[str, Any], *, is_solved: bool | None) -> None:
    from forge.cli.episode_print import EpisodePrinter, message_text

    printer = EpisodePrinter(sys.stdout)
    mark = {True: "solved", False: "not solved", None: "its task is not complete"}[is_solved]
    printer.rule(f"task {fields['group']} ({fields['prompt_id']}), sample {fields['index']}: {mark}")
    turns = fields.get("turns")
    if not turns:
        prompt = fields["prompt"]
        messages = [{"role": "prompt", "content": prompt}] if isinstance(prompt, str) else prompt
        turns = [{"messages": messages, "text": fields["text"], "calls": ()}]
    for turn in turns:
        for message in turn["messages"]:
            printer.message(str(message.get("role")), message_text(message), name=message.get("name"))
        printer.message("assistant", turn["text"])
    parts = ", ".join(f"{name} {value:g}" for name, value in fields["parts"].items())
    print()
    print(f"{'reward':<14}{fields['reward']:g} ({parts})")
    if fields["answer"] is not None:
        print(f"{'answer':<14}{fields['answer']}")
    if fields["num_tokens"] is not None:
        print(f"{'tokens':<14}{fields['num_tokens']}")
    print(f"{'outcome':<14}{fields.get('ending', fields['finish_reason'])}")
    for name, reason in fields["failures"].items():
        print(f"{'failed reward':<14}{name}: {reason}")
    print()


# ---- Comparison ------------------------------------------------------------------------------------------------------


def _compare(arguments: argparse.Namespace) -> int:
    from forge.loops.evals.comparing import compare_evals

    found = compare_evals(arguments.folders, confidence=arguments.confidence)
    if arguments.json:
        print(json.dumps([each.plain() for each in found], indent=2, ensure_ascii=False))
    else:
        print("\n\n".join("\n".join(_comparison_lines(each, arguments.confidence)) for each in found))
    return 0


def _comparison_lines(comparison: EvalComparison, confidence: float) -> Iterable[str]:
    yield f"A  {comparison.first}"
    yield f"B  {comparison.second}"
    left_out = comparison.num_left_out
    more = f"; {left_out} left out, which one of them lacks" if left_out else ""
    yield f"{_count(comparison.num_tasks, 'task')}{more}"
    yield ""
    yield f"{'':<10}{'A':<9}{'B':<9}{'B - A':<10}{f'{confidence:.4g} interval':<24}{'p':<10}wins/losses/ties"
    for figure in comparison.figures:
        paired, estimate = figure.difference, figure.difference.estimate
        interval = "" if estimate.low is None else f"{estimate.low:+.4g} to {estimate.high:+.4g}"
        yield (
            f"{figure.name:<10}{figure.first:<9.4g}{figure.second:<9.4g}{estimate.value:<+10.4g}{interval:<24}"
            f"{paired.p_value:<10.4g}{paired.num_wins}/{paired.num_losses}/{paired.num_ties}"
        )
    if comparison.changes:
        yield ""
        yield "settings that differ:"
        yield from (f"  {change}" for change in comparison.changes)
