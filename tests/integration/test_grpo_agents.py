"""Reinforcement learning of several agents in one episode, whole: tokens, rewards, advantages, other models, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from answering_endpoint import answering
from forge.config import GRPOConfig
from forge.errors import ConfigError
from forge.loops.run_paths import run_dir
from forge.rollout.ledger import check_ledger
from forge.trainer.checkpoint_folder import list_checkpoints
from grpo_runs import NUM_STEPS, config, episodes, kept_buffer, ledger, metrics, train, train_here, weights_digest

PENNIES = ("rewards.functions=[]", "episode.kind=own_games:pennies")
REVIEW = ("rewards.functions=[]", "episode.kind=own_games:review")
ZERO_SUM = "episode.agents={row: {advantage: baseline}, column: {advantage: zero_sum}}"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> GRPOConfig:
    """A run of a zero-sum game in processes of its own, with a running baseline."""
    chosen = config(
        tmp_path_factory.mktemp("agents") / "pennies", *PENNIES, ZERO_SUM, "algorithm.loss.average=sequence_mean"
    )
    assert train(chosen).step == NUM_STEPS
    return chosen


def by_agent(episode: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [turn for turn in episode["turns"] if turn["agent"] == name]


def test_tokens_of_both_agents_have_the_same_probability_in_trainer_and_sampler(played: GRPOConfig) -> None:
    """Bit for bit: each conversation is what the engine got, and no token of one agent is in the other's."""
    seen = list(episodes(played))
    assert seen
    for episode in seen:
        assert episode["logprobs"] == episode["trainer_logprobs"]
        assert {version for version, _, _ in episode["versions"]} == {episode["step"] - 1}
        assert [(turn["agent"], turn["parent"]) for turn in episode["turns"]] == [
            ("row", None),
            ("row", 0),
            ("column", None),
            ("column", 2),
        ]
        assert sorted(turn["order"] for turn in episode["turns"]) == [0, 1, 2, 3]
        assert all(turn["num_cached"] > 0 for turn in (episode["turns"][1], episode["turns"][3]))
    assert sum(metrics(played, "train/num_loss_tokens")) == sum(len(each["token_ids"]) for each in seen)
    assert set(metrics(played, "train/mismatch_max")) == {0.0}


def test_each_agent_hears_what_the_other_one_did(played: GRPOConfig) -> None:
    for episode in episodes(played):
        for name, other in (("row", "column"), ("column", "row")):
            heard = by_agent(episode, name)[1]["messages"][0]
            said = by_agent(episode, other)[0]["text"]
            assert (heard["name"], heard["content"]) == (other, str(len(said) % 2))


def test_advantages_are_those_of_the_running_baseline_and_add_up_to_zero(played: GRPOConfig) -> None:
    value, num_batches, rewards = 0.0, 0, dict[int, list[float]]()
    for episode in episodes(played):
        rewards.setdefault(episode["step"], []).append(episode["agents"]["row"]["reward"])
    for step in sorted(rewards):
        for episode in (each for each in episodes(played) if each["step"] == step):
            row, column = episode["agents"]["row"], episode["agents"]["column"]
            assert row["reward"] + column["reward"] == 0.0
            assert row["advantage"] == row["reward"] - value
            assert row["advantage"] + column["advantage"] == 0.0
            assert {turn["advantage"] for turn in by_agent(episode, "column")} == {column["advantage"]}
        kept = 0.9 if num_batches else 0.0
        value, num_batches = kept * value + (1 - kept) * sum(rewards[step]) / len(rewards[step]), num_batches + 1
    newest = list_checkpoints(run_dir(played) / "checkpoints")[-1]
    text, count = newest.extra["caller"]["agents"]["row"]
    assert (float.fromhex(text), count) == (pytest.approx(value, abs=1e-12), NUM_STEPS)


def test_metrics_are_those_of_each_agent(played: GRPOConfig) -> None:
    assert metrics(played, "episode/agents/row/num_turns") == [2.0] * NUM_STEPS
    assert metrics(played, "episode/num_turns") == [4.0] * NUM_STEPS
    both = zip(
        metrics(played, "episode/agents/row/reward"), metrics(played, "episode/agents/column/reward"), strict=True
    )
    assert all(row + column == 0.0 for row, column in both)
    check_ledger(
        ledger(played),
        pending=kept_buffer(played)["pending"],
        next_number=kept_buffer(played)["next_number"],
    )


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    """The running baseline comes from the checkpoint, bit for bit; moves at the same time are replayed."""
    options = (*PENNIES, ZERO_SUM, "checkpointing.export_hf=true")
    whole = config(tmp_path / "whole", *options)
    train_here(whole)
    first = config(tmp_path / "parts", *options, "training.max_steps=3", "checkpointing.save_interval=1")
    train_here(first)
    second = config(tmp_path / "parts", *options, "checkpointing.resume=must")
    assert train_here(second).step == NUM_STEPS
    assert weights_digest(second) == weights_digest(whole)
    ends = [list_checkpoints(run_dir(each) / "checkpoints")[-1].extra["caller"]["agents"] for each in (whole, second)]
    assert ends[0] == ends[1]


def test_an_endpoint_answers_for_an_agent_that_does_not_learn(tmp_path: Path) -> None:
    with answering(lambda body: "odd") as server:
        agents = f"episode.agents={{critic: {{endpoint: {{url: '{server.url}'}}, limits: {{max_turns: 1}}}}}}"
        chosen = config(tmp_path / "endpoint", *REVIEW, agents, "training.max_steps=2")
        assert train_here(chosen).step == 2
    assert {body["model"] for body in server.requests} == {"stand-in"}
    seen = list(episodes(chosen))
    for episode in seen:
        (turn,) = by_agent(episode, "critic")
        assert (turn["text"], turn["start"], turn["is_trained"]) == ("odd", turn["end"], False)
        assert episode["agents"]["critic"]["policy"] == f"endpoint {server.url} (stand-in)"
        assert episode["agents"]["critic"]["advantage"] is None
        assert episode["logprobs"] == episode["trainer_logprobs"]
        heard = by_agent(episode, "solver")[1]["messages"][0]
        assert (heard["name"], heard["content"]) == ("critic", "odd")
        assert turn["messages"][0]["content"] == by_agent(episode, "solver")[0]["text"]
    assert sum(metrics(chosen, "train/num_loss_tokens")) == sum(len(each["token_ids"]) for each in seen)


def test_another_model_answers_with_weights_that_stay(tmp_path: Path) -> None:
    """A checkpoint of the run, and a model's folder: at temperature 1 they answer as their weights do."""
    options = (*PENNIES, "episode.args={num_rounds: 1}", "training.max_steps=2")
    before = config(tmp_path / "before", *options, "checkpointing.export_hf=true")
    train_here(before)
    step = list_checkpoints(run_dir(before) / "checkpoints")[-1].path
    found = {}
    for name, source in (("model", run_dir(before) / "checkpoints" / "hf"), ("checkpoint", step)):
        chosen = config(tmp_path / name, *options, f"episode.agents={{column: {{{name}: '{source}'}}}}")
        run = train if name == "checkpoint" else train_here  # its weights are exported beside the trainer
        assert run(chosen).step == 2
        seen = list(episodes(chosen))
        assert {each["agents"]["column"]["policy"] for each in seen} == {f"{name} {source}"}
        assert all(turn["start"] == turn["end"] for each in seen for turn in by_agent(each, "column"))
        assert {version for each in seen for version, _, _ in each["versions"]} == {0, 1}
        found[name] = [(each["group"], each["index"], by_agent(each, "column")[0]["text"]) for each in seen]
    assert found["model"] == found["checkpoint"]  # the same weights, the same seeds


@pytest.mark.parametrize(
    ("agents", "message"),
    [
        ("{rwo: {}}", r"the program has no such agent[\s\S]*episode.agents.rwo[\s\S]*one of row, column"),
        ("{row: {learns: false}, column: {learns: false}}", "no agent learns"),
        ("{row: {advantage: zero_sum}, column: {advantage: zero_sum}}", "no opponent"),
        ("{row: {model: nowhere}}", r"this agent cannot be loaded[\s\S]*episode.agents.row.model"),
        ("{row: {checkpoint: nowhere}}", r"this agent cannot be loaded[\s\S]*episode.agents.row.checkpoint"),
    ],
)
def test_agents_that_are_refused(agents: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        train_here(config(tmp_path / "refused", *PENNIES, f"episode.agents={agents}"))


def test_agents_of_a_program_that_declares_none(tmp_path: Path) -> None:
    overrides = ("rewards.functions=[]", "episode.kind=own_episodes:dialogue", "episode.agents={critic: {}}")
    with pytest.raises(ConfigError, match="declares no agents"):
        train_here(config(tmp_path / "none", *overrides))
