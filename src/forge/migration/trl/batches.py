"""How many prompts and updates a step of TRL has, and of ours."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from forge.migration.records import Converted, PeerConfig
from forge.migration.rules import changed

_PROCESSES_NOTE = "for one process, since batch sizes of TRL are per process: give --num-processes for more"


@dataclass(frozen=True, slots=True)
class Batches:
    """The arithmetic of a GRPO or RLOO run of TRL.

    Attributes:
        completions: completions of one optimizer step.
        generated: completions that are generated at once.
        group: completions of a prompt.
        iterations: passes over what was generated.
    """

    completions: int
    generated: int
    group: int
    iterations: int

    @property
    def groups(self) -> Fraction:
        """Prompts of one optimizer step."""
        return Fraction(self.completions, self.group)

    @property
    def updates(self) -> Fraction:
        """Optimizer steps of one pass over what was generated at once."""
        return Fraction(self.generated, self.completions)


def processes_of(config: PeerConfig) -> int:
    """Return how many processes train, as far as is known."""
    given = config["num_processes"]
    return config.num_processes or (given if isinstance(given, int) and given > 0 else 1)


def _is_counted(config: PeerConfig) -> bool:
    """Whether the number of processes is known."""
    return config.num_processes is not None or config["num_processes"] is not None


def batches_of(config: PeerConfig) -> Batches | None:
    """Return the arithmetic of a run; None where a number is missing or impossible."""
    per_device, accumulation = config["per_device_train_batch_size"], config["gradient_accumulation_steps"]
    group, iterations = config["num_generations"], config["num_iterations"] or 1
    if not all(isinstance(each, int) and each > 0 for each in (per_device, accumulation, group, iterations)):
        return None
    at_once = per_device * processes_of(config)
    generated = config["generation_batch_size"] or at_once * (config["steps_per_generation"] or accumulation)
    return Batches(at_once * accumulation, int(generated), group, iterations)


def rollout_batch(config: PeerConfig) -> Converted:
    """Convert batch sizes: a step of ours learns from `batch_groups` groups, however they fit into memory."""
    found = batches_of(config)
    if found is None:
        text = "the prompts of a step: per_device_train_batch_size x processes x accumulation / num_generations"
        return Converted(todo={"rollout.batch_groups": text})
    groups = max(1, round(found.groups))
    values: dict[str, Any] = {
        "rollout.batch_groups": groups,
        "rollout.group_size": found.group,
        "rollout.iterations": found.iterations,
    }
    notes = [] if _is_counted(config) else [_PROCESSES_NOTE]
    if found.groups != groups:
        notes.append(f"TRL's optimizer step has {float(found.groups):g} groups; here groups are whole")
    if found.updates > 1:
        notes.append(
            f"TRL takes {float(found.updates):g} optimizer steps on what it generates at once; here every step of "
            f"{groups} groups is sampled by the newest weights. rollout.staleness: {int(-(-found.updates // 1)) - 1} "
            "(with placement apart, beside or shared) lets them be as old as with TRL"
        )
    if found.updates < 1 and found.iterations > 1:
        values["rollout.iterations"] = 1
        notes.append("TRL repeats a batch within one optimizer step, which changes no gradient; here it is used once")
    return changed(values, "; ".join(notes)) if notes else Converted(values)


def run_length(config: PeerConfig) -> Converted:
    """Convert the number of steps or epochs."""
    most, epochs = config["max_steps"], config["num_train_epochs"]
    iterations = (config["num_iterations"] or 1) if config.kind in ("grpo", "rloo") else 1
    if isinstance(most, int) and most > 0:
        steps = max(1, -(-most // iterations))
        if iterations == 1:
            return Converted({"training.max_steps": steps})
        note = f"TRL counts optimizer steps; a step here takes rollout.iterations, which is {iterations}"
        return changed({"training.max_steps": steps}, note)
    if isinstance(epochs, int | float) and epochs > 0 and float(epochs).is_integer():
        return Converted({"training.num_epochs": int(epochs)})
    text = f"num_train_epochs is {epochs}: epochs are whole here, so write the number of steps"
    return Converted(todo={"training.max_steps": text})


def supervised_batch(config: PeerConfig) -> Converted:
    """Convert batch sizes of a supervised run: rows of a step over all processes."""
    per_device, accumulation = config["per_device_train_batch_size"], config["gradient_accumulation_steps"]
    if not all(isinstance(each, int) and each > 0 for each in (per_device, accumulation)):
        return Converted(todo={"training.batch_size": "samples of a step, over all processes"})
    values = {
        "training.batch_size": per_device * processes_of(config),
        "training.gradient_accumulation_steps": accumulation,
    }
    return Converted(values) if _is_counted(config) else changed(values, _PROCESSES_NOTE)
