"""Rewards that print and log."""

from __future__ import annotations

import logging
import os
import sys

from forge.types import Completion, Task
from grpo_rewards import even

_log = logging.getLogger("my.rewards")


def talking(prompt: Task, completion: Completion) -> float:
    """Say what there is to say once in each process, in every way that there is."""
    if "TALKED" not in os.environ:
        os.environ["TALKED"] = "1"
        print("printed by a reward", flush=True)
        print("to standard error by a reward", file=sys.stderr, flush=True)
        _log.debug("debugged by a reward")
        _log.info("logged by a reward")
        _log.warning("warned by a reward")
    return even(prompt, completion)
