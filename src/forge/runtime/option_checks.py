"""The checks that options of actors, services, endpoints and calls share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from forge.errors import OptionError, nearest


def bad_option(name: str, value: object, rule: str, repair: str, *, where: str = "options") -> OptionError:
    return OptionError(f"option {name!r} is not valid", path=f"{where}({name}=)", value=value, rule=rule, repair=repair)


def check_known(keywords: Mapping[str, object], options: type[Any], *, where: str = "options") -> None:
    """Raise unless every keyword is a field of the dataclass `options`."""
    known = [entry.name for entry in fields(options)]
    for name, value in keywords.items():
        if name in known:
            continue
        near = nearest(name, known)
        raise OptionError(
            f"{where}() has no {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
            path=f"{where}({name}=)",
            value=value,
            rule=f"one of {', '.join(known)}",
            repair=f"write {where}({near[0]}=...)" if near else "remove it",
        )


def check_count(name: str, value: object, *, optional: bool = False, least: int = 1, where: str = "options") -> None:
    """Raise unless `value` is a whole number of at least `least` (or None, where that is allowed)."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        rule = f"a whole number >= {least}" + (" or None" if optional else "")
        raise bad_option(name, value, rule, f"{name}={least}", where=where)


def check_seconds(
    name: str, value: object, *, optional: bool = False, zero: bool = False, where: str = "options"
) -> None:
    """Raise unless `value` is a positive (or, where allowed, zero) finite number of seconds."""
    if value is None and optional:
        return
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not (0 < value < math.inf or (zero and value == 0)):  # type: ignore[operator]
        rule = f"a finite number of seconds >{'=' if zero else ''} 0" + (" or None" if optional else "")
        raise bad_option(name, value, rule, f"{name}=60", where=where)
