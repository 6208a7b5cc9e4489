"""The order in which a run goes through its prompts."""

from __future__ import annotations

import hashlib
from typing import Protocol

from forge.data.mixing import Indices, derive, shuffled
from forge.types import Prompt

_EPOCHS_KEPT = 2


class Readable(Protocol):
    """Prompts by number, and what tells whether they are still the same."""

    digest: str

    def __len__(self) -> int: ...

    def read(self, index: int) -> Prompt: ...


class PromptOrder:
    """Prompts one after the other, without end: every epoch has each of them once, in an order of its own.

    The place in the order is a number that counts on over epochs, and a prompt is found by it alone. So there is no
    state: a run that goes on needs the next number, and may ask for those in between again. `digest` changes when any
    number could mean another prompt.
    """

    def __init__(self, book: Readable, *, seed: int, shuffle: bool = True) -> None:
        self.book = book
        self._seed = seed
        self._shuffle = shuffle
        self._orders: dict[int, Indices] = {}
        text = repr((book.digest, seed if shuffle else None))
        self.digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        """Prompts in an epoch."""
        return len(self.book)

    def at(self, number: int) -> tuple[int, Prompt]:
        """The epoch and the prompt of the number-th group; both count from 0."""
        epoch, index = self.place(number)
        return epoch, self.book.read(index)

    def place(self, number: int) -> tuple[int, int]:
        """The epoch, and the prompt's index in its book."""
        if number < 0:
            raise IndexError(f"prompts are numbered from 0, and {number} is below")
        epoch, turn = divmod(number, len(self.book))
        return epoch, int(self._order(epoch)[turn]) if self._shuffle else turn

    def _order(self, epoch: int) -> Indices:
        if epoch not in self._orders:
            self._orders[epoch] = shuffled(len(self.book), derive(self._seed, "prompts", epoch))
            for old in sorted(self._orders, key=lambda kept: abs(kept - epoch))[_EPOCHS_KEPT:]:
                del self._orders[old]
        return self._orders[epoch]
