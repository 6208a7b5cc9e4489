"""How pytest-xdist spreads files over workers, some of which crash.

The scheduler of xdist 3.8 for `--dist loadfile` returns all files of a dead worker to its queue: with the test that
crashed, which runs again, and with completed files, which leave a new worker without a test. Work is assigned when a
worker has completed a test, so such a worker waits for ever, and the run with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class CrashSafeScheduling(LoadFileScheduling):
    """Gives each worker whole files. When a worker dies, another continues after the test that it died in."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._unreachable: set[WorkerController] = set()

    def remove_node(self, node: WorkerController) -> str | None:
        files = self.assigned_work.pop(node)
        pending = [(file, test) for file, tests in files.items() for test, is_done in tests.items() if not is_done]
        if not pending:
            return None
        file, test = pending[0]
        files[file][test] = True
        self.workqueue.update({file: tests for file, tests in files.items() if not all(tests.values())})
        for other in self.nodes:
            self._reschedule(other)
        return test

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        super().add_node_collection(node, collection)
        if node not in self.registered_collections:
            pytest.exit(f"Worker {node.gateway.id} replaces a dead one and collected other tests.", returncode=3)

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Send a file to a worker. One that died unnoticed keeps the file until `remove_node` returns it."""
        try:
            super()._assign_work_unit(node)
        except OSError:
            self._unreachable.add(node)

    def _reschedule(self, node: WorkerController) -> None:
        """Assign files until the worker has three tests to run: it keeps the last one until it knows the next."""
        while node in self.registered_collections and not node.shutting_down and node not in self._unreachable:
            if self.workqueue and self._pending_of(self.assigned_work[node]) > 2:
                return
            super()._reschedule(node)
