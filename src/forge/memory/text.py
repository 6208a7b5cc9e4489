"""A plan as a person reads it, and as a program does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forge.memory.constants import GIB
from forge.memory.fitting import Change, Limits
from forge.memory.records import DevicePlan, MemoryPlan, Moment, Part


def gib(num_bytes: int | float) -> str:
    """A size in GiB, with two decimals."""
    return f"{num_bytes / GIB:.2f}"


def largest_parts(moment: Moment, most: int = 3) -> tuple[Part, ...]:
    """The parts of a moment that take most."""
    return tuple(sorted(moment.parts, key=lambda part: -part.num_bytes)[:most])


def summary_lines(plan: MemoryPlan) -> tuple[str, ...]:
    """One line for each kind of GPU, for a log."""
    return tuple(_summary(device) for device in plan.gpus)


def _summary(device: DevicePlan) -> str:
    parts = ", ".join(f"{_named(part)} {gib(part.num_bytes)}" for part in largest_parts(device.peak, 4))
    of_all = "" if device.capacity is None else f" of {gib(device.capacity)}"
    peak = f"{gib(device.peak.num_bytes)}{of_all} GiB at its fullest ({device.peak.phase}, {device.peak.name})"
    return f"{_counted(device)}: {peak}; {parts}"


def _counted(device: DevicePlan) -> str:
    return device.name if device.count == 1 else f"{device.name} ({device.count} GPUs)"


def _named(part: Part) -> str:
    return f"{part.owner}: {part.name}" if part.owner else part.name


def as_table(plan: MemoryPlan, *, limits: Limits | None = None, changes: Sequence[Change] = ()) -> str:
    """The whole plan as text: a table for each kind of device, what is free, and what would fit."""
    lines = [f"{plan.model}: {plan.num_parameters:,} parameters"]
    if plan.card is not None:
        there = "" if plan.card.num_gpus is None else f" of {plan.card.num_gpus}"
        lines.append(f"{plan.num_gpus}{there} GPU(s) of {gib(plan.card.usable)} GiB ({plan.card.name})")
    for device in plan.devices:
        lines += ["", *_device_lines(device)]
    lines += ["", *_verdict(plan, limits, changes)]
    lines += [f"Note: {note}." for note in plan.notes]
    return "\n".join(lines) + "\n"


def _device_lines(device: DevicePlan) -> list[str]:
    peak = device.peak
    rows = [(_named(part), gib(part.num_bytes), part.why) for part in peak.parts]
    width = max(len(name) for name, _, _ in rows)
    lines = [f"{_counted(device)}, fullest while {peak.phase} ({peak.name}), in GiB"]
    lines += [f"  {name:<{width}}  {size:>8}  {why}".rstrip() for name, size, why in rows]
    lines.append(f"  {'peak':<{width}}  {gib(peak.num_bytes):>8}")
    if device.capacity is not None and device.free is not None:
        word = "free" if device.fits else "MISSING"
        lines.append(f"  {word:<{width}}  {gib(abs(device.free)):>8}  of {gib(device.capacity)}")
    others = [f"{phase} {gib(moment.num_bytes)}" for phase, moment in device.phase_peaks().items()]
    if len(others) > 1:
        lines.append(f"  peak of each phase: {', '.join(others)}")
    return lines


def _verdict(plan: MemoryPlan, limits: Limits | None, changes: Sequence[Change]) -> list[str]:
    lines = ["It fits." if plan.fits else "It does NOT fit."]
    if not plan.has_enough_gpus and plan.card is not None:
        lines.append(f"It needs {plan.num_gpus} GPUs, and there are {plan.card.num_gpus}.")
    if limits is not None and plan.fits:
        if limits.microbatch_tokens is not None:
            lines.append(f"Largest training.microbatch_tokens that fits: {limits.microbatch_tokens:,}")
        if limits.max_seq_len is not None:
            lines.append(f"Longest training.max_seq_len that fits, one sequence to a row: {limits.max_seq_len:,}")
    if changes:
        lines.append("What does fit, the cheapest first:")
        lines += [f"  {' '.join(change.words)}{_more_gpus(plan, change, '  # {}')}" for change in changes]
    elif not plan.fits:
        lines.append("No change that was tried makes it fit.")
    return lines


def change_text(plan: MemoryPlan, change: Change) -> str:
    """A change as the text of an error has it: its overrides, and how many GPUs it takes if that differs."""
    return " ".join(change.words) + _more_gpus(plan, change, " ({})")


def _more_gpus(plan: MemoryPlan, change: Change, form: str) -> str:
    """How many GPUs a change takes, where that differs from the plan; a comment for a shell can be pasted with it."""
    if change.plan.num_gpus == plan.num_gpus:
        return ""
    return form.format(f"on {change.plan.num_gpus} GPUs instead of {plan.num_gpus}")


def as_json(plan: MemoryPlan, *, limits: Limits | None = None, changes: Sequence[Change] = ()) -> dict[str, Any]:
    """The whole plan in plain values, sizes in bytes."""
    return {
        "model": plan.model,
        "num_parameters": plan.num_parameters,
        "fits": plan.fits,
        "num_gpus": plan.num_gpus,
        "card": None
        if plan.card is None
        else {"name": plan.card.name, "usable_bytes": plan.card.usable, "num_gpus": plan.card.num_gpus},
        "gpus": [_device_json(device) for device in plan.gpus],
        "host": _device_json(plan.host),
        "largest": None
        if limits is None
        else {"microbatch_tokens": limits.microbatch_tokens, "max_seq_len": limits.max_seq_len},
        "proposals": [list(change.words) for change in changes],
        "proposals_num_gpus": [change.plan.num_gpus for change in changes],
        "notes": list(plan.notes),
    }


def _device_json(device: DevicePlan) -> dict[str, Any]:
    return {
        "name": device.name,
        "count": device.count,
        "capacity_bytes": device.capacity,
        "peak_bytes": device.peak.num_bytes,
        "free_bytes": device.free,
        "fits": device.fits,
        "moments": [
            {
                "phase": moment.phase,
                "name": moment.name,
                "bytes": moment.num_bytes,
                "parts": [
                    {"name": part.name, "owner": part.owner, "bytes": part.num_bytes, "why": part.why}
                    for part in moment.parts
                ],
            }
            for moment in device.moments
        ],
    }
