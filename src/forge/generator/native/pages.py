"""Who holds which page of the cache, and which beginnings of text are computed already.

A page holds the keys and values of `PAGE` tokens. A full page can be *sealed*: it is then known by the page before it
and its own tokens, so that another sequence that begins alike takes it instead of computing it. Known pages that nobody
holds stay until their memory is needed; those that were let go of longest ago, and the ends of texts before their
beginnings, go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from forge.kernels.paged import PAGE_TOKENS

PAGE: Final = PAGE_TOKENS
"""Tokens in a page."""

ROOT: Final = 0
"""The beginning of every text, as the page before its first."""

Tokens = tuple[int, ...]


class OutOfPages(Exception):
    """There are fewer free pages than were asked for. Nothing was taken."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The computed beginning of a text.

    Attributes:
        pages: its pages, which the caller holds now.
        mark: stands for the text up to its end; the next page is sealed behind it.
    """

    pages: list[int]
    mark: int


class PagePool:
    """The pages of one cache.

    Args:
        num_pages: how many there are.
        sharing: whether sealed pages are remembered.
    """

    def __init__(self, num_pages: int, *, sharing: bool = True) -> None:
        self.num_pages = num_pages
        self._sharing = sharing
        self._holders = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._known: dict[tuple[int, Tokens], tuple[int, int]] = {}
        self._key_of: dict[int, tuple[int, Tokens]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._next_mark = ROOT + 1

    @property
    def num_free(self) -> int:
        """Pages that can be taken, those included that are remembered and held by nobody."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_free

    def take(self, num: int) -> list[int]:
        """Pages for the caller alone. Raises `OutOfPages`, and takes none, if there are not enough."""
        if num > self.num_free:
            raise OutOfPages(f"{num} pages asked for, {self.num_free} of {self.num_pages} free")
        pages = []
        for _ in range(num):
            page = self._free.pop() if self._free else self._evict()
            self._holders[page] = 1
            pages.append(page)
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Hold pages that somebody holds already once more."""
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Let go of pages. Those of a text's end come first when memory is needed."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] < 0:
                raise AssertionError(f"page {page} was let go of more often than it was taken")
            if self._holders[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def find(self, token_ids: Sequence[int], *, most: int) -> Prefix:
        """The longest computed beginning of a text, of at most `most` tokens, held for the caller from now on."""
        pages: list[int] = []
        mark = ROOT
        for start in range(0, most - PAGE + 1, PAGE):
            found = self._known.get((mark, tuple(token_ids[start : start + PAGE])))
            if found is None:
                break
            page, mark = found
            if self._holders[page] == 0:
                del self._idle[page]
            self._holders[page] += 1
            pages.append(page)
        return Prefix(pages, mark)

    def seal(self, page: int, token_ids: Sequence[int], *, after: int) -> int:
        """Remember a full page by its tokens and the mark of the text before it; the mark of the text up to its end.

        If that text is known already the page stays the caller's own, and the known page's mark is returned.
        """
        if not self._sharing:
            return ROOT
        key = (after, tuple(token_ids))
        known = self._known.get(key)
        if known is not None:
            return known[1]
        mark = self._next_mark
        self._next_mark += 1
        self._known[key] = (page, mark)
        self._key_of[page] = key
        return mark

    def forget(self) -> None:
        """Forget every computed text: the weights are others now. Pages that are held stay with their holders."""
        self._free.extend(reversed(self._idle))
        self._idle.clear()
        self._known.clear()
        self._key_of.clear()

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._known[self._key_of.pop(page)]
        return page
