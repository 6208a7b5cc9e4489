"""Which schema a configuration belongs to, told by the sections that its files and overrides have."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from forge.config.generator import PolicyConfig
from forge.config.grpo import GRPOConfig
from forge.config.renames import old_keys
from forge.config.schema import ForgeConfig
from forge.config.sft import SFTConfig
from forge.config.yaml_text import read_yaml

SCHEMAS: Final[Mapping[str, type[ForgeConfig]]] = {"sft": SFTConfig, "policy": PolicyConfig, "grpo": GRPOConfig}
"""The kinds of runs, in the order in which a file that says too little is taken for one."""


@dataclass(frozen=True, slots=True)
class Detected:
    """The schema that knows most of a configuration's sections.

    Attributes:
        kind: its key in `SCHEMAS`.
        evidence: the sections that every configuration does not have and this schema does, in alphabetical order.
        others: kinds that know as many of the sections.
    """

    kind: str
    evidence: tuple[str, ...]
    others: tuple[str, ...] = ()

    @property
    def schema(self) -> type[ForgeConfig]:
        return SCHEMAS[self.kind]


def detect_kind(files: Sequence[str], overrides: Sequence[str]) -> Detected:
    """Return the kind of run that files and overrides describe. Without evidence it is a guess, the first kind."""
    sections = _sections(files, overrides)
    unknown = {kind: len(sections - _known(schema)) for kind, schema in SCHEMAS.items()}
    best = [kind for kind in SCHEMAS if unknown[kind] == min(unknown.values())]
    own = _known(SCHEMAS[best[0]]) - _known(ForgeConfig)
    return Detected(best[0], tuple(sorted(sections & own)), tuple(best[1:]))


def _known(schema: type[ForgeConfig]) -> set[str]:
    """Return the keys at the top of a schema, the first part of old ones included."""
    return {*schema.model_fields, *(key.partition(".")[0] for key in old_keys(schema))}


def program_of(kind: str) -> str:
    """Return the path of the program in `apps/` that runs configurations of this kind."""
    return f"apps/{'vllm' if kind == 'policy' else kind}/main.py"


def other_program(schema: type[ForgeConfig], files: Sequence[str], overrides: Sequence[str]) -> str | None:
    """Return a line that names the right program, where a configuration is one of another kind; else None."""
    if schema not in SCHEMAS.values():
        return None
    found = detect_kind(files, overrides)
    foreign = set(found.evidence) - _known(schema)
    if not foreign:
        return None
    sections = ", ".join(sorted(foreign))
    which = f"{found.schema.__name__} has the keys {sections}, {schema.__name__} does not."
    return f"{which} Is {program_of(found.kind)} the right program?"


def _sections(files: Sequence[str], overrides: Sequence[str]) -> set[str]:
    """What stands at the top of files and overrides. A file that cannot be read is refused when it is loaded."""
    found = {word.lstrip("~").partition("=")[0].partition(".")[0] for word in overrides}
    for file in files:
        if os.path.isfile(file):
            with open(file, encoding="utf-8", errors="replace") as stream:
                data = read_yaml(stream.read(), source=file).data
            found |= set(data) if isinstance(data, dict) else set()
    return found
