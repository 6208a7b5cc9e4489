"""The text of a shell script as commands of words, with quotes taken off and nothing put in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

Quote = Literal["", "'", '"']
Piece = tuple[str, Quote]

_ENDS: Final = "\n;&|"
_PAIRS: Final = {"(": ")", "{": "}"}


@dataclass(frozen=True, slots=True)
class Token:
    """A word as it is written: its pieces, each with the quotes that it stood in, and the line."""

    pieces: tuple[Piece, ...]
    line: int

    @property
    def written(self) -> str:
        """The word without its quotes."""
        return "".join(text for text, _ in self.pieces)

    @property
    def is_plain(self) -> bool:
        """Whether nothing of it is in quotes."""
        return all(not quote for _, quote in self.pieces)

    def without(self, count: int) -> Token:
        """Return the word without its first characters."""
        left: list[Piece] = []
        for text, quote in self.pieces:
            cut = min(count, len(text))
            count -= cut
            left.append((text[cut:], quote))
        return Token(tuple(left), self.line)

    def without_last(self) -> Token:
        """Return the word without its last character."""
        *before, (text, quote) = self.pieces
        return Token((*before, (text[:-1], quote)), self.line)


def tokens(text: str) -> Iterator[list[Token]]:
    """Yield the commands of a script, each as its words."""
    yield from _Cutter(text).commands()


class _Cutter:
    """Goes through a script once, character by character."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position, self._line, self._started, self._depth = 0, 1, 1, 0
        self._pieces: list[Piece] = []
        self._words: list[Token] = []

    def commands(self) -> Iterator[list[Token]]:
        while self._position < len(self._text):
            if self._take_piece() or self._take_space():
                continue
            character = self._text[self._position]
            if character in _ENDS and not self._is_redirection(character):
                self._end_word()
                if self._words:
                    yield self._words
                    self._words = []
                self._move(1)
            else:
                self._depth = max(0, self._depth + (character == "(") - (character == ")"))
                self._add(character, "", 1)
        self._end_word()
        if self._words:
            yield self._words

    def _take_piece(self) -> bool:
        """Take an escaped character, a text in quotes, or something with `$`; False where there is none."""
        text, position = self._text, self._position
        character = text[position]
        if text.startswith("\\\n", position):
            self._move(2)
        elif character == "\\":
            self._add(text[position + 1 : position + 2], "'", 2)
        elif character == "'":
            end = _closing(text, position)
            self._add(text[position + 1 : end], "'", end + 1 - position)
        elif character == '"':
            end = _closing(text, position)
            inner = re.sub(r'\\(["\\$`])|\\\n', lambda match: match[1] or "", text[position + 1 : end])
            self._add(inner, '"', end + 1 - position)
        elif text.startswith(("$(", "`", "${"), position):
            end = _nested_end(text, position)
            self._add(text[position:end], "", end - position)
        else:
            return False
        return True

    def _take_space(self) -> bool:
        """Skip blanks, comments, and the ends of lines inside brackets; False where there are none."""
        character = self._text[self._position]
        if character == "#" and not self._pieces:
            end = self._text.find("\n", self._position)
            self._move((len(self._text) if end < 0 else end) - self._position)
        elif character in " \t\r" or (self._depth and character == "\n"):
            self._end_word()
            self._move(1)
        else:
            return False
        return True

    def _is_redirection(self, character: str) -> bool:
        """Whether this is the middle of `2>&1`."""
        return character == "&" and bool(self._pieces) and self._pieces[-1][0].endswith(">")

    def _add(self, piece: str, quote: Quote, count: int) -> None:
        if not self._pieces:
            self._started = self._line
        if self._pieces and self._pieces[-1][1] == quote:
            piece = self._pieces.pop()[0] + piece  # so that `$NAME` is one piece
        self._pieces.append((piece, quote))
        self._move(count)

    def _end_word(self) -> None:
        if self._pieces:
            self._words.append(Token(tuple(self._pieces), self._started))
            self._pieces = []

    def _move(self, count: int) -> None:
        self._line += self._text.count("\n", self._position, self._position + count)
        self._position += count


def _closing(text: str, position: int) -> int:
    """Where the quote that opens at a position closes; the end of the text where it does not."""
    quote, position = text[position], position + 1
    while position < len(text) and text[position] != quote:
        position += 2 if quote == '"' and text[position] == "\\" else 1
    return min(position, len(text))


def _nested_end(text: str, position: int) -> int:
    """Where `$(…)`, `${…}` or a pair of back-ticks ends."""
    if text[position] == "`":
        end = text.find("`", position + 1)
        return len(text) if end < 0 else end + 1
    opening = text[position + 1]
    depth, position = 0, position + 1
    while position < len(text):
        depth += (text[position] == opening) - (text[position] == _PAIRS[opening])
        position += 1
        if depth == 0:
            break
    return position
