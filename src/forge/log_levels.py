"""How much a program logs, and as what: what `FORGE_LOG`, `-v`, `-q` and `--log-format` say.

Flags of a command line become environment variables, so that they reach every process that the program starts.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Self, cast

from forge.errors import OptionError, did_you_mean

LEVELS_VARIABLE: Final = "FORGE_LOG"
"""Which records are shown: `info`, or `info,forge.service=debug`."""
VERBOSITY_VARIABLE: Final = "FORGE_VERBOSITY"
"""Levels that -v adds to what is shown, and -q takes away."""
FORMAT_VARIABLE: Final = "FORGE_LOG_FORMAT"
LEVELS: Final = ("debug", "info", "warning", "error", "critical")
FORMATS: Final = ("text", "json")

LogFormat = Literal["text", "json"]
_LOGGER = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")


@dataclass(frozen=True, slots=True)
class LogLevels:
    """The least level that is shown of each logger.

    Attributes:
        default: of every logger that is not below one of `named`; None where the program decides.
        named: of loggers by name, and of those below them.
    """

    default: str | None = None
    named: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, *, path: str) -> Self:
        """Read `info`, `forge.service=debug`, or several of these with commas. `path` says where it was written."""
        default, named = None, {}
        for word in filter(None, (part.strip() for part in text.split(","))):
            name, equals, level = word.rpartition("=")
            _check_level(level, word, path=path)
            if not equals:
                default = level.lower()
            elif _LOGGER.fullmatch(name.strip()) is None:
                raise _wrong(word, "the name of a logger is letters, digits and `_`, joined by dots", path=path)
            else:
                named[name.strip()] = level.lower()
        return cls(default, named)

    def __str__(self) -> str:
        words = [] if self.default is None else [self.default]
        return ",".join([*words, *(f"{name}={level}" for name, level in self.named.items())])

    def shifted(self, verbosity: int) -> Self:
        """Return the same with a default that shows so many levels more, or fewer where it is negative."""
        assert self.default is not None
        place = min(max(LEVELS.index(self.default) - verbosity, 0), len(LEVELS) - 1)
        return replace(self, default=LEVELS[place])

    def at_most(self, level: str) -> Self:
        """Return levels that show at least this level of everything, and whatever these show."""

        def lower(one: str) -> str:
            return min(one, level, key=LEVELS.index)

        return replace(
            self, default=lower(self.default or level), named={name: lower(one) for name, one in self.named.items()}
        )

    def of(self, logger: str) -> str:
        """Return the level of a logger: its own, or the nearest one above it."""
        while logger:
            if logger in self.named:
                return self.named[logger]
            logger = logger.rpartition(".")[0]
        return self.default or "warning"


@dataclass(frozen=True, slots=True)
class LogOptions:
    """What is logged, and as what."""

    levels: LogLevels
    format: LogFormat = "text"

    @classmethod
    def from_environment(cls, default: str, environ: Mapping[str, str] = os.environ) -> Self:
        """Return what the environment asks for. `default` is the program's own level, for what it leaves open."""
        levels = LogLevels.parse(environ.get(LEVELS_VARIABLE, ""), path=LEVELS_VARIABLE)
        levels = replace(levels, default=levels.default or default)
        return cls(levels.shifted(verbosity(environ)), _read_format(environ.get(FORMAT_VARIABLE) or "text"))

    def variables(self) -> dict[str, str]:
        """Return the variables that make another process log the same."""
        return {LEVELS_VARIABLE: str(self.levels), FORMAT_VARIABLE: self.format, VERBOSITY_VARIABLE: "0"}


def verbosity(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many levels more are shown than the program shows by itself; negative for fewer."""
    text = environ.get(VERBOSITY_VARIABLE, "0")
    if re.fullmatch(r"[+-]?\d{1,3}", text) is None:
        raise OptionError(
            "this is not a number of levels",
            path=VERBOSITY_VARIABLE,
            value=text,
            rule="a whole number: 1 for -v, -1 for -q",
            repair="unset it, and use -v, -q or FORGE_LOG",
        )
    return int(text)


def add_log_flags(parser: argparse.ArgumentParser) -> None:
    """Add `-v`, `-q`, `--log-level` and `--log-format` to a command line."""
    group = parser.add_argument_group("logging")
    group.add_argument("-v", "--verbose", action="count", default=0, help="log more; -vv for more still")
    group.add_argument("-q", "--quiet", action="count", default=0, help="log less, and show no progress")
    group.add_argument(
        "--log-level", metavar="LEVELS", help=f"{', '.join(LEVELS)}, or of single loggers: info,forge.service=debug"
    )
    group.add_argument("--log-format", metavar="FORMAT", help="text, or json: an object to a line")


def apply_log_flags(parsed: argparse.Namespace, environ: MutableMapping[str, str] = os.environ) -> None:
    """Put what the flags say into the environment, for this process and those that it starts."""
    if parsed.log_level is not None:
        environ[LEVELS_VARIABLE] = str(LogLevels.parse(parsed.log_level, path="--log-level"))
    if parsed.log_format is not None:
        environ[FORMAT_VARIABLE] = _read_format(parsed.log_format, path="--log-format")
    if change := parsed.verbose - parsed.quiet:
        environ[VERBOSITY_VARIABLE] = str(verbosity(environ) + change)


def parse_with_log_flags(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None, *, intermixed: bool = False
) -> argparse.Namespace:
    """Parse a program's command line with the flags of logging added, and let them have their effect.

    A level or a format that is wrong, there or in the environment, is printed and ends the program with exit code 2, as
    every wrong argument does.
    """
    add_log_flags(parser)
    parsed = parser.parse_intermixed_args(arguments) if intermixed else parser.parse_args(arguments)
    try:
        apply_log_flags(parsed)
        LogOptions.from_environment("info")
    except OptionError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    return parsed


def _read_format(text: str, *, path: str = FORMAT_VARIABLE) -> LogFormat:
    if text.lower() not in FORMATS:
        raise OptionError(
            "there is no such format of log records",
            path=path,
            value=text,
            rule=f"one of {', '.join(FORMATS)}",
            repair=did_you_mean(text, FORMATS) or "leave it out for text",
        )
    return cast("LogFormat", text.lower())


def _check_level(level: str, word: str, *, path: str) -> None:
    if level.strip().lower() not in LEVELS:
        raise _wrong(word, f"one of {', '.join(LEVELS)}", path=path, repair=did_you_mean(level, LEVELS))


def _wrong(word: str, rule: str, *, path: str, repair: str | None = None) -> OptionError:
    return OptionError(
        "this is not a level of logging",
        path=path,
        value=word,
        rule=rule,
        repair=repair or "write for example info, or info,forge.service=debug",
    )
