"""Configurations of TitanRL: Python functions that return a `Controller.Config`, and flags of its command line.

A function is followed statement by statement, without running it: what it assigns, what it changes in an object, what
functions of the same file it calls with which arguments, and `dataclasses.replace`.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from forge.errors import ConfigError
from forge.migration.python_source import Call, Scope, parse_python, scope_of, value_of
from forge.migration.reading import flags, no_command
from forge.migration.records import Given
from forge.migration.shell_words import commands

_ROOT: Final = "Controller.Config"
_MOST_CALLS: Final = 20
_MODULE: Final = "torchtitan.experiments.rl.train"


class Module:
    """The functions of a Python file, and what they return."""

    def __init__(self, text: str, *, where: str) -> None:
        self._where = where
        tree = parse_python(text, where=where)
        self._scope = scope_of(tree.body)
        self._functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self.unread: dict[str, str] = {}

    def config(self, name: str | None) -> Call:
        """Return what a function returns: the named one, or the only one that returns a configuration.

        Raises `ConfigError` where there is none, or where several could be meant.
        """
        if name is not None and name not in self._functions:
            raise self._refused(name, f"one of {', '.join(self._public()) or 'the functions of the file'}")
        names = [name] if name is not None else self._public()
        found = {each: self._returned(self._functions[each], {}, depth=0) for each in names}
        configs = {each: value for each, value in found.items() if isinstance(value, Call) and _is_root(value)}
        if len(configs) == 1:
            if name is None:
                self.unread.clear()
                chosen = next(iter(configs))
                self._returned(self._functions[chosen], {}, depth=0)
            return next(iter(configs.values()))
        if not configs:
            raise self._refused(name, f"a function that returns {_ROOT}(…)")
        raise self._refused(None, "one function", repair=f"add --config with one of {', '.join(configs)}")

    def _public(self) -> list[str]:
        return [name for name in self._functions if not name.startswith("_")]

    def _refused(self, value: Any, rule: str, repair: str | None = None) -> ConfigError:
        return ConfigError(
            "The file does not say which configuration of TitanRL is meant.",
            path=self._where if value is None else "--config",
            value=value,
            rule=rule,
            repair=repair or f"name the file whose functions return {_ROOT}, as --config of the run does",
        )

    def _returned(self, function: ast.FunctionDef, given: Mapping[str, Any], *, depth: int) -> Any:
        """What a function returns for arguments, from its assignments in their order."""
        names: dict[str, Any] = dict(given)
        scope = Scope(names, self._scope)
        scope.names = names
        for statement in function.body:
            if isinstance(statement, ast.Return):
                return self._value(statement.value, scope, depth)
            self._step(statement, names, scope, depth)
        return None

    def _step(self, statement: ast.stmt, names: dict[str, Any], scope: Scope, depth: int) -> None:
        """Follow one statement; what cannot be followed is kept in `unread`."""
        if not self._is_followed(statement, names, scope, depth):
            text = " ".join(ast.unparse(statement).split())
            self.unread[f"{self._where}:{statement.lineno}"] = text if len(text) <= 80 else f"{text[:79]}…"

    def _is_followed(self, statement: ast.stmt, names: dict[str, Any], scope: Scope, depth: int) -> bool:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            return self._assign(statement.targets[0], self._value(statement.value, scope, depth), names)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names[statement.target.id] = self._value(statement.value, scope, depth)
            return True
        if isinstance(statement, ast.Expr):
            is_text = isinstance(statement.value, ast.Constant)
            return is_text or self._append(statement.value, names, scope, depth)
        return isinstance(statement, ast.Import | ast.ImportFrom | ast.Assert | ast.Pass)

    def _append(self, node: ast.expr, names: dict[str, Any], scope: Scope, depth: int) -> bool:
        """Follow `name.append(value)`."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "append":
            return False
        name = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        if not isinstance(names.get(name), list) or len(node.args) != 1:
            return False
        names[name] = [*names[name], self._value(node.args[0], scope, depth)]
        return True

    def _assign(self, target: ast.expr, value: Any, names: dict[str, Any]) -> bool:
        """Set a name, or an attribute of an attribute of the object that a name stands for."""
        path: list[str] = []
        while isinstance(target, ast.Attribute):
            path.insert(0, target.attr)
            target = target.value
        if not isinstance(target, ast.Name):
            return False
        if not path:
            names[target.id] = value
            return True
        base = names.get(target.id)
        if not isinstance(base, Call):
            return False
        names[target.id] = base.with_value(tuple(path), value, getattr(target, "lineno", 0))
        return True

    def _value(self, node: ast.expr | None, scope: Scope, depth: int) -> Any:
        return self._followed(value_of(node, scope), depth)

    def _followed(self, value: Any, depth: int) -> Any:
        """A value with calls of the file's own functions, and of `replace`, followed."""
        if isinstance(value, list):
            return [self._followed(each, depth) for each in value]
        if not isinstance(value, Call) or depth > _MOST_CALLS:
            return value
        kwargs = {key: self._followed(each, depth) for key, each in value.kwargs.items()}
        args = tuple(self._followed(each, depth) for each in value.args)
        found = replace(value, kwargs=kwargs, args=args)
        if value.name in self._functions:
            function = self._functions[value.name]
            return self._returned(function, _bound(function, found, self._scope), depth=depth + 1)
        if value.last_name == "replace" and args and isinstance(args[0], Call):
            base = args[0]
            return replace(base, kwargs={**base.kwargs, **kwargs}, lines={**base.lines, **value.lines})
        return found


def _bound(function: ast.FunctionDef, call: Call, scope: Scope) -> dict[str, Any]:
    """The arguments of a call by the names of a function's parameters, with defaults."""
    spec = function.args
    names = [each.arg for each in (*spec.posonlyargs, *spec.args)]
    found = dict(
        zip(names[len(names) - len(spec.defaults) :], (value_of(each, scope) for each in spec.defaults), strict=True)
    )
    for parameter, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        if default is not None:
            found[parameter.arg] = value_of(default, scope)
    return found | dict(zip(names, call.args, strict=False)) | dict(call.kwargs)


def _is_root(value: Call) -> bool:
    return value.name == _ROOT or value.name.endswith(f".{_ROOT}")


def flat(call: Call, where: str, known: Collection[str], path: str = "") -> Iterator[tuple[str, Given]]:
    """Yield what a configuration gives by dotted keys. The class of a section is a value where it is a known key."""
    for key, value in call.kwargs.items():
        dotted = f"{path}.{key}" if path else key
        place = f"{where}:{call.lines.get(key, call.line)}"
        if isinstance(value, Call) and (not value.name or value.last_name.endswith("Config")):
            if value.name and dotted in known:
                yield dotted, Given(value.name, place)
            yield from flat(value, where, known, dotted)
        else:
            yield dotted, Given(value, place)


def read_flags(text: str, *, where: str) -> dict[str, Given]:
    """Return the keys that a shell script gives `torchtitan.experiments.rl.train`, with dots."""
    for words in commands(text):
        index = next((i for i, word in enumerate(words) if word.text == _MODULE), None)
        if index is None:
            continue
        return {key.replace("-", "_"): each for key, each in flags(words[index + 1 :], where=where)}
    raise no_command(where, wanted=f"python3 -m {_MODULE} --module NAME --config NAME")
