"""The pairs of orders.jsonl. Run it with `python -m pytest`."""

from __future__ import annotations

import json
import re
from pathlib import Path

FILE = next(folder / "orders.jsonl" for folder in Path(__file__).parents if (folder / "orders.jsonl").is_file())


def test_the_chosen_order_is_the_one_that_was_asked_for() -> None:
    for line in FILE.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        chosen, rejected = ([int(number) for number in record[key].split(", ")] for key in ("chosen", "rejected"))
        falling = "from large to small" in record["prompt"]
        assert sorted(map(int, re.findall(r"\d+", record["prompt"])), reverse=falling) == chosen
        assert sorted(rejected) == sorted(chosen)
        assert rejected != chosen
