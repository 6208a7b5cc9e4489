"""From rewards to advantages: values worked by hand, what has no signal, and a peer's own numbers."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from forge.config.algorithm import AdvantageConfig, AlgorithmConfig
from forge.errors import ConfigError, DataError
from forge.rollout.advantage import advantages, completion_kl, gae

# Means 0.375 and 0.5. Squared differences of the first add up to 0.6875, of the second to 1.
FIRST, SECOND = [1.0, 0.0, 0.0, 0.5], [1.0, 1.0, 0.0, 0.0]
STD, STD_OF_SET = math.sqrt(0.6875 / 3), math.sqrt(0.6875 / 4)


def of(rewards: list[list[float]], **keys: Any) -> list[list[float]]:
    return advantages(rewards, AdvantageConfig(**keys))


def by_preset(rewards: list[list[float]], preset: Any, convention: Any = None) -> list[list[float]]:
    return advantages(rewards, AlgorithmConfig(preset=preset, convention=convention).advantage)


def near(value: Any) -> Any:
    return pytest.approx(value, abs=1e-12)


# ---- By hand ---------------------------------------------------------------------------------------------------------


def test_grpo_by_hand() -> None:
    differences = [0.625, -0.375, -0.375, 0.125]
    assert of([FIRST])[0] == near([difference / (STD + 1e-4) for difference in differences])
    assert of([FIRST], std_ddof=0)[0] == near([difference / (STD_OF_SET + 1e-4) for difference in differences])
    assert of([FIRST], epsilon=1e-6)[0] == near([difference / (STD + 1e-6) for difference in differences])


def test_groups_do_not_touch_each_other_unless_asked() -> None:
    assert of([FIRST, SECOND]) == [of([FIRST])[0], of([SECOND])[0]]
    # The mean of all eight is 3.5 / 8 = 0.4375; their squared differences add up to 3.25 - 8 x 0.4375^2 = 1.71875.
    std = math.sqrt((1 + 0.25 + 1 + 1 - 8 * 0.4375**2) / 7)
    assert of([FIRST, SECOND], scale="batch_std")[1] == near([0.5 / (std + 1e-4)] * 2 + [-0.5 / (std + 1e-4)] * 2)
    assert of([FIRST, SECOND], baseline="batch_mean", scale="none")[0] == near([0.5625, -0.4375, -0.4375, 0.0625])


def test_dr_grpo_does_not_divide() -> None:
    assert by_preset([FIRST], "dr_grpo")[0] == near([0.625, -0.375, -0.375, 0.125])


def test_rloo_compares_with_the_others() -> None:
    """The others of the first have a mean of 0.5 / 3; of the second and third 1.5 / 3; of the last 1 / 3."""
    wanted = [1 - 0.5 / 3, -0.5, -0.5, 0.5 - 1 / 3]
    assert by_preset([FIRST], "rloo")[0] == near(wanted)
    assert wanted == near([4 / 3 * difference for difference in (0.625, -0.375, -0.375, 0.125)])


def test_the_deviation_of_the_others() -> None:
    """Of [0, 0] it is 0, and does not divide; of [1, 0] it is sqrt(0.5)."""
    found = of([[1.0, 0.0, 0.0]], baseline="leave_one_out", scale="others_std", epsilon=1e-6)[0]
    assert found == near([1.0, -0.5 / (math.sqrt(0.5) + 1e-6), -0.5 / (math.sqrt(0.5) + 1e-6)])


def test_reinforce_pp_whitens_the_batch() -> None:
    """Rewards of 1, 0, 0.5 and 0.5 have a mean of 0.5 and squared differences of 0.5 in all."""
    scale = math.sqrt(0.5 / 3) + 1e-4
    assert by_preset([[1.0, 0.0], [0.5, 0.5]], "reinforce_pp") == [near([0.5 / scale, -0.5 / scale]), near([0, 0])]
    # With the mean of each group taken away, the differences of [1, 0] and [0.5, 0.1] are ±0.5 and ±0.2.
    scale = math.sqrt(2 * (0.25 + 0.04) / 3) + 1e-4
    found = by_preset([[1.0, 0.0], [0.5, 0.1]], "reinforce_pp_baseline")
    assert found == [near([0.5 / scale, -0.5 / scale]), near([0.2 / scale, -0.2 / scale])]


def test_reinforce_takes_the_reward_as_it_is() -> None:
    assert by_preset([FIRST, [-2.0]], "reinforce") == [FIRST, [-2.0]]


def test_advantages_are_clipped_last() -> None:
    assert of([FIRST], clip=0.5)[0] == near([0.5, -0.5, -0.5, 0.125 / (STD + 1e-4)])


# ---- Nothing to compare with -----------------------------------------------------------------------------------------

EVERY = [
    {"baseline": baseline, "scale": scale, "whiten": whiten, "std_ddof": ddof}
    for baseline in ("group_mean", "leave_one_out", "batch_mean", "none")
    for scale in ("group_std", "others_std", "batch_std", "none")
    for whiten in (False, True)
    for ddof in (0, 1)
]


@pytest.mark.parametrize("keys", EVERY, ids=lambda keys: "-".join(map(str, keys.values())))
def test_any_rewards_give_finite_advantages(keys: dict[str, Any]) -> None:
    cases = [[[0.1] * 7], [[0.3]], [[0.1] * 3, [0.1] * 4], [[0.7], [0.2], [0.2]], [[0.1, 0.1], [0.9, 0.9]], []]
    cases += [[[1e-30, 0.0], [1e30, -1e30]], [[1e-12, 0.0, 0.0]], [[1e200, -1e200], [0.0, 1.0]]]
    for rewards in cases:
        found = of(rewards, **keys)
        assert [len(group) for group in found] == [len(group) for group in rewards]
        assert all(math.isfinite(value) for group in found for value in group)


@pytest.mark.parametrize("keys", [keys for keys in EVERY if keys["baseline"] in ("group_mean", "leave_one_out")])
@pytest.mark.parametrize("reward", [0.1, 0.3, 1 / 3, -2.7])
def test_equal_rewards_and_a_group_of_one_say_nothing(keys: dict[str, Any], reward: float) -> None:
    """Exactly 0, not a rounding error that a small deviation would blow up."""
    assert of([[reward] * 7, [reward]], **keys) == [[0.0] * 7, [0.0]]
    if not keys["whiten"]:
        assert of([[reward] * 3, FIRST], **keys)[0] == [0.0] * 3


@pytest.mark.parametrize("baseline", ["none", "batch_mean"])
def test_a_deviation_of_0_does_not_divide(baseline: Any) -> None:
    """Divided by epsilon alone, 0.25 would become 2500."""
    found = of([[0.5, 0.5], [0.0, 0.0]], baseline=baseline, scale="group_std")
    assert found == ([[0.5, 0.5], [0.0, 0.0]] if baseline == "none" else [[0.25, 0.25], [-0.25, -0.25]])


@pytest.mark.parametrize("preset", ["reinforce_pp", "reinforce_pp_baseline"])
def test_whitening_a_batch_of_equal_rewards(preset: Any) -> None:
    assert by_preset([[0.3, 0.3], [0.3, 0.3]], preset) == [[0.0, 0.0], [0.0, 0.0]]
    assert by_preset([[0.3]], preset) == [[0.0]]


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"])
def test_advantages_do_not_depend_on_the_order(preset: Any) -> None:
    order = random.Random(3)
    groups = [[order.random() for _ in range(order.randint(1, 6))] for _ in range(5)]
    found = by_preset(groups, preset)
    shuffled = order.sample(range(5), 5)
    turned = [groups[index][::-1] for index in shuffled]
    again = by_preset(turned, preset)
    for place, index in enumerate(shuffled):
        assert again[place] == near(found[index][::-1])


# ---- A peer's numbers ------------------------------------------------------------------------------------------------


def test_the_convention_of_trl_computes_what_trl_does() -> None:
    """TRL 1.16.0 in float64: `scale_rewards` of "group", and of "batch"."""
    group = [1.3053097493539774, -0.7831858496123865, -0.7831858496123865, 0.2610619498707955]
    assert by_preset([FIRST, SECOND], "grpo", "trl") == [
        near(group),
        near([0.8658754297607016] * 2 + [-0.8658754297607016] * 2),
    ]
    batch = [
        [1.2610579536786883, -0.756634772207213, -0.756634772207213, 0.2522115907357377],
        [1.0088463629429507, 1.0088463629429507, -1.0088463629429507, -1.0088463629429507],
    ]
    found = of([FIRST, SECOND], scale="batch_std", epsilon=1e-4, std_ddof=1)
    assert found == [near(batch[0]), near(batch[1])]


@pytest.mark.parametrize(("convention", "epsilon"), [("trl", 1e-4), ("verl", 1e-6), ("openrlhf", 1e-9)])
def test_conventions_differ_in_what_they_add_to_the_deviation(convention: Any, epsilon: float) -> None:
    assert by_preset([FIRST], "grpo", convention)[0][0] == near(0.625 / (STD + epsilon))


def test_the_convention_of_nemo_leaves_each_out_of_its_own_baseline_and_deviation() -> None:
    """For [1, 0, 0]: the others of the first are equal, so that it is not divided."""
    found = by_preset([[1.0, 0.0, 0.0]], "grpo", "nemo")[0]
    assert found == near([1.0, -0.5 / (math.sqrt(0.5) + 1e-6), -0.5 / (math.sqrt(0.5) + 1e-6)])


# ---- Divergence in the reward, and GAE -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [("k1", 0.5 - 1), ("k2", (0.25 + 1) / 2), ("k3", (math.exp(-0.5) - 1 + 0.5) + (math.e - 1 - 1))],
)
def test_the_divergence_of_a_completion(estimator: Any, divergence: float) -> None:
    assert completion_kl([-1.0, -2.0], [-1.5, -1.0], estimator) == near(divergence)
    assert completion_kl([], [], estimator) == 0
    assert completion_kl([-1.0], [-1.0], estimator) == 0


def test_a_divergence_without_bounds_is_finite() -> None:
    assert math.isfinite(completion_kl([-2000.0], [0.0], "k3"))


def test_gae_by_hand() -> None:
    """Differences of 0.04, 0.03 and 0.3; gamma lam is 0.72."""
    found, returns = gae([0, 0, 1], [0.5, 0.6, 0.7], gamma=0.9, lam=0.8)
    assert found == near([0.04 + 0.72 * 0.246, 0.03 + 0.72 * 0.3, 0.3])
    assert returns == near([0.5 + 0.21712, 0.6 + 0.246, 1.0])
    cut_off, _ = gae([0, 0, 1], [0.5, 0.6, 0.7], gamma=0.9, lam=0.8, last_value=0.5)
    assert cut_off[2] == near(0.3 + 0.9 * 0.5)


def test_the_two_ends_of_gae() -> None:
    rewards, values = [1.0, -2.0, 3.0], [0.1, 0.2, 0.3]
    assert gae(rewards, values, gamma=1.0, lam=1.0)[1] == near([2.0, 1.0, 3.0])
    assert gae(rewards, values, gamma=1.0, lam=0.0)[0] == near([1 + 0.2 - 0.1, -2 + 0.3 - 0.2, 3 - 0.3])
    assert gae([], [], gamma=1.0, lam=1.0) == ([], [])


# ---- What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "path"),
    [
        (lambda: of([[1.0], [0.0, math.nan]]), DataError, "rewards[1][1]"),
        (lambda: of([[math.inf]]), DataError, "rewards[0][0]"),
        (lambda: of([[1.0], []]), DataError, "rewards[1]"),
        (lambda: completion_kl([-1.0], [-1.0, -2.0], "k1"), DataError, "ref_logprobs"),
        (lambda: gae([1.0], [], gamma=1.0, lam=1.0), DataError, "values_T"),
        (lambda: gae([1.0], [0.0], gamma=1.1, lam=1.0), ConfigError, "gamma"),
        (lambda: gae([1.0], [0.0], gamma=1.0, lam=math.nan), ConfigError, "lam"),
    ],
)
def test_what_is_refused(make: Any, error: Any, path: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert caught.value.path == path
    assert caught.value.rule
    assert caught.value.repair
