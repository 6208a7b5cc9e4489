"""The task of boxes.py without a model: scripted answers take its place. Run it with `python -m pytest`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from boxes import call, look, write_files

from forge import Task
from forge.testing import play

ASKED = {"role": "user", "content": "Look at 3 and 7. What is in the last?"}
TASK = Task("1", messages=(ASKED,), answer="52", metadata={"numbers": [10, 11, 12, 13, 14, 15, 16, 52, 18, 19]})


def reward(*answers: str) -> float:
    return asyncio.run(play(look, answers, task=TASK, tool_format="json")).score.reward


def test_the_tool_has_the_answer() -> None:
    assert reward(call(7)["content"], "It is 52.") == 1.0


def test_a_guess_and_the_number_of_the_other_box_are_wrong() -> None:
    assert reward("It is 77.") == 0.0
    assert reward(call(3)["content"], "It is 13.") == 0.0


def test_held_out_questions_are_not_trained_on(tmp_path: Path) -> None:
    folder = write_files(tmp_path, seed=1)
    asked = {name: {_question(line) for line in (folder / name).open()} for name in ("prompts.jsonl", "heldout.jsonl")}
    assert asked["prompts.jsonl"]
    assert asked["heldout.jsonl"]
    assert not asked["prompts.jsonl"] & asked["heldout.jsonl"]


def _question(line: str) -> str:
    return str(json.loads(line)["messages"][0]["content"])
