"""The rules of a self-play league, as pure functions: which opponent is drawn, which member makes room, who won, and
ratings.

| rule | a member's weight in the draw |
|---|---|
| `latest` | 1 for the newest version, 0 for all others |
| `uniform` | 1 |
| `prioritised`, `hard` | (1 - w)^power |
| `prioritised`, `variance` | (w (1 - w))^power |

w is the win rate of the live policy against the member: (points + 1) / (games + 2), a win being one point and a draw
half a point. Without games it is 1/2, and it is never 0 or 1: no member is left out for good. Earlier games count less
than later ones: with each game the sums before it are multiplied by `decay`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from forge.config.league import LeagueConfig
from forge.errors import RewardError
from forge.types import AgentResult, Episode

Outcome = Literal["win", "draw", "loss"]
"""How a game ended for the learner."""

POINTS: Final[dict[Outcome, float]] = {"win": 1.0, "draw": 0.5, "loss": 0.0}
_SCALE: Final = 400.0
"""A difference of so many points of Elo means odds of 10 to 1."""


@dataclass(slots=True)
class Standing:
    """How the live policy did against one opponent.

    Attributes:
        rating: the opponent's Elo rating.
        num_wins, num_draws, num_losses: games of the live policy against it.
        games, points: the same games with earlier ones counting less; a win is one point, a draw half a point.
    """

    rating: float
    num_wins: int = 0
    num_draws: int = 0
    num_losses: int = 0
    games: float = 0.0
    points: float = 0.0

    @property
    def num_games(self) -> int:
        """All games."""
        return self.num_wins + self.num_draws + self.num_losses

    @property
    def win_rate(self) -> float:
        """The win rate of the live policy, a draw counting half; 1/2 without games."""
        return (self.points + 1) / (self.games + 2)

    def add(self, outcome: Outcome, *, decay: float) -> None:
        """Count a game."""
        self.num_wins += outcome == "win"
        self.num_draws += outcome == "draw"
        self.num_losses += outcome == "loss"
        self.games = decay * self.games + 1
        self.points = decay * self.points + POINTS[outcome]


def weights(config: LeagueConfig, win_rates: Sequence[float]) -> list[float]:
    """Return the weight of each member in the draw. Members are ordered from the first to the newest."""
    if config.rule == "latest":
        return [float(place == len(win_rates) - 1) for place in range(len(win_rates))]
    if config.rule == "uniform":
        return [1.0] * len(win_rates)
    is_hard = config.prioritise == "hard"
    return [((1 - rate) if is_hard else rate * (1 - rate)) ** config.power for rate in win_rates]


def draw(seed: int, number: int, values: Sequence[float]) -> int:
    """Return a place in `values` with a probability that is proportional to the value there.

    It depends on the run's seed, the group's number and the values, and on nothing else. Where all values are 0, as
    high powers of small numbers are, each place is as probable.
    """
    values = values if any(values) else [1.0] * len(values)
    threshold, total = uniform(seed, number, "opponent") * sum(values), 0.0
    for place, value in enumerate(values):
        total += value
        if threshold < total:
            return place
    return max(place for place, value in enumerate(values) if value > 0)  # rounding


def uniform(seed: int, number: int, what: str) -> float:
    """Return a number from 0 up to 1 for one decision about a group."""
    digest = hashlib.blake2b(f"{seed}:{number}:league:{what}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def evicted(versions: Sequence[int], new: int, *, evict: str, busy: Collection[int]) -> int | None:
    """Return which of the members makes room for a new version; None while all that could are in use.

    `oldest` is the oldest that is not `busy`. `spread` keeps the first, and takes away the one whose neighbours, the
    new version included, are closest to each other; the older one where two are alike.
    """
    ordered = sorted(versions)
    if evict == "oldest" or len(ordered) == 1:
        return next((version for version in ordered if version not in busy), None)
    line = [*ordered, new]
    gaps = {line[at]: line[at + 1] - line[at - 1] for at in range(1, len(ordered)) if line[at] not in busy}
    return min(gaps, key=lambda version: (gaps[version], version), default=None)


def rate(live: float, opponent: float, outcome: Outcome, *, k: float) -> tuple[float, float]:
    """Return the Elo ratings of the live policy and its opponent after a game. Their sum stays."""
    expected = 1 / (1 + 10 ** ((opponent - live) / _SCALE))
    change = k * (POINTS[outcome] - expected)
    return live + change, opponent - change


def outcome_of(episode: Episode, learner: str, opponents: Sequence[str], *, config: LeagueConfig) -> Outcome:
    """Return how a game ended for the learner, by what the agents earned before shaping."""
    own = _earned(episode, learner)
    others = 0.0 if config.result == "sign" else max(_earned(episode, name) for name in opponents)
    difference = own - others
    if abs(difference) <= config.draw_margin:
        return "draw"
    return "win" if difference > 0 else "loss"


def _earned(episode: Episode, name: str) -> float:
    result: AgentResult = episode.agents[name]
    if result.score is None:
        raise RewardError(
            f"{name} has no reward, so the game has no result",
            path="episode.league.result",
            value="compare",
            rule="a reward for every agent of the league",
            repair=f"return a reward for {name}, too; or set episode.league.result to sign",
        )
    return result.score.reward if result.score.unshaped is None else result.score.unshaped
