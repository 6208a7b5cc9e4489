"""Objects that a configuration names: found by a built-in name or `module:attribute`, or refused with a repair."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from episodes import make_completion, make_group
from forge.config import AlgorithmConfig, GRPOConfig, InvalidConfig, MetricsConfig, SFTConfig, load
from forge.data.tasks import open_task
from forge.errors import ConfigError, DataError
from forge.generator.engine import engine_class
from forge.losses import PolicyLoss, Surrogate, TokenView, make_loss
from forge.losses.build import build_loss
from forge.observe import make_sinks
from forge.observe.log import sink_errors
from forge.registry import (
    ADVANTAGES,
    CURRICULA,
    ENGINES,
    LOSSES,
    OPTIMIZERS,
    REWARDS,
    SINKS,
    SURROGATES,
    TASKS,
    Registry,
    call,
)
from forge.rewards import find
from forge.rollout.credit import assign_advantages, find_advantage, needs_batch
from own_parts import Doubling, FileSink, OnlyBetter, OwnEngine, ranked, surrogate

ALL = {
    "algorithm.loss.function": LOSSES,
    "algorithm.loss.kind": SURROGATES,
    "algorithm.advantage.function": ADVANTAGES,
    "generator.engine": ENGINES,
}


def read(*overrides: str) -> GRPOConfig:
    return load(GRPOConfig, overrides=list(overrides))


# ---- The class -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "registry", [LOSSES, OPTIMIZERS, SURROGATES, ADVANTAGES, TASKS, REWARDS, ENGINES, SINKS, CURRICULA]
)
def test_every_built_in_is_found(registry: Registry[Any]) -> None:
    assert registry.names == sorted(registry.names)
    for name in registry.names:
        if "/" not in name:
            assert registry.find(name, path="here") is not None
        assert registry.problem(name) is None


@pytest.mark.parametrize(
    ("name", "says", "repair"),
    [
        ("clyp", "there is no surrogate 'clyp'", "did you mean `clip`?"),
        ("zzzz", "must be one of cispo, clip, gspo, reinforce, sapo, or `module:attribute`", "choose one of them"),
        ("no_such_module:f", "cannot be imported", "put it beside the script"),
        ("own_parts:surogate", "has no 'surogate'", "did you mean `surrogate`?"),
        ("own_parts.py:surrogate", "cannot be imported", "write own_parts, the module's name"),
        ("./own_parts:surrogate", "is not the name of a module", "dotted name"),
        ("own_parts:constant", "it is of type int", "write a surrogate"),
    ],
)
def test_what_cannot_be_found_is_refused_with_path_value_rule_and_repair(name: str, says: str, repair: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SURROGATES.find(name, path="algorithm.loss.kind")
    assert (caught.value.path, caught.value.value) == ("algorithm.loss.kind", name)
    assert caught.value.rule
    assert repair in str(caught.value.repair)
    assert says in str(caught.value)


@pytest.mark.parametrize("path", ALL)
def test_a_schema_refuses_an_unknown_name_and_lists_the_known_ones(path: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        read(f"{path}=nonesuch")
    (problem,) = caught.value.problems
    assert problem.path == path
    assert all(name in problem.rule for name in ALL[path].names)


def test_a_function_gets_what_its_signature_names() -> None:
    def function(first: int, *, a: int, b: int = 2, c: int = 3) -> tuple[int, ...]:
        return first, a, b, c

    assert call(function, 0, args={"c": 30}, offered={"a": 1, "c": 9, "d": 4}) == (0, 1, 2, 30)


def test_an_object_that_cannot_be_hashed_may_be_called() -> None:
    @dataclass
    class Scaled:
        factor: int = 2

        def __call__(self, value: int, *, bias: int) -> int:
            return self.factor * value + bias

    assert call(Scaled(), 3, args={}, offered={"bias": 1, "other": 5}) == 7


def test_a_family_needs_the_name_of_its_member() -> None:
    assert TASKS.is_built_in("reasoning_gym/leg_counting")
    with pytest.raises(InvalidConfig) as caught:
        read("prompts.sources=[{task: reasoning_gym}]")
    assert "reasoning_gym/NAME" in str(caught.value.problems[0].rule)


# ---- The kinds -------------------------------------------------------------------------------------------------------


def view(**fields: list[float]) -> TokenView:
    tensors = {name: torch.tensor(values) for name, values in fields.items()}
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    return TokenView(logprobs, torch.ones(2), (2,), fields=tensors)


def test_a_loss_of_ones_own() -> None:
    config = read("algorithm.loss.function=own_parts:OnlyBetter", "algorithm.loss.args={factor: 2.0}")
    loss = make_loss(config.algorithm, max_tokens=8, temperature=0.7)
    assert loss == OnlyBetter(factor=2.0, temperature=0.7)
    assert loss(view(advantages=[1.0, -1.0])).total.item() == pytest.approx(2.0)


def test_a_loss_of_ones_own_in_fine_tuning() -> None:
    config = load(SFTConfig, overrides=["loss.function=own_parts:HalfLikelihood", "loss.args.half=0.25"])
    loss = build_loss(config.loss.function, config.loss.args, offered={}, path="loss")
    assert loss(view()).total.item() == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["algorithm.loss.args={facto: 2.0}"], "algorithm.loss.args.facto"),
        (["algorithm.loss.args={factor: much}"], "algorithm.loss.args.factor"),
        (["algorithm.loss.function=own_parts:Doubling"], "algorithm.loss.args.arguments"),
        (["algorithm.loss.function=builtins:dict"], "algorithm.loss.function"),
    ],
)
def test_a_loss_that_cannot_be_made_is_refused(overrides: list[str], path: str) -> None:
    config = read("algorithm.loss.function=own_parts:OnlyBetter", *overrides)
    with pytest.raises(ConfigError, match=path.replace(".", r"\.")):
        make_loss(config.algorithm, max_tokens=8)


def test_a_loss_must_know_the_samplers_temperature() -> None:
    config = read("algorithm.loss.function=own_parts:HalfLikelihood")
    make_loss(config.algorithm, max_tokens=8)
    with pytest.raises(ConfigError, match=r"generator\.sampling\.temperature"):
        make_loss(config.algorithm, max_tokens=8, temperature=0.7)


def test_a_surrogate_of_ones_own() -> None:
    config = read("algorithm.loss.kind=own_parts:surrogate", "algorithm.loss.args={slope: 3.0}")
    loss = make_loss(config.algorithm, max_tokens=8)
    terms = loss(view(advantages=[1.0, 1.0], old_logprobs=[-1.0, -4.0]))
    assert terms.total.item() == pytest.approx(-3.0 * (1.0 + 1.2))
    assert "clip_high" not in terms.metrics
    assert terms.metrics["ratio_max"].item() == pytest.approx(math.exp(2.0))


def test_a_surrogate_declares_what_it_does_with_the_ratio() -> None:
    plain = PolicyLoss(kind=Surrogate(lambda logprobs, advantages: -advantages * logprobs, uses_ratio=False))
    named = PolicyLoss(kind="reinforce")
    tokens = {"advantages": [1.0, -2.0], "old_logprobs": [-1.5, -1.5]}
    assert plain(view(**tokens)).total.item() == named(view(**tokens)).total.item()
    assert PolicyLoss(kind=surrogate, proximal="trainer", iterations=2).fields[-1] == "proximal_logprobs"
    assert "proximal_logprobs" not in PolicyLoss(kind="reinforce", proximal="trainer", iterations=2).fields


@pytest.mark.parametrize("args", [{"slop": 1.0}, {"slope": "steep"}])
def test_arguments_of_a_surrogate_are_checked(args: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=r"algorithm\.loss\.args\.slop"):
        PolicyLoss(kind="own_parts:surrogate", args=args)


def test_a_surrogate_returns_one_loss_for_each_token() -> None:
    with pytest.raises(DataError, match="one loss for each token"):
        PolicyLoss(kind="own_parts:total")(view(advantages=[1.0, 1.0], old_logprobs=[-1.0, -2.0]))


def test_arguments_that_a_run_gives_itself_are_not_offered_to_the_user() -> None:
    with pytest.raises(InvalidConfig, match="takes no arguments"):
        find_advantage(read("algorithm.advantage.args={gamma: 0.5}").algorithm)
    with pytest.raises(InvalidConfig, match="the arguments are gamma, baseline"):
        find_advantage(read("algorithm.advantage.function=turn", "algorithm.advantage.args={gama: 0.5}").algorithm)


def test_an_advantage_function_of_ones_own() -> None:
    algorithm = read(
        "algorithm.advantage.function=own_parts:ranked", "algorithm.advantage.args={spread: 2.0}"
    ).algorithm
    assert find_advantage(algorithm) is ranked
    assert not needs_batch(algorithm)
    (group,) = assign_advantages([make_group(0, (0.5, 0.0, 1.0))], algorithm, mask_truncated=False)
    assert [episode.advantage for episode in group.episodes] == [0.0, -2.0, 2.0]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([[0.0, 1.0]], "one for each episode: 3"),
        ([[0.0, math.nan, 1.0]], "not a finite number"),
        ([[0.0, 1.0, [0.5]]], "one for each sampled token: 3"),
        ([], "one entry for each group: 1"),
    ],
)
def test_advantages_that_do_not_fit_their_groups_are_refused(values: Any, says: str) -> None:
    def function(groups: object) -> Any:
        return values

    with pytest.raises(DataError, match=says):
        assign_advantages([make_group(0, (0, 0, 1))], AlgorithmConfig(), mask_truncated=False, function=function)
    assert needs_batch(AlgorithmConfig(), function)


def test_an_advantage_function_may_give_each_token_its_own() -> None:
    def late(groups: Any) -> Any:
        return [[[0.0, 0.0, reward] for reward in group.rewards] for group in groups]

    (group,) = assign_advantages([make_group(0, (0, 3))], AlgorithmConfig(), mask_truncated=False, function=late)
    assert group.episodes[1].token_advantages == (0.0, 0.0, 3.0)
    assert group.episodes[1].advantage == 1.0


def test_token_credit_is_for_the_built_in_function() -> None:
    kl = ["algorithm.kl.coefficient=0.1", "algorithm.kl.place=reward", "algorithm.kl.credit=token"]
    with pytest.raises(InvalidConfig, match=r"algorithm\.kl\.credit"):
        read("algorithm.advantage.function=own_parts:ranked", *kl)


def test_a_task_of_ones_own() -> None:
    task = open_task("own_parts:Doubling", args={"top": 10}, seed=3, where="prompts.sources[0]", size=5)
    assert isinstance(task, Doubling)
    assert task.read(1).answer == "0"
    with pytest.raises(ConfigError, match=r"prompts\.sources\[0\]\.task_args\.tip"):
        open_task("own_parts:Doubling", args={"tip": 1}, seed=3, where="prompts.sources[0]", size=5)
    with pytest.raises(ConfigError, match="does not make a task"):
        open_task("builtins:repr", args={}, seed=3, where="prompts.sources[0]", size=5)


def test_a_reward_of_ones_own() -> None:
    assert find("own_parts:even")(make_group(0).task, make_completion(), mark=2.0) == 2.0


def test_an_engine_of_ones_own() -> None:
    config = read("generator.engine=own_parts:OwnEngine", "placement=shared")
    assert engine_class(config.generator.engine) is OwnEngine
    assert config.generator.capabilities.shared_weights


@pytest.mark.parametrize("name", ["own_parts:surrogate", "own_parts:None_such", "no_such_module:Engine"])
def test_an_engine_that_cannot_be_used_is_refused_when_the_configuration_is_read(name: str) -> None:
    with pytest.raises(InvalidConfig, match=r"generator\.engine"):
        read(f"generator.engine={name}")


def test_a_sink_of_ones_own(tmp_path: Path) -> None:
    config = read("metrics.sinks=[{kind: 'own_parts:FileSink', args: {file: names.txt}}]", "metrics.tensorboard=false")
    with make_sinks(config.metrics, folder=tmp_path) as log:
        assert isinstance(log.sinks["FileSink"], FileSink)
        log.write(1, {"train/loss": 0.5})
    assert (tmp_path / "names.txt").read_text() == "1 train/loss\n"
    assert (tmp_path / "metrics.jsonl").exists()


def test_sinks_that_cannot_be_opened_are_refused() -> None:
    kinds = [{"kind": "own_parts:FileSink", "name": name} for name in "ab"]
    config = MetricsConfig.model_validate({"sinks": [*kinds, {"kind": "own_parts:nothing"}]})
    text = "\n".join(map(str, sink_errors(config)))
    assert all(path in text for path in ("sinks[0].args.file", "sinks[1].args.file", "sinks[2].kind"))
    with pytest.raises(InvalidConfig, match="name of its own"):
        read("metrics.sinks=[{kind: jsonl}]")
