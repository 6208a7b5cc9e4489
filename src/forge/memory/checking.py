"""The check before a run starts: refuse what cannot fit, and say what does."""

from __future__ import annotations

import logging

from forge.config import ForgeConfig, ModelConfig
from forge.errors import ConfigError
from forge.memory.card import Card, find_card, host_memory
from forge.memory.constants import START_TOLERANCE
from forge.memory.devices import plan_memory
from forge.memory.fitting import Change, propose
from forge.memory.records import DevicePlan, MemoryPlan
from forge.memory.resolved import ResolvedRun, resolve_run
from forge.memory.text import change_text, gib, largest_parts, summary_lines


def check_memory(
    config: ForgeConfig, *, card: Card | None, facts: ModelConfig | None = None, host_bytes: int | None = None
) -> MemoryPlan:
    """The plan of a run that fits. Raises `ConfigError` with the largest parts and with changes that do fit.

    The plan is an estimate of a peak: what it refuses would run out of memory, or come within a hand's breadth of it.
    """
    plan = plan_memory(resolve_run(config, card=card, facts=facts), card=card, host_bytes=host_bytes)
    if not plan.fits:
        raise refusal(plan, propose(config, card=card, facts=facts, host_bytes=host_bytes))
    return plan


def check_at_start(
    config: ForgeConfig, *, log: logging.Logger, facts: ModelConfig | None = None, run: ResolvedRun | None = None
) -> MemoryPlan | None:
    """Check the same for the GPUs of this machine, before a run starts on it; None where it uses none of them.

    Log one line for each kind of GPU. Raises `ConfigError` for what cannot fit. A run on other hosts is planned for
    GPUs like this machine's, as many as it needs; where this machine has none, nothing is known and nothing is logged.
    `run` is the same configuration, resolved for this machine.
    """
    card = find_card()
    return None if card is None else check_on_card(config, card=card, facts=facts, run=run, log=log)


def check_on_card(
    config: ForgeConfig,
    *,
    card: Card,
    log: logging.Logger,
    facts: ModelConfig | None = None,
    run: ResolvedRun | None = None,
) -> MemoryPlan | None:
    """As `check_at_start`, for GPUs that are known."""
    is_local = config.launcher.kind == "local"
    facts = facts if run is None else run.facts
    if not is_local:
        card, run = Card(card.num_bytes, None, card.name), None
    host_bytes = host_memory() if is_local else None
    run = resolve_run(config, card=card, facts=facts) if run is None else run
    plan = plan_memory(run, card=card, host_bytes=host_bytes)
    if plan.card is None:
        return None
    if not plan.fits:
        error = refusal(plan, propose(config, card=card, facts=facts, host_bytes=host_bytes))
        if not plan.has_enough_gpus or any(_is_far_over(device) for device in plan.gpus):
            raise error
        log.warning("memory may run out: %s", error)
    for line in summary_lines(plan):
        log.info("%s", line)
    return plan


def _is_far_over(device: DevicePlan) -> bool:
    return device.capacity is not None and device.peak.num_bytes > device.capacity * (1 + START_TOLERANCE)


def refusal(plan: MemoryPlan, changes: tuple[Change, ...]) -> ConfigError:
    """The error for a plan that does not fit."""
    repair = " | ".join(change_text(plan, change) for change in changes)
    repair = f"one of: {repair}" if changes else "use a smaller model, or more or larger GPUs"
    if not plan.has_enough_gpus and plan.card is not None:
        return ConfigError(
            f"the run needs {plan.num_gpus} GPUs: {', '.join(f'{each.count} {each.name}' for each in plan.gpus)}",
            path="distributed, generator, reference, rewards.reward_model",
            value=plan.num_gpus,
            rule=f"at most {plan.card.num_gpus}, which is how many there are",
            repair=repair,
        )
    worst = min((device for device in plan.devices if not device.fits), key=lambda device: device.free or 0)
    return ConfigError(
        f"the run does not fit into {_where(worst)}: {_largest(worst)}",
        path="training, generator, placement",
        value=f"{gib(worst.peak.num_bytes)} GiB while {worst.peak.phase} ({worst.peak.name})",
        rule=f"at most {gib(worst.capacity or 0)} GiB",
        repair=repair,
    )


def _where(device: DevicePlan) -> str:
    return device.name if device.name.startswith("host") else f"a GPU ({device.name})"


def _largest(device: DevicePlan) -> str:
    named = [(f"{part.owner}'s {part.name}" if part.owner else part.name, part) for part in largest_parts(device.peak)]
    return ", ".join(f"{name} {gib(part.num_bytes)} GiB" for name, part in named)
