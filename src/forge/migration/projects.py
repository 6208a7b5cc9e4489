"""The projects that configurations are converted from, and the way from a file to a conversion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forge.errors import ConfigError
from forge.migration import titanrl, trl, verl
from forge.migration.converting import Target, convert
from forge.migration.reading import Form, form_of, peer_keys, read_text
from forge.migration.records import Conversion, Options, PeerConfig

Open = Callable[[str, Form, str, Options], tuple[PeerConfig, Target]]
"""Reads a text of some form, which came from a file of that name."""


@dataclass(frozen=True, slots=True)
class Project:
    """A project that configurations are converted from.

    Attributes:
        title: its name as it writes it.
        kinds: which of its runs can be converted.
        open: reads a file: what it gives, and the table for it.
        roots: first parts of keys that are this project's and no other's.
    """

    title: str
    kinds: tuple[str, ...]
    open: Open
    roots: frozenset[str]

    @property
    def version(self) -> str:
        """The version that the table is for."""
        return str(peer_keys(self.title.lower())["version"])


PROJECTS: Final[Mapping[str, Project]] = {
    "trl": Project("TRL", trl.KINDS, trl.open_config, trl.ROOTS),
    "verl": Project("verl", verl.KINDS, verl.open_config, verl.ROOTS),
    "titanrl": Project("TitanRL", titanrl.KINDS, titanrl.open_config, titanrl.ROOTS),
}


def convert_file(project: str, path: str | Path, options: Options | None = None) -> Conversion:
    """Return the configuration of ours that a file of another project becomes.

    Raises `ConfigError` for a file that cannot be read, that configures no run of this project, or whose kind of run
    cannot be told.
    """
    options = options or Options()
    found = PROJECTS[project]
    if options.kind is not None and options.kind not in found.kinds:
        raise ConfigError(
            f"There is no such kind of run for {found.title}.",
            path="--kind",
            value=options.kind,
            rule=f"one of {', '.join(found.kinds)}",
            repair="leave it out to find the kind from the keys",
        )
    text = read_text(Path(path))
    form = form_of(Path(path), text)
    config, target = found.open(text, form, str(path), options)
    _check_project(project, config)
    return convert(config, target)


def _check_project(project: str, config: PeerConfig) -> None:
    """Refuse a file that has no key of the project: it is another's."""
    if any(key in config.defaults for key in config.given):
        return
    roots = {key.partition(".")[0] for key in config.given}
    others = [name for name, each in PROJECTS.items() if name != project and roots & each.roots]
    title = PROJECTS[project].title
    repair = f"use `forge import {others[0]}`" if others else f"name the file that configures a run of {title}"
    raise ConfigError(
        f"This is not a configuration of {title}: it has none of its keys.",
        path=config.where,
        value=sorted(roots)[:8],
        rule=f"at least one key of {title} {PROJECTS[project].version}",
        repair=repair,
    )
