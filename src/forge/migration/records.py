"""What `forge import` works with: what a file gives, the rules of a table, and what comes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from forge.config import ForgeConfig

Verdict = Literal["maps", "differs", "none"]
"""`maps`: the same meaning. `differs`: converted, but meaning or default differ. `none`: there is no counterpart."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A value that a file computes when it runs: only its text is known."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Given:
    """A value that a file gives, and where: `train.py:12`."""

    value: Any
    place: str


@dataclass(frozen=True, slots=True)
class Options:
    """What a file alone does not tell.

    Attributes:
        kind: which of the project's runs it is; null to find out.
        num_processes: how many processes train; null for what the file says, or one.
        config: the function of a Python file that makes the configuration; null for the only one.
    """

    kind: str | None = None
    num_processes: int | None = None
    config: str | None = None


class PeerConfig:
    """The configuration of another project: what a file gives, over the defaults of that project.

    Args:
        given: what the file gives, by the project's own dotted keys.
        defaults: every key that the project knows, with its default.
        kind: which of the project's runs it is, such as `grpo`.
        num_processes: how many processes train, where the file does not tell; None for unknown.
        where: the file, in messages.
    """

    def __init__(
        self,
        given: Mapping[str, Given],
        defaults: Mapping[str, Any],
        *,
        kind: str,
        num_processes: int | None = None,
        where: str = "",
    ) -> None:
        self.given = dict(given)
        self.defaults = defaults
        self.kind = kind
        self.num_processes = num_processes
        self.where = where

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key: what the file gives, or its default."""
        found = self.given.get(key)
        return self.defaults.get(key) if found is None else found.value

    def is_given(self, *keys: str) -> bool:
        """Whether the file gives one of these keys."""
        return any(key in self.given for key in keys)

    def below(self, prefix: str) -> Mapping[str, Any]:
        """Return what the file gives below a key, by the rest of the path."""
        start = f"{prefix}."
        return {key.removeprefix(start): each.value for key, each in self.given.items() if key.startswith(start)}

    def place(self, key: str) -> str:
        """Return where the file gives a key."""
        return self.given[key].place


@dataclass(frozen=True, slots=True)
class Converted:
    """What comes of a rule.

    Attributes:
        values: our dotted key → value.
        verdict: null for the rule's own.
        note: null for the rule's own.
        todo: our dotted key → what only the user can fill in there.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    verdict: Verdict | None = None
    note: str | None = None
    todo: Mapping[str, str] = field(default_factory=dict)


Convert = Callable[[PeerConfig], Converted | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """A line of a table: which keys of theirs become which of ours.

    Attributes:
        theirs: their keys that belong together; `section.*` for everything below one. Empty where it is their code and
            not a key that decides.
        verdict: what is usual; a value may get another.
        ours: our dotted keys that it may set.
        note: how it differs, or what to do instead.
        convert: the values, from all that is given; None for nothing to carry over.
    """

    theirs: tuple[str, ...]
    verdict: Verdict
    ours: tuple[str, ...] = ()
    note: str = ""
    convert: Convert | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the report.

    Attributes:
        theirs: their key → value.
        given: those of them that the file sets; the others are defaults.
        ours: our dotted key → value.
        note: how it differs, or what to do instead.
    """

    theirs: Mapping[str, Any]
    given: frozenset[str]
    ours: Mapping[str, Any]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Todo:
    """What only the user can fill in: our dotted key, and with what."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """A key that the project does not have, in the version that the table is for."""

    key: str
    value: Any
    place: str
    hint: str


@dataclass(frozen=True, slots=True)
class Conversion:
    """A configuration of ours, and how it came about.

    Attributes:
        project, version: whose configuration it was, and the version that the table is for.
        kind: the kind of run, by its name in `forge.config.command_line.SCHEMAS`.
        source: the file.
        schema: what the configuration is checked against.
        config: our keys, nested.
        maps, differs, none: the three parts of the report.
        unchanged: keys without counterpart that have their default, so that nothing is lost.
        unknown: keys that the project does not have.
        todo: what only the user can fill in.
    """

    project: str
    version: str
    kind: str
    source: str
    schema: type[ForgeConfig]
    config: Mapping[str, Any]
    maps: tuple[Row, ...] = ()
    differs: tuple[Row, ...] = ()
    none: tuple[Row, ...] = ()
    unchanged: tuple[str, ...] = ()
    unknown: tuple[Unknown, ...] = ()
    todo: tuple[Todo, ...] = ()

    @property
    def rows(self) -> Iterator[Row]:
        """All lines of the report."""
        yield from (*self.maps, *self.differs, *self.none)
