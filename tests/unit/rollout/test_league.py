"""The league: draws, members, results, ratings, and what a checkpoint keeps."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.config import LeagueConfig
from forge.errors import RewardError
from forge.rollout.league import Change, League, Match
from forge.rollout.league_rules import Standing, draw, evicted, outcome_of, rate, weights
from forge.types import AgentResult, Episode, Group, Score, Task

TASK = Task("game:0")


def league(max_versions: int | None = None, agents: tuple[str, ...] = ("row", "column"), **keys: object) -> League:
    config = LeagueConfig(**keys)  # type: ignore[arg-type]
    most = max_versions or config.max_members - len(config.checkpoints)
    return League(config, agents, seed=7, max_versions=most, version_bytes=10**9)


def group(number: int, *rewards: tuple[float, float | None]) -> Group:
    episodes = tuple(
        Episode(
            TASK,
            (),
            Score(row),
            member=member,
            agents={
                "row": AgentResult(Score(row)),
                "column": AgentResult(None if column is None else Score(column), learns=False),
            },
        )
        for member, (row, column) in enumerate(rewards)
    )
    return Group(number, 0, episodes)


def grown(league: League, *steps: int) -> League:
    for step in steps:
        change = league.next_change(step)
        if change is not None:
            league.apply(change)
    return league


def with_versions(*versions: int, **keys: object) -> League:
    return grown(league(add_every=1, max_members=len(versions), **keys), *versions)


# ---- Draws ----------------------------------------------------------------------------------------------------------


def test_weights_of_the_rules() -> None:
    rates = [0.5, 0.8, 0.2]
    assert weights(LeagueConfig(rule="latest"), rates) == [0, 0, 1]
    assert weights(LeagueConfig(), rates) == [1, 1, 1]
    hard = weights(LeagueConfig(rule="prioritised", power=2), rates)
    assert hard == pytest.approx([0.25, 0.04, 0.64])
    variance = weights(LeagueConfig(rule="prioritised", prioritise="variance"), rates)
    assert variance == pytest.approx([0.25, 0.16, 0.16])


def test_weights_that_are_too_small_for_a_float_are_equal() -> None:
    values = weights(LeagueConfig(rule="prioritised", power=2000), [0.9, 0.95])
    assert {draw(3, number, values) for number in range(20)} == {0, 1}


def test_draws_follow_the_weights_and_nothing_but_seed_and_number() -> None:
    counts = Counter(draw(3, number, [1.0, 3.0, 0.0, 4.0]) for number in range(8000))
    assert counts[2] == 0
    assert [round(counts[place] / 1000) for place in (0, 1, 3)] == [1, 3, 4]
    assert [draw(3, number, [1.0, 1.0]) for number in range(40)] == [
        draw(3, number, [1.0, 1.0]) for number in range(40)
    ]
    assert [draw(3, number, [1.0, 1.0]) for number in range(40)] != [
        draw(4, number, [1.0, 1.0]) for number in range(40)
    ]


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=6).filter(any), st.integers(0, 1000))
def test_what_has_no_weight_is_never_drawn(values: list[float], number: int) -> None:
    assert values[draw(0, number, values)] > 0


def test_a_group_keeps_its_opponent_whatever_happens_meanwhile() -> None:
    found = with_versions(0, 1, 2, self_play=0.0)
    first = [found.match(number) for number in range(50)]
    assert {match.opponent for match in first} == {"version 0", "version 1", "version 2"}
    found.standings["version 0"].add("win", decay=1.0)
    found.config = LeagueConfig(rule="latest", self_play=0.0)
    assert [found.match(number) for number in range(50)] == first
    assert {found.match(number).opponent for number in range(50, 90)} == {"version 2"}


def test_order_of_arrival_does_not_matter() -> None:
    forwards, backwards = with_versions(0, 1, 2), with_versions(0, 1, 2)
    there = [forwards.match(number) for number in range(40)]
    back = [backwards.match(number) for number in reversed(range(40))]
    assert there == back[::-1]
    share = sum(match.opponent == "live" for match in (forwards.match(number) for number in range(2000))) / 2000
    assert share == pytest.approx(0.2, abs=0.03)


def test_a_league_without_members_plays_against_itself() -> None:
    assert league(self_play=0.0).match(3) == Match("column", "live")


def test_sides() -> None:
    both, fixed = with_versions(0, self_play=0.0), with_versions(0, self_play=0.0, learner="column")
    assert [both.match(number).learner for number in range(3)] == ["row", "column", "row"]
    assert {fixed.match(number).learner for number in range(4)} == {"column"}
    seats = both.seats(both.match(1))
    assert (seats["column"].learns, seats["column"].label, seats["column"].version) == (True, "live", None)
    assert (seats["row"].learns, seats["row"].label, seats["row"].version) == (False, "version 0", 0)
    old = league(checkpoints=("runs/a",), self_play=0.0)
    assert old.seats(old.match(0))["column"].generators == "checkpoint runs/a"


def test_evaluations_have_a_fixed_opponent() -> None:
    for against, opponent in (("first", "version 0"), ("latest", "version 2"), ("live", "live")):
        found = with_versions(0, 1, 2, evaluate_against=against)
        assert {found.evaluation_match(number).opponent for number in range(9)} == {opponent}
    assert found.state(range(9))["matches"] == []


# ---- Members --------------------------------------------------------------------------------------------------------


def test_members_are_added_every_so_many_steps_and_once_a_step() -> None:
    found = league(add_every=3)
    assert found.next_change(0) == Change(0)
    assert found.next_change(0) is None
    found.apply(Change(0))
    assert [found.next_change(step) for step in (1, 2)] == [None, None]
    assert found.next_change(3) == Change(3)


def test_members_are_added_when_all_are_beaten() -> None:
    found = grown(league(add_every=None, add_at_win_rate=0.6, min_games=4, decay=1.0), 0)
    for number in range(3):
        found._matches[number] = Match("row", "version 0")
        found.finished(group(number, (1, 0)))
    found.commit([0, 1, 2], [])
    assert found.next_change(1) is None  # three games are too few
    found._matches[3] = Match("row", "version 0")
    found.finished(group(3, (1, 0)))
    found.commit([3], [])
    assert found.next_change(2) == Change(2)
    found.apply(Change(2))
    assert found.next_change(3) is None  # the new one is not beaten yet


@pytest.mark.parametrize(
    ("versions", "new", "evict", "busy", "removed"),
    [
        ([0, 10, 20, 30], 40, "spread", (), 10),
        ([0, 20, 30, 40], 50, "spread", (), 30),
        ([0, 20, 30, 40], 50, "spread", (30,), 40),
        ([0, 20], 30, "spread", (), 20),
        ([0, 20], 30, "spread", (20,), None),
        ([5], 30, "spread", (), 5),
        ([0, 20, 30], 50, "oldest", (), 0),
        ([0, 20, 30], 50, "oldest", (0,), 20),
        ([0], 50, "oldest", (0,), None),
    ],
)
def test_which_member_makes_room(
    versions: list[int], new: int, evict: str, busy: tuple[int, ...], removed: int | None
) -> None:
    assert evicted(versions, new, evict=evict, busy=busy) == removed


def test_members_stay_spread_over_the_run() -> None:
    found = grown(league(add_every=1, max_members=5), *range(101))
    versions = found.versions
    assert (versions[0], versions[-1], len(versions)) == (0, 100, 5)
    assert max(later - earlier for earlier, later in itertools.pairwise(versions)) <= 64
    assert found.num_bytes == 5 * 10**9


def test_a_member_that_a_group_needs_stays_and_the_new_one_waits() -> None:
    found = grown(league(add_every=4, max_members=1, self_play=0.0), 0)
    assert found.match(0).opponent == "version 0"
    assert found.next_change(4) is None
    found.finished(group(0, (1, 0)))
    found.commit([0], [])
    assert found.next_change(5) == Change(5, 0)
    assert found.match(1).opponent == "live"  # what is being removed is not drawn any more
    found.apply(Change(5, 0))
    assert found.versions == (5,)
    assert found.next_change(6) is None


@pytest.mark.parametrize(("keys", "num_kept"), [({"max_members": 1}, 0), ({"max_members": 2, "rule": "latest"}, 1)])
def test_members_are_replaced_though_groups_always_run_ahead(keys: dict[str, object], num_kept: int) -> None:
    found = grown(league(add_every=1, self_play=0.0, **keys), *range(num_kept + 1))
    found.match(0)
    for step in range(num_kept + 1, 10):  # the next group has begun before one is learned from
        at = step - num_kept
        found.match(at)
        found.finished(group(at - 1, (1, 0)))
        found.commit([at - 1], [])
        found = grown(found, step)
        again = league(add_every=1, self_play=0.0, **keys)
        again.load(json.loads(json.dumps(found.state([at]))))
        assert again.state([at]) == found.state([at])
        assert again.match(at + 1) == found.match(at + 1)
    assert found.versions[num_kept:][0] >= 8
    assert len(found.versions) == num_kept + 1


# ---- Results --------------------------------------------------------------------------------------------------------


def test_who_wins() -> None:
    (episode,) = group(0, (1.0, 0.75)).episodes

    def found(learner: str, opponents: tuple[str, ...] = ("column",), **keys: object) -> str:
        config = LeagueConfig(**keys)  # type: ignore[arg-type]
        return outcome_of(episode, learner, opponents, config=config)

    assert found("row") == "win"
    assert found("column", ("row",)) == "loss"
    assert found("row", draw_margin=0.25) == "draw"
    assert found("column", ("row",), result="sign") == "win"


def test_a_game_is_read_before_shaping() -> None:
    agents = {"row": AgentResult(Score(-3.0, unshaped=1.0)), "column": AgentResult(Score(0.0))}
    episode = Episode(TASK, (), Score(0.0), agents=agents)
    assert outcome_of(episode, "row", ["column"], config=LeagueConfig()) == "win"


def test_an_opponent_without_a_reward() -> None:
    (episode,) = group(0, (1.0, None)).episodes
    with pytest.raises(RewardError, match=r"column has no reward[\s\S]*episode.league.result[\s\S]*sign"):
        outcome_of(episode, "row", ["column"], config=LeagueConfig())
    assert outcome_of(episode, "row", ["column"], config=LeagueConfig(result="sign")) == "win"


def test_elo_against_the_formula() -> None:
    assert rate(1000, 1000, "win", k=16) == (1008, 992)
    live, other = rate(1400, 1000, "draw", k=32)
    assert live == pytest.approx(1400 + 32 * (0.5 - 10 / 11))
    assert live + other == pytest.approx(2400)


def test_win_rates_forget_old_games_and_never_reach_0_or_1() -> None:
    standing = Standing(1000.0)
    assert standing.win_rate == 0.5
    for _ in range(200):
        standing.add("win", decay=0.9)
    assert 0.9 < standing.win_rate < 1
    for _ in range(200):
        standing.add("loss", decay=0.9)
    assert 0 < standing.win_rate < 0.1
    assert (standing.num_wins, standing.num_losses, standing.num_games) == (200, 200, 400)


def test_a_group_counts_once_and_when_it_is_committed() -> None:
    found = with_versions(0, self_play=0.0)
    for number in (0, 2, 4, 6):
        found.match(number)
    found.finished(group(2, (1, 0), (0, 1)))
    found.finished(group(0, (1, 0), (1, 0)))
    found.finished(group(4, (0.5, 0.5), (0, 1)))
    found.finished(group(6, (1, 0), (1, 0)))
    assert found.standings["version 0"].num_games == 0
    found.commit([2], [(0, "no_signal"), (6, "failed")])
    standing = found.standings["version 0"]
    assert (standing.num_wins, standing.num_draws, standing.num_losses) == (3, 0, 1)  # dropped for faults: no games
    found.commit([2], [(0, "no_signal"), (6, "failed")])
    assert standing.num_games == 4
    found.commit([4], [])
    assert (standing.num_wins, standing.num_draws, standing.num_losses) == (3, 1, 2)


def test_games_count_in_the_order_of_groups() -> None:
    tables = []
    for order in ((0, 2, 4), (4, 0, 2)):
        found = with_versions(0, self_play=0.0)
        for number in order:
            found.match(number)
            found.finished(group(number, (number, 2), (1, 0)))
        found.commit(order, [])
        tables.append(found.state([]))
    assert tables[0] == tables[1]
    assert not math.isclose(float.fromhex(tables[0]["rating"]), 1000.0)


def test_games_against_itself_change_no_rating() -> None:
    found = league(self_play=0.0)
    found.match(0)
    found.finished(group(0, (1, 0)))
    found.commit([0], [])
    assert (found.rating, found.live.num_games) == (1000.0, 1)
    assert "league/win_rate/all" not in found.metrics()


# ---- Checkpoints, tables --------------------------------------------------------------------------------------------


def played() -> League:
    found = with_versions(0, 3, 5, rule="prioritised", checkpoints=(), self_play=0.1)
    for number in range(12):
        found.match(number)
        found.finished(group(number, (number % 3, 1), (1, 0)))
    found.commit(range(8), [])
    return found


def test_a_checkpoint_keeps_all_of_it_bit_for_bit() -> None:
    before = played()
    state = json.loads(json.dumps(before.state([8, 9, 10, 11, 30])))
    after = league(add_every=1, max_members=3, rule="prioritised", self_play=0.1)
    after.load(state)
    assert after.state([8, 9, 10, 11, 30]) == state
    assert after.table() == before.table()
    assert [after.match(number) for number in range(8, 40)] == [before.match(number) for number in range(8, 40)]
    assert after.next_change(5) is None  # the step's change is part of the state
    after.finished(group(8, (1, 0)))
    before.finished(group(8, (1, 0)))
    for each in (after, before):
        each.commit([8], [])
    assert after.state([]) == before.state([])


def test_checkpoints_that_are_no_longer_named_are_no_members() -> None:
    before = grown(league(checkpoints=("a", "b"), self_play=0.0), 0)
    for number in range(30):
        before.match(number)
    after = league(checkpoints=("b", "c"), self_play=0.0)
    after.load(before.state(range(30)))
    assert list(after.standings) == ["checkpoint b", "checkpoint c", "version 0"]
    kept = {number for number, _, opponent in after.state(range(30))["matches"] if opponent == "checkpoint a"}
    assert not kept


def test_the_table_and_the_metrics() -> None:
    found = with_versions(0, 2, self_play=0.0, rule="latest")
    found.match(0)
    found.finished(group(0, (1, 0), (0, 0)))
    found.commit([0], [])
    rows = {row["member"]: row for row in found.table()}
    assert list(rows) == ["version 0", "version 2", "live"]
    assert (rows["version 2"]["wins"], rows["version 2"]["draws"], rows["version 2"]["losses"]) == (1, 1, 0)
    assert rows["version 0"]["win_rate"] is None
    values = found.metrics()
    assert values["league/elo/live"] == rows["live"]["rating"] > 1000
    assert (values["league/win_rate/all"], values["league/num_games"]) == (0.75, 2.0)
    assert (values["league/num_members"], values["league/gb"]) == (2.0, 2.0)
    assert values["league/win_rate/version_2"] == rows["version 2"]["win_rate"]
    assert "league/win_rate/version_0" not in values
