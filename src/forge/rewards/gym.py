"""The reward `reasoning_gym`: the package's own verdict on its own tasks."""

from __future__ import annotations

import importlib
import json
from functools import lru_cache
from typing import Any

from forge.errors import ConfigError, DataError
from forge.rewards.catalog import checks
from forge.rewards.regions import Take, answer_text, needed_metadata
from forge.types import Answer, Task


def reasoning_gym(
    prompt: Task,
    completion: Answer,
    *,
    take: Take = "all",
    within: str | None = None,
    partial: bool = True,
) -> float:
    """What reasoning-gym's own `score_answer` says of the answer, for prompts of the tasks `reasoning_gym/NAME`.

    Many of its tasks give a little for any answer, and more for one that has the right one in it; `partial: false`
    counts only a full score. `take` and `within` say which part of the completion is the answer, as for `exact`. Needs
    the extra `reasoning-gym`.
    """
    task = needed_metadata(prompt, "source_dataset", reward="reasoning_gym")
    details = needed_metadata(prompt, "reasoning_gym", reward="reasoning_gym")
    answer = answer_text(completion.text, within=within, take=take)
    if answer is None or not answer.strip():
        return 0.0
    entry = {"question": details["question"], "answer": prompt.answer, "metadata": dict(prompt.metadata)}
    dataset = _dataset(task, json.dumps(details.get("args", {}), sort_keys=True))
    score = float(dataset.score_answer(answer=answer.strip(), entry=entry))
    return score if partial else float(score >= 1.0)


@lru_cache(maxsize=64)
def _dataset(task: str, args: str) -> Any:
    """The task's object, which scores. It is kept: making it may read word lists."""
    gym = check_installed()
    try:
        return gym.create_dataset(task, seed=0, size=1, **json.loads(args))
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(
            f"reasoning-gym cannot make the task {task!r} again: {error}",
            path=f"reasoning_gym/{task}",
            value=args,
            rule="the task and its arguments must be those that made the prompt",
            repair="use the version of reasoning-gym that the prompts were made with",
        ) from error


@checks(reasoning_gym)
def check_installed(args: object = None) -> Any:
    """The package, or an error that says how to get it."""
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError(
            f"The package reasoning-gym cannot be imported: {error}",
            path="kind",
            value="reasoning_gym",
            rule="the reward `reasoning_gym` needs that package",
            repair="pip install 'torchforge[reasoning-gym]'",
        ) from error
