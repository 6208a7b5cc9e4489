"""Values in Python sources, read from the syntax tree: nothing is run.

Understood are literals, names that are assigned once, arithmetic, f-strings, lists and dicts of these, and calls, which
become `Call`. Everything else is `Computed`, with its text.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from forge.errors import ConfigError
from forge.migration.records import Computed

_LONGEST_TEXT = 80
_MOST_NESTED = 50
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True, slots=True)
class Call:
    """A call that stands for the object that it makes.

    Attributes:
        name: what is called, as it is written: `LoraConfig`, `trainer.PolicyTrainer.Config`.
        args, kwargs: its arguments, as values.
        line: where it stands.
        lines: where each keyword argument stands.
        text: the call as it is written.
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    line: int = 0
    lines: Mapping[str, int] = field(default_factory=dict)
    text: str = ""

    @property
    def last_name(self) -> str:
        """The name without the module in front of it."""
        return self.name.rpartition(".")[2]

    def __str__(self) -> str:
        return self.text or f"{self.name}(…)"

    def with_value(self, path: tuple[str, ...], value: Any, line: int) -> Call:
        """Return the object with an attribute of an attribute set."""
        key, *rest = path
        below = self.kwargs.get(key)
        if rest:
            value = (below if isinstance(below, Call) else Call("", line=line)).with_value(tuple(rest), value, line)
        return replace(self, kwargs={**self.kwargs, key: value}, lines={**self.lines, key: line})


def parse_python(text: str, *, where: str) -> ast.Module:
    """Return the tree of a Python source. Raises `ConfigError` for what is not Python."""
    try:
        return ast.parse(text, filename=where)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(
            "The file cannot be read as Python.",
            path=where if line is None else f"{where}:{line}",
            value=getattr(error, "msg", str(error)),
            rule="a .py file holds Python",
            repair="correct it, or give the YAML file or shell script that the run is started with",
        ) from None


class Scope:
    """The names that are assigned once, in a module or in a function, and what they stand for."""

    def __init__(self, names: Mapping[str, Any], outer: Scope | None = None) -> None:
        self.names = dict(names)
        self._outer = outer

    def find(self, name: str) -> Any:
        """Return the expression or the value that a name stands for; None for an unknown one."""
        if name in self.names:
            return self.names[name]
        return None if self._outer is None else self._outer.find(name)


def scope_of(body: list[ast.stmt], outer: Scope | None = None) -> Scope:
    """Return the names that statements assign. One that is assigned twice stands for no single value."""
    found: dict[str, Any] = {}
    for statement in body:
        for name, value in _assigned(statement):
            found[name] = Computed(f"{name}, which is assigned twice") if name in found else value
    return Scope(found, outer)


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.expr | None]]:
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Name):
                yield target.id, statement.value
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id, statement.value if isinstance(statement, ast.AnnAssign) else None
    elif isinstance(statement, ast.If | ast.For | ast.While | ast.With | ast.Try):
        for inner in ast.walk(statement):
            if isinstance(inner, ast.stmt) and inner is not statement:
                yield from ((name, None) for name, _ in _assigned(inner))


def text_of(node: ast.expr) -> str:
    """Return an expression as text, on one line, shortened."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"


def value_of(node: ast.expr | None, scope: Scope, depth: int = 0) -> Any:
    """Return the value of an expression: plain data, a `Call`, or `Computed`."""
    if node is None or depth > _MOST_NESTED:
        return Computed("…")
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return _named(node, scope, depth)
    if isinstance(node, ast.Attribute):
        return _attribute(node, scope, depth)
    if isinstance(node, ast.Call):
        return _call(node, scope, depth)
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [value_of(each, scope, depth + 1) for each in node.elts]
    if isinstance(node, ast.Dict):
        return _dict(node, scope, depth)
    try:
        return _computable(node, scope, depth)
    except (TypeError, ValueError, ArithmeticError, MemoryError):
        return Computed(text_of(node))


def _named(node: ast.Name, scope: Scope, depth: int) -> Any:
    found = scope.find(node.id)
    if isinstance(found, ast.expr):
        return value_of(found, scope, depth + 1)
    return Computed(node.id) if found is None else found


def _attribute(node: ast.Attribute, scope: Scope, depth: int) -> Any:
    """An attribute of an object that a call made, where it was given; otherwise its text, such as `torch.bfloat16`."""
    base = value_of(node.value, scope, depth + 1)
    if isinstance(base, Call):
        return base.kwargs.get(node.attr, Call("", line=node.lineno))
    return Computed(text_of(node))


def _call(node: ast.Call, scope: Scope, depth: int) -> Call:
    kwargs: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for word in node.keywords:
        value = value_of(word.value, scope, depth + 1)
        if word.arg is not None:
            kwargs[word.arg] = value
        elif isinstance(value, dict):
            kwargs |= value
        elif isinstance(value, Call) and value.name == "dict":
            kwargs |= value.kwargs
        else:
            kwargs[f"**{text_of(word.value)}"] = Computed(text_of(word.value))
        lines |= dict.fromkeys(kwargs.keys() - lines.keys(), word.value.lineno)
    args = tuple(value_of(each, scope, depth + 1) for each in node.args)
    return Call(text_of(node.func), args, kwargs, node.lineno, lines, text_of(node))


def _dict(node: ast.Dict, scope: Scope, depth: int) -> Any:
    found: dict[str, Any] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        name = None if key is None else value_of(key, scope, depth + 1)
        inner = value_of(value, scope, depth + 1)
        if key is None and isinstance(inner, dict):
            found |= inner
        elif isinstance(name, str | int | float):
            found[str(name)] = inner
        else:
            return Computed(text_of(node))
    return found


def _computable(node: ast.expr, scope: Scope, depth: int) -> Any:
    """The value of an expression of numbers and texts; TypeError where a part is not known."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        inner = _plain(value_of(node.operand, scope, depth + 1))
        return not inner if isinstance(node.op, ast.Not) else -inner
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = (_plain(value_of(each, scope, depth + 1)) for each in (node.left, node.right))
        if isinstance(node.op, ast.Mult) and not (_is_number(left) and _is_number(right)):
            raise TypeError
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.JoinedStr):
        return "".join(_part(each, scope, depth) for each in node.values)
    raise TypeError


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _plain(value: Any) -> Any:
    if not isinstance(value, int | float | str | bool):
        raise TypeError
    return value


def _part(node: ast.expr, scope: Scope, depth: int) -> str:
    """A part of an f-string without a format."""
    if isinstance(node, ast.FormattedValue):
        if node.format_spec is not None or node.conversion != -1:
            raise TypeError
        return str(_plain(value_of(node.value, scope, depth + 1)))
    return str(_plain(value_of(node, scope, depth + 1)))
