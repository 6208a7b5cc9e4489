"""reasoning-gym for tests, with a task that fails in all ways.

It runs in our own process, so the packages of its venv are found after ours, as with the extra, until they are let go.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import foreign_packages
from external_envs import Integration, Script, Unavailable, venv_or_unavailable
from forge import Task
from forge.envs.environment import load_program
from forge.envs.episode import EpisodeProgram

REQUIREMENTS = foreign_packages.REASONING_GYM
TROUBLED = "forge_troubled"
_ENTERED = contextlib.ExitStack()


def _is_below(module: object, folder: str) -> bool:
    known: dict[str, Any] = getattr(module, "__dict__", {})  # an attribute of some modules would start an import
    return any(str(place).startswith(folder) for place in (known.get("__file__"), *known.get("__path__", ())))


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Make reasoning-gym importable where it is not."""
    if importlib.util.find_spec("reasoning_gym") is not None:
        yield
        return
    (packages,) = venv_or_unavailable(REQUIREMENTS).parents[1].glob("lib/python*/site-packages")
    sys.path.append(str(packages))
    importlib.invalidate_caches()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the syntax of its dependencies
            importlib.import_module("reasoning_gym")
        yield
    finally:
        sys.path.remove(str(packages))
        for name in [name for name, module in list(sys.modules.items()) if _is_below(module, f"{packages}/")]:
            del sys.modules[name]
        rewards = sys.modules.get("forge.rewards.gym")
        if rewards is not None:
            rewards._dataset.cache_clear()


def _register() -> None:
    """Register the task that fails, once in a process."""
    factory: Any = importlib.import_module("reasoning_gym.factory")
    if TROUBLED in factory.DATASETS:
        return
    known, config = factory.DATASETS["chain_sum"]

    class Troubled(known):  # type: ignore[misc]
        def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
            if answer == "crash":
                raise SystemExit(3)
            while answer == "hang":
                time.sleep(0.1)
            return float("nan") if answer == "violation" else float(answer == entry["answer"])

    factory.DATASETS[TROUBLED] = (Troubled, config)


async def _open() -> EpisodeProgram:
    try:
        await asyncio.to_thread(_ENTERED.enter_context, importable())
    except ImportError as error:
        raise Unavailable(f"reasoning-gym cannot be imported: {error}") from error
    _register()
    return load_program("reasoning_gym", {"attempts": 3})


async def _close() -> None:
    _ENTERED.close()


def _trouble(word: str, kind: str, **args: Any) -> Script:
    return Script(("1", word), fault=f"reasoning_gym_{kind}", args=args)


REASONING_GYM = Integration(
    "reasoning-gym",
    open=_open,
    task=Task(
        "sum:1",
        text="What is 2 + 3?",
        answer="5",
        metadata={"source_dataset": TROUBLED, "reasoning_gym": {"question": "What is 2 + 3?", "args": {}}},
    ),
    good=Script(("I think it is six.", "5"), reward=1.0),
    bad=Script(("6", "7", "8"), reward=0.0),
    troubles={
        "crash": _trouble("crash", "error"),
        "hang": _trouble("hang", "timeout", score_timeout_s=2.0),
        "flood": "the policy reads nothing from the task after its question",
        "violation": _trouble("violation", "schema"),
    },
    close=_close,
)
