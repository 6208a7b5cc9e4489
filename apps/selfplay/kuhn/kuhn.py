"""Kuhn poker: the smallest game in which bluffing pays.

Three cards, J < Q < K; each of two players antes one chip and gets one card. The first player checks or bets one chip;
against a bet, the other calls or folds; after a check, the second may check or bet. Each player sees its own card and
what was said. An answer names the own card: `Q` puts a chip in (bet or call), `q` does not (check or fold). The other
player hears the move alone. Any other answer loses two chips, the most that a hand can cost.

The game is known to the last detail (Kuhn, 1950): with best play the first player loses 1/18 of a chip on average. So
`exploitability` says exactly how far a policy is from best play.

python apps/selfplay/kuhn/kuhn.py FOLDER [SEED] writes
demonstrations.jsonl   hands of players who choose each legal move equally often: how the game is spoken, and
                       nothing about how to win.
prompts.jsonl          the six deals.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, Final

import forge
from forge import Agent, Task

CARDS: Final = "JQK"
DEALS: Final = tuple(permutations(CARDS, 2))
ILLEGAL: Final = "illegal"
ILLEGAL_COST: Final = 2.0
NUM_SHOWN: Final = 20_000
VALUE: Final = -1 / 18
"""What the first player wins with best play of both."""

Played = tuple[str, ...]
"""The moves so far."""

InformationSet = tuple[str, Played]
"""What the player to move knows: its card, and the moves so far."""

Policy = Mapping[InformationSet, Mapping[str, float]]
"""The probability of each legal move; what is missing to 1 are illegal answers."""

LEGAL: Final[Mapping[Played, tuple[str, str]]] = {
    (): ("check", "bet"),
    ("check",): ("check", "bet"),
    ("bet",): ("call", "fold"),
    ("check", "bet"): ("call", "fold"),
}
INFORMATION_SETS: Final = tuple((card, played) for played in LEGAL for card in CARDS)


# ---- The game -------------------------------------------------------------------------------------------------------


@forge.episode(agents=["first", "second"], deterministic=True)
async def kuhn(task: Task, first: Agent, second: Agent) -> dict[str, float]:
    """Play one hand. The rewards are the chips that each wins."""
    deal, played, agents = tuple(task.metadata["deal"]), (), (first, second)
    while played in LEGAL:
        mover = len(played) % 2
        turn = await agents[mover].generate(seen(deal[mover], played)[-1:])
        legal = {said(deal[mover], move): move for move in LEGAL[played]}
        played = (*played, legal.get(turn.text, ILLEGAL))
    won = winnings(deal, played)
    return {"first": won, "second": -won}


def seen(card: str, played: Played) -> list[dict[str, str]]:
    """Return the conversation of the player who is to move."""
    if not played:
        return [_message(f"You have {card}. You start.")]
    if len(played) == 1:
        return [_message(f"You have {card}. They {played[0]}.")]
    return [*seen(card, ()), _answer(card, played[0]), _message(f"They {played[1]}.")]


def said(card: str, move: str) -> str:
    """Return how a move is written."""
    return card if move in ("bet", "call") else card.lower()


def _answer(card: str, move: str) -> dict[str, str]:
    return {"role": "assistant", "content": said(card, move)}


def _message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def winnings(deal: Sequence[str], played: Played) -> float:
    """Return the chips that the first player wins in a hand that is over."""
    if played[-1] == ILLEGAL:
        return ILLEGAL_COST if len(played) % 2 == 0 else -ILLEGAL_COST
    if played[-1] == "fold":
        return 1.0 if len(played) % 2 == 0 else -1.0
    stake = 2.0 if played[-1] == "call" else 1.0
    return stake if CARDS.index(deal[0]) > CARDS.index(deal[1]) else -stake


# ---- How good a policy is -------------------------------------------------------------------------------------------


def uniform() -> Policy:
    """Return the policy that chooses each legal move with the same probability."""
    return {(card, played): dict.fromkeys(LEGAL[played], 0.5) for card, played in INFORMATION_SETS}


def equilibrium(bluff: float = 1 / 3) -> Policy:
    """Return one of the policies of best play: the first player bets with J in this part of hands, from 0 to 1/3."""
    bets = {((), "J"): bluff, ((), "Q"): 0.0, ((), "K"): 3 * bluff}
    bets |= {(("check",), "J"): 1 / 3, (("check",), "Q"): 0.0, (("check",), "K"): 1.0}
    calls = {(("bet",), "J"): 0.0, (("bet",), "Q"): 1 / 3, (("bet",), "K"): 1.0}
    calls |= {(("check", "bet"), "J"): 0.0, (("check", "bet"), "Q"): 1 / 3 + bluff, (("check", "bet"), "K"): 1.0}
    found: dict[InformationSet, Mapping[str, float]] = {}
    for card, played in INFORMATION_SETS:
        (one, other), is_raise = LEGAL[played], (played, card) in bets
        chance = bets[played, card] if is_raise else calls[played, card]
        found[card, played] = {one: 1 - chance, other: chance} if is_raise else {one: chance, other: 1 - chance}
    return found


def expected(first: Policy, second: Policy) -> float:
    """Return the chips that the first player wins in a hand on average."""

    def value(deal: tuple[str, ...], played: Played) -> float:
        if played not in LEGAL:
            return winnings(deal, played)
        mover = len(played) % 2
        moves = _with_illegal((first, second)[mover][deal[mover], played])
        return sum(chance * value(deal, (*played, move)) for move, chance in moves.items() if chance)

    return sum(value(deal, ()) for deal in DEALS) / len(DEALS)


def _with_illegal(moves: Mapping[str, float]) -> dict[str, float]:
    return {**moves, ILLEGAL: max(0.0, 1 - sum(moves.values()))}


def best_response(policy: Policy, *, player: int) -> tuple[float, dict[InformationSet, str]]:
    """Return what a player who knows the other's policy wins, and which moves achieve it.

    A hand is weighted with the probability that the deal and the other's moves lead to it: `reach`.
    """
    chosen: dict[InformationSet, str] = {}

    def value(played: Played, reach: Mapping[tuple[str, ...], float]) -> float:
        """Return what the player wins from here on, over all deals."""
        if played not in LEGAL:
            sign = 1 if player == 0 else -1
            return sum(weight * sign * winnings(deal, played) for deal, weight in reach.items())
        if len(played) % 2 != player:
            moves = {deal: _with_illegal(policy[deal[1 - player], played]) for deal in reach}
            return sum(
                value((*played, move), {deal: weight * moves[deal][move] for deal, weight in reach.items()})
                for move in (*LEGAL[played], ILLEGAL)
            )
        total = 0.0
        for card in CARDS:
            held = {deal: weight for deal, weight in reach.items() if deal[player] == card}
            if not held:
                continue
            values = {move: value((*played, move), held) for move in (*LEGAL[played], ILLEGAL)}
            chosen[card, played] = max(values, key=values.__getitem__)
            total += values[chosen[card, played]]
        return total

    return value((), dict.fromkeys(DEALS, 1 / len(DEALS))), chosen


def exploitability(policy: Policy) -> float:
    """Return what a player who knows the policy wins from it in a hand, on average over both sides; 0 for best play."""
    return (best_response(policy, player=0)[0] + best_response(policy, player=1)[0]) / 2


def averaged(policies: Sequence[Policy]) -> Policy:
    """Return the policy that plays like a player who draws one of these before every hand.

    A move counts as much as its player's own earlier moves make the information set likely.
    """
    found: dict[InformationSet, Mapping[str, float]] = {}
    for card, played in INFORMATION_SETS:
        weights = [each[card, ()]["check"] if len(played) == 2 else 1.0 for each in policies]
        total = sum(weights) or 1.0
        found[card, played] = {
            move: sum(weight * each[card, played][move] for weight, each in zip(weights, policies, strict=True)) / total
            for move in LEGAL[played]
        }
    return found


def read_policy(probabilities: Callable[[Sequence[Any]], Sequence[Mapping[str, float]]]) -> Policy:
    """Return the policy of a model, from its probabilities of answers (`MoveReader.probabilities`)."""
    questions = [
        (seen(card, played), [said(card, move) for move in LEGAL[played]]) for card, played in INFORMATION_SETS
    ]
    found = zip(INFORMATION_SETS, probabilities(questions), strict=True)
    return {place: dict(zip(LEGAL[place[1]], row.values(), strict=True)) for place, row in found}


# ---- Files ----------------------------------------------------------------------------------------------------------


def write_files(folder: str | Path, *, seed: int = 0) -> Path:
    """Write the two files into a folder, which is made, and return it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    shown: list[dict[str, Any]] = []
    while len(shown) < NUM_SHOWN:
        shown += _hand(rng)
    _write(folder / "demonstrations.jsonl", shown[:NUM_SHOWN])
    _write(folder / "prompts.jsonl", map(_task, DEALS))
    return folder


def _hand(rng: random.Random) -> list[dict[str, Any]]:
    """Return the conversations of both players in a hand of uniform moves."""
    deal, played = rng.choice(DEALS), ()
    found: dict[int, dict[str, Any]] = {}
    while played in LEGAL:
        mover = len(played) % 2
        move = rng.choice(LEGAL[played])
        found[mover] = {"messages": [*seen(deal[mover], played), _answer(deal[mover], move)]}
        played = (*played, move)
    return list(found.values())


def _task(deal: Sequence[str]) -> dict[str, Any]:
    return {"messages": [_message(f"Kuhn poker: {deal[0]} against {deal[1]}.")], "deal": deal}


def _write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    print(write_files(sys.argv[1], seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0))
