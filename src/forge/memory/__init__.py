"""The memory of a run, worked out from its configuration before anything starts.

Everything here is arithmetic on a configuration and the facts of a model: nothing is built, torch is not imported, and
no GPU is needed. `docs/guides/memory.md` has every formula, and `forge.memory.constants` every number that was measured
instead of derived.
"""

from forge.memory.card import Card, find_card, parse_size
from forge.memory.checking import check_at_start, check_memory
from forge.memory.devices import checkpoint_bytes, plan_memory
from forge.memory.fitting import Change, Limits, find_limits, propose
from forge.memory.records import DevicePlan, MemoryPlan, Moment, Part
from forge.memory.resolved import ResolvedRun, resolve_run
from forge.memory.text import as_json, as_table

__all__ = [
    "Card",
    "Change",
    "DevicePlan",
    "Limits",
    "MemoryPlan",
    "Moment",
    "Part",
    "ResolvedRun",
    "as_json",
    "as_table",
    "check_at_start",
    "check_memory",
    "checkpoint_bytes",
    "find_card",
    "find_limits",
    "parse_size",
    "plan_memory",
    "propose",
    "resolve_run",
]
