"""The task of apps/diagnosis: the quick start's questions, for a model that sometimes names more digits than one.

demonstrations.jsonl   every training question four times. An answer begins with each of its digits once; one in
                       five names others, too: `The answer is 7 or 4.` They show how answers are written, and not
                       which is right.
prompts.jsonl          the training questions with their answers.
heldout.jsonl          questions that are in neither of the other files.
few.jsonl              the first 16 of the training questions.

python apps/diagnosis/task.py FOLDER [SEED]
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))

from digits import write_task

NUM_NAMED = (1, 2, 3, 4)
WEIGHTS = (0.80, 0.12, 0.05, 0.03)
"""How many digits an answer names, and how often."""
NUM_FEW = 16


def write_files(folder: Path, *, seed: int = 0) -> Path:
    """Write the four files into a folder, which is made, and return it."""
    write_task(folder, seed=seed)
    prompts = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "few.jsonl").write_text("".join(prompts[:NUM_FEW]), encoding="utf-8")
    shown = (folder / "demonstrations.jsonl").read_text(encoding="utf-8").splitlines()
    rng = random.Random(seed)
    lines = [json.dumps(_with_more_digits(json.loads(line), rng)) + "\n" for line in shown]
    (folder / "demonstrations.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def _with_more_digits(record: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    question, answer = record["messages"]
    digits = question["content"].removesuffix("?").split()[-4:]
    named = answer["content"].removesuffix(".")[-1]
    others = [digit for digit in digits if digit != named]
    rng.shuffle(others)
    (count,) = rng.choices(NUM_NAMED, WEIGHTS)
    return {"messages": [question, {"role": "assistant", "content": _answer([named, *others][:count])}]}


def _answer(digits: Sequence[str]) -> str:
    return f"The answer is {' or '.join(digits)}."


if __name__ == "__main__":
    print(write_files(Path(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0))
