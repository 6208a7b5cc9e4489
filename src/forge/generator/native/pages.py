"""The pages of the cache: who holds them, and which prefixes are already computed.

A page holds the keys and values of `PAGE` tokens. A full page can be *sealed*: it is then known by the page before it
and its own tokens, so that another sequence with the same prefix uses it instead of computing it. Known pages without a
holder stay until their memory is needed; the least recently released go first, and ends of texts before their starts.
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
"""The mark of the empty prefix."""

Tokens = tuple[int, ...]


class OutOfPages(Exception):
    """There are fewer free pages than were asked for. Nothing was taken."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The computed prefix of a text.

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
        sharing: whether sealed pages are registered.
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
        """Pages that can be taken, including known pages without a holder."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_free

    def take(self, num: int) -> list[int]:
        """Return pages for the caller alone. Raise `OutOfPages`, and take none, if there are not enough."""
        if num > self.num_free:
            raise OutOfPages(f"{num} pages asked for, {self.num_free} of {self.num_pages} free")
        pages = []
        for _ in range(num):
            page = self._free.pop() if self._free else self._evict()
            self._holders[page] = 1
            pages.append(page)
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Add a holder to pages that are already held."""
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Release pages. Those of a text's end are evicted first when memory is needed."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] < 0:
                raise AssertionError(f"page {page} was released more often than it was taken")
            if self._holders[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def find(self, token_ids: Sequence[int], *, most: int) -> Prefix:
        """Return the longest computed prefix of a text, of at most `most` tokens, and hold it for the caller."""
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
        """Register a full page by its tokens and the mark of the text before it. Return the mark at its end.

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
        """Forget every computed prefix, because the weights changed. Held pages stay with their holders."""
        self._free.extend(reversed(self._idle))
        self._idle.clear()
        self._known.clear()
        self._key_of.clear()

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._known[self._key_of.pop(page)]
        return page
