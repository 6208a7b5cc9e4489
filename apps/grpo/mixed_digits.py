"""Prompts of mixed difficulty from the quick start's task: most of them teach nothing.

100 questions as they are; 300 with an answer that no completion can give, as broken labels are; and 100 that every
completion answers right: four times the same digit. Each has a `level`: 0 for too easy, 1 as it is, 2 for impossible.

python apps/grpo/mixed_digits.py runs/quickstart/task [SEED]
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

NUM_USEFUL, NUM_IMPOSSIBLE, NUM_EASY = 100, 300, 100


def write_mixed(folder: Path, *, seed: int = 0) -> Path:
    """Write mixed.jsonl beside prompts.jsonl, and return its path."""
    records = [json.loads(line) for line in (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    useful = [{**record, "level": 1} for record in records[:NUM_USEFUL]]
    others = records[NUM_USEFUL : NUM_USEFUL + NUM_IMPOSSIBLE]
    impossible = [{**record, "answer": "none of them", "level": 2} for record in others]
    mixed = [*useful, *impossible, *(_easy(number) for number in range(NUM_EASY))]
    random.Random(seed).shuffle(mixed)
    path = folder / "mixed.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in mixed), encoding="utf-8")
    return path


def _easy(number: int) -> dict[str, object]:
    digit, word = str(number % 10), ("largest", "smallest")[number // 10 % 2]
    return {"prompt": f"Which is the {word} of {' '.join([digit] * 4)}?", "answer": digit, "level": 0}


if __name__ == "__main__":
    print(write_mixed(Path(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0))
