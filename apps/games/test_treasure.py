"""The game of treasure.py without a model: scripted moves take its place. Run it with `python -m pytest`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from treasure import ILLEGAL, hunt, shown, write_files

from forge import Task
from forge.envs.episode import EpisodeRun
from forge.testing import play

WAY = (2, -1)
TASK = Task("1", messages=(shown(WAY),), metadata={"way": WAY})


def walk(*moves: str) -> EpisodeRun:
    return asyncio.run(play(hunt, moves, task=TASK))


def test_walking_to_the_treasure_finds_it() -> None:
    run = walk("down", "right", "right")
    assert run.score.parts["found"] == 1.0
    assert run.score.parts["closer"] == pytest.approx(0.6)


def test_walking_away_does_not() -> None:
    assert walk("left", "left", "left", "left", "left").score.parts["found"] == 0.0


def test_an_answer_that_is_not_a_move_ends_the_game() -> None:
    run = walk("sit")
    assert (len(run.turns), run.score.parts["illegal"]) == (1, ILLEGAL)


def test_held_out_starts_are_not_trained_on(tmp_path: Path) -> None:
    folder = write_files(tmp_path, seed=1)
    ways = {name: {_way(line) for line in (folder / name).open()} for name in ("prompts.jsonl", "heldout.jsonl")}
    assert ways["prompts.jsonl"]
    assert ways["heldout.jsonl"]
    assert not ways["prompts.jsonl"] & ways["heldout.jsonl"]


def _way(line: str) -> tuple[int, ...]:
    return tuple(json.loads(line)["way"])
