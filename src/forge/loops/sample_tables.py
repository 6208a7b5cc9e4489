"""A few rollouts as a table, for trackers that show tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from forge.observe.sink import Table
from forge.rollout.record import spread
from forge.types import Episode, Group

COLUMNS: Final = ("group", "prompt", "answer", "reward", "tokens", "version")
MOST_CHARACTERS: Final = 2000
"""Of a prompt or an answer. A longer one has its end, where the answer is."""


def sample_table(groups: Sequence[Group], limit: int) -> Table:
    """Return at most `limit` episodes, one of each group, evenly over all groups: of an evaluation the same prompts
    every time."""
    rows = [_row(group.number, group.episodes[0]) for group in spread(groups, limit) if group.episodes]
    return Table(COLUMNS, rows)


def _row(number: int, episode: Episode) -> list[float | int | str]:
    task = episode.task
    prompt = task.text if task.text is not None else json.dumps([dict(each) for each in task.messages], default=str)
    versions = [span.version for turn in episode.turns for span in turn.versions]
    return [
        number,
        _cut(prompt),
        _cut(episode.text),
        float(episode.score.reward),
        episode.num_tokens,
        max(versions, default=-1),
    ]


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"…{text[1 - MOST_CHARACTERS :]}"
