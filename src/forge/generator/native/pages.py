"""The pages of the cache: who holds them, and which prefixes are already computed.

A page holds the keys and values of `PAGE` tokens. A full page can be *sealed*: it is then known by the page before it
and its own tokens, so that another sequence with the same prefix uses it instead of computing it. This is how the next
turn of a conversation finds the turns before it: their prompts and their completions. The last page of a sequence,
which is not full, is sealed too: a sequence that continues it writes to the page itself, or to a copy of it.

Known pages without a holder stay until their memory is needed; the least recently released go first, and ends of texts
before their starts. They never keep a page from a sequence that runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from forge.kernels.paged import PAGE_TOKENS

PAGE: Final = PAGE_TOKENS
"""Tokens in a page."""

ROOT: Final = 0
"""The mark of the empty prefix of the live weights. Those of pinned versions are larger, and less than
`FIXED_ROOTS`."""

FIXED_ROOTS: Final = 1 << 30
"""The first of the marks of the empty prefix of adapters that no update concerns."""

ADAPTER_ROOTS: Final = 1 << 31
"""The first of the marks of the empty prefix of adapters on the live weights; all are less than `_SERIAL`."""

_SERIAL: Final = 1 << 32
"""A mark is a serial number times this, plus the mark of the empty prefix that its text begins with."""

LEAST_PARTIAL: Final = 4
"""The fewest tokens of a page for which it is continued or copied: fewer are computed sooner."""

_MOST_COMPARED: Final = 32
"""How many pages, at most, are compared with the rest of a text behind its full pages."""

Tokens = tuple[int, ...]


class OutOfPages(Exception):
    """There are fewer free pages than were asked for. Nothing was taken."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The computed prefix of a text.

    Attributes:
        pages: its full pages, which the caller holds now.
        mark: stands for the text up to their end; the next page is sealed behind it.
        source: a page whose first `num_partial` tokens are the next ones of the text; -1 for none. The caller does not
            hold it; `PagePool.claim` makes it, or a page to copy it to, the caller's own.
    """

    pages: list[int]
    mark: int
    source: int = -1
    num_partial: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.pages) * PAGE + self.num_partial


class PagePool:
    """The pages of one cache.

    Args:
        num_pages: how many there are.
        sharing: whether sealed pages are registered.
        copying: whether pages are copied where a text continues in the middle of one that another text needs. On a GPU
            computing a few tokens again takes less time.
    """

    def __init__(self, num_pages: int, *, sharing: bool = True, copying: bool = True) -> None:
        self.num_pages = num_pages
        self.is_sharing, self._copying = sharing, copying
        self._holders = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._known: dict[tuple[int, Tokens], tuple[int, int]] = {}
        self._key_of: dict[int, tuple[int, Tokens]] = {}
        self._behind: dict[tuple[int, int], dict[int, Tokens]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._next_mark = _SERIAL
        self._has_pinned = False

    @property
    def num_free(self) -> int:
        """Pages that can be taken, including known pages without a holder."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_free

    @property
    def num_retained(self) -> int:
        """Known pages without a holder: prefixes that are kept for requests to come."""
        return len(self._idle)

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

    def find(self, token_ids: Sequence[int], *, most: int, root: int = ROOT) -> Prefix:
        """Return the longest computed prefix of a text, of at most `most` tokens, and hold its full pages.

        `root` says which weights computed it.
        """
        pages: list[int] = []
        mark = root
        for start in range(0, most - PAGE + 1, PAGE):
            found = self._known.get((mark, tuple(token_ids[start : start + PAGE])))
            if found is None:
                break
            page, mark = found
            if self._holders[page] == 0:
                del self._idle[page]
            self._holders[page] += 1
            pages.append(page)
        start = len(pages) * PAGE
        source, num_partial = self._longest(mark, token_ids[start : min(start + PAGE, most)])
        return Prefix(pages, mark, source, num_partial)

    def _longest(self, mark: int, token_ids: Sequence[int]) -> tuple[int, int]:
        """Return the page behind a mark that has the most of these tokens in common, and how many; (-1, 0) for none."""
        best, most = -1, LEAST_PARTIAL - 1
        if len(token_ids) > most:
            candidates = self._behind.get((mark, token_ids[0]), {})
            for page in islice(reversed(candidates), _MOST_COMPARED):
                num = _num_common(candidates[page], token_ids)
                if num > most and (self._copying or self._may_continue(page, num)):
                    best, most = page, num
        return (best, most) if best >= 0 else (-1, 0)

    def _may_continue(self, page: int, num: int) -> bool:
        """Return whether a text that has `num` tokens in common with a page may write to the page itself."""
        return self._holders[page] == 0 and len(self._key_of[page][1]) == num < PAGE

    def claim(self, prefix: Prefix) -> tuple[int, bool]:
        """Return a page for the caller alone to continue `prefix.source` in, and whether to copy that page to it first.

        Call it right after `find`. The copy must be made before anything else is computed: the source may already be
        another's. A page that is continued stays known as far as it was; its new holder seals it again.
        """
        source = prefix.source
        if not self._may_continue(source, prefix.num_partial):
            return self.take(1)[0], True
        del self._idle[source]
        self._holders[source] = 1
        return source, False

    def seal(self, page: int, token_ids: Sequence[int], *, after: int) -> int:
        """Register a page by its tokens and the mark of the text before it. Return the mark at its end.

        If that text is known already the page stays the caller's own, and the known page's mark is returned. A page
        that is not full may be sealed again with more tokens; its end has no mark of its own.
        """
        if not self.is_sharing:
            return after
        key = (after, tuple(token_ids))
        if page in self._key_of:
            self._unregister(page)
        if len(token_ids) < PAGE:
            if len(token_ids) >= LEAST_PARTIAL and self._longest(after, token_ids)[1] < len(token_ids):
                self._register(page, key)
            return after
        known = self._known.get(key)
        if known is not None:
            return known[1]
        mark = self._next_mark + after % _SERIAL
        self._next_mark += _SERIAL
        self._known[key] = (page, mark)
        self._register(page, key)
        return mark

    def forget_live(self) -> None:
        """Forget the prefixes that the live weights computed, with any adapter, because they changed."""
        if not self._has_pinned:
            self.forget()
            return
        for page in [page for page, (after, _) in self._key_of.items() if _is_live(after)]:
            self._unregister(page)
            if page in self._idle:
                del self._idle[page]
                self._free.append(page)

    def forget(self) -> None:
        """Forget every computed prefix. Held pages stay with their holders."""
        self._free.extend(reversed(self._idle))
        self._idle.clear()
        self._known.clear()
        self._key_of.clear()
        self._behind.clear()
        self._has_pinned = False

    def _register(self, page: int, key: tuple[int, Tokens]) -> None:
        after, tokens = key
        self._has_pinned = self._has_pinned or not _is_live(after)
        self._key_of[page] = key
        self._behind.setdefault((after, tokens[0]), {})[page] = tokens

    def _unregister(self, page: int) -> None:
        key = self._key_of.pop(page)
        after, tokens = key
        if len(tokens) == PAGE:
            del self._known[key]
        siblings = self._behind[after, tokens[0]]
        del siblings[page]
        if not siblings:
            del self._behind[after, tokens[0]]

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._unregister(page)
        return page


def _is_live(mark: int) -> bool:
    """Return whether a text was computed by the live weights, or by an adapter on them."""
    root = mark % _SERIAL
    return root == ROOT or root >= ADAPTER_ROOTS


def _num_common(tokens: Tokens, others: Sequence[int]) -> int:
    """Return how many tokens two texts have in common at their start."""
    num = 0
    for one, other in zip(tokens, others, strict=False):
        if one != other:
            break
        num += 1
    return num
