"""The data of sums.jsonl. Run it with `python -m pytest`."""

from __future__ import annotations

import json
import re
from pathlib import Path

FILE = next(folder / "sums.jsonl" for folder in Path(__file__).parents if (folder / "sums.jsonl").is_file())


def test_every_answer_is_right() -> None:
    for line in FILE.read_text(encoding="utf-8").splitlines():
        question, answer = (turn["content"] for turn in json.loads(line)["messages"])
        left, sign, right, result = re.findall(r"\d+|[+-]", answer)
        assert re.findall(r"\d+", question) == [left, right]
        assert int(result) == (int(left) + int(right) if sign == "+" else int(left) - int(right))
