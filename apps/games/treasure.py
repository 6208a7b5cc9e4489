"""A game of several turns: walk to a treasure.

Every message says how far the treasure is, and an answer is one of `up`, `down`, `left` and `right`. The policy has to
find out what these words do.

python apps/games/treasure.py FOLDER [SEED] writes
demonstrations.jsonl   walks of somebody who confuses left with right, and up with down: every other move is the
                       opposite of what the message says. They show how to play, and nothing about where to go.
prompts.jsonl          the starts to train on.
heldout.jsonl          starts that are in neither of the other files.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forge
from forge import Observation, Task

MOVES = {"right": (1, 0), "left": (-1, 0), "up": (0, 1), "down": (0, -1)}
DISTANCES = range(2, 5)
ILLEGAL = -1.0
NUM_HELDOUT, NUM_SHOWN, NUM_SHOWN_MOVES = 10, 4000, 4

OPPOSITES = {"right": "left", "left": "right", "up": "down", "down": "up"}

Way = tuple[int, int]
"""How far the treasure is to the right, and how far up; negative to the left and down."""


@dataclass(slots=True)
class Treasure:
    """The game. `found` is the final reward, `closer` the shaped one: `shaping` for every step towards the treasure,
    and minus as much for every step away from it. An answer that is not a direction ends the game, and costs more than
    walking at random does: otherwise silence would pay.

    Attributes:
        max_moves: moves after which the game ends.
        shaping: 0 for the final reward alone.
    """

    max_moves: int = 5
    shaping: float = 0.2
    _way: Way = field(default=(0, 0), init=False)
    _num_moves: int = field(default=0, init=False)

    async def reset(self, task: Task) -> Observation:
        right, up = task.metadata["way"]
        self._way, self._num_moves = (right, up), 0
        return Observation(task.messages)

    async def step(self, message: Mapping[str, Any]) -> Observation:
        answer = str(message["content"]).strip()
        if answer not in MOVES:
            return Observation(reward=ILLEGAL, name="illegal", terminated=True)
        before, self._way = distance(self._way), moved(self._way, answer)
        after, self._num_moves = distance(self._way), self._num_moves + 1
        found = {"found": float(after == 0)}
        return Observation(
            [shown(self._way)],
            reward={"closer": self.shaping * (before - after), **found} if self.shaping else found,
            terminated=after == 0,
            truncated=self._num_moves >= self.max_moves,
        )

    async def close(self) -> None:
        """Nothing is held: an environment with a process or a connection would release it here."""

    @staticmethod
    def oracle(task: Task) -> list[str]:
        """Return right answers, for `forge env check`."""
        right, up = task.metadata["way"]
        return ["right"] * right + ["left"] * -right + ["up"] * up + ["down"] * -up


hunt = forge.episode_from_env(Treasure, deterministic=True)


def distance(way: Way) -> int:
    return abs(way[0]) + abs(way[1])


def moved(way: Way, answer: str) -> Way:
    """Return the way that is left after a move."""
    right, up = MOVES[answer]
    return way[0] - right, way[1] - up


def shown(way: Way) -> dict[str, str]:
    words = (("right", "left"), ("up", "down"))
    parts = [f"{abs(steps)} {names[steps < 0]}" for steps, names in zip(way, words, strict=True) if steps]
    return {"role": "user", "content": f"It is {' and '.join(parts) or 'here'}."}


def oracle(task: Task, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the best answer, for `forge env check`: the last direction that the last message names."""
    return str(messages[-1]["content"]).rstrip(".").split()[-1]


# ---- Files ----------------------------------------------------------------------------------------------------------


def write_files(folder: str | Path, *, seed: int = 0) -> Path:
    """Write the three files into a folder, which is made, and return it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    steps = range(-DISTANCES[-1], DISTANCES[-1] + 1)
    ways = [(right, up) for right in steps for up in steps if distance((right, up)) in DISTANCES]
    rng.shuffle(ways)
    heldout, train = ways[:NUM_HELDOUT], ways[NUM_HELDOUT:]
    _write(folder / "demonstrations.jsonl", (_walk(rng, rng.choice(train)) for _ in range(NUM_SHOWN)))
    _write(folder / "prompts.jsonl", map(_task, train))
    _write(folder / "heldout.jsonl", map(_task, heldout))
    return folder


def _walk(rng: random.Random, way: Way) -> dict[str, Any]:
    messages = [shown(way)]
    for _ in range(NUM_SHOWN_MOVES):
        move = rng.choice(_named(way))
        move = rng.choice([move, OPPOSITES[move]])
        way = moved(way, move)
        messages += [{"role": "assistant", "content": move}, shown(way)]
        if distance(way) == 0:
            break
    return {"messages": messages[:-1]}


def _named(way: Way) -> list[str]:
    """Return the directions that a message names."""
    return [move for move, (right, up) in MOVES.items() if right * way[0] + up * way[1] > 0]


def _task(way: Way) -> dict[str, Any]:
    return {"messages": [shown(way)], "way": way}


def _write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    print(write_files(sys.argv[1], seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0))
