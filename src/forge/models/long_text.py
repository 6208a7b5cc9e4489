"""Long texts: how much text a token stands for at most, and tokens of long texts without holding the interpreter."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from typing import Any, Final

LONG_TEXT: Final = 16_384
"""From so many characters on a text is long: `Tokenizer.encode` would hold the interpreter's lock for too long."""

_KEEPS_ALL: Final = frozenset(("ByteLevel", "Digits", "Metaspace"))
"""Pre-tokenizers that drop no character."""

_MOST_COMPOSED: Final = 4
"""NFC makes one character of at most so many: a Greek vowel with breathing, accent and iota subscript."""


class TextTooLong(Exception):
    """A text has more tokens than the caller allows; the text says how long it is."""


def encode_long(tokenizer: Any, text: str, *, add_special_tokens: bool, max_tokens: int | None) -> list[int]:
    """Return the tokens of a long text; other threads run meanwhile. Raise `TextTooLong` for more than `max_tokens`.

    `encode` holds the interpreter's lock until it is done and keeps the position of every token; a batch of one does
    neither. What the tokenizer allocated goes back to the system: it is a hundred times the size of the text.
    """
    try:
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if max_tokens is not None and len(encoding) > max_tokens:
            raise TextTooLong(f"{len(encoding)} tokens")
        ids: list[int] = encoding.ids
        return ids
    finally:
        encoding = None
        _trim_memory()


def _trim_memory() -> None:
    """Give freed memory back to the system where the C library can (glibc); elsewhere it does so by itself."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def characters_per_token(tokenizer: Any) -> int | None:
    """Return how many characters of text one token stands for at most, or None where a token may stand for any number.

    A text of more characters than that many for each token of a context can never fit into it. There is no bound where
    the tokenizer drops characters (spaces, accents), where one token stands for all that it does not know, or where a
    special token takes the spaces around it.
    """
    described = json.loads(tokenizer.to_str())
    shrink = _shrink(described["normalizer"])
    parts = _parts(described["pre_tokenizer"], "pretokenizers")
    if shrink is None or not all(map(_drops_nothing, parts)):
        return None
    if not _knows_all(described["model"], is_byte_level=any(part["type"] == "ByteLevel" for part in parts)):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in described["added_tokens"]):
        return None
    return shrink * max(map(len, tokenizer.get_vocab(with_added_tokens=True)))


def _parts(described: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, sequences unfolded."""
    if described is None:
        return []
    if described["type"] == "Sequence":
        return [step for part in described[name] for step in _parts(part, name)]
    return [described]


def _shrink(normalizer: Mapping[str, Any] | None) -> int | None:
    """Return how many characters of a text become one at most; None where they may vanish."""
    shrink = 1
    for step in _parts(normalizer, "normalizers"):
        if step["type"] == "NFC":
            shrink *= _MOST_COMPOSED
        elif step["type"] == "Replace":
            found = step["pattern"].get("String")
            if found is None or len(step["content"]) < len(found):
                return None
        elif step["type"] != "Prepend":
            return None
    return shrink


def _drops_nothing(step: Mapping[str, Any]) -> bool:
    return step["type"] in _KEEPS_ALL or (step["type"] == "Split" and step["behavior"] != "Removed")


def _knows_all(model: Mapping[str, Any], *, is_byte_level: bool) -> bool:
    """Return whether every character has tokens of its own: those of its bytes, if no others."""
    if model["type"] != "BPE" or not (is_byte_level or model.get("byte_fallback")):
        return False
    return all((_LETTERS[byte] if is_byte_level else f"<0x{byte:02X}>") in model["vocab"] for byte in _UTF8_BYTES)


def byte_letters() -> dict[int, str]:
    """Return the letters that byte-level tokenizers write bytes with: themselves if visible, else from U+0100 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(0x100 + place) for place, byte in enumerate(others)}


_LETTERS: Final = byte_letters()
_UTF8_BYTES: Final = [byte for byte in range(0xF5) if byte not in (0xC0, 0xC1)]
