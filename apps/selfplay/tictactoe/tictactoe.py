"""Tic-tac-toe, played by two agents of one policy.

A message shows the board, with the numbers of the free squares, and an answer is one of these numbers. Every message
starts a new conversation: the board says all there is to know. An answer that is not a free square loses the game.

The game is known to the last detail: with best play it is a draw. `against_random` and `against_perfect` compute
exactly, from the probabilities of a policy, how often it wins, draws and loses.

python apps/selfplay/tictactoe/tictactoe.py FOLDER [SEED] writes
demonstrations.jsonl   boards with a free square, drawn at random: which answers are legal, and nothing about what wins.
prompts.jsonl          where games start: all boards on which there is a move to make. Most are near the end, so that
                       the reward comes soon after the move that earns it.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import forge
from forge import Agent, Task

EMPTY: Final = "123456789"
LINES: Final = ("012", "345", "678", "036", "147", "258", "048", "246")
PLAYERS: Final = "xo"
NUM_SHOWN: Final = 26_000

Policy = Mapping[str, Mapping[str, float]]
"""The probability of each free square, by board; what is missing to 1 are illegal answers."""

Outcome = tuple[float, float, float]
"""How likely the policy wins, draws and loses."""

WON, DRAWN, LOST = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)


# ---- The game -------------------------------------------------------------------------------------------------------


@forge.episode(agents=["x", "o"], deterministic=True)
async def tictactoe(task: Task, x: Agent, o: Agent) -> dict[str, float]:
    """Play a game from the task's board. The rewards are 1 for a win, -1 for a loss and 0 for a draw."""
    board, agents = str(task.metadata["board"]), {"x": x, "o": o}
    while not is_over(board):
        mover = to_move(board)
        agents[mover].replace_history([])
        turn = await agents[mover].generate([shown(board)])
        if turn.text not in free(board):
            return {mover: -1.0, _other(mover): 1.0}
        board = board.replace(turn.text, mover)
    won = winner(board)
    return {"x": 0.0, "o": 0.0} if won is None else {won: 1.0, _other(won): -1.0}


def shown(board: str) -> dict[str, str]:
    return {"role": "user", "content": f"{to_move(board)}: {board}"}


def to_move(board: str) -> str:
    return "x" if board.count("x") == board.count("o") else "o"


def free(board: str) -> list[str]:
    """Return the free squares."""
    return [square for square in board if square not in PLAYERS]


@cache
def winner(board: str) -> str | None:
    """Return who has three in a row."""
    rows = ({board[int(place)] for place in line} for line in LINES)
    return next((min(row) for row in rows if len(row) == 1), None)


def is_over(board: str) -> bool:
    return winner(board) is not None or not free(board)


def _other(player: str) -> str:
    return "o" if player == "x" else "x"


def boards() -> list[str]:
    """Return all boards that games lead to and on which there is a move to make."""
    found: dict[str, None] = {}
    line = [EMPTY]
    while line:
        board = line.pop()
        if board not in found and not is_over(board):
            found[board] = None
            line += [board.replace(square, to_move(board)) for square in free(board)]
    return list(found)


# ---- How good a policy is -------------------------------------------------------------------------------------------


@cache
def best_value(board: str) -> int:
    """Return the result of best play for the player to move: 1, 0 or -1."""
    if is_over(board):
        return -1 if winner(board) is not None else 0
    return max(-best_value(board.replace(square, to_move(board))) for square in free(board))


@cache
def best_moves(board: str) -> tuple[str, ...]:
    """Return the squares of best play."""
    values = {square: -best_value(board.replace(square, to_move(board))) for square in free(board)}
    return tuple(square for square, value in values.items() if value == best_value(board))


def random_player(board: str) -> dict[str, float]:
    return dict.fromkeys(free(board), 1 / len(free(board)))


def perfect_player(board: str) -> dict[str, float]:
    """Return the moves of the perfect player: each move of best play with the same probability."""
    return dict.fromkeys(best_moves(board), 1 / len(best_moves(board)))


def outcome(policy: Policy, opponent: Callable[[str], Mapping[str, float]], *, side: str) -> Outcome:
    """Return how often a policy that plays one side wins, draws and loses against an opponent, exactly."""

    @cache
    def value(board: str) -> Outcome:
        if is_over(board):
            won = winner(board)
            return DRAWN if won is None else WON if won == side else LOST
        mover = to_move(board)
        moves = policy[board] if mover == side else opponent(board)
        parts = [(chance, value(board.replace(square, mover))) for square, chance in moves.items() if chance]
        illegal = max(0.0, 1 - sum(moves.values()))
        return _mixed([*parts, (illegal, LOST if mover == side else WON)])

    return value(EMPTY)


def _mixed(parts: Sequence[tuple[float, Outcome]]) -> Outcome:
    won, drawn, lost = (sum(chance * each[place] for chance, each in parts) for place in range(3))
    return won, drawn, lost


def both_sides(policy: Policy, opponent: Callable[[str], Mapping[str, float]]) -> Outcome:
    """Return the outcome where the policy plays each side in half of the games."""
    return _mixed([(0.5, outcome(policy, opponent, side=side)) for side in PLAYERS])


def likeliest(policy: Policy) -> Policy:
    """Return the policy that always makes the likeliest legal move."""
    return {board: {max(moves, key=moves.__getitem__): 1.0} for board, moves in policy.items()}


def read_policy(probabilities: Callable[[Sequence[Any]], Sequence[Mapping[str, float]]]) -> Policy:
    """Return the policy of a model, from its probabilities of answers (`MoveReader.probabilities`)."""
    places = boards()
    found = probabilities([([shown(board)], free(board)) for board in places])
    return dict(zip(places, found, strict=True))


# ---- Files ----------------------------------------------------------------------------------------------------------


def write_files(folder: str | Path, *, seed: int = 0) -> Path:
    """Write the two files into a folder, which is made, and return it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    _write(folder / "demonstrations.jsonl", (_move(rng) for _ in range(NUM_SHOWN)))
    _write(folder / "prompts.jsonl", ({"messages": [shown(board)], "board": board} for board in boards()))
    return folder


def _move(rng: random.Random) -> dict[str, Any]:
    """Return a random move of a game of random moves."""
    board = EMPTY
    met = []
    while not is_over(board):
        met.append(board)
        board = board.replace(rng.choice(free(board)), to_move(board))
    chosen = rng.choice(met)
    return {"messages": [shown(chosen), {"role": "assistant", "content": rng.choice(free(chosen))}]}


def _write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    print(write_files(sys.argv[1], seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0))
