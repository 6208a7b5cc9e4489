"""Write a function, run it in a sandbox, repair it.

A task gives a number k. The hidden tests want one of x + k, x - k and x * k, and the task does not say which. The first
attempt can therefore only be a guess. The sandbox runs it, the policy reads whether `f(5)` is too small or too large,
and the second attempt has to follow from that. (A first guess of x + k makes the reply decisive: too small means x * k,
too large means x - k. A first guess of x * k does not.)

python apps/coding/functions.py FOLDER [SEED] writes
demonstrations.jsonl   how functions are written, by somebody who guesses at first, and of whose repairs half are wrong.
prompts.jsonl          the tasks to train on.
heldout.jsonl          tasks with numbers that are in neither of the other files.
"""

from __future__ import annotations

import json
import operator
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import forge
from forge import Agent, Task

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
NUMBERS = range(10, 100)
TESTED = (5, 7)
NUM_HELDOUT, NUM_SHOWN = 20, 8000


class Verdict(NamedTuple):
    """What became of a program: whether it passed, and what the policy reads if it did not."""

    passed: bool
    reply: str


_known: dict[tuple[str, tuple[int, ...]], Verdict] = {}
"""Verdicts of this process. The same program gets the same verdict, so it is run once."""


def solutions(task: Task) -> list[str]:
    """Return a right answer, for `forge env check`."""
    k = int(task.messages[-1]["content"].rstrip(".").split()[-1])
    return [written(sign, k) for sign in OPERATORS if _task(k, sign)["wanted"] == task.metadata["wanted"]]


@forge.episode(deterministic=True, oracle=solutions)
async def repair(task: Task, agent: Agent, *, max_attempts: int = 2) -> float:
    """Write a function that passes the tests, in a few attempts. The reward is 1 if one of them does."""
    wanted = tuple(task.metadata["wanted"])
    messages: Iterable[Mapping[str, Any]] = task.messages
    for _ in range(max_attempts):
        turn = await agent.generate(tuple(messages))
        program = turn.text.strip()
        if (program, wanted) not in _known:
            _known[program, wanted] = await run_tests(program, wanted)
        verdict = _known[program, wanted]
        if verdict.passed:
            return 1.0
        messages = [{"role": "user", "content": verdict.reply}]
    return 0.0


async def run_tests(program: str, wanted: tuple[int, ...]) -> Verdict:
    """Run a program in a sandbox of its own, and compare what f gives."""
    async with forge.sandbox() as box:
        ran = await box.python(f"{program}\nprint(*(f(x) for x in {TESTED}))")
    if ran.error is not None or ran.timed_out:
        return Verdict(passed=False, reply="It failed.")
    found = ran.output.split()
    if found == [str(value) for value in wanted]:
        return Verdict(passed=True, reply="")
    try:
        first = int(found[0])
    except (IndexError, ValueError):
        return Verdict(passed=False, reply="It failed.")
    return Verdict(passed=False, reply=replied(first, wanted[0]))


def replied(value: int, wanted: int) -> str:
    """Return what the policy reads after a failed test: only what it may know."""
    how = "right, but not all" if value == wanted else "too small" if value < wanted else "too large"
    return f"f({TESTED[0]}) is {how}."


def asked(k: int) -> dict[str, str]:
    return {"role": "user", "content": f"Write f with x and {k}."}


def written(sign: str, k: int) -> str:
    return f"def f(x): return x {sign} {k}"


def oracle(task: Task, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the best answer, for `forge env check`: `+` at first, and then what the reply says."""
    k = int(str(messages[0]["content"]).rstrip(".").split()[-1])
    sign = "+" if len(messages) == 1 else "*" if "small" in str(messages[-1]["content"]) else "-"
    return written(sign, k)


# ---- Files ----------------------------------------------------------------------------------------------------------


def write_files(folder: str | Path, *, seed: int = 0) -> Path:
    """Write the three files into a folder, which is made, and return it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    numbers = list(NUMBERS)
    rng.shuffle(numbers)
    heldout, train = numbers[:NUM_HELDOUT], numbers[NUM_HELDOUT:]
    _write(folder / "demonstrations.jsonl", [_shown(rng, rng.choice(train)) for _ in range(NUM_SHOWN)])
    _write(folder / "prompts.jsonl", [_task(k, sign) for k in train for sign in OPERATORS])
    _write(folder / "heldout.jsonl", [_task(k, sign) for k in heldout for sign in OPERATORS])
    return folder


def _shown(rng: random.Random, k: int) -> dict[str, Any]:
    """Return an attempt at random, and where it fails the reply and a repair, which is right every other time."""
    first, right = rng.choice(list(OPERATORS)), rng.choice(list(OPERATORS))
    second = rng.choice([right, right, *(sign for sign in OPERATORS if sign != right)])
    messages = [asked(k), {"role": "assistant", "content": written(first, k)}]
    if first != right:
        values = [OPERATORS[sign](TESTED[0], k) for sign in (first, right)]
        messages += [{"role": "user", "content": replied(*values)}]
        messages += [{"role": "assistant", "content": written(second, k)}]
    return {"messages": messages}


def _task(k: int, sign: str) -> dict[str, Any]:
    return {"messages": [asked(k)], "wanted": [OPERATORS[sign](x, k) for x in TESTED]}


def _write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    print(write_files(sys.argv[1], seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0))
