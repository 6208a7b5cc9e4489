"""Make the venvs of foreign packages that tests use: environments, agents and evaluation harnesses of other projects.

Each is made once per machine, in the user's cache (see `forge.envs.external.venvs`). A package that cannot be installed
is named with the reason, and its tests are skipped; after one that finds no index the others are not tried.
"""

from __future__ import annotations

import concurrent.futures
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from foreign_packages import ALL
from forge.envs.external.venvs import VenvError, python_of

NUM_AT_ONCE = 2
_UNREACHABLE = ("Temporary failure in name resolution", "Network is unreachable", "Connection refused", "timed out")


def main() -> None:
    """Make what is missing, two at a time."""
    is_offline = threading.Event()

    def make(requirements: tuple[str, ...]) -> str:
        name = requirements[0]
        if is_offline.is_set():
            return f"{name}: not tried"
        began = time.monotonic()
        try:
            python_of(requirements)
        except VenvError as error:
            if any(reason in str(error) for reason in _UNREACHABLE):
                is_offline.set()
            return f"{name}: {str(error).splitlines()[-1]}"
        took = time.monotonic() - began
        return f"{name}: {took:.0f} s" if took > 1 else ""

    with concurrent.futures.ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        for line in pool.map(make, ALL):
            if line:
                print(f"foreign venv: {line}", flush=True)


if __name__ == "__main__":
    main()
