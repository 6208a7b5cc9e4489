"""The conventions of other libraries: advantages of tokens that their own functions computed, and who pays for the
divergence from the reference."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from episodes import make_completion, make_group, with_turn
from forge.config import AlgorithmConfig
from forge.errors import DataError
from forge.rollout.advantage import advantages, charged, token_advantages, token_kl
from forge.rollout.credit import assign_advantages
from forge.rollout.samples import make_batch
from forge.types import Group, Turn

# Two groups of two completions, of 3, 1, 2 and 2 tokens. The last token is so unlikely for the reference that its k1 is
# 14, its k2 98 and its k3 13.
REWARDS = [[1.0, 0.0], [0.5, 0.1]]
LOGPROBS = [[[-0.7, -1.2, -0.4], [-2.0]], [[-0.3, -0.9], [-1.5, -0.2]]]
REFERENCE = [[[-0.9, -1.0, -0.6], [-1.5]], [[-0.5, -1.0], [-1.1, -14.2]]]


def groups(**changes: Any) -> list[Group]:
    made = []
    for number, (rewards, logprobs, references) in enumerate(zip(REWARDS, LOGPROBS, REFERENCE, strict=True)):
        plain = make_group(number, rewards)
        episodes = [
            replace(
                episode,
                turns=(Turn.of(make_completion(range(len(own)), logprobs=tuple(own), **changes)),),
                ref_logprobs=tuple(reference),
            )
            for episode, own, reference in zip(plain.episodes, logprobs, references, strict=True)
        ]
        made.append(replace(plain, episodes=tuple(episodes)))
    return made


def found(convention: Any, preset: Any, estimator: str | None = None, **advantage: Any) -> list[list[float]]:
    """The advantages of the tokens of each completion; with an estimator, 0.1 of the divergence is in the reward."""
    kl = {} if estimator is None else {"coefficient": 0.1, "estimator": estimator, "place": "reward"}
    keys = {"convention": convention, "preset": preset, "kl": kl, "advantage": advantage}
    config = AlgorithmConfig.model_validate(keys)
    batch = make_batch(assign_advantages(punished(groups(), config), config, mask_truncated=False))
    return [sample.fields["advantages"][2:].tolist() for sample in batch.samples()]


def punished(made: list[Group], config: AlgorithmConfig) -> list[Group]:
    """What the rollouter does where the divergence of a whole completion is taken from its reward."""
    if config.kl.coefficient == 0 or config.kl.credit != "completion":
        return made
    kl = config.kl
    return [
        replace(
            group,
            episodes=tuple(
                replace(each, score=replace(each.score, reward=each.score.reward - kl.coefficient * divergence))
                for each, own, reference in zip(group.episodes, LOGPROBS[number], REFERENCE[number], strict=True)
                for divergence in [math.fsum(token_kl(own, reference, kl.estimator, clamp=kl.clamp))]
            ),
        )
        for number, group in enumerate(made)
    ]


def flat(values: list[list[float]]) -> list[float]:
    return [value for each in values for value in each]


# ---- What their own functions gave, in float64 -----------------------------------------------------------------------

VERL = [
    # verl 0.9.1, core_algos.compute_reinforce_plus_plus_outcome_advantage of token_level_scores - 0.1 x kl_penalty
    ("reinforce_pp", None, [1.095922245537] * 3 + [-1.211282478722] + [-0.057680116592] * 2 + [-0.980562006296] * 2),
    (
        "reinforce_pp",
        "k1",
        [
            0.839704080189,
            0.860598738478,
            0.839704080189,
            -0.131897530214,
            0.306890293839,
            0.327784952127,
            -1.500497648095,
            -1.542286964672,
        ],
    ),
    (
        "reinforce_pp",
        "k2",
        [
            0.607644549455,
            0.608060254973,
            0.608475960491,
            0.398440747585,
            0.504445654643,
            0.504861360161,
            -1.616795676695,
            -1.615132854623,
        ],
    ),
    (
        "reinforce_pp",
        "k3",
        [
            0.900264944551,
            0.902594208797,
            0.905255750442,
            -0.354460003208,
            0.282878806556,
            0.285208070802,
            -1.466580320976,
            -1.455161453604,
        ],
    ),
    # compute_reinforce_plus_plus_baseline_outcome_advantage, compute_rloo_outcome_advantage, compute_grpo_outcome_…
    (
        "reinforce_pp_baseline",
        None,
        [0.975236840044] * 3 + [-1.625394732323] + [0.195047368334] * 2 + [-0.845205260613] * 2,
    ),
    (
        "reinforce_pp_baseline",
        "k3",
        [0.590918821685] * 3 + [-0.984864702152] + [0.901582115086] * 2 + [-1.295527995552] * 2,
    ),
    ("rloo", "k1", [0.93] * 3 + [-0.93] + [1.73] * 2 + [-1.73] * 2),
    ("rloo", "k3", [1.008985700638] * 3 + [-1.008985700638] + [1.406825652653] * 2 + [-1.406825652653] * 2),
    ("grpo", "k3", [0.707105790094] * 3 + [-0.707105790094] + [0.707106070367] * 2 + [-0.707106070367] * 2),
]

OPENRLHF = [
    # OpenRLHF 0.11.2, experience_maker.compute_advantages_and_returns with `rloo`, `reinforce`, `reinforce_baseline`,
    # `group_norm` and `dr_grpo`, n_samples_per_prompt 2; its divergences are float32
    ("rloo", None, [1.0] * 3 + [-1.0] + [0.4] * 2 + [-0.4] * 2),
    ("rloo", "k1", [0.98, 1.0, 0.98, -0.95, 0.37, 0.39, -1.36, -1.4]),
    ("rloo", "k2", [0.994, 0.996, 0.998, -1.0125, 0.3975, 0.3995, -1.408, -1.4]),
    (
        "rloo",
        "k3",
        [
            0.994113579392,
            0.995986655354,
            0.998126927018,
            -1.014872121811,
            0.397643184662,
            0.399516260624,
            -1.409182465076,
            -1.4,
        ],
    ),
    ("reinforce_pp", None, [1.171590184382] * 3 + [-1.294915468883] + [-0.06166264225] * 2 + [-1.048264903557] * 2),
    (
        "reinforce_pp",
        "k1",
        [
            0.957307175855,
            0.984513062115,
            0.957307167747,
            -0.307766616314,
            0.263557027578,
            0.290762913838,
            -1.545634518169,
            -1.600046290689,
        ],
    ),
    (
        "reinforce_pp_baseline",
        "k2",
        [
            0.899298434958,
            0.902183402037,
            0.905068370728,
            -0.552561413771,
            0.471602017544,
            0.474486984623,
            -1.555808830002,
            -1.544268961686,
        ],
    ),
    (
        "grpo",
        "k1",
        [
            0.687106784359,
            0.707106783167,
            0.687106778398,
            -0.657106780187,
            0.677106777494,
            0.697106776302,
            -1.667106781071,
            -1.707106778687,
        ],
    ),
    ("dr_grpo", "k1", [0.48, 0.5, 0.48, -0.45, 0.17, 0.19, -1.16, -1.2]),
]

NEMO = [
    # NeMo RL at 00925dd1, the formulas of ReinforcePlusPlusAdvantageEstimator with minus_baseline false and true
    ("reinforce_pp", None, [1.171590190359] * 3 + [-1.294915473554] + [-0.061662641598] * 2 + [-1.048264907163] * 2),
    (
        "reinforce_pp",
        "k1",
        [
            0.94663833435,
            1.01249143587,
            0.94663833435,
            -0.58444627599,
            0.12347456535,
            0.13993784073,
            -0.43627679757,
            -2.148457437091,
        ],
    ),
    (
        "reinforce_pp",
        "k3",
        [
            0.975226558363,
            0.974793817507,
            0.975226558363,
            -0.665361927517,
            0.165458531914,
            0.167708607614,
            -0.494193717092,
            -2.098858429152,
        ],
    ),
    (
        "reinforce_pp_baseline",
        None,
        [1.042572070285] * 3 + [-1.737620117142] + [0.208514414057] * 2 + [-0.903562460914] * 2,
    ),
    (
        "reinforce_pp_baseline",
        "k2",
        [
            0.885230497837,
            0.885230497837,
            0.885230497837,
            -0.898024758708,
            0.355812806631,
            0.358459895087,
            -0.360665802134,
            -2.111273634389,
        ],
    ),
]

DISCOUNTED = [
    # gamma 0.9: verl's compute_reinforce_plus_plus_outcome_advantage, and OpenRLHF's `reinforce`; OpenRLHF sets gamma
    # to 1 for every estimator with a group baseline, and verl's others have none
    (
        "verl",
        None,
        [
            0.835454234632,
            1.064171743314,
            1.318302308517,
            -1.223003343508,
            -0.079415800097,
            0.047649482504,
            -0.994285834826,
            -0.968872778306,
        ],
    ),
    (
        "verl",
        "k1",
        [
            0.71648371868,
            0.839622373976,
            0.926780405855,
            -0.1124115127,
            0.302147844057,
            0.37924917995,
            -1.430956097533,
            -1.620915910602,
        ],
    ),
    (
        "verl",
        "k3",
        [
            0.755798084233,
            0.878040339394,
            1.014261747309,
            -0.339226624527,
            0.278814001105,
            0.348058024807,
            -1.413881822171,
            -1.521863746956,
        ],
    ),
    (
        "openrlhf",
        None,
        [
            0.893138198925,
            1.137647513109,
            1.409324528868,
            -1.307445628729,
            -0.08489905781,
            0.05093945007,
            -1.062936314545,
            -1.035768612969,
        ],
    ),
    (
        "openrlhf",
        "k1",
        [
            0.798720561399,
            0.95986850482,
            1.073929656267,
            -0.286030310015,
            0.256491353602,
            0.357391607267,
            -1.485134802206,
            -1.675236729855,
        ],
    ),
]


@pytest.mark.parametrize(("convention", "estimator", "wanted"), DISCOUNTED)
def test_discounted_returns_are_those_of_the_library(convention: Any, estimator: Any, wanted: list[float]) -> None:
    computed = flat(found(convention, "reinforce_pp", estimator, gamma=0.9))
    assert computed == pytest.approx(wanted, abs=1e-6 if convention == "openrlhf" else 2e-7)


def test_discounts_by_hand() -> None:
    """With R - group mean = 0.5 and -0.5, 0.2 and -0.2: 0.5^n of it, n tokens before the last."""
    plain = {"gamma": 0.5, "scale": "none"}
    assert found(None, "grpo", **plain) == [
        [0.125, 0.25, 0.5],
        [-0.5],
        pytest.approx([0.1, 0.2]),
        pytest.approx([-0.1, -0.2]),
    ]
    assert charged(2.0, [0.5, 0.25, 1.0], "return_to_go", gamma=0.5) == [0.5 - 0.875, 1.0 - 0.75, 2.0 - 1.0]
    assert charged(2.0, [0.5, 0.25, 1.0], "token", gamma=0.5) == [0.0, 0.75, 1.0]
    assert charged(2.0, [], "token", gamma=0.5) == []


EVERY = [
    pytest.param(name, *case, id=f"{name}-{case[0]}-{case[1]}")
    for name, cases in {"verl": VERL, "openrlhf": OPENRLHF, "nemo": NEMO}.items()
    for case in cases
]


@pytest.mark.parametrize(("convention", "preset", "estimator", "wanted"), EVERY)
def test_a_convention_computes_what_the_library_does(
    convention: Any, preset: Any, estimator: str | None, wanted: list[float]
) -> None:
    assert flat(found(convention, preset, estimator)) == pytest.approx(wanted, abs=2e-7)


# ---- By hand ---------------------------------------------------------------------------------------------------------


def near(value: Any) -> Any:
    return pytest.approx(value, abs=1e-12)


def test_who_pays_for_a_token() -> None:
    assert charged(1.0, [0.1, -0.2, 0.4], "token") == near([0.9, 1.2, 0.6])
    assert charged(1.0, [0.1, -0.2, 0.4], "return_to_go") == near([1 - 0.3, 1 - 0.2, 1 - 0.4])
    assert charged(1.0, [], "token") == charged(1.0, [], "return_to_go") == []


def test_the_divergence_of_tokens_is_clamped_one_by_one() -> None:
    assert token_kl([-1.0, -0.5], [-13.0, -0.75], "k1") == near([12.0, 0.25])
    assert token_kl([-1.0, -0.5], [-13.0, -0.75], "k1", clamp=10.0) == near([10.0, 0.25])
    assert token_kl([-13.0, -0.5], [-1.0, -0.75], "k1", clamp=10.0) == near([-10.0, 0.25])


@pytest.mark.parametrize(
    ("keys", "scale"),
    [
        ({"std_ddof": 0, "epsilon_place": "floor"}, math.sqrt(0.1875)),
        ({"std_ddof": 1, "epsilon_place": "variance"}, math.sqrt(0.25 + 1e-8)),
        ({"std_ddof": 1, "epsilon_place": "std"}, 0.5 + 1e-8),
        ({"std_ddof": 0, "epsilon_place": "floor", "epsilon": 4.0}, 2.0),
    ],
)
def test_whitening_over_tokens_by_hand(keys: dict[str, Any], scale: float) -> None:
    """Rewards of 1 and 0 with three tokens and one: mean 0.75, squares of 3 x 0.0625 + 0.5625 = 0.75 in all."""
    config = AlgorithmConfig.model_validate(
        {"preset": "reinforce_pp", "advantage": {"whiten_over": "tokens", "epsilon": 1e-8, **keys}}
    ).advantage
    assert advantages([[1.0, 0.0]], config, num_tokens=[[3, 1]]) == [near([0.25 / scale, -0.75 / scale])]
    with pytest.raises(DataError) as refused:
        advantages([[1.0, 0.0]], config)
    assert refused.value.path == "num_tokens"


def test_tokens_that_do_not_count_are_left_out_of_mean_and_deviation() -> None:
    """As in NeMo RL, whose mask is that of the loss. Without the first completion, 0, 0.5 and 0.1 are left."""
    config = AlgorithmConfig.model_validate({"convention": "nemo", "preset": "reinforce_pp"})
    made = groups()
    cut = with_turn(made[0].episodes[0], finish_reason="length")
    made[0] = replace(made[0], episodes=(cut, made[0].episodes[1]))
    mean = (0 + 2 * 0.5 + 2 * 0.1) / 5
    std = math.sqrt((mean**2 + 2 * (0.5 - mean) ** 2 + 2 * (0.1 - mean) ** 2) / 5)
    masked = assign_advantages(made, config, mask_truncated=True)
    assert masked[0].episodes[1].advantage == near(-mean / std)
    assert masked[1].episodes[0].advantage == near((0.5 - mean) / std)
    assert assign_advantages(made, config, mask_truncated=False)[0].episodes[1].advantage != near(-mean / std)
    charging = AlgorithmConfig.model_validate(
        {"convention": "nemo", "preset": "reinforce_pp", "kl": {"coefficient": 1e-12}}
    )
    tokens = assign_advantages(made, charging, mask_truncated=True)
    assert tokens[1].episodes[0].token_advantages == pytest.approx([(0.5 - mean) / std] * 2, abs=1e-9)


def test_tokens_with_advantages_of_their_own_reach_the_batch() -> None:
    config = AlgorithmConfig.model_validate(
        {"convention": "openrlhf", "preset": "rloo", "kl": {"coefficient": 0.1}},
    )
    assigned = assign_advantages(groups(), config, mask_truncated=False)
    first = assigned[0].episodes[0]
    assert first.token_advantages == near((0.98, 1.0, 0.98))
    assert first.advantage == near((0.98 + 1.0 + 0.98) / 3)
    sample = next(iter(make_batch(assigned).samples()))
    assert sample.fields["advantages"].tolist() == pytest.approx([0, 0, 0.98, 1.0, 0.98], abs=1e-6)
    plain = assign_advantages(groups(), AlgorithmConfig(preset="rloo"), mask_truncated=False)
    assert plain[0].episodes[0].token_advantages is None
    assert plain[0].episodes[0].advantage == near(1.0)


def test_advantages_of_tokens_are_clipped_last() -> None:
    config = AlgorithmConfig.model_validate(
        {"convention": "openrlhf", "preset": "rloo", "kl": {"coefficient": 0.1}, "advantage": {"clip": 0.985}}
    )
    clipped = assign_advantages(groups(), config, mask_truncated=False)
    assert clipped[0].episodes[0].token_advantages == near((0.98, 0.985, 0.98))


@pytest.mark.parametrize("credit", ["return_to_go", "token"])
@pytest.mark.parametrize("convention", ["verl", "openrlhf", "nemo"])
def test_costs_of_0_change_nothing(credit: Any, convention: Any) -> None:
    config = AlgorithmConfig(preset="reinforce_pp", convention=convention).advantage
    lengths = [[3, 1], [2, 2]]
    costs = [[[0.0] * length for length in group] for group in lengths]
    counted = [[True, True], [True, True]]
    tokens = token_advantages(REWARDS, config, costs=costs, credit=credit, is_counted=counted)
    whole = advantages(REWARDS, config, num_tokens=lengths)
    for group, values in zip(tokens, whole, strict=True):
        for each, value in zip(group, values, strict=True):
            assert each == near([value] * len(each))


def test_advantages_of_tokens_do_not_depend_on_the_order() -> None:
    order = random.Random(5)
    config = AlgorithmConfig.model_validate({"convention": "verl", "preset": "reinforce_pp"}).advantage
    rewards = [[order.random() for _ in range(3)] for _ in range(4)]
    costs = [[[order.gauss(0, 0.1) for _ in range(order.randint(0, 6))] for _ in group] for group in rewards]
    counted = [[order.random() < 0.8 for _ in group] for group in rewards]

    def whole(numbers: list[int]) -> list[list[list[float]]]:
        return token_advantages(
            [rewards[number] for number in numbers],
            config,
            costs=[costs[number] for number in numbers],
            credit="return_to_go",
            is_counted=[counted[number] for number in numbers],
        )

    plain, shuffled = whole([0, 1, 2, 3]), whole([2, 0, 3, 1])
    for place, number in enumerate([2, 0, 3, 1]):
        for one, other in zip(shuffled[place], plain[number], strict=True):
            assert one == near(other)


def test_a_divergence_that_is_not_finite_is_named() -> None:
    config = AlgorithmConfig.model_validate({"preset": "rloo", "kl": {"coefficient": 0.1, "credit": "token"}})
    made = groups()
    broken = replace(made[1].episodes[1], ref_logprobs=(-1.0, -math.inf))
    with pytest.raises(DataError) as refused:
        assign_advantages(
            [made[0], replace(made[1], episodes=(made[1].episodes[0], broken))], config, mask_truncated=False
        )
    assert refused.value.path == "costs[1][1]"
    bounded = AlgorithmConfig.model_validate(
        {"preset": "rloo", "kl": {"coefficient": 0.1, "credit": "token", "clamp": 10}}
    )
    assert assign_advantages(made, bounded, mask_truncated=False)


def test_a_group_without_a_reference_is_named() -> None:
    config = AlgorithmConfig.model_validate({"preset": "rloo", "kl": {"coefficient": 0.1, "credit": "token"}})
    with pytest.raises(DataError) as refused:
        assign_advantages([make_group(7)], config, mask_truncated=False)
    assert "group 7" in str(refused.value.path)
    assert torch.is_tensor(make_batch([make_group(7)]).fields["advantages"])
