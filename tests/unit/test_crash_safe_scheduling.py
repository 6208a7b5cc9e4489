"""Files of a worker that died before xdist noticed it run elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from crash_safe_scheduling import CrashSafeScheduling

TESTS = [f"test_{file}.py::test_{number}" for file in "abcd" for number in range(2)]


class Node:
    """What the scheduler uses of an xdist worker. A dead one refuses what is sent, as its pipe does."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.is_dead = self.shutting_down = False
        self.given: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        if self.is_dead:
            raise OSError("cannot send (already closed?)")
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_files_sent_to_a_dead_worker_run_on_another() -> None:
    option = SimpleNamespace(loadscopereorder=False)
    config: Any = SimpleNamespace(getvalue=lambda _: ["popen", "popen"], option=option)
    scheduler = CrashSafeScheduling(config)
    first, second = nodes = [Node("gw0"), Node("gw1")]
    for node in nodes:
        scheduler.add_node(node)  # type: ignore[arg-type]
        scheduler.add_node_collection(node, TESTS)  # type: ignore[arg-type]
    scheduler.schedule()
    assert (first.given, second.given) == ([0, 1, 4, 5], [2, 3, 6, 7])

    scheduler.workqueue["test_e.py"] = {"test_e.py::test_0": False}
    for node in nodes:
        node.shutting_down = False
        scheduler.registered_collections[node].append("test_e.py::test_0")  # type: ignore[index]
    first.is_dead = True
    scheduler.mark_test_complete(first, 0)  # type: ignore[arg-type]
    scheduler.mark_test_complete(first, 1)  # type: ignore[arg-type]
    assert scheduler.remove_node(first) == TESTS[4]  # type: ignore[arg-type]
    for index in (2, 3, 6):
        scheduler.mark_test_complete(second, index)  # type: ignore[arg-type]
    assert second.given == [2, 3, 6, 7, 5, 8]
