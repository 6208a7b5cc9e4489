"""Reinforcement learning with a self-play league, whole: sides, opponents, results, records and resume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from forge.config import GRPOConfig
from forge.loops.run_paths import run_dir
from forge.observe import read_jsonl
from forge.observe.league_table import read_league
from forge.observe.report import read_run
from forge.rollout.league_rules import Standing, rate
from forge.trainer.checkpoint_folder import list_checkpoints
from grpo_runs import NUM_STEPS, config, episodes, ledger, metrics, train, train_here, weights_digest

PENNIES = ("rewards.functions=[]", "episode.kind=own_games:pennies")
LEAGUE = "episode.league={rule: prioritised, add_every: 1, max_members: 3, self_play: 0.3}"
RUN = (*PENNIES, LEAGUE, "rollout.no_signal=keep", "checkpointing.export_hf=true", "checkpointing.save_interval=1")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> GRPOConfig:
    chosen = config(tmp_path_factory.mktemp("league") / "whole", *RUN)
    assert train_here(chosen).step == NUM_STEPS
    return chosen


def league_of(chosen: GRPOConfig) -> Mapping[str, Any]:
    """What the last checkpoint has, except the matches of groups that were begun after its step."""
    state: dict[str, Any] = list_checkpoints(run_dir(chosen) / "checkpoints")[-1].extra["caller"]["league"]
    return {key: value for key, value in state.items() if key != "matches"}


def opponents(chosen: GRPOConfig) -> dict[int, set[tuple[str, str]]]:
    """For each group: who learned, and what the opponent was, over its episodes."""
    found: dict[int, set[tuple[str, str]]] = {}
    for episode in episodes(chosen):
        ((learner, opponent),) = [
            (name, episode["agents"][other]["policy"])
            for name, other in (("row", "column"), ("column", "row"))
            if episode["agents"][name]["learns"]
        ]
        found.setdefault(episode["group"], set()).add((learner, opponent))
    return found


def test_sides_alternate_and_a_group_has_one_opponent(played: GRPOConfig) -> None:
    found = opponents(played)
    assert all(len(matches) == 1 for matches in found.values())
    assert {number: learner for number, ((learner, _),) in ((n, tuple(m)) for n, m in found.items())} == {
        number: ("row", "column")[number % 2] for number in range(2 * NUM_STEPS)
    }
    kinds = {opponent for matches in found.values() for _, opponent in matches}
    assert "live" in kinds
    assert {kind for kind in kinds if kind.startswith("version ")} >= {"version 0", "version 1"}


def test_only_the_learner_is_trained_on_and_its_tokens_are_exact(played: GRPOConfig) -> None:
    num_learned = 0
    for episode in episodes(played):
        assert {version for version, _, _ in episode["versions"]} == {episode["step"] - 1}
        for turn in episode["turns"]:
            result = episode["agents"][turn["agent"]]
            assert turn["is_trained"] == result["learns"]
            if result["policy"].startswith("version "):
                assert (turn["start"], turn["advantage"]) == (turn["end"], None)
            if result["learns"]:
                own = slice(turn["start"], turn["end"])
                assert episode["logprobs"][own] == episode["trainer_logprobs"][own]
                num_learned += turn["end"] - turn["start"]
        learner = next(result for result in episode["agents"].values() if result["learns"])
        assert (episode["reward"], episode["advantage"]) == (learner["reward"], learner["advantage"])
    assert sum(metrics(played, "train/num_loss_tokens")) == num_learned


def test_the_table_is_what_the_records_say(played: GRPOConfig) -> None:
    """Every game once, in the order of groups, against the ratings that they had then."""
    live, standings = 1000.0, dict[str, Standing]()
    rows = sorted(episodes(played), key=lambda each: (each["step"], each["group"], each["index"]))
    after = {line.step: line.values for line in read_jsonl(run_dir(played) / "metrics.jsonl")}
    standings["version 0"], standings["live"] = Standing(live), Standing(live)
    for step in range(1, NUM_STEPS + 1):
        for row in (each for each in rows if each["step"] == step):
            ((own, other),) = [(each["reward"], against) for each, against in _sides(row["agents"]) if each["learns"]]
            outcome = "draw" if own == other["reward"] else "win" if own > other["reward"] else "loss"
            standing = standings[other["policy"]]
            standing.add(outcome, decay=0.99)  # type: ignore[arg-type]
            if other["policy"] != "live":
                live, standing.rating = rate(live, standing.rating, outcome, k=16.0)  # type: ignore[arg-type]
        names = [name.rpartition("/")[2] for name in after[step] if name.startswith("league/elo/version_")]
        kept = {name.replace("_", " "): standings.get(name.replace("_", " ")) or Standing(live) for name in names}
        standings = {**kept, "live": standings["live"]}
    table = read_league(run_dir(played))
    assert (table["step"], table["rating"]) == (NUM_STEPS, live)
    assert {row["member"]: (row["wins"], row["draws"], row["losses"]) for row in table["members"]} == {
        name: (each.num_wins, each.num_draws, each.num_losses) for name, each in standings.items()
    }
    ratings = {row["member"]: row["rating"] for row in table["members"] if row["member"] != "live"}
    assert ratings == {name: each.rating for name, each in standings.items() if name != "live"}
    assert metrics(played, "league/elo/live")[-1] == live
    assert set(metrics(played, "league/num_members")[2:]) == {3.0}
    assert read_run(run_dir(played), max_samples=0).league["members"] == table["members"]


def _sides(agents: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    return [(agents["row"], agents["column"]), (agents["column"], agents["row"])]


def test_members_are_bounded_and_their_files_are_there(played: GRPOConfig) -> None:
    state = league_of(played)
    versions = [int(name.removeprefix("version ")) for name in state["standings"]]
    assert (versions[0], versions[-1], len(versions)) == (0, NUM_STEPS, 3)
    infos = list_checkpoints(run_dir(played) / "checkpoints")
    needed = {int(version) for info in infos for version in info.extra["caller"]["league"]["digests"]}
    files = {int(path.stem.removeprefix("version-")) for path in (run_dir(played) / "pinned").iterdir()}
    assert needed <= files


def test_a_resumed_run_has_the_same_members_table_opponents_and_weights(played: GRPOConfig, tmp_path: Path) -> None:
    train_here(config(tmp_path / "parts", *RUN, "training.max_steps=3"))
    second = config(tmp_path / "parts", *RUN, "checkpointing.resume=must")
    assert train_here(second).step == NUM_STEPS
    assert weights_digest(second) == weights_digest(played)
    assert json.dumps(league_of(second)) == json.dumps(league_of(played))
    assert opponents(second) == opponents(played)
    assert ledger(second) == ledger(played)
    assert read_league(run_dir(second)) == read_league(run_dir(played))


def test_games_of_groups_without_signal_count(tmp_path: Path) -> None:
    """Most groups of a game with two results have none: the policy won, or lost, all of them."""
    chosen = config(tmp_path / "dropped", *PENNIES, "episode.league={}", "episode.args={num_rounds: 1}")
    train_here(chosen)
    outcomes = [line.outcome for line in ledger(chosen) if line.step <= NUM_STEPS]
    assert "no_signal" in outcomes
    assert sum(row["games"] for row in read_league(run_dir(chosen))["members"]) == 3 * len(outcomes)


def test_a_version_answers_as_a_model_with_its_weights_does(tmp_path: Path) -> None:
    """A league whose only member is version 0 is a run against the model that it started from, bit for bit."""
    common = (*PENNIES, "checkpointing.export_hf=true", "training.max_steps=3")
    train_here(config(tmp_path / "start", *common))
    folder = tmp_path / "start" / "checkpoints" / "hf"
    model = ("~model.preset", f"model.path={folder}")
    fixed = config(tmp_path / "fixed", *common, *model, f"episode.agents={{column: {{model: '{folder}'}}}}")
    league = config(
        tmp_path / "league", *common, *model, "episode.league={learner: row, add_every: null, self_play: 0}"
    )
    for each in (fixed, league):
        train_here(each)
    said = [
        [(each["group"], each["index"], [turn["text"] for turn in each["turns"]]) for each in episodes(chosen)]
        for chosen in (fixed, league)
    ]
    assert said[0] == said[1]
    assert {policy for matches in opponents(league).values() for _, policy in matches} == {"version 0"}
    assert weights_digest(league) == weights_digest(fixed)


def test_a_checkpoint_is_a_member_with_generators_of_its_own(tmp_path: Path) -> None:
    train_here(config(tmp_path / "before", *PENNIES, "training.max_steps=2"))
    step = list_checkpoints(tmp_path / "before" / "checkpoints")[-1].path
    section = f"{{checkpoints: ['{step}'], add_every: null, self_play: 0, learner: column}}"
    short = ("rollout.no_signal=keep", "rollout.batch_groups=4", "training.max_steps=1")
    chosen = config(tmp_path / "checkpoint", *PENNIES, f"episode.league={section}", *short)
    assert train(chosen).step == 1  # its weights are exported beside the trainer
    seen = {opponent for matches in opponents(chosen).values() for _, opponent in matches}
    assert seen == {"version 0", f"checkpoint {step}"}
    assert metrics(chosen, "league/elo/checkpoint_0")
    assert [row["member"] for row in read_league(run_dir(chosen))["members"]] == [
        f"checkpoint {step}",
        "version 0",
        "live",
    ]


def test_evaluations_are_against_the_first_member(tmp_path: Path) -> None:
    held_out = ("evaluation.fraction=0.1", "evaluation.interval=2", "training.max_steps=2")
    chosen = config(tmp_path / "evaluated", *PENNIES, LEAGUE, *held_out)
    train_here(chosen)
    lines = (run_dir(chosen) / "rollouts" / "evaluation_000002.jsonl").read_text().splitlines()
    labels = {result["policy"] for line in lines for result in json.loads(line)["agents"].values()}
    assert labels == {"live", "version 0"}


def test_rollouts_that_run_ahead(tmp_path: Path) -> None:
    """A member that a group in flight plays against stays, and one that makes room is not drawn any more."""
    ahead = ("rollout.staleness=2", "episode.league={add_every: 1, max_members: 2, evict: oldest, self_play: 0}")
    chosen = config(tmp_path / "ahead", *PENNIES, *ahead, "rollout.no_signal=keep")
    assert train_here(chosen).step == NUM_STEPS
    found = opponents(chosen)
    assert all(len(matches) == 1 and "live" not in str(matches) for matches in found.values())
    assert max(metrics(chosen, "league/num_members")) == 2.0
    assert sum(metrics(chosen, "league/num_games")) == 3 * len(found)


def test_a_policy_that_shares_the_weights_of_its_trainer(tmp_path: Path) -> None:
    """What is pinned does not change with the trainer's weights."""
    model = ("placement=shared", "training.max_steps=3", "checkpointing.export_hf=true", "rollout.no_signal=keep")
    only_first = "episode.league={learner: row, add_every: null, self_play: 0}"
    shared = config(tmp_path / "shared", *PENNIES, *model, only_first)
    apart = config(tmp_path / "apart", *PENNIES, *model, only_first, "placement=apart")
    for each in (shared, apart):
        train_here(each)
    assert weights_digest(shared) == weights_digest(apart)
    assert read_league(run_dir(shared)) == read_league(run_dir(apart))
