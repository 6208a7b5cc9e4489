"""The runners of a model and of the one that drafts for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forge.generator.native.runner import ModelRunner


class Runners:
    """Runners whose caches have the same pages: what happens to a page, or to the memory, happens to all."""

    def __init__(self, *runners: ModelRunner | None) -> None:
        self._all = [runner for runner in runners if runner is not None]

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages of the caches, each from the first to the second of a pair."""
        for runner in self._all:
            runner.copy_pages(pairs)

    def release(self) -> None:
        """Release caches and weights."""
        for runner in self._all:
            runner.release()

    def restore(self) -> None:
        """Undo `release`; the caches are empty. If there is too little memory, nothing changes."""
        self._for_all(ModelRunner.restore, undo=ModelRunner.release)

    def release_cache(self) -> None:
        """Release the caches."""
        for runner in self._all:
            runner.release_cache()

    def allocate_cache(self) -> None:
        """Undo `release_cache`; the caches are empty. If there is too little memory, nothing changes."""
        self._for_all(ModelRunner.allocate_cache, undo=ModelRunner.release_cache)

    def _for_all(self, do: Callable[[ModelRunner], object], *, undo: Callable[[ModelRunner], object]) -> None:
        done: list[ModelRunner] = []
        try:
            for runner in self._all:
                do(runner)
                done.append(runner)
        except BaseException:
            for runner in done:
                undo(runner)
            raise
