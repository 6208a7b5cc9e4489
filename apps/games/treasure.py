"""A game of several turns: walk to a treasure on a board of five by five squares.

Every message says where the player is and where the gold is. An answer is one of `up`, `down`, `left` and `right`. The
policy has to find out what these words do.

python apps/games/treasure.py FOLDER [SEED] writes
demonstrations.jsonl   random walks: how the game is played, and nothing about where to go.
prompts.jsonl          the boards to train on.
heldout.jsonl          other boards.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forge
from forge import Observation, Task

SIZE = 5
MOVES = {"up": (0, 1), "down": (0, -1), "left": (-1, 0), "right": (1, 0)}
DISTANCES = range(2, 5)
NUM_TRAIN, NUM_HELDOUT, NUM_SHOWN = 280, 100, 2000
NUM_SHOWN_MOVES = 5

Square = tuple[int, int]


@dataclass(slots=True)
class Treasure:
    """The game. `found` is the final reward, `closer` the shaped one: `shaping` for every step towards the treasure,
    and minus as much for every step away from it.

    Attributes:
        max_moves: moves after which the game ends.
        shaping: 0 for the final reward alone.
    """

    max_moves: int = 6
    shaping: float = 0.1
    _at: Square = field(default=(0, 0), init=False)
    _treasure: Square = field(default=(0, 0), init=False)
    _num_moves: int = field(default=0, init=False)

    async def reset(self, task: Task) -> Observation:
        self._at, self._treasure = tuple(task.metadata["start"]), tuple(task.metadata["treasure"])
        self._num_moves = 0
        return Observation(task.messages)

    async def step(self, message: Mapping[str, Any]) -> Observation:
        before = distance(self._at, self._treasure)
        self._at = moved(self._at, str(message["content"]))
        self._num_moves += 1
        after = distance(self._at, self._treasure)
        rewards = {"closer": self.shaping * (before - after), "found": float(after == 0)}
        return Observation(
            [shown(self._at, self._treasure)],
            reward=rewards if self.shaping else {"found": rewards["found"]},
            terminated=after == 0,
            truncated=self._num_moves >= self.max_moves,
        )

    async def close(self) -> None:
        """Nothing is held: an environment with a process or a connection would release it here."""


hunt = forge.episode_from_env(Treasure, deterministic=True)


def distance(a: Square, b: Square) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def moved(at: Square, answer: str) -> Square:
    """Return where an answer leads. At the board's edge, and for anything but a direction, the player stays."""
    x, y = (place + by for place, by in zip(at, MOVES.get(answer.strip(), (0, 0)), strict=True))
    return (x, y) if 0 <= x < SIZE and 0 <= y < SIZE else at


def shown(at: Square, treasure: Square) -> dict[str, str]:
    return {"role": "user", "content": f"At {at[0]} {at[1]}, gold at {treasure[0]} {treasure[1]}."}


# ---- Files ----------------------------------------------------------------------------------------------------------


def write_files(folder: str | Path, *, seed: int = 0) -> Path:
    """Write the three files into a folder, which is made, and return it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    squares = [(x, y) for x in range(SIZE) for y in range(SIZE)]
    boards = [(at, treasure) for at in squares for treasure in squares if distance(at, treasure) in DISTANCES]
    rng.shuffle(boards)
    train, heldout = boards[:NUM_TRAIN], boards[NUM_TRAIN : NUM_TRAIN + NUM_HELDOUT]
    _write(folder / "demonstrations.jsonl", (_walk(rng, *rng.choice(train)) for _ in range(NUM_SHOWN)))
    _write(folder / "prompts.jsonl", (_task(*board) for board in train))
    _write(folder / "heldout.jsonl", (_task(*board) for board in heldout))
    return folder


def _walk(rng: random.Random, at: Square, treasure: Square) -> dict[str, Any]:
    messages = [shown(at, treasure)]
    for _ in range(NUM_SHOWN_MOVES):
        move = rng.choice(list(MOVES))
        at = moved(at, move)
        messages += [{"role": "assistant", "content": move}, shown(at, treasure)]
        if at == treasure:
            break
    return {"messages": messages[:-1]}


def _task(at: Square, treasure: Square) -> dict[str, Any]:
    return {"messages": [shown(at, treasure)], "start": at, "treasure": treasure}


def _write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    print(write_files(sys.argv[1], seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0))
