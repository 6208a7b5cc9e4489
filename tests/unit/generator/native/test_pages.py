"""Who holds which page, and which beginnings are shared."""

from __future__ import annotations

import random

import pytest

from forge.generator.native.pages import ADAPTER_ROOTS, FIXED_ROOTS, PAGE, ROOT, OutOfPages, PagePool


def text(seed: int, num_pages: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000) for _ in range(num_pages * PAGE)]


def fill(pool: PagePool, ids: list[int], *, root: int = ROOT) -> list[int]:
    """Compute a text from its beginning, as a sequence does, and return its pages."""
    prefix = pool.find(ids, most=len(ids), root=root)
    shared, mark = len(prefix.pages), prefix.mark
    pages = prefix.pages + pool.take(len(ids) // PAGE - shared)
    for number in range(shared, len(pages)):
        mark = pool.seal(pages[number], ids[number * PAGE : (number + 1) * PAGE], after=mark)
    return pages


def test_pages_are_taken_once_and_come_back() -> None:
    pool = PagePool(4)
    first, second = pool.take(2), pool.take(2)
    assert sorted(first + second) == [0, 1, 2, 3]
    with pytest.raises(OutOfPages):
        pool.take(1)
    pool.release(first)
    assert pool.num_free == 2
    assert sorted(pool.take(2)) == sorted(first)


def test_an_update_forgets_what_adapters_computed_on_the_weights_that_changed() -> None:
    pool, ids = PagePool(16), text(1, 2)
    pinned, fixed = 1, FIXED_ROOTS + 3
    roots = (ROOT, pinned, fixed, ADAPTER_ROOTS, ADAPTER_ROOTS + 5)
    for root in roots:
        pool.release(fill(pool, ids, root=root))
    assert pool.num_retained == 2 * len(roots), "every adapter has prefixes of its own"
    pool.forget_live()
    known = []
    for root in roots:
        prefix = pool.find(ids, most=len(ids), root=root)
        pool.release(prefix.pages)
        known += [root] if prefix.pages else []
    assert known == [pinned, fixed]


def test_too_many_pages_take_none() -> None:
    pool = PagePool(4)
    pool.take(1)
    with pytest.raises(OutOfPages, match="4 pages asked for, 3 of 4 free"):
        pool.take(4)
    assert pool.num_free == 3


def test_a_text_that_begins_alike_takes_the_pages_that_are_there() -> None:
    pool = PagePool(8)
    ids = text(1, 3)
    pages = fill(pool, ids)
    other = ids[: 2 * PAGE] + text(2, 1)
    found = pool.find(other, most=len(other))
    assert found.pages == pages[:2]
    assert pool.num_held == 3


def test_most_bounds_what_is_found() -> None:
    pool = PagePool(8)
    ids = text(1, 3)
    pages = fill(pool, ids)
    assert pool.find(ids, most=len(ids) - 1).pages == pages[:2]
    assert pool.find(ids, most=PAGE - 1).pages == []


def test_the_same_tokens_after_another_beginning_are_another_text() -> None:
    pool = PagePool(8)
    middle = text(5, 1)
    fill(pool, text(1, 1) + middle)
    other = text(2, 1) + middle
    assert pool.find(other, most=len(other)).pages == []


def test_pages_that_nobody_holds_are_remembered_until_they_are_needed() -> None:
    pool = PagePool(4)
    ids = text(1, 2)
    pages = fill(pool, ids)
    pool.release(pages)
    assert pool.num_free == 4
    assert pool.find(ids, most=len(ids)).pages == pages
    pool.release(pages)
    pool.take(3)  # two were never used; the end of the text goes before its beginning
    assert pool.find(ids, most=len(ids)).pages == pages[:1]


def test_what_was_let_go_of_first_goes_first() -> None:
    pool = PagePool(2)
    old, new = text(1, 1), text(2, 1)
    old_pages, new_pages = fill(pool, old), fill(pool, new)
    pool.release(old_pages)
    pool.release(new_pages)
    pool.take(1)
    assert pool.find(old, most=PAGE).pages == []
    assert pool.find(new, most=PAGE).pages == new_pages


def test_shared_pages_stay_while_anybody_holds_them() -> None:
    pool = PagePool(3)
    ids = text(1, 2)
    pages = fill(pool, ids)
    again = pool.find(ids, most=len(ids)).pages
    pool.release(pages)
    assert pool.num_free == 1
    pool.release(again)
    assert pool.num_free == 3


def test_forgetting_keeps_what_is_held_and_shares_nothing_old() -> None:
    pool = PagePool(4)
    held, idle = text(1, 1), text(2, 1)
    held_pages = fill(pool, held)
    pool.release(fill(pool, idle))
    pool.forget()
    assert pool.find(held, most=PAGE).pages == []
    assert pool.find(idle, most=PAGE).pages == []
    assert pool.num_held == 1
    pool.release(held_pages)
    assert sorted(pool.take(4)) == [0, 1, 2, 3]


def test_without_sharing_nothing_is_found() -> None:
    pool = PagePool(4, sharing=False)
    ids = text(1, 2)
    fill(pool, ids)
    assert pool.find(ids, most=len(ids)).pages == []


def test_a_page_let_go_of_twice_is_a_bug_that_shows() -> None:
    pool = PagePool(2)
    pages = pool.take(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(pages)


# ---- Pages that are not full -------------------------------------------------------------------------------------


def sealed_part(pool: PagePool, ids: list[int]) -> int:
    """Compute a text within one page and end it there. Return its page."""
    (page,) = pool.take(1)
    pool.seal(page, ids, after=0)
    pool.release([page])
    return page


def test_the_last_page_of_a_text_is_continued_in_place() -> None:
    pool = PagePool(2)
    ids = text(1, 1)
    page = sealed_part(pool, ids[:9])
    prefix = pool.find(ids, most=PAGE)
    assert (prefix.pages, prefix.source, prefix.num_partial, prefix.num_tokens) == ([], page, 9, 9)
    assert pool.num_held == 0, "it is not held before it is claimed"
    assert pool.claim(prefix) == (page, False)
    assert (pool.num_held, pool.num_retained) == (1, 0)
    assert pool.find(ids, most=PAGE).num_partial == 9, "others may copy it"
    pool.seal(page, ids, after=0)
    assert pool.find(ids, most=PAGE).pages == [page]


@pytest.mark.parametrize("num", [4, 8])
def test_a_page_that_another_text_needs_is_copied(num: int) -> None:
    pool = PagePool(3)
    ids = text(1, 1)
    page = sealed_part(pool, ids[:9])
    branch = ids[:num] + text(2, 1)[num:]
    prefix = pool.find(branch, most=PAGE)
    assert (prefix.source, prefix.num_partial) == (page, num)
    copy, is_copy = pool.claim(prefix)
    assert is_copy
    assert copy != page
    assert pool.find(ids, most=PAGE).num_partial == 9, "the first text is still there"


def test_a_full_page_is_copied_for_a_text_that_ends_in_it() -> None:
    pool = PagePool(2)
    ids = text(1, 1)
    (page,) = fill(pool, ids)
    prefix = pool.find(ids, most=PAGE - 1)
    assert (prefix.pages, prefix.source, prefix.num_partial) == ([], page, PAGE - 1)
    assert pool.claim(prefix)[1]


def test_without_copying_only_whole_ends_that_nobody_holds_are_continued() -> None:
    pool = PagePool(4, copying=False)
    ids = text(1, 1)
    page = sealed_part(pool, ids[:9])
    assert pool.find(ids[:8] + text(2, 1)[8:], most=PAGE).num_tokens == 0
    prefix = pool.find(ids, most=PAGE)
    assert pool.claim(prefix) == (page, False)
    assert pool.find(ids, most=PAGE).num_tokens == 0


def test_a_few_tokens_are_not_worth_a_page() -> None:
    pool = PagePool(2)
    ids = text(1, 1)
    sealed_part(pool, ids[:3])
    assert pool.find(ids, most=PAGE).num_tokens == 0
    assert pool.num_retained == 0


def test_an_end_that_is_known_already_is_not_kept_twice() -> None:
    pool = PagePool(4)
    ids = text(1, 1)
    sealed_part(pool, ids[:9])
    sealed_part(pool, ids[:7])
    assert pool.num_retained == 1
    sealed_part(pool, ids[:12])
    assert pool.find(ids, most=PAGE).num_partial == 12


def test_pages_that_are_not_full_are_evicted_and_forgotten_like_others() -> None:
    pool = PagePool(2)
    ids, other = text(1, 1), text(2, 1)
    sealed_part(pool, ids[:9])
    sealed_part(pool, other[:9])
    (taken,) = pool.take(1)
    assert [pool.find(each, most=PAGE).num_partial for each in (ids, other)] == [0, 9]
    pool.forget()
    assert pool.find(other, most=PAGE).num_partial == 0
    pool.release([taken])
    assert sorted(pool.take(2)) == [0, 1]


def test_a_source_may_become_the_copy() -> None:
    """With no other page left the source is evicted, and is already what it would be copied to."""
    pool = PagePool(2)
    ids = text(1, 1)
    page = sealed_part(pool, ids[:9])
    pool.take(1)
    assert pool.claim(pool.find(ids[:8] + text(2, 1)[8:], most=PAGE)) == (page, True)


def test_random_use_never_gives_a_page_to_two_texts() -> None:
    draw = random.Random(7)
    pool = PagePool(12)
    texts = [text(seed, 4) for seed in range(3)]
    texts += [one[: 2 * PAGE] + text(100 + number, 2) for number, one in enumerate(texts)]
    meaning: dict[int, tuple[int, ...]] = {}
    held: list[list[int]] = []
    for _ in range(2000):
        if held and (pool.num_free < 4 or draw.random() < 0.4):
            pool.release(held.pop(draw.randrange(len(held))))
            continue
        if draw.random() < 0.02:
            pool.forget()
        ids = draw.choice(texts)[: draw.randrange(1, 5) * PAGE]
        found = pool.find(ids, most=len(ids)).pages
        for number, page in enumerate(found):
            assert meaning[page] == tuple(ids[: (number + 1) * PAGE])
        pool.release(found)
        if pool.num_free < len(ids) // PAGE:
            continue
        pages = fill(pool, ids)
        for number, page in enumerate(pages):
            meaning[page] = tuple(ids[: (number + 1) * PAGE])
        held.append(pages)
        flat = [page for pages in held for page in set(pages)]
        for page in set(flat):
            owners = {meaning[page] for pages in held if page in pages}
            assert len(owners) == 1
    for pages in held:
        pool.release(pages)
    assert pool.num_free == 12
