"""The files of the tiny run, which are the same for the same seed: a question names a number, and asks for it.

demonstrations.jsonl        answers to the training questions, three in ten with the right number and the others with
                            one drawn at random: a policy that learns from them is right in four of ten.
preferences.jsonl           pairs of answers to the training questions: the right number against another one, or a whole
                            sentence against a broken one. The labeller is wrong in one pair of ten.
heldout_preferences.jsonl   pairs for the held-out questions.
prompts.jsonl               the training questions.
heldout.jsonl               questions that no file for training has; their answers measure, and never train.

python apps/rlhf/preferences.py FOLDER [SEED]
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

NAMES = ("Tom", "Ann", "Bob", "Eve", "Max", "Lea", "Sam", "Zoe")
THINGS = ("apples", "books", "letters", "houses", "friends", "keys", "ways", "days")
NUMBERS = tuple(range(2, 10))
NUM_HELDOUT = 112
NUM_SHOWN = 8
"""Demonstrations for each question."""
KNOWN = 0.3
"""The part of demonstrations that have the right number for sure."""
NUM_PAIRS = 8
"""Pairs for each question."""
BROKEN = 0.4
"""The part of pairs with a broken sentence: without them a policy finds out that these are not punished."""
MISTAKES = 0.1
"""The part of pairs in which the labeller prefers the wrong answer."""


def write_files(folder: str | Path, *, seed: int = 0) -> Path:
    """Write all files into a folder, which is made, and return it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    cases = list(product(NAMES, THINGS, NUMBERS))
    rng.shuffle(cases)
    heldout, train = cases[:NUM_HELDOUT], cases[NUM_HELDOUT:]
    _write(folder / "demonstrations.jsonl", [_shown(*case, rng=rng) for case in train * NUM_SHOWN])
    for prefix, chosen in (("", train), ("heldout_", heldout)):
        pairs = [_pair(*case, rng=rng) for case in chosen * NUM_PAIRS]
        rng.shuffle(pairs)
        _write(folder / f"{prefix}preferences.jsonl", pairs)
    _write(folder / "prompts.jsonl", [{"prompt": _question(*case), "answer": str(case[2])} for case in train])
    _write(folder / "heldout.jsonl", [{"prompt": _question(*case), "answer": str(case[2])} for case in heldout])
    return folder


def _question(name: str, thing: str, number: int) -> str:
    return f"{name} has {number} {thing}. How many {thing} does {name} have?"


def _answer(name: str, thing: str, number: int) -> str:
    return f"{name} has {number} {thing}."


def _shown(name: str, thing: str, number: int, *, rng: random.Random) -> dict[str, Any]:
    said = number if rng.random() < KNOWN else rng.choice(NUMBERS)
    asked = {"role": "user", "content": _question(name, thing, number)}
    return {"messages": [asked, {"role": "assistant", "content": _answer(name, thing, said)}]}


def _pair(name: str, thing: str, number: int, *, rng: random.Random) -> dict[str, Any]:
    other = rng.choice([each for each in NUMBERS if each != number])
    pair = _answer(name, thing, number), _answer(name, thing, other)
    if rng.random() < BROKEN:
        pair = rng.choice(pair), _broken(name, thing, number, rng=rng)
    chosen, rejected = reversed(pair) if rng.random() < MISTAKES else pair
    return {"prompt": _question(name, thing, number), "chosen": chosen, "rejected": rejected}


def _broken(name: str, thing: str, number: int, *, rng: random.Random) -> str:
    """A sentence with a word left out, too many or wrong, or without its end."""
    words = f"{name} has {number} {thing}.".split(" ")
    place, kind = rng.randrange(len(words)), rng.randrange(4)
    if kind == 0:
        del words[place]
    elif kind == 1:
        words = words[:place] or ["."]
    else:
        others = [word for word in (*NAMES, *THINGS, "has", "have") if word != words[place]]
        words[place : place + (kind == 2)] = [rng.choice(others)]
    return " ".join(words)


def _write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    print(write_files(sys.argv[1], seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0))
