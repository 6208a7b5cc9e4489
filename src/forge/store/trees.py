"""Values that hold tensors: taken apart into named tensors and the rest, and put together again."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from forge.errors import StoreError
from forge.runtime.serialization import encode

MAX_REST = 16 << 20
"""Bytes of a value, apart from its tensors, that the store takes."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """Stands in a structure where a tensor was."""

    name: str


def take_apart(value: Any, is_leaf: Callable[[Any], bool]) -> tuple[Any, dict[str, Any]]:
    """The structure of `value` with a `Leaf` for everything that `is_leaf`, and those by name.

    Looks into dicts, lists and tuples. A leaf's name is the way to it, with dots: `{"a": [x]}` has `a.0`. The value
    itself, if it is a leaf, is named with the empty string.
    """
    leaves: dict[str, Any] = {}

    def walk(node: Any, path: str) -> Any:
        if is_leaf(node):
            if path in leaves:
                raise StoreError(
                    f"two tensors of the value have the name {path!r}",
                    path=path,
                    value=path,
                    rule="the way to each tensor, its keys joined with dots, is unique",
                    repair="rename one of the keys",
                )
            leaves[path] = node
            return Leaf(path)
        if isinstance(node, Mapping):
            items = {key: walk(child, f"{path}.{key}" if path else str(key)) for key, child in node.items()}
            return items if type(node) is dict else _same_kind(node, items)
        if type(node) in (list, tuple):
            return type(node)(walk(child, f"{path}.{i}" if path else str(i)) for i, child in enumerate(node))
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            fields = zip(node._fields, node, strict=True)
            return type(node)(*(walk(child, f"{path}.{name}" if path else name) for name, child in fields))
        return node

    return walk(value, ""), leaves


def _same_kind(node: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """An OrderedDict stays one; other mappings, such as a module's state dict with hooks, come back as dicts."""
    from collections import OrderedDict

    return OrderedDict(items) if type(node) is OrderedDict else items


def put_together(structure: Any, leaf: Callable[[str], Any]) -> Any:
    """The value again: `leaf(name)` gives what belongs in each tensor's place."""
    if isinstance(structure, Leaf):
        return leaf(structure.name)
    if isinstance(structure, Mapping):
        pairs = {key: put_together(child, leaf) for key, child in structure.items()}
        return _same_kind(structure, pairs)
    if type(structure) in (list, tuple):
        return type(structure)(put_together(child, leaf) for child in structure)
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(put_together(child, leaf) for child in structure))
    return structure


def write_structure(key: str, structure: Any) -> bytes:
    """A structure as bytes, to be kept by the registry."""
    try:
        data = encode(structure)
    except Exception as error:
        raise StoreError(
            f"a part of the value of {key!r} that is not a tensor cannot be pickled: {error}",
            path=key,
            value=type(error).__name__,
            rule="values are tensors, nested dicts, lists and tuples of them, and small picklable objects",
            repair="leave out what cannot be pickled",
        ) from error
    if len(data) > MAX_REST:
        raise StoreError(
            f"the value of {key!r} is too large without its tensors",
            path=key,
            value=f"{len(data)} bytes",
            rule=f"at most {MAX_REST} bytes of objects that are not tensors",
            repair="put large data as tensors (bytes as uint8)",
        )
    return data


def read_structure(data: bytes) -> Any:
    return pickle.loads(data)
