"""Rewards that tests of the loop use; the processes that score import them by name."""

from __future__ import annotations

import os
import signal
import time

from forge.types import Completion, Task


def even(prompt: Task, completion: Completion) -> float:
    """The part of tokens with an even id: something that every model can learn at once. A little more is added by the
    tokens, so that no two completions earn the same."""
    hair = sum(place * token for place, token in enumerate(completion.token_ids, start=1)) % 997
    return sum(token % 2 == 0 for token in completion.token_ids) / len(completion) + 1e-6 * hair


def constant(prompt: Task, completion: Completion) -> float:
    """No signal, ever."""
    return 1.0


def raises(prompt: Task, completion: Completion) -> float:
    """Fails on every completion, each time with another text."""
    raise LookupError(f"nothing is known of {sum(completion.token_ids)}")


def fails_sometimes(prompt: Task, completion: Completion) -> float:
    """Raises for about a quarter of completions."""
    if sum(completion.token_ids) % 4 == 0:
        raise ValueError("this completion cannot be scored")
    return even(prompt, completion)


def dies_sometimes(prompt: Task, completion: Completion) -> float:
    """Kills its own process for about a quarter of completions."""
    if sum(completion.token_ids) % 4 == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return even(prompt, completion)


def hangs_sometimes(prompt: Task, completion: Completion) -> float:
    """Never ends for about one completion in sixteen."""
    if sum(completion.token_ids) % 16 == 0:
        time.sleep(3600)
    return even(prompt, completion)
