"""`make test` ends, and a crash or a hang is one failed test.

Small suites run as `make test` runs ours: the same program, the same pyproject.toml, the same plugin.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 200
"""Of a small suite, which takes a few seconds."""

THREE = "def test_a(): pass\ndef test_b(): pass\ndef test_c(): pass\n"


@pytest.fixture
def suite(tmp_path: Path) -> Iterator[Suite]:
    made = Suite(tmp_path)
    yield made
    for process in made.left():
        process.kill()


class Suite:
    """Test files in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, name: str, text: str) -> None:
        (self.folder / f"test_{name}.py").write_text(textwrap.dedent(text))

    def run(self, *options: str, limit_s: float = LIMIT_S) -> Outcome:
        command = [sys.executable, str(ROOT / "scripts" / "run_tests.py"), "--limit-s", str(limit_s), *options]
        command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(self.folder), str(self.folder)]
        for plugin in ("xdist.plugin", "bounded_tests", "no:cacheprovider"):
            command += ["-p", plugin]
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        env |= {
            "PYTHONPATH": str(ROOT / "tests" / "support"),
            "FORGE_SUITE": str(self.folder),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        ended = subprocess.run(
            command, env=env, cwd=self.folder, capture_output=True, text=True, timeout=2 * LIMIT_S, check=False
        )
        return Outcome(ended.returncode, ended.stdout + ended.stderr)

    def left(self) -> list[psutil.Process]:
        """The processes of a run that still live."""
        return [process for process in psutil.process_iter() if self._is_of_run(process)]

    def _is_of_run(self, process: psutil.Process) -> bool:
        try:
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            return is_alive and process.environ().get("FORGE_SUITE") == str(self.folder)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False


class Outcome:
    """The exit status of a run, what it printed, and what it counted."""

    def __init__(self, status: int, text: str) -> None:
        self.status, self.text = status, text
        last = next((line for line in reversed(text.splitlines()) if re.search(r"\d+ (passed|failed)", line)), "")
        self.counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|error)", last)}

    @property
    def failed(self) -> set[str]:
        """The tests that failed, and how often each is named says how often it did."""
        names = re.findall(r"^FAILED \S*?(\w+\.py::\w+)", self.text, re.MULTILINE)
        assert len(names) == len(set(names)), f"failed more than once: {names}"
        return set(names)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_crash_is_one_failed_test(suite: Suite, num_workers: int) -> None:
    """Also after files that the dead worker had completed: xdist's own scheduler hangs or runs tests again here."""
    for name in "abcd":
        suite.file(name, THREE)
    suite.file("e", "import os\ndef test_dies(): os._exit(3)\ndef test_after(): pass\n")
    suite.file("f", "import os, signal\ndef test_dies(): os.kill(os.getpid(), signal.SIGILL)\n")
    suite.file("g", "import ctypes\ndef test_before(): pass\ndef test_dies(): ctypes.string_at(0)\n")
    outcome = suite.run("-n", str(num_workers))
    assert outcome.failed == {"test_e.py::test_dies", "test_f.py::test_dies", "test_g.py::test_dies"}, outcome.text
    assert (outcome.status, outcome.counts) == (1, {"failed": 3, "passed": 14})
    for how in ("exit status 3", "killed by SIGILL", "killed by SIGSEGV"):
        assert how in outcome.text
    assert suite.left() == []


def test_more_crashes_than_workers_may_be_replaced_by_default(suite: Suite) -> None:
    suite.file("a", "\n".join(f"import os\ndef test_{number}(): os._exit(1)" for number in range(5)))
    suite.file("b", THREE)
    outcome = suite.run("-n", "1")
    assert (outcome.status, outcome.counts) == (1, {"failed": 5, "passed": 3}), outcome.text


def test_what_a_dead_worker_started_ends_with_it(suite: Suite) -> None:
    """A forked child keeps the worker's pipe open: until that is closed, xdist does not notice the worker's death."""
    suite.file(
        "a",
        """
        import os, subprocess, time

        def test_forks():
            if os.fork() == 0:
                time.sleep(10_000)
            subprocess.Popen(["sleep", "10000"], start_new_session=True)
            subprocess.Popen(["sleep", "10000"], env={})
            os._exit(1)

        def test_is_alone():
            import psutil
            assert psutil.Process().children() == []
        """,
    )
    outcome = suite.run("-n", "1")
    assert outcome.failed == {"test_a.py::test_forks"}, outcome.text
    assert (outcome.status, outcome.counts) == (1, {"failed": 1, "passed": 1})
    assert "killed a process that was left" not in outcome.text, "the worker's death has ended them"
    assert suite.left() == []


def test_a_hang_is_one_failed_test(suite: Suite) -> None:
    """In the test, in C code that holds the GIL, in set-up, in tear-down, and in the tear-down of a failed test."""
    suite.file("a", "import time\ndef test_hangs(): time.sleep(10_000)\ndef test_after(): pass\n")
    suite.file("b", "import ctypes\ndef test_hangs(): ctypes.PyDLL(None).sleep(10_000)\ndef test_after(): pass\n")
    for name, before, after, holds in (
        ("c", "time.sleep(10_000)", "", "True"),
        ("d", "", "time.sleep(10_000)", "True"),
        ("e", "", "time.sleep(10_000)", "False"),
    ):
        suite.file(
            name,
            f"""
            import pytest, time

            @pytest.fixture
            def slow():
                {before or "pass"}
                yield
                {after or "pass"}

            def test_hangs(slow):
                assert {holds}

            def test_after():
                pass
            """,
        )
    outcome = suite.run("-n", "5", "-o", "test_limit_s=12")
    assert set(re.findall(r"crashed while running '\S*?(\w+\.py)::test_hangs'", outcome.text)) == {
        f"test_{name}.py" for name in "abcde"
    }, outcome.text
    assert "Timeout (0:00:12)!" in outcome.text
    assert "in test_hangs" in outcome.text
    # d has passed and e has failed before its tear-down hung, which is one more failure of each
    assert (outcome.status, outcome.counts) == (1, {"failed": 6, "passed": 6})
    assert suite.left() == []


def test_a_crash_while_tests_are_collected_ends_the_run(suite: Suite) -> None:
    suite.file("a", THREE)
    suite.file("b", "import os\nos._exit(3)\n")
    outcome = suite.run("-n", "2")
    assert outcome.status not in (0, 5), outcome.text
    assert re.search(r"Worker gw\d died while it collected the tests \(exit status 3", outcome.text)
    assert suite.left() == []


def test_a_run_that_does_not_end_is_stopped(suite: Suite) -> None:
    suite.file(
        "a",
        """
        import subprocess, time

        def test_hangs():
            subprocess.Popen(["sleep", "10000"], start_new_session=True)
            time.sleep(10_000)
        """,
    )
    outcome = suite.run("-n", "1", limit_s=8)
    assert outcome.status == 124, outcome.text
    assert "run_tests: failed: the run did not end within 8 s" in outcome.text
    assert suite.left() == []


def test_every_target_runs_pytest_through_the_bounded_runner() -> None:
    """The coverage target runs in one process, and each of its tests has the limit of `pyproject.toml`."""
    recipes = (ROOT / "Makefile").read_text()
    assert recipes.count("-m pytest") == recipes.count("-m coverage run -m pytest") == 1
    assert recipes.count("scripts/run_tests.py --limit-s") == 3
