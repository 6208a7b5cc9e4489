"""A solver and a critic: two agents of one policy that learn together.

The solver sees three numbers and offers one. The critic sees the offer and which number is wanted, and answers with
one word: `yes`, `more` or `less`. Then the solver offers again, and this offer counts: both agents earn 1 if it is the
wanted number. The critic cannot name a number, and the solver cannot see what is wanted. Only together they do better
than one in three: the critic has to say the right word, and the solver has to follow it, and to offer the middle number
first, from which `more` and `less` each leave one number.

python apps/critic/offers.py FOLDER [SEED] writes
demonstrations.jsonl   conversations of a sloppy pair: the first offer is any of the three, the critic says any word
                       half of the time, and the solver ignores the word half of the time.
prompts.jsonl          the tasks to train on.
heldout.jsonl          lists of numbers that are in neither of the other files.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, Final

import forge
from forge import Agent, Task

WORDS: Final = ("yes", "more", "less")
AGAIN: Final = "again"
NUM_HELDOUT: Final = 40
NUM_SHOWN: Final = 40_000

Numbers = Sequence[int]


@forge.episode(agents=["solver", "critic"], deterministic=True)
async def review(task: Task, solver: Agent, critic: Agent) -> dict[str, float]:
    """Offer a number, hear a word, offer again. Both agents earn 1 if the second offer is right, and 0 otherwise.

    A word that is not one of the three costs the critic 1, and is not passed on.
    """
    draft = await solver.generate([asked(task.metadata["numbers"])])
    note = await critic.generate([shown(str(task.answer), draft.text)])
    is_word = note.text in WORDS
    final = await solver.generate([commented(note.text if is_word else AGAIN)])
    right = float(final.text == task.answer)
    return {"solver": right, "critic": right if is_word else -1.0}


@forge.episode(deterministic=True)
async def alone(task: Task, agent: Agent) -> float:
    """Offer as many times as `review` has turns, without a critic. The last offer counts."""
    await agent.generate([asked(task.metadata["numbers"])])
    await agent.generate([commented(AGAIN)])
    final = await agent.generate([commented(AGAIN)])
    return float(final.text == task.answer)


def asked(numbers: Numbers) -> dict[str, str]:
    return _message("Offer one: " + " ".join(map(str, numbers)))


def shown(wanted: str, offer: str) -> dict[str, str]:
    return {**_message(f"They want {wanted}. Offer: {offer}"), "name": "solver"}


def commented(word: str) -> dict[str, str]:
    return {**_message(word), "name": "critic"}


def _message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def right_word(wanted: int, offer: int) -> str:
    """Return what a good critic says."""
    return "yes" if offer == wanted else "more" if offer < wanted else "less"


def fitting(numbers: Numbers, offer: int, word: str) -> list[int]:
    """Return the numbers that agree with a word about an offer; all of them where none does."""
    found = [number for number in numbers if right_word(number, offer) == word]
    return found or list(numbers)


# ---- Files ----------------------------------------------------------------------------------------------------------


def write_files(folder: str | Path, *, seed: int = 0) -> Path:
    """Write the three files into a folder, which is made, and return it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    lists = list(permutations(range(10), 3))
    rng.shuffle(lists)
    heldout, train = lists[:NUM_HELDOUT], lists[NUM_HELDOUT:]
    shown_lines: list[dict[str, Any]] = []
    while len(shown_lines) < NUM_SHOWN:
        shown_lines += _sloppy(rng, rng.choice(train))
    _write(folder / "demonstrations.jsonl", shown_lines)
    _write(folder / "prompts.jsonl", (_task(numbers, wanted) for numbers in train for wanted in numbers))
    _write(folder / "heldout.jsonl", (_task(numbers, wanted) for numbers in heldout for wanted in numbers))
    return folder


def _sloppy(rng: random.Random, numbers: Numbers) -> list[dict[str, Any]]:
    """Return the conversations of both agents of a sloppy pair."""
    wanted, offer = rng.choice(numbers), rng.choice(numbers)
    word = right_word(wanted, offer) if rng.random() < 0.5 else rng.choice(WORDS)
    final = rng.choice(fitting(numbers, offer, word) if rng.random() < 0.5 else numbers)
    solver = [asked(numbers), _answer(offer), _message(word), _answer(final)]
    critic = [_message(str(shown(str(wanted), str(offer))["content"])), _answer(word)]
    return [{"messages": solver}, {"messages": critic}]


def _answer(text: int | str) -> dict[str, str]:
    return {"role": "assistant", "content": str(text)}


def _task(numbers: Numbers, wanted: int) -> dict[str, Any]:
    return {"messages": [asked(numbers)], "answer": str(wanted), "numbers": numbers}


def _write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    print(write_files(sys.argv[1], seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0))
