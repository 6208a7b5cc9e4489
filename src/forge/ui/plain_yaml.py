"""Reads YAML that somebody else may have written, fast: only plain data of a bounded size comes out of it.

PyYAML's parser in C follows nested values by recursion without a bound, and a value that is named can be repeated
without end. So the depth is checked first, and what was read is copied into lists and mappings with text for keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import yaml

MAX_DEPTH: Final = 64
MAX_VALUES: Final = 200_000
_LARGEST: Final = 1 << 63
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_plain_yaml(text: str) -> Any:
    """Return the data of a document: null, texts, numbers, lists and mappings. `ValueError` where it is not that."""
    try:
        _check_depth(text)
        return _plain(yaml.load(text, Loader=_LOADER), iter(range(MAX_VALUES)), 0)
    except (yaml.YAMLError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        # The constructors of PyYAML raise these for a tag that does not fit its value, such as `!!bool x`.
        raise ValueError(f"the YAML cannot be read: {error}") from None


def _check_depth(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"values are nested more than {MAX_DEPTH} deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _plain(value: Any, left: Iterator[int], depth: int) -> Any:
    if next(left, None) is None or depth > MAX_DEPTH:
        raise ValueError(f"there are more than {MAX_VALUES} values, or they contain themselves")
    if isinstance(value, dict):
        return {_word(key): _plain(below, left, depth + 1) for key, below in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(each, left, depth + 1) for each in value]
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ValueError("a whole number is out of range")
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _word(key: object) -> str:
    return key if isinstance(key, str) else str(key)
