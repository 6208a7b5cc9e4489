"""What the page says that a step does to each token is what autograd finds in the real loss, batch and record."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent_folders import make_agent_groups
from episodes import with_turn
from forge.config import AlgorithmConfig, RecordConfig
from forge.losses import PolicyLoss, TokenView, make_loss
from forge.rollout.agent_credit import AgentCredit
from forge.rollout.credit import assign_advantages
from forge.rollout.record import RolloutRecorder
from forge.rollout.samples import logprobs_by_episode, make_batch
from forge.types import AgentResult, Batch, Episode, Group, Score, Turn
from forge.ui.rollouts.explanation import LearningRules, batch_size, explain, explain_advantage
from forge.ui.rollouts.index import RolloutIndex
from forge.ui.rollouts.lines import Fields
from run_folders import decode, make_groups

MAX_TOKENS = 64
BOUNDS = ("low", "high", "dual")


def scattered(episode: Episode, chance: random.Random, *, width: float) -> tuple[float, ...]:
    return tuple(min(-1e-3, value + chance.gauss(0, width)) for value in episode.logprobs)


def two_agents(step: int) -> list[Group]:
    """Episodes in which two agents that learn and one that does not take turns; the last turn of one is cut off."""
    (group,) = make_agent_groups(step)
    names = ("a", "b", "a", "c", "b")

    def turn(each: Turn) -> Turn:
        parent = {0: None, 1: None, 2: 0, 3: None, 4: 1}[each.index]
        is_cut = each.index == 4
        return replace(
            each, agent=names[each.index], parent=parent, previous=parent, path=(), is_delivered=True,
            finish_reason="length" if is_cut else "stop",
        )  # fmt: skip

    def episode(each: Episode) -> Episode:
        results = {
            name: AgentResult(Score(each.score.reward * factor), learns=name != "c")
            for name, factor in (("a", 1.0), ("b", -0.5), ("c", 0.0))
        }
        turns = tuple(map(turn, each.turns))
        return replace(each, turns=turns, agents=results, outcome="finished", turn_rewards={}, token_advantages=None)

    return [replace(group, number=900 + step, episodes=tuple(map(episode, group.episodes)))]


def batch_groups(kind: str) -> list[Group]:
    """Groups of single completions, some cut off; of programs with branches and lost answers; or of several agents."""
    if kind == "agents":
        groups = two_agents(1)
    elif kind == "turns":
        (first,) = make_agent_groups(2)
        second = replace(first, number=77, episodes=tuple(replace(e, outcome="finished") for e in first.episodes))
        groups = [first, second]
    else:
        groups = make_groups(3, num_groups=3, group_size=3)
        odd = with_turn(groups[0].episodes[0], finish_reason="length")
        groups[0] = replace(groups[0], episodes=(odd, *groups[0].episodes[1:]))
    chance = random.Random(5)
    return [
        replace(
            group,
            episodes=tuple(replace(e, ref_logprobs=scattered(e, chance, width=0.4)) for e in group.episodes),
        )
        for group in groups
    ]


def autograd(loss: PolicyLoss, batch: Batch, policy_T: torch.Tensor) -> list[torch.Tensor]:
    """d loss / d logprob of every token, by sample."""
    logprobs = policy_T.clone().requires_grad_()
    fields = {name: values.double() for name, values in batch.fields.items()}
    weights = batch.loss_weights.double()
    view = TokenView(logprobs, weights, batch.lengths, fields=fields)
    if batch.sequences:
        plain = replace(view, sequences=batch.sequences)
        sums = plain.sequence_sums(weights)[plain.sequence_index()]
        view = replace(plain, sequence_weights_T=sums)
    (loss(view).total / loss.normalizer(batch)).backward()
    assert logprobs.grad is not None
    return list(logprobs.grad.split(batch.lengths))


def policy_of(batch: Batch, *, width: float) -> torch.Tensor:
    """The trainer's logprobs before the step: those of the sampler, with differences."""
    maker = torch.Generator().manual_seed(11)
    noise = torch.randn(batch.num_tokens, generator=maker, dtype=torch.float64)
    return torch.where(
        batch.loss_weights != 0, (batch.fields["old_logprobs"].double() + width * noise).clamp(max=-1e-4), 0
    )


def lines_of(folder: Path) -> list[Fields]:
    return [json.loads(line) for path in sorted(folder.glob("rollouts/step_*")) for line in path.open()]


def explained(folder: Path, config: dict[str, Any]) -> list[dict[str, Any]]:
    """What the page is told about each line."""
    index = RolloutIndex(folder)
    index.advance()
    assert index.is_complete
    rules = LearningRules.of(config)
    size = batch_size(index.rows(), 1, rules, None)
    return [explain(line, rules, size, limit=1000) for line in lines_of(folder)]


def compare(
    tmp_path: Path,
    algorithm: dict[str, Any],
    *,
    kind: str = "single",
    mask_truncated: bool = False,
    iterations: int = 1,
    width: float = 0.3,
) -> list[dict[str, Any]]:
    """Train on a batch and explain it from its record; return the explanations, after comparing every token."""
    config = {
        "algorithm": algorithm,
        "rollout": {"mask_truncated": mask_truncated, "iterations": iterations},
        "generator": {"sampling": {"max_tokens": MAX_TOKENS}},
    }
    section = AlgorithmConfig.model_validate(algorithm)
    credit = AgentCredit(names=("a", "b", "c")) if kind == "agents" else AgentCredit()
    groups = assign_advantages(batch_groups(kind), section, mask_truncated=mask_truncated, agents=credit)
    batch = make_batch(groups, mask_truncated=mask_truncated, with_reference=True)
    policy = policy_of(batch, width=width)
    if iterations > 1:
        batch = replace(batch, fields={**batch.fields, "proximal_logprobs": policy})
    loss = make_loss(section, max_tokens=MAX_TOKENS, iterations=iterations)
    assert isinstance(loss, PolicyLoss)
    gradients = logprobs_by_episode(groups, autograd(loss, batch, policy))
    recorder = RolloutRecorder(tmp_path / "rollouts", decode=decode, config=RecordConfig(), resume_step=None)
    recorder.write(1, groups, logprobs_by_episode(groups, list(policy.split(batch.lengths))))
    found = explained(tmp_path, config)
    counted = 0
    for line, told in zip(lines_of(tmp_path), found, strict=True):
        assert (told["none"], told["unknown"]) == ("", "")
        expected = gradients[line["group"], line["index"]]
        given = [0.0 if value is None else value for value in told["tokens"]["gradient"]]
        assert given == pytest.approx(expected, rel=1e-5, abs=1e-9)
        counted += np.count_nonzero(given)
    assert counted > 5
    return found


LOSSES: dict[str, dict[str, Any]] = {
    "clip": {"kind": "clip", "clip_low": 0.1, "clip_high": 0.2},
    "dual clip": {"kind": "clip", "clip_low": 0.1, "clip_high": 0.1, "dual_clip": 1.3},
    "gspo": {"kind": "gspo", "clip_low": 0.02, "clip_high": 0.02, "average": "sequence_mean"},
    "cispo": {"kind": "cispo", "clip_low": 1.0, "clip_high": 0.2},
    "sapo": {"kind": "sapo", "tau_positive": 2.0, "tau_negative": 3.0},
    "reinforce": {"kind": "reinforce", "average": "constant"},
    "fixed length": {"kind": "clip", "average": "constant", "length": 50},
    "all sequences": {"kind": "clip", "average": "sequence_mean", "count_masked": True},
    "truncated correction": {"kind": "clip", "proximal": "trainer", "correction": {"kind": "truncate", "high": 1.1}},
    "masked tokens": {"kind": "clip", "correction": {"kind": "mask", "low": 0.8, "high": 1.2}},
    "masked, of reinforce": {"kind": "reinforce", "correction": {"kind": "mask", "low": 0.8, "high": 1.2}},
    "correction of sequences": {
        "kind": "cispo", "proximal": "trainer", "correction": {"kind": "truncate", "level": "sequence", "high": 1.5},
    },
    "masked sequences": {
        "kind": "gspo", "correction": {"kind": "mask", "high": 1.1, "sequence_mask": {"low": 0.97, "high": 1.05}},
    },
    "product of a sequence": {"kind": "clip", "correction": {"sequence_mask": {"ratio": "product", "high": 2.0}}},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["single", "turns", "agents"])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_moves_tokens_as_the_page_says(tmp_path: Path, name: str, kind: str) -> None:
    compare(tmp_path, {"advantage": {"scale": "none"}, "loss": LOSSES[name]}, kind=kind)


KLS: dict[str, dict[str, Any]] = {
    "k1": {"estimator": "k1"},
    "k2": {"estimator": "k2", "clamp": 0.05},
    "k3": {"estimator": "k3"},
    "weighted k3": {"estimator": "k3", "weighted": True},
    "k3 with the score": {"estimator": "k3", "score_gradient": True, "clamp": 0.2},
    "weighted k1": {"estimator": "k1", "weighted": True, "clamp": 0.3},
}


@pytest.mark.parametrize("surrogate", ["clip", "gspo"])
@pytest.mark.parametrize("name", KLS)
def test_the_penalty_is_part_of_it(tmp_path: Path, name: str, surrogate: str) -> None:
    algorithm = {"loss": {"kind": surrogate}, "kl": {"coefficient": 0.3, **KLS[name]}}
    found = compare(tmp_path, algorithm, kind="turns")
    assert any(value for told in found for value in told["tokens"]["penalty"])


@pytest.mark.parametrize("average", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("kind", ["single", "turns", "agents"])
def test_completions_that_were_cut_off_are_left_out(tmp_path: Path, kind: str, average: str) -> None:
    found = compare(tmp_path, {"loss": {"average": average}}, kind=kind, mask_truncated=True)
    left_out = [sequence["isLeftOut"] for told in found for sequence in told["sequences"]]
    assert 0 < sum(left_out) < len(left_out)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"preset": "grpo"}, {"preset": "dapo"}, {"preset": "dr_grpo"}, {"preset": "gspo"}, {"preset": "cispo"},
        {"preset": "sapo"}, {"preset": "rloo"}, {"preset": "reinforce"}, {"preset": "reinforce_pp"},
        {"preset": "reinforce_pp_baseline"}, {"preset": "grpo", "convention": "verl"},
        {"preset": "grpo", "advantage": {"gamma": 0.9}},
        {"preset": "grpo", "kl": {"coefficient": 0.2, "place": "reward", "credit": "token"}},
    ],
    ids=str,
)  # fmt: skip
def test_published_algorithms(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    compare(tmp_path, algorithm)


def test_the_first_of_several_steps_on_a_batch(tmp_path: Path) -> None:
    algorithm = {"loss": {"proximal": "trainer"}}
    found = compare(tmp_path, algorithm, iterations=4)
    assert {ratio for told in found for ratio in told["tokens"]["ratio"]} == {1.0}
    assert all("first of 4 optimizer steps" in told["notes"][0] for told in found)


def test_the_page_says_which_bound_acts(tmp_path: Path) -> None:
    loss = {"kind": "clip", "clip_low": 0.1, "clip_high": 0.1, "dual_clip": 1.5}
    found = compare(tmp_path, {"loss": loss}, width=0.5)
    seen = set()
    for told in found:
        tokens = told["tokens"]
        for bound, ratio, advantage, pull in zip(
            tokens["bound"], tokens["ratio"], tokens["advantage"], tokens["pull"], strict=True
        ):
            seen.add(bound)
            expected = {
                "high": ratio > 1.1 and advantage > 0,
                "low": ratio < 0.9 and advantage < 0,
                "dual": ratio > 1.5 and advantage < 0,
                "outside": (ratio < 0.9 and advantage > 0) or (1.1 < ratio <= 1.5 and advantage < 0),
                "": 0.9 <= ratio <= 1.1 or advantage == 0,
            }
            assert expected[bound], (bound, ratio, advantage)
            assert (pull == 0) == (bound in BOUNDS or advantage == 0)
        assert told["sequences"][0]["bounds"]["high"] == tokens["bound"].count("high")
    assert seen == {"high", "low", "dual", "outside", ""}


def first_line(tmp_path: Path, **changes: Any) -> Fields:
    groups = make_groups(1, num_groups=1, group_size=2)
    recorder = RolloutRecorder(tmp_path / "rollouts", decode=decode, config=RecordConfig(), resume_step=None)
    recorder.write(1, groups)
    return {**lines_of(tmp_path)[0], **changes}


def told_of(line: Fields, algorithm: Any, **config: Any) -> dict[str, Any]:
    return explain(line, LearningRules.of({"algorithm": algorithm, **config}), None, limit=8)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    line = first_line(tmp_path)
    told = told_of(line, {"preset": "grpo"})
    assert "trainer’s logprobs were not recorded" in told["unknown"]
    assert told["tokens"]["gradient"] == [None] * 8
    assert told["tokens"]["advantage"] == [pytest.approx(line["advantage"])] * 8
    on_policy = told_of(line, {"loss": {"proximal": "trainer"}})
    assert on_policy["unknown"] == ""
    assert on_policy["tokens"]["pull"] == [pytest.approx(-line["advantage"])] * 8
    assert (on_policy["hasWeight"], on_policy["tokens"]["weight"]) == (False, [None] * 8)
    recorded = {**line, "trainer_logprobs": line["logprobs"], "ref_logprobs": None}
    notes = told_of(recorded, {"kl": {"coefficient": 0.1}, "loss": {"entropy_coefficient": 0.01}})["notes"]
    assert ["reference’s logprobs" in notes[0], "entropy bonus" in notes[1]] == [True, True]
    own = told_of(recorded, {"loss": {"function": "mine:loss"}})
    assert "mine:loss is not one of this library" in own["unknown"]
    assert "mine:surrogate" in told_of(recorded, {"loss": {"kind": "mine:surrogate"}})["unknown"]
    for damaged in (None, [], {"loss": 3}, {"preset": "x"}):
        assert "could not be read" in told_of(recorded, damaged)["unknown"]


def test_samples_that_were_not_trained_on_have_none(tmp_path: Path) -> None:
    held_out = told_of(first_line(tmp_path, outcome="evaluation"), {"preset": "grpo"})
    assert held_out["none"] == "held-out prompts are not trained on"
    dropped = told_of(first_line(tmp_path, outcome="no_signal", reason="all rewards are 0"), {"preset": "grpo"})
    assert dropped["none"] == "its group was not trained on: all rewards are 0"
    assert dropped["sequences"] == []


def test_while_the_critic_is_warmed_up_the_policy_learns_nothing(tmp_path: Path) -> None:
    line = first_line(tmp_path)
    for steps, none in ((0, ""), (1, "the critic learned alone in this step (critic.warmup_steps)")):
        critic = {"warmup_steps": steps}
        assert told_of(line, {"preset": "ppo"}, critic=critic)["none"] == none
        assert told_of(line, {"preset": "grpo"}, critic=critic)["none"] == ""


def test_how_an_advantage_comes_about_of_a_group(tmp_path: Path) -> None:
    def of(**advantage: Any) -> dict[str, Any] | None:
        rules = LearningRules.of({"algorithm": {"advantage": advantage}})
        return explain_advantage([1.0, 0.0, 0.5, 0.5], 1.0, rules)

    plain = of(scale="group_std", std_ddof=0, epsilon=0.1)
    assert plain is not None
    assert plain["value"] == pytest.approx((1 - plain["baseline"]) / (plain["std"] + plain["epsilon"]))
    assert (plain["baseline"], plain["std"]) == (0.5, pytest.approx(math.sqrt(0.125)))
    assert of(scale="none") == {
        "reward": 1.0,
        "baseline": 0.5,
        "std": None,
        "epsilon": 1e-4,
        "clip": None,
        "value": 0.5,
    }
    for other in (
        {"whiten": True},
        {"baseline": "batch_mean"},
        {"function": "turn"},
        {"epsilon_place": "floor"},
        {"gamma": 0.9},
    ):
        assert of(**other) is None
    assert explain_advantage([1.0, math.nan], 1.0, LearningRules.of({"algorithm": {}})) is None


def test_a_step_of_which_some_groups_are_recorded_is_divided_by_what_its_metrics_say(tmp_path: Path) -> None:
    groups = make_groups(1, num_groups=3, group_size=2)
    config = RecordConfig(rollouts="some", num_groups=1)
    recorder = RolloutRecorder(tmp_path / "rollouts", decode=decode, config=config, resume_step=None)
    recorder.write(1, groups)
    index = RolloutIndex(tmp_path)
    index.advance()
    for average, expected in (("token_mean", 1 / 500), ("sequence_mean", None), ("constant", None)):
        loss = {"average": average, "proximal": "trainer"}
        rules = LearningRules.of({"algorithm": {"loss": loss}, "record": {"rollouts": "some"}})
        size = batch_size(index.rows(), 1, rules, 500.0)
        told = explain(lines_of(tmp_path)[0], rules, size, limit=1)
        assert told["tokens"]["weight"] == [expected]
        assert batch_size(index.rows(), 1, rules, None) is None


def test_numbers_that_are_not_known_are_null(tmp_path: Path) -> None:
    line = first_line(tmp_path)
    line["trainer_logprobs"] = [None, *line["logprobs"][1:]]
    told = told_of(line, {"preset": "grpo"})
    assert told["tokens"]["gradient"][0] is None
    assert all(math.isfinite(value) for value in told["tokens"]["gradient"][1:])
