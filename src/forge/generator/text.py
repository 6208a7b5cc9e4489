"""The text of a completion while its tokens come, and the stop strings in it.

Text is returned when it is final: when no later token can change it, and when it cannot be the start of a stop string.
The parts add up to the tokenizer's decoding of all tokens at once, cut at the first stop string.
Only the last few tokens are decoded at each step, so a completion takes time in proportion to its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Final
from weakref import WeakKeyDictionary

from forge.config import Sampling

if TYPE_CHECKING:
    from forge.models.tokenizer import ChatTokenizer

_BROKEN: Final = "\ufffd"
_RARE: Final = "\U000e0001"  # in no vocabulary as a whole: where it can be encoded, then as bytes
_OPEN: Final = 4
"""An unfinished character has at most three bytes: it is in the last three tokens, and one more stays before it."""


class TextTracker:
    """The text of one completion.

    A token that ends a completion is not part of its text: do not pass it to `add`. Special tokens and numbers that are
    not tokens may be passed; they have no text.
    """

    def __init__(self, tokenizer: ChatTokenizer, sampling: Sampling) -> None:
        """`stop`, `include_stop` and `min_tokens` of the sampling are used: a stop string counts only if text of a
        token after the first `min_tokens` completes it."""
        self.stopped: str | None = None
        self._decoder = _Decoder.of(tokenizer)
        self._include_stop = sampling.include_stop
        self._min_tokens = sampling.min_tokens
        self._stops = [_Search(stop) for stop in sampling.stop]
        self._window: list[int] = []
        self._num_shown = 0  # characters of the window's text that went on to `_pass_on`
        self._num_tokens = 0
        self._held = ""
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """All that `add` and `finish` returned."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def add(self, token_ids: Sequence[int]) -> str:
        """Take in tokens, and return the text that has become final. After a stop string nothing more does."""
        fresh = ""
        for token in token_ids:
            if self.stopped is not None:
                break
            self._num_tokens += 1
            if not self._decoder.is_silent(token):
                self._window.append(token)
                fresh += self._pass_on(self._final_text())
        if fresh:
            self._parts.append(fresh)
        return fresh

    def finish(self) -> str:
        """Return the rest: what was held back because more could have come. Nothing may be added after it."""
        if self.stopped is not None:
            return ""
        rest = self._decoder.decode(self._window)[self._num_shown :]
        self._window, self._num_shown = [], 0
        fresh = self._pass_on(rest) + self._held
        self._held = ""
        if fresh:
            self._parts.append(fresh)
        return fresh

    def _final_text(self) -> str:
        """Return the characters that the newest token of the window has made final."""
        decoder, window = self._decoder, self._window
        if decoder.is_loose_byte(window[-1]):
            return ""
        text = decoder.decode(window)
        is_open = text.endswith(_BROKEN) and not decoder.spoils
        end = max(self._num_shown, len(text) - 1 if is_open else len(text))
        fresh, self._num_shown = text[self._num_shown : end], end
        if not is_open:
            # One token stays, so that the next is not decoded as the first of a text, which loses a leading space.
            self._window = window[-1:]
            self._num_shown = len(decoder.decode(self._window))
        elif len(window) > 2 * _OPEN:
            self._window = window[-_OPEN:]
            self._num_shown = len(decoder.decode(self._window)) - 1
        return fresh

    def _pass_on(self, text: str) -> str:
        """Return what is final of the text held back and this: up to a stop string, or to what may become one."""
        if not self._stops:
            return text
        known = len(self._held)
        text = self._held + text
        may_stop = self._num_tokens > self._min_tokens
        for end in range(known + 1, len(text) + 1):
            found = [search.stop for search in self._stops if search.reaches(text[end - 1])]
            if found and may_stop:
                self.stopped = max(found, key=len)
                self._held = ""
                return text[: end if self._include_stop else end - len(self.stopped)]
        num_held = max(search.length for search in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


class _Search:
    """Looks for one string, character by character. `length` of its characters are the last that were seen."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        # For a prefix of each length: the longest shorter prefix that it ends with (Knuth, Morris and Pratt).
        self._shorter = [0, 0]
        for size in range(1, len(stop)):
            length = self._shorter[size]
            while length and stop[length] != stop[size]:
                length = self._shorter[length]
            self._shorter.append(length + 1 if stop[length] == stop[size] else 0)

    def reaches(self, character: str) -> bool:
        """Add a character, and return whether the string ends with it."""
        length = self.length
        while length and self.stop[length] != character:
            length = self._shorter[length]
        if self.stop[length] == character:
            length += 1
        is_whole = length == len(self.stop)
        self.length = self._shorter[length] if is_whole else length
        return is_whole


class _Decoder:
    """How a tokenizer's decoder behaves, found out by calling it. One for each tokenizer, as the answers are cached.

    Attributes:
        spoils: whether bytes that make no character also spoil the characters made of bytes just before them, as in
            vocabularies of SentencePiece that fall back to bytes. There nothing made of bytes is final until a token
            that is not a byte follows. Otherwise only the last character can be unfinished.
    """

    _known: ClassVar[WeakKeyDictionary[ChatTokenizer, _Decoder]] = WeakKeyDictionary()

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._decode = tokenizer.decode
        self._num_tokens = tokenizer.vocab_size
        self._silent: dict[int, bool] = {}
        self._loose: dict[int, bool] = {}
        rare = [token for token in tokenizer.encode_beginning(_RARE) if not self.is_silent(token)]
        self._last_byte = rare[-1:]
        self.spoils = self.decode(rare) == _RARE and not self.decode(rare + self._last_byte).startswith(_RARE)

    @classmethod
    def of(cls, tokenizer: ChatTokenizer) -> _Decoder:
        found = cls._known.get(tokenizer)
        if found is None:
            found = cls._known[tokenizer] = cls(tokenizer)
        return found

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._decode(token_ids, skip_special=True)

    def is_silent(self, token: int) -> bool:
        """Return whether a token has no text: it is special, or not a token of this tokenizer."""
        if token not in self._silent:
            is_special = self._decode([token], skip_special=False) != self.decode([token])
            self._silent[token] = is_special or not 0 <= token < self._num_tokens
        return self._silent[token]

    def is_loose_byte(self, token: int) -> bool:
        """Return whether a token is a byte that later ones can still spoil."""
        if not self.spoils:
            return False
        if token not in self._loose:
            alone = self.decode([token])
            spoilt = self.decode([token, *self._last_byte])
            self._loose[token] = alone == _BROKEN or spoilt != alone + _BROKEN
        return self._loose[token]
