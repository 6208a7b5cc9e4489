"""YAML in and out, with the position of every value.

Plain words are read by the rules of YAML 1.2, which hold fewer surprises than the 1.1 rules that PyYAML follows: `1e-4`
is a number, `01:30:00` and `2026-01-31` and `yes` are text, and `007` is text because it is not clear what else it
would be. Keys are always text. What is written here is quoted so that a reader of either version agrees.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.resolver import BaseResolver

from forge.config.problems import KeyPath, Problem, format_path

MAX_VALUES = 100_000
_TAG = "tag:yaml.org,2002:"
_NUMBER_START = list("-+0123456789.")
_RULES: list[tuple[str, str, list[str]]] = [
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)|0x[0-9a-fA-F]+|0o[0-7]+", _NUMBER_START),
    (
        "float",
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        _NUMBER_START,
    ),
]


class _Resolver(BaseResolver):
    """Decides what a plain word is."""


for _name, _pattern, _first in _RULES:
    _Resolver.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _first)


class _Reader(yaml.reader.Reader, yaml.scanner.Scanner, yaml.parser.Parser, yaml.composer.Composer, _Resolver):
    def __init__(self, text: str) -> None:
        yaml.reader.Reader.__init__(self, text)
        yaml.scanner.Scanner.__init__(self)
        yaml.parser.Parser.__init__(self)
        yaml.composer.Composer.__init__(self)
        _Resolver.__init__(self)


class _Writer(yaml.emitter.Emitter, yaml.serializer.Serializer, yaml.representer.SafeRepresenter, _Resolver):
    def __init__(self, stream: Any, **options: Any) -> None:
        self._rules_1_1: Any = yaml.resolver.Resolver()
        style = {key: options[key] for key in ("indent", "width", "allow_unicode", "line_break", "canonical")}
        yaml.emitter.Emitter.__init__(self, stream, **style)
        marks = ("encoding", "explicit_start", "explicit_end", "version", "tags")
        yaml.serializer.Serializer.__init__(self, **{key: options[key] for key in marks})
        yaml.representer.SafeRepresenter.__init__(self, default_flow_style=False, sort_keys=False)
        _Resolver.__init__(self)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(writer: _Writer, text: str) -> yaml.ScalarNode:
    tag_1_1 = writer._rules_1_1.resolve(yaml.ScalarNode, text, (True, False))
    style = None if tag_1_1 == f"{_TAG}str" and text.isprintable() else '"'
    return writer.represent_scalar(f"{_TAG}str", text, style=style)


_Writer.add_representer(str, _represent_text)


def write_yaml(value: object) -> str:
    """Block-style YAML that `read_yaml` reads back to an equal value."""
    return yaml.dump(value, Dumper=_Writer, allow_unicode=True, width=110)


@dataclass
class Document:
    """One text, read: plain data, the line of every path in it, and what was wrong."""

    data: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    readable: bool = True
    """False when the text could not be read at all, so that its keys are unknown."""


def read_yaml(text: str, *, source: str) -> Document:
    """Read one document. Nothing is raised for bad text: `problems` says what is wrong and where."""
    document = Document()
    try:
        node = _Reader(text).get_single_node()
        if node is not None:
            document.data = _Builder(document, source).build(node, (), frozenset())
    except yaml.YAMLError as error:
        document.readable = False
        document.problems.append(_syntax_problem(error, source))
    except RecursionError:
        rule = "must not be nested hundreds of levels deep"
        unreadable = Problem(path=source, rule=rule, repair="check its brackets", origin=source)
        return Document(readable=False, problems=[unreadable])
    return document


class _Builder:
    """Turns nodes into data. Written out, since PyYAML's own keeps no positions and accepts a key twice."""

    def __init__(self, document: Document, source: str) -> None:
        self._document = document
        self._source = source
        self._count = 0

    def build(self, node: yaml.Node, path: KeyPath, above: frozenset[int]) -> Any:
        self._document.lines[path] = node.start_mark.line + 1
        self._count += 1
        if id(node) in above or self._count > MAX_VALUES:
            if self._document.readable:
                self._complain(
                    node, path, f"a file may not contain itself or more than {MAX_VALUES} values", "remove *"
                )
            self._document.readable = False
            return None
        above = above | {id(node)}
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return {key: self.build(value, (*path, key), above) for key, value in self._keys(node, path)}
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return [self.build(item, (*path, index), above) for index, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _keys(self, node: yaml.MappingNode, path: KeyPath) -> Iterator[tuple[str, yaml.Node]]:
        lines: dict[str, int] = {}
        for key_node, value in node.value:
            merge = key_node.value == "<<" and key_node.style is None
            if merge or not isinstance(key_node, yaml.ScalarNode):
                rule = "YAML merge keys (<<) are not read" if merge else "a key must be plain text"
                self._complain(key_node, path, rule, "write the keys out, or pass several files: they are merged")
                continue
            key = key_node.value
            if key in lines:
                rule = f"a key may stand only once in a mapping; it is already on line {lines[key]}"
                self._complain(key_node, (*path, key), rule, "remove one of the two")
            lines.setdefault(key, key_node.start_mark.line + 1)
            if self._is_text(key_node, (*path, key)):
                yield key, value

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        text = node.value
        match node.tag.removeprefix(_TAG) if isinstance(node, yaml.ScalarNode) else None:
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int" | "float" as kind:
                return self._number(node, path, kind)
            case "str":
                return text if self._is_text(node, path) else None
        repair = "write a plain value; text goes in quotes"
        self._complain(node, path, f"the YAML tag {node.tag!r} is not read", repair)
        return None

    def _number(self, node: yaml.Node, path: KeyPath, kind: str) -> int | float | None:
        text = node.value
        try:
            if kind == "int":
                return int(text, 0)
            return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
        except ValueError:
            self._complain(node, path, f"{text[:40]!r} is not a number that can be read", "write it in decimal digits")
            return None

    def _is_text(self, node: yaml.Node, path: KeyPath) -> bool:
        try:
            node.value.encode()
        except UnicodeEncodeError:
            self._complain(node, path, "text must be valid Unicode", "remove the escape of half a surrogate pair")
            return False
        return True

    def _complain(self, node: yaml.Node, path: KeyPath, rule: str, repair: str) -> None:
        mark = node.start_mark
        origin = f"{self._source}:{mark.line + 1}"
        where = format_path(path).encode(errors="replace").decode() or self._source
        self._document.problems.append(Problem(path=where, rule=rule, repair=repair, origin=origin))


def _syntax_problem(error: yaml.YAMLError, source: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    reason = getattr(error, "problem", None) or str(error).splitlines()[0]
    where = source if mark is None else f"{source}:{mark.line + 1}:{mark.column + 1}"
    position = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
    return Problem(
        path=source,
        rule=f"must be valid YAML: {reason}{position}",
        repair="check indentation and brackets there; put text with special characters such as : # @ % in quotes",
        origin=where,
    )
