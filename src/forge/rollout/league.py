"""The self-play league of a run: its members, the opponent of every group, and how the live policy does against them.

A *member* is a version of the policy that stays available, or a checkpoint. A *match* says who plays in a group: which
agent learns, and which opponent all other agents of the league are. It depends on the run's seed, the group's number,
and the members and win rates when the group was first rolled out. It is kept until the group is learned from or
dropped: a group that is rolled out again, in the same process or after a resume, has the same opponent.

A group's games count once, when the group is committed: when it was learned from, or dropped for lack of signal. (A
group in which the policy won every game has no signal; without it win rates would be wrong.) They are counted in the
order of the groups' numbers. A checkpoint keeps all of it bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from forge.config.league import LeagueConfig
from forge.rollout.agent_policies import Seat
from forge.rollout.league_rules import POINTS, Outcome, Standing, draw, evicted, outcome_of, rate, uniform, weights
from forge.rollout.signal import DropReason
from forge.types import LIVE, Group, labelled_version, version_label

_COUNTED: Final = ("no_signal", "empty")
"""Why a group was dropped whose games count all the same."""


@dataclass(frozen=True, slots=True)
class Match:
    """Who plays in a group.

    Attributes:
        learner: the agent that is the live policy and learns.
        opponent: what all other agents of the league are: `live`, `version 12`, or `checkpoint FOLDER`.
    """

    learner: str
    opponent: str

    @property
    def version(self) -> int | None:
        """The version that the opponent is; None where it is not one."""
        return labelled_version(self.opponent)


@dataclass(frozen=True, slots=True)
class Change:
    """How the members change after a step: a version that becomes one, and one that makes room for it."""

    add: int
    remove: int | None = None


@dataclass(slots=True)
class League:
    """The league of one run.

    Attributes:
        config: the section `episode.league`.
        agents: the agents that take part, in the order of the program.
        seed: the run's.
        max_versions: the most versions that are members at a time.
        version_bytes: the size of one version's weights.
        rating: the Elo rating of the live policy.
        standings: how it did against each member, by the member's name, from the first to the newest.
        live: how it did against itself.
        digests: of the weights of versions that are members.
    """

    config: LeagueConfig
    agents: tuple[str, ...]
    seed: int
    max_versions: int
    version_bytes: int = 0
    rating: float = field(init=False)
    standings: dict[str, Standing] = field(init=False)
    live: Standing = field(init=False)
    digests: dict[int, str] = field(init=False, default_factory=dict)
    _matches: dict[int, Match] = field(init=False, default_factory=dict)
    _results: dict[int, tuple[Outcome, ...]] = field(init=False, default_factory=dict)
    _step: int = field(init=False, default=-1)
    _is_overdue: bool = field(init=False, default=False)
    _leaving: int | None = field(init=False, default=None)
    _last: list[float] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        start = self.config.elo.start
        self.rating, self.live = start, Standing(start)
        self.standings = {f"checkpoint {folder}": Standing(start) for folder in self.config.checkpoints}

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that are members, oldest first."""
        return tuple(version for name in self.standings if (version := labelled_version(name)) is not None)

    @property
    def num_bytes(self) -> int:
        """The size of the weights of all members."""
        return len(self.standings) * self.version_bytes

    # ---- Matches ------------------------------------------------------------------------------------------------

    def match(self, number: int) -> Match:
        """Return who plays in a group: the same until the group is committed."""
        if number not in self._matches:
            self._matches[number] = Match(self.learner(number), self._drawn(number))
        return self._matches[number]

    def learner(self, number: int) -> str:
        """Return which agent learns in a group."""
        return self.config.learner or self.agents[number % len(self.agents)]

    def _drawn(self, number: int) -> str:
        names = [name for name in self.standings if self._leaving is None or name != version_label(self._leaving)]
        if not names or uniform(self.seed, number, "self_play") < self.config.self_play:
            return LIVE
        rates = [self.standings[name].win_rate for name in names]
        return names[draw(self.seed, number, weights(self.config, rates))]

    def evaluation_match(self, number: int) -> Match:
        """Return who plays in a group of held-out episodes."""
        names, against = list(self.standings), self.config.evaluate_against
        opponent = LIVE if against == "live" or not names else names[0 if against == "first" else -1]
        return Match(self.learner(number), opponent)

    def seats(self, match: Match) -> dict[str, Seat]:
        """Return what answers for each agent of the league."""
        folder = match.opponent if match.opponent.startswith("checkpoint ") else None
        opponent = Seat(False, match.opponent, version=match.version, generators=folder)
        return {name: Seat(True, LIVE) if name == match.learner else opponent for name in self.agents}

    # ---- Results ------------------------------------------------------------------------------------------------

    def finished(self, group: Group) -> None:
        """Note how the games of a group ended. They count when the group is committed."""
        learner = self.match(group.number).learner
        others = [name for name in self.agents if name != learner]
        self._results[group.number] = tuple(
            outcome_of(episode, learner, others, config=self.config) for episode in group.episodes
        )

    def commit(self, trained: Iterable[int], drops: Iterable[tuple[int, DropReason]]) -> None:
        """Count the games of groups that were learned from, or dropped for lack of signal, and forget all of them."""
        dropped = dict(drops)
        played = sorted([*trained, *(number for number, why in dropped.items() if why in _COUNTED)])
        self._last = []
        for number in played:
            for outcome in self._results.get(number, ()):
                self._count(self._matches[number].opponent, outcome)
        for number in (*played, *dropped):
            self._matches.pop(number, None)
            self._results.pop(number, None)

    def _count(self, opponent: str, outcome: Outcome) -> None:
        standing = self.live if opponent == LIVE else self.standings[opponent]
        standing.add(outcome, decay=self.config.decay)
        if opponent != LIVE:
            self.rating, standing.rating = rate(self.rating, standing.rating, outcome, k=self.config.elo.k)
            self._last.append(POINTS[outcome])

    # ---- Members ------------------------------------------------------------------------------------------------

    def next_change(self, step: int) -> Change | None:
        """Return how members change after a step, once for each step: None for not at all.

        No group is given the member that makes room from now on; the new one waits for `apply`, when it is pinned. A
        member is not removed while a group that has it as its opponent is not committed. If that holds for all that
        could make room, one of them is not given to groups any more, and the new one is added after the step that
        learns from its last.
        """
        if step <= self._step:
            return None
        self._step = step
        if not (self._is_overdue or self._is_due(step)):
            return None
        self._is_overdue = False
        if len(self.versions) < self.max_versions:
            return Change(step)
        busy = {version for match in self._matches.values() if (version := match.version) is not None}
        removed = evicted(self.versions, step, evict=self.config.evict, busy=busy)
        self._is_overdue = removed is None
        if removed is None:
            if self._leaving is None:
                self._leaving = evicted(self.versions, step, evict=self.config.evict, busy=())
            return None
        self._leaving = None
        self._drop(removed)
        return Change(step, removed)

    def _is_due(self, step: int) -> bool:
        config = self.config
        if not self.versions or (config.add_every is not None and step % config.add_every == 0):
            return True
        if config.add_at_win_rate is None:
            return False
        known = self.standings.values()
        return all(each.num_games >= config.min_games and each.win_rate >= config.add_at_win_rate for each in known)

    def apply(self, change: Change, *, digest: str = "") -> None:
        """Add the new member. It is as strong as the live policy, which it was until now."""
        self.standings[version_label(change.add)] = Standing(self.rating)
        self.digests[change.add] = digest

    def _drop(self, version: int) -> None:
        del self.standings[version_label(version)]
        self.digests.pop(version, None)

    # ---- Checkpoints and tables -----------------------------------------------------------------------------------

    def state(self, pending: Sequence[int]) -> dict[str, Any]:
        """Return what a checkpoint keeps, with the matches of groups that are `pending`."""
        return {
            "step": self._step,
            "is_overdue": self._is_overdue,
            "leaving": self._leaving,
            "rating": self.rating.hex(),
            "live": _plain(self.live),
            "standings": {name: _plain(each) for name, each in self.standings.items()},
            "digests": {str(version): digest for version, digest in self.digests.items()},
            "matches": [
                [number, match.learner, match.opponent]
                for number in sorted(pending)
                if (match := self._matches.get(number)) is not None
            ],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint. What the configuration has no room for any more, or no longer names, is not a
        member any more."""
        self._step, self._is_overdue = int(state["step"]), bool(state["is_overdue"])
        self.rating, self.live = float.fromhex(state["rating"]), _read(state["live"])
        known = {name: _read(each) for name, each in state["standings"].items()}
        fixed = {name: known.get(name, each) for name, each in self.standings.items()}
        self.standings = fixed | {name: each for name, each in known.items() if labelled_version(name) is not None}
        self.digests = {int(version): digest for version, digest in state["digests"].items()}
        while len(self.versions) > self.max_versions:
            *older, newest = self.versions
            removed = evicted(older, newest, evict=self.config.evict, busy=())
            assert removed is not None
            self._drop(removed)
        leaving = state.get("leaving")
        self._leaving = leaving if leaving in self.versions and len(self.versions) == self.max_versions else None
        matches = {int(number): Match(learner, opponent) for number, learner, opponent in state["matches"]}
        self._matches = {
            number: match
            for number, match in matches.items()
            if match.learner == self.learner(number) and (match.opponent == LIVE or match.opponent in self.standings)
        }
        self._results = {}

    def table(self) -> list[dict[str, Any]]:
        """Return the rows of the table of results, the live policy against itself last."""
        rows = [(name, each, each.rating) for name, each in self.standings.items()]
        return [
            {
                "member": name,
                "rating": rating,
                "games": each.num_games,
                "wins": each.num_wins,
                "draws": each.num_draws,
                "losses": each.num_losses,
                "win_rate": each.win_rate if each.num_games else None,
            }
            for name, each, rating in (*rows, (LIVE, self.live, self.rating))
        ]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step that was committed last."""
        values = {
            "league/elo/live": self.rating,
            "league/num_members": float(len(self.standings)),
            "league/gb": self.num_bytes / 1e9,
            "league/num_games": float(len(self._last)),
        }
        if self._last:
            values["league/win_rate/all"] = sum(self._last) / len(self._last)
        for name, each in self.standings.items():
            key = _metric_name(name, self.config)
            values[f"league/elo/{key}"] = each.rating
            if each.num_games:
                values[f"league/win_rate/{key}"] = each.win_rate
        return values


def _metric_name(member: str, config: LeagueConfig) -> str:
    kind, _, rest = member.partition(" ")
    return f"{kind}_{rest}" if kind == "version" else f"{kind}_{config.checkpoints.index(rest)}"


def _plain(standing: Standing) -> list[Any]:
    counts = [standing.num_wins, standing.num_draws, standing.num_losses]
    return [standing.rating.hex(), *counts, standing.games.hex(), standing.points.hex()]


def _read(plain: Sequence[Any]) -> Standing:
    rating, wins, draws, losses, games, points = plain
    return Standing(
        float.fromhex(rating), int(wins), int(draws), int(losses), float.fromhex(games), float.fromhex(points)
    )
