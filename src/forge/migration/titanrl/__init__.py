"""Configurations of TitanRL, TorchTitan's reinforcement learning: Python functions, and flags of its command line."""

from __future__ import annotations

from typing import Any, Final

from forge.config import GRPOConfig
from forge.migration.converting import Target
from forge.migration.python_source import Call
from forge.migration.reading import Form, coerced, flat_values, peer_keys, read_sections
from forge.migration.records import Given, Options, PeerConfig
from forge.migration.titanrl.reading import Module, flat, read_flags
from forge.migration.titanrl.rules import RULES

KINDS: Final = ("grpo",)
ROOTS: Final = frozenset(("async_loop", "rollouter", "hf_assets_path", "num_generators"))
_CHOICES: Final = {
    "trainer.loss": ("GRPOLoss", "DAPOLoss", "ChunkedLossWrapper"),
    "trainer.loss.loss_fn": ("GRPOLoss", "DAPOLoss", "CrossEntropyLoss"),
    "trainer.ac_config": ("SelectiveAC", "FullAC", "MemoryBudgetAC"),
}
"""Sections that one of several classes makes."""


def defaults() -> dict[str, Any]:
    """Return every key with its default: those of the whole, and of the classes that a section may be made from."""
    groups = peer_keys("titanrl")["groups"]
    found: dict[str, Any] = {
        "statements": None,
        "module": None,
        "config": None,
        "rollouter": None,
        "trainer.optimizer": None,
    }
    for section, names in _CHOICES.items():
        for name in names:
            found |= {f"{section}.{key}": value for key, value in groups[name].items()}
    return {**found, **groups["Controller"]}


def open_config(text: str, form: Form, where: str, options: Options) -> tuple[PeerConfig, Target]:
    """Return what a file gives, and the table."""
    known = defaults()
    given: dict[str, Given]
    if form == "python":
        module = Module(text, where=where)
        given = dict(flat(module.config(options.config), where, known))
        if module.unread:
            given["statements"] = Given(list(module.unread.values()), next(iter(module.unread)))
    elif form == "shell":
        given = read_flags(text, where=where)
    else:
        data, lines = read_sections(text, form, where=where)
        given = dict(flat_values(data, lines, where=where, known=known))
    given = {key: Given(_plain(each.value, key), each.place) for key, each in given.items()}
    config = PeerConfig(coerced(given, known), known, kind="grpo", num_processes=options.num_processes, where=where)
    return config, Target("titanrl", str(peer_keys("titanrl")["version"]), "grpo", GRPOConfig, RULES)


def _plain(value: Any, key: str) -> Any:
    """A value without a call in it, except where a rule reads the call."""
    return value if key in ("model_spec", "trainer.optimizer") or not isinstance(value, Call) else value.name or None
