"""What the GPU benchmarks found: a step's time split alike for all sides, what it cost, and tables of both."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from harness.gpu_plan import Plan
from harness.report import table, verdict

GOAL_SPEED, GOAL_MEMORY, GOAL_SYNC_MS = 2.0, 1.0, 10.0
PARTS = ("generation", "training", "sync", "other")
Event = Mapping[str, Any]


def intervals(steps: Sequence[Event], *, num_warm: int) -> list[float]:
    """Seconds from the end of one training step to that of the next, without those of the warm steps.

    Each holds all that makes a step, once: handing over weights, generating, training. One warm step at least is
    needed, from whose end the first interval counts.
    """
    if num_warm < 1:
        raise ValueError(f"the first interval begins with the end of a warm step; num_warm is {num_warm}")
    ends = [float(step["ended"]) for step in steps[num_warm - 1 :]]
    return [late - early for early, late in itertools.pairwise(ends)]


def split_ours(times: Mapping[str, float], *, engine_s: float) -> dict[str, float]:
    """A step of ours by what its time went into, from what the run wrote down.

    What the trainer waits for is generation. Training is what the engine took; sleep and waking of generators, and the
    way of the batch, are `other`.
    """
    found = {
        "generation": times["waiting"] + times["generating"],
        "training": min(engine_s, times["training"]),
        "sync": times["syncing"],
    }
    return {**found, "other": max(0.0, times["step"] - sum(found.values()))}


def split_trl(parts: Mapping[str, float], *, step_s: float) -> dict[str, float]:
    """A step of TRL's likewise. `other` is mostly the forward pass for the ratio of trainer to sampler."""
    sync = parts.get("sync", 0.0)
    generation = parts["generation_and_sync"] - sync
    other = parts["rollout"] - parts["generation_and_sync"]
    return {"generation": generation, "training": step_s - parts["rollout"], "sync": sync, "other": other}


def training_flops(facts: Any, plan: Plan, *, prompt_once: bool) -> float:
    """Operations that one step of training needs, forward and backward.

    As everywhere: 6 for each weight that takes part in a token, and attention to all tokens before. With `prompt_once`
    the prompt of a group is counted once, which is what our trainer computes; without, once for each of its samples.
    """
    from forge.models.sizes import flops_per_token

    prompt, new, size = plan.prompt_tokens, plan.max_tokens, plan.group_size
    copies = 1 if prompt_once else size
    num_tokens = copies * prompt + size * new
    attended = copies * prompt * (prompt + 1) / 2 + size * (new * prompt + new * (new + 1) / 2)
    return float(plan.num_prompts * num_tokens * flops_per_token(facts, attended / num_tokens))


def mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def side_figures(outcome: Mapping[str, Any], plan: Plan, *, facts: Any, peak_flops: float | None) -> dict[str, Any]:
    """A side's figures from what it told: `outcome` is a summary of `gpu_children.Outcome`."""
    by_kind: dict[str, list[Event]] = {}
    for event in outcome["events"]:
        by_kind.setdefault(event["event"], []).append(event)
    steps, ends = by_kind.get("step", []), by_kind.get("trainer", [{}])[-1]
    taken = intervals(steps, num_warm=plan.num_warm)
    figures: dict[str, Any] = {
        "status": outcome["status"],
        "why": outcome["why"],
        "start_s": by_kind.get("started", [{}])[-1].get("seconds"),
        "peak_gb": (outcome["peak_bytes"] - outcome["start_bytes"]) / 1e9,
        "torch_peak_gib": ends.get("memory_gib") or ends.get("allocated_gib"),
        "steps_s": taken,
    }
    if not taken:
        return figures
    measured = steps[plan.num_warm : plan.num_warm + len(taken)]
    step_s = statistics.fmean(taken)
    samples = sum(step["samples"] for step in measured)
    split = _mean_split(by_kind, measured, taken)
    figures |= {
        "step_s": step_s,
        "samples_per_s": samples / sum(taken),
        "split": split,
        "shares_prompts": not _is_trl(measured),
        "tokens": sum(step["tokens"] for step in measured) / len(measured),
    }
    return figures | _rates(figures, plan, facts=facts, peak_flops=peak_flops) | _policy(by_kind, measured, plan)


def _mean_split(
    by_kind: Mapping[str, Sequence[Event]], measured: Sequence[Event], taken: Sequence[float]
) -> dict[str, float]:
    if _is_trl(measured):
        splits = [split_trl(step["parts"], step_s=step_s) for step, step_s in zip(measured, taken, strict=True)]
    else:
        engine = {step["step"]: step["engine_s"] for step in measured}
        splits = [
            split_ours(event["times"], engine_s=engine[event["step"]])
            for event in by_kind.get("times", [])
            if event["step"] in engine
        ]
    return {part: statistics.fmean(split[part] for split in splits) for part in PARTS} if splits else {}


def _is_trl(steps: Sequence[Event]) -> bool:
    return "parts" in steps[0]


def _rates(figures: Mapping[str, Any], plan: Plan, *, facts: Any, peak_flops: float | None) -> dict[str, Any]:
    """How much of the device training used, and how fast tokens came. Where generating and training overlap, the rate
    of tokens is that of the whole step."""
    split = figures["split"]
    found: dict[str, Any] = {}
    if split and peak_flops is not None and split["training"] > 0 and not plan.tail:  # of one known length
        found["mfu"] = training_flops(facts, plan, prompt_once=False) / split["training"] / peak_flops
        if figures["shares_prompts"]:
            found["mfu_prompt_once"] = training_flops(facts, plan, prompt_once=True) / split["training"] / peak_flops
    if split and split["generation"] > 0:
        found["waited_tokens_per_s"] = figures["tokens"] / split["generation"]
        found["tokens_per_s"] = figures["tokens"] / figures["step_s"]
    return found


def _policy(by_kind: Mapping[str, Sequence[Event]], measured: Sequence[Event], plan: Plan) -> dict[str, Any]:
    """How old the samples were, and how far sampler and trainer were apart."""
    late = [event for event in by_kind.get("times", []) if event["step"] > plan.num_warm]
    stale = [event["staleness_mean"] for event in late if event.get("staleness_mean") is not None]
    found: dict[str, Any] = {"staleness_mean": mean(stale)}
    found["staleness_max"] = max((event["staleness_max"] for event in late), default=None)
    apart = [step for step in measured if "mean_apart" in step]
    if apart:
        tokens = sum(step["num_tokens"] for step in apart)
        for name in ("mean_apart", "outside"):
            found[name] = sum(step[name] * step["num_tokens"] for step in apart) / tokens
        found["max_apart"] = max(step["max_apart"] for step in apart)
    return found


def goal_rows(sides: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Our best against TRL's best, in samples a second and in memory.

    A side whose time was over counts with the steps that it took.
    """
    known = {name: each for name, each in sides.items() if each.get("samples_per_s") and each["status"] != "failed"}
    peers = [name for name in known if name.startswith("trl")]
    ours = [name for name in known if not name.startswith("trl")]
    if not peers or not ours:
        return []
    peer = max(peers, key=lambda name: known[name]["samples_per_s"])
    best = max(ours, key=lambda name: known[name]["samples_per_s"])
    rows = []
    for name in sorted(ours, key=lambda name: name != best):
        speed = known[name]["samples_per_s"] / known[peer]["samples_per_s"]
        memory = known[name]["peak_gb"] / known[peer]["peak_gb"]
        held = name == best
        rows.append(_row(f"{name} / {peer}, samples a second", speed, GOAL_SPEED if held else None, sign="≥"))
        rows.append(_row(f"{name} / {peer}, peak memory", memory, GOAL_MEMORY if held else None, sign="≤"))
    return rows


def _row(what: str, value: float, goal: float | None, *, sign: str) -> dict[str, Any]:
    met = None if goal is None else value >= goal if sign == "≥" else value <= goal
    return {"what": what, "ratio": value, "goal": goal, "sign": sign, "met": met}


# ---- What is printed


def text(value: Any, form: str = ".3g", *, scale: float = 1.0, unit: str = "") -> str:
    """A number for a cell of a table; empty where there is none."""
    return "" if value is None else f"{value * scale:{form}}{unit}"


def speed_table(sides: Mapping[str, Mapping[str, Any]]) -> str:
    head = ("side", "samples/s", "s a step", *(f"{part}, s" for part in PARTS), "peak GB", "start, s", "")
    rows = []
    for name, side in sides.items():
        split = side.get("split") or {}
        note = "" if side["status"] == "ok" else f"{side['status']}: {first_line(side['why'])}"
        cells = [text(side.get("samples_per_s")), text(side.get("step_s"), ".2f")]
        cells += [text(split.get(part), ".2f") for part in PARTS]
        rows.append((name, *cells, text(side.get("peak_gb"), ".1f"), text(side.get("start_s"), ".0f"), note))
    return table(head, rows)


def use_table(sides: Mapping[str, Mapping[str, Any]]) -> str:
    head = (
        "side",
        "MFU, whole samples",
        "MFU, prompt once",
        "tokens/s while waited for",
        "tokens/s",
        "staleness, mean (max)",
        "mean abs Δ logprob",
        "max",
        "outside [0.9, 1.1]",
        "torch's peak, GiB",
    )
    rows = []
    for name, side in sides.items():
        stale = side.get("staleness_mean")
        rows.append(
            (
                name,
                text(side.get("mfu"), ".1f", scale=100, unit="%"),
                text(side.get("mfu_prompt_once"), ".1f", scale=100, unit="%"),
                text(side.get("waited_tokens_per_s"), ",.0f"),
                text(side.get("tokens_per_s"), ",.0f"),
                "" if stale is None else f"{stale:.2f} ({side['staleness_max']:.0f})",
                text(side.get("mean_apart"), ".2e"),
                text(side.get("max_apart"), ".3f"),
                text(side.get("outside"), ".3f", scale=100, unit="%"),
                text(side.get("torch_peak_gib"), ".1f"),
            )
        )
    return table(head, rows)


def goals_table(rows: Sequence[Mapping[str, Any]]) -> str:
    return table(
        ("", "measured", "goal"),
        [(row["what"], f"{row['ratio']:.2f}", verdict(dict(row), row["sign"])) for row in rows],
    )


def first_line(why: str) -> str:
    """What is worth a cell of a table."""
    lines = [line.strip() for line in why.splitlines() if line.strip() and line.strip() != "…"]
    return lines[0][:160].replace("|", "/") if lines else ""


def best_probe(tried: Sequence[Event], *, most_gib: float | None = None) -> Event | None:
    """The settings of TRL's with which a sample took the least time.

    `most_gib` is what training may take: what vLLM keeps while it sleeps needs room beside it.
    """
    room = float("inf") if most_gib is None else most_gib
    fitting = [event for event in tried if event["fits"] and event.get("allocated_gib", 0.0) <= room]
    return min(fitting, key=lambda event: event["seconds_a_sample"], default=None)
