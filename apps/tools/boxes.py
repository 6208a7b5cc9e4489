"""A task that needs a tool: which number is in a box, where only the tool can look into boxes.

A question names two boxes and asks for the number in one of them. The policy has to call the tool, with the box that is
asked for, and to answer with what the tool says. Numbers are drawn anew for every task, so none can be known.

python apps/tools/boxes.py FOLDER [SEED] writes
demonstrations.jsonl   how the tool is called and how an answer is written: half of them open the wrong box, and one in
                       four guesses instead of calling the tool.
prompts.jsonl          the tasks to train on.
heldout.jsonl          questions that are in neither of the other files.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import forge
from forge import Agent, Task

NUM_BOXES = 10
WORDS = ("first", "last")
NUM_HELDOUT_PAIRS, NUM_PER_QUESTION, NUM_SHOWN = 25, 4, 8000


def solutions(task: Task) -> list[Any]:
    """Return right answers, for `forge env check`."""
    box = task.metadata["numbers"].index(int(str(task.answer)))
    return [{"name": "open", "arguments": {"box": box}}, f"It is {task.answer}."]


@forge.episode(deterministic=True, oracle=solutions)
async def look(task: Task, agent: Agent, *, max_turns: int = 3) -> float:
    """Answer with the number in a box. The reward is 1 for the right number, and 0 otherwise."""
    numbers = task.metadata["numbers"]

    @forge.tool
    async def open(box: int) -> str:
        "Return the number in a box."
        if not 0 <= box < len(numbers):
            raise ValueError(f"there is no box {box}")
        return str(numbers[box])

    turn = await agent.run_tools(task.messages, tools=[open], max_turns=max_turns)
    return float(said(turn.text) == task.answer)


def said(answer: str) -> str | None:
    """Return the number that an answer gives; None if it is not written as shown."""
    text = answer.strip()
    return text.removeprefix("It is ").removesuffix(".") if text.startswith("It is ") and text.endswith(".") else None


def question(boxes: tuple[int, int], word: str) -> dict[str, str]:
    return {"role": "user", "content": f"Look at {boxes[0]} and {boxes[1]}. What is in the {word}?"}


def call(box: int) -> dict[str, str]:
    """Return a call as the tiny model's chat template has it: the whole answer is JSON."""
    return {"role": "assistant", "content": json.dumps({"name": "open", "arguments": {"box": box}})}


def oracle(task: Task) -> list[Any]:
    """Return the best answers, for `forge env check`: a call, whatever the model's format, and a text."""
    words = str(task.messages[0]["content"]).rstrip("?").split()
    boxes = int(words[2]), int(words[4].rstrip("."))
    call = {"name": "open", "arguments": {"box": boxes[WORDS.index(words[-1])]}}
    return [call, f"It is {task.answer}."]


# ---- Files ----------------------------------------------------------------------------------------------------------


def write_files(folder: str | Path, *, seed: int = 0) -> Path:
    """Write the three files into a folder, which is made, and return it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    pairs = list(permutations(range(NUM_BOXES), 2))
    rng.shuffle(pairs)
    heldout = [(pair, word) for pair in pairs[:NUM_HELDOUT_PAIRS] for word in WORDS]
    train = [(pair, word) for pair in pairs[NUM_HELDOUT_PAIRS:] for word in WORDS]
    shown = [_shown(rng, *rng.choice(train)) for _ in range(NUM_SHOWN)]
    _write(folder / "demonstrations.jsonl", shown)
    _write(folder / "prompts.jsonl", [_task(rng, *each) for each in train for _ in range(NUM_PER_QUESTION)])
    _write(folder / "heldout.jsonl", [_task(rng, *each) for each in heldout for _ in range(NUM_PER_QUESTION)])
    return folder


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randint(10, 99) for _ in range(NUM_BOXES)]


def _shown(rng: random.Random, boxes: tuple[int, int], word: str) -> dict[str, Any]:
    messages = [question(boxes, word)]
    found = rng.randint(10, 99)
    if rng.random() < 0.75:
        messages += [call(rng.choice(boxes)), {"role": "tool", "content": str(found)}]
    return {"messages": [*messages, {"role": "assistant", "content": f"It is {found}."}]}


def _task(rng: random.Random, boxes: tuple[int, int], word: str) -> dict[str, Any]:
    numbers = _numbers(rng)
    asked = numbers[boxes[WORDS.index(word)]]
    return {"messages": [question(boxes, word)], "answer": str(asked), "numbers": numbers}


def _write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    print(write_files(sys.argv[1], seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0))
