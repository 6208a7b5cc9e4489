"""The commands of a shell script, as words, with the script's own variables put in: nothing is run.

Understood are quotes, comments, continued lines, assignments, arrays, `$NAME`, `${NAME}`, `${NAME:-default}`, and
arithmetic in `$(( ))`. A word with anything else in it, such as `$(nproc)`, a variable of the environment, or one that
is set in a branch or a loop, is computed when the script runs: its text is kept as it is written.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from forge.config.yaml_text import read_yaml
from forge.migration.shell_tokens import Token, tokens

_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE: Final = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*|\d+)(?:(:?-)([^}]*))?\})")
_REDIRECTION: Final = re.compile(r"\d*(?:>>?|<)(&\d|.+)?", re.DOTALL)
_ALL_OF_ARRAY: Final = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}")
_OPENING: Final = ("if", "for", "while", "until", "case")
_CLOSING: Final = ("fi", "done", "esac")
_BETWEEN: Final = ("then", "else", "elif", "do", "{", "}", "!", "time", "exec", "nohup")
_DECLARING: Final = ("export", "declare", "readonly", "local")
_INTEGERS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command: its text, whether a part of it is known only when the script runs, and the line."""

    text: str
    is_computed: bool
    line: int


def commands(text: str) -> list[list[Word]]:
    """Return the commands of a script, in order, without assignments."""
    script = _Script()
    found = [script.command(list(words)) for words in tokens(text)]
    return [words for words in found if words]


class _Script:
    """The variables of a script, as far as it was read."""

    def __init__(self) -> None:
        self._variables: dict[str, str | None] = {}
        self._arrays: dict[str, list[Word]] = {}
        self._depth = 0

    def command(self, words: list[Token]) -> list[Word]:
        """Return a command's words; none where it sets variables, or heads a loop."""
        while words and words[0].is_plain and words[0].written in (*_OPENING, *_CLOSING, *_BETWEEN):
            keyword = words.pop(0).written
            self._depth = max(0, self._depth + (keyword in _OPENING) - (keyword in _CLOSING))
            if keyword in ("for", "case"):
                return []
        while words and (match := _ASSIGNMENT.fullmatch(words[0].written)) is not None:
            self._assign(match, words.pop(0), words)
        if words and words[0].written in _DECLARING:
            for each in words[1:]:
                if (match := _ASSIGNMENT.fullmatch(each.written)) is not None:
                    self._assign(match, each, [])
            return []
        return [word for each in _arguments(words) for word in self._expand(each)]

    def _assign(self, match: re.Match[str], token: Token, rest: list[Token]) -> None:
        """Set a variable, or an array, whose elements are the words up to the closing bracket."""
        name, adds, value = match[1], bool(match[2]), match[3]
        whole = token.without(len(name) + len(match[2]) + 1)
        opening = next((quote for piece, quote in whole.pieces if piece), "'")
        if value.startswith("(") and not opening:
            before_it = self._arrays.get(name, []) if adds else []
            self._arrays[name] = [*before_it, *self._elements(whole.without(1), rest)]
            return
        word = self._substituted(whole)
        before = self._variables.get(name, "") if adds else ""
        found = None if word.is_computed or before is None else before + word.text
        is_sure = not self._depth or self._variables.get(name) == found  # not set in a branch or a loop
        self._variables[name] = found if is_sure else None

    def _elements(self, first: Token, rest: list[Token]) -> Iterator[Word]:
        """Yield the elements of an array, and take their words from the rest of the command."""
        taken = [first]
        while not _closes(taken[-1]) and rest:
            taken.append(rest.pop(0))
        if _closes(taken[-1]):
            taken[-1] = taken[-1].without_last()
        for each in taken:
            yield from (word for word in self._expand(each) if word.text)

    def _expand(self, token: Token) -> list[Word]:
        """The words that one stands for: those of an array or of a variable without quotes, or itself."""
        match = _ALL_OF_ARRAY.fullmatch(token.written)
        if match is not None and match[1] in self._arrays:
            return self._arrays[match[1]]
        word = self._substituted(token)
        is_variable = token.is_plain and _VARIABLE.fullmatch(token.written) is not None
        if is_variable and not word.is_computed and re.search(r"\s", word.text):
            return [Word(each, False, token.line) for each in re.sub(r"\\\s", " ", word.text).split()]
        return [word]

    def _substituted(self, token: Token) -> Word:
        is_computed = False

        def value(match: re.Match[str]) -> str:
            nonlocal is_computed
            found = self._variables.get(match[1] or match[2])
            if found is None and match[3] and (match[2] not in self._variables):
                found = match[4]
            if found is None:
                is_computed = True
                return match[0]
            return found

        parts = []
        for text, quote in token.pieces:
            filled = text if quote == "'" else self._arithmetic(_VARIABLE.sub(value, text))
            is_computed = is_computed or (quote != "'" and ("$" in filled or "`" in filled))
            parts.append(filled)
        return Word("".join(parts), is_computed, token.line)

    def _arithmetic(self, text: str) -> str:
        """The text with `$(( ))` of whole numbers computed."""

        def value(match: re.Match[str]) -> str:
            try:
                return str(self._whole(ast.parse(match[1].strip(), mode="eval").body))
            except (SyntaxError, TypeError, ValueError, ArithmeticError):
                return match[0]

        return re.sub(r"\$\(\((.*?)\)\)", value, text)

    def _whole(self, node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return int(self._variables.get(node.id) or "")
        if isinstance(node, ast.BinOp) and type(node.op) in _INTEGERS:
            return _INTEGERS[type(node.op)](self._whole(node.left), self._whole(node.right))
        raise TypeError


def _closes(token: Token) -> bool:
    """Whether a word ends an array."""
    return token.pieces[-1][1] == "" and token.pieces[-1][0].endswith(")")


def _arguments(words: list[Token]) -> Iterator[Token]:
    """Yield the words of a command that are not about where its output goes."""
    remaining = iter(words)
    for word in remaining:
        match = _REDIRECTION.fullmatch(word.written) if not word.pieces[0][1] else None
        if match is None:
            yield word
        elif match[1] is None:
            next(remaining, None)  # the file that it names


def as_scalar(text: str) -> Any:
    """Return what a word of a command line stands for, by the rules of our YAML."""
    document = read_yaml(text, source="")
    return text if document.problems or not document.readable else document.data
