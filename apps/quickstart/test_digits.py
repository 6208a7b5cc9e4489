"""The task of digits.py without a model. Run it with `python -m pytest`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from digits import write_task


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_answers_are_right(tmp_path: Path) -> None:
    for record in records(write_task(tmp_path, seed=1) / "prompts.jsonl"):
        *_, word, _, a, b, c, d = record["prompt"].rstrip("?").split()
        assert record["answer"] == {"largest": max, "smallest": min}[word]((a, b, c, d))


def test_held_out_questions_are_not_trained_on(tmp_path: Path) -> None:
    folder = write_task(tmp_path, seed=1)
    asked, heldout = (
        {record["prompt"] for record in records(folder / f"{name}.jsonl")} for name in ("prompts", "heldout")
    )
    assert asked
    assert heldout
    assert not asked & heldout
