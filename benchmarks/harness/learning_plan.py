"""What `learning_gpu.py` trains: tasks of reasoning-gym with short numeric answers, and the reward of both sides.

Only the standard library is imported at the top: this file also runs in TRL's environment. `write_tasks` needs the
package `reasoning-gym`; files that are there already are used as they are, so that a machine without it can run them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NUM_TRAIN, NUM_HELDOUT = 2000, 128
SUFFIX = "\nAnswer with the number only."
TASKS: Mapping[str, Mapping[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 40},
}
"""Tasks by their names in reasoning-gym, and how they are configured."""
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def is_solved(text: str, answer: str) -> float:
    """Return 1 if the last number of the text is the answer, else 0."""
    found = NUMBER.findall(text.replace(",", ""))
    return float(bool(found) and found[-1] == answer)


def reward(task: Any, completion: Any) -> float:
    """Score a completion as our rewards are called: `harness.learning_plan:reward`."""
    return is_solved(completion.text, task.answer)


def write_tasks(folder: Path, names: list[str]) -> None:
    """Write the questions of each task into `folder/NAME`, unless they are there. No held-out one is trained on."""
    for name in names:
        place = folder / name
        if (place / "prompts.jsonl").exists() and (place / "heldout.jsonl").exists():
            continue
        import reasoning_gym

        # Small tasks repeat questions, also with their numbers in another order: each is kept once.
        dataset = reasoning_gym.create_dataset(name, size=4 * (NUM_TRAIN + NUM_HELDOUT), seed=0, **TASKS[name])
        entries = [dataset[at] for at in range(len(dataset))]
        questions = {(*sorted(NUMBER.findall(entry["question"])), entry["answer"]): entry for entry in entries}
        records = [
            json.dumps({"prompt": entry["question"] + SUFFIX, "answer": entry["answer"]})
            for entry in questions.values()
        ]
        num_heldout = min(NUM_HELDOUT, len(records) // 4)
        place.mkdir(parents=True, exist_ok=True)
        (place / "heldout.jsonl").write_text("\n".join(records[:num_heldout]) + "\n", encoding="utf-8")
        chosen = records[num_heldout : num_heldout + NUM_TRAIN]
        (place / "prompts.jsonl").write_text("\n".join(chosen) + "\n", encoding="utf-8")
