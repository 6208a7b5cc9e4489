"""The loop of reinforcement learning, whole, on real actors.

Runs of `train` have their workers in processes of their own. Those of `train_here` have the same workers in this one:
they are for what a run computes, records and raises.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from forge.config import GRPOConfig
from forge.errors import ConfigError, NonFiniteError, RewardError, RolloutError
from forge.loops.run_paths import run_dir
from forge.observe import is_tracing
from forge.rollout.ledger import check_ledger
from grpo_runs import NUM_STEPS, config, episodes, kept_buffer, ledger, metrics, train, train_here, weights_digest


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> GRPOConfig:
    """A synchronous run with everything that a run can write."""
    chosen = config(
        tmp_path_factory.mktemp("grpo") / "plain",
        *("evaluation.fraction=0.2", "evaluation.interval=3", "record.report=true", "metrics.tensorboard=true"),
    )
    result = train(chosen)
    assert not is_tracing()
    assert result.step == NUM_STEPS
    assert result.export == run_dir(chosen) / "checkpoints" / "hf"
    assert result.report is not None
    assert result.report.stat().st_size > 10_000
    assert result.evaluation is not None
    assert result.first_evaluation is not None
    assert result.evaluation.reward > result.first_evaluation.reward
    return chosen


def test_every_group_is_in_the_ledger_once(plain: GRPOConfig) -> None:
    check_ledger(ledger(plain), pending=[], next_number=2 * NUM_STEPS)
    assert [line.step for line in ledger(plain)] == [step for step in range(1, NUM_STEPS + 1) for _ in range(2)]


def test_on_the_policy_the_trainer_gives_every_token_the_samplers_probability(plain: GRPOConfig) -> None:
    """To the last bit: so the first ratio is 1 because it was computed, not because nobody asked the sampler."""
    seen = list(episodes(plain))
    assert len(seen) == NUM_STEPS * 2 * 3
    for episode in seen:
        assert episode["logprobs"] == episode["trainer_logprobs"], episode["group"]
        assert episode["versions"] == [[episode["step"] - 1, 0, len(episode["token_ids"])]]
        assert "".join(episode["pieces"]) or not episode["text"]
    assert metrics(plain, "train/ratio") == pytest.approx([1.0] * NUM_STEPS, abs=1e-6)
    assert set(metrics(plain, "sync/canary")) == {0.0}
    assert set(metrics(plain, "rollout/staleness_max")) == {0.0}


def test_advantages_add_up_to_nothing_in_a_group(plain: GRPOConfig) -> None:
    groups: dict[int, list[float]] = {}
    for episode in episodes(plain):
        groups.setdefault(episode["group"], []).append(episode["advantage"])
    assert all(abs(math.fsum(values)) < 1e-6 and max(values) > 0 for values in groups.values())


def test_a_run_leaves_what_it_promises(plain: GRPOConfig) -> None:
    folder = run_dir(plain)
    names = {path.name for path in folder.iterdir()}
    assert {"metrics.jsonl", "ledger.jsonl", "rollouts", "trace.json", "report.html", "config.yaml"} <= names
    assert (folder / "tensorboard").is_dir()
    trace = json.loads((folder / "trace.json").read_text())
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    assert {"rollout", "train", "wait for batch", "update generators"} <= {event["name"] for event in events}
    assert len(metrics(plain, "rollout/reward_mean")) == NUM_STEPS
    assert len(metrics(plain, "evaluation/pass@1")) == 3
    parts = ("waiting", "generating", "training", "syncing", "other")
    for step in range(NUM_STEPS):
        total = math.fsum(metrics(plain, f"time/{part}")[step] for part in parts)
        assert total == pytest.approx(metrics(plain, "time/step")[step], rel=1e-6)


def test_one_process_learns_the_same_as_two(plain: GRPOConfig, tmp_path: Path) -> None:
    """Sharing weights, or taking turns, changes where things run and nothing else."""
    shared = config(tmp_path / "shared", "placement=shared", "evaluation.fraction=0.2")
    train(shared)
    assert weights_digest(shared) == weights_digest(plain)
    assert [line.group for line in ledger(shared)] == [line.group for line in ledger(plain)]


def test_taking_turns_puts_generators_to_sleep_while_the_trainer_works(plain: GRPOConfig, tmp_path: Path) -> None:
    turns = config(tmp_path / "turns", "placement=turns", "evaluation.fraction=0.2", "training.max_steps=2")
    train_here(turns)
    first = [episode["token_ids"] for episode in episodes(plain) if episode["step"] <= 2]
    assert [episode["token_ids"] for episode in episodes(turns)] == first


def test_beside_the_trainer_generators_go_on_while_it_works(tmp_path: Path) -> None:
    chosen = config(tmp_path / "beside", "placement=beside", "rollout.staleness=1", "training.max_steps=3")
    train_here(chosen)
    stale, apart = metrics(chosen, "rollout/staleness_max"), metrics(chosen, "train/mismatch")
    assert (stale[0], apart[0]) == (0.0, 0.0)
    assert (stale[1], max(stale)) == (1.0, 1.0), "the second batch was begun with the first"
    assert apart[1] > 0, "older weights made the tokens"


def test_one_process_may_keep_more_digits_than_it_generates_with(tmp_path: Path) -> None:
    """A trainer in mixed precision has float32 weights: the engine beside it computes with a bfloat16 copy of them."""
    chosen = config(
        tmp_path / "mixed",
        *("placement=shared", "distributed.precision=bfloat16", "generator.precision=bfloat16"),
        *("training.max_steps=3", "model.head_precision=float32"),
        # It also scores between two steps of generation.
        *("algorithm.loss.proximal=trainer", "rollout.iterations=2"),
    )
    train_here(chosen)
    assert max(metrics(chosen, "train/mismatch_max")) < 0.05, "every step generates with the weights of the last one"
    assert set(metrics(chosen, "train/mismatch_outside")) == {0.0}


def test_a_run_in_float16_trains_on_every_group_once(tmp_path: Path) -> None:
    """The first batch overflows and is computed again; generators compute with what is published, in float16."""
    chosen = config(
        tmp_path / "half",
        *("placement=turns", "distributed.precision=fp16", "training.loss_scaling.initial_scale=16777216"),
        *("training.max_steps=2", "training.optimizer=muon", "generator.update.verify=full"),
    )
    assert chosen.generator.precision == "float16"
    train_here(chosen)
    overflows, scales = metrics(chosen, "train/overflows"), metrics(chosen, "train/loss_scale")
    assert overflows[0] > 0
    assert scales[0] == 16777216 / 2 ** overflows[0]
    assert not metrics(chosen, "train/skipped")
    trained = [line.group for line in ledger(chosen) if line.outcome == "trained"]
    assert len(trained) == len(set(trained)) == 4, "two steps of two groups"
    assert max(metrics(chosen, "train/mismatch_max")) < 0.02


def test_asynchronous_training_keeps_its_bound(tmp_path: Path) -> None:
    chosen = config(
        tmp_path / "late",
        *("rollout.staleness=2", "training.max_steps=8", "generator.num_replicas=2"),
        # Versions are kept twice, on volumes, and checked in full.
        *("store.volumes=2", "store.copies=2", "store.keep=3", "generator.update.verify=full"),
    )
    train(chosen)
    stale = metrics(chosen, "rollout/staleness_max")
    assert max(stale) in (1.0, 2.0)
    for episode in episodes(chosen):
        oldest = min(version for version, _, _ in episode["versions"])
        assert 0 <= episode["step"] - 1 - oldest <= 2
    # Which groups were under way at the end is in the last checkpoint; all others are settled.
    state = kept_buffer(chosen)
    check_ledger(ledger(chosen), pending=state["pending"], next_number=state["next_number"])


def test_a_reference_holds_the_policy_and_batches_may_be_learned_from_twice(tmp_path: Path) -> None:
    chosen = config(
        tmp_path / "held",
        *("algorithm.kl.coefficient=0.1", "rollout.iterations=2", "algorithm.loss.proximal=trainer"),
        *("training.max_steps=2", "algorithm.loss.correction.kind=truncate", "generator.sampling.temperature=0.7"),
        "placement=shared",
    )
    train(chosen)
    divergence = metrics(chosen, "train/kl")
    assert divergence[0] == pytest.approx(0.0, abs=1e-7)  # the policy is its own reference at first
    assert divergence[1] > 0
    for episode in episodes(chosen):
        assert len(episode["ref_logprobs"]) == len(episode["token_ids"])
        if episode["step"] == 1:
            assert episode["ref_logprobs"] == pytest.approx(episode["logprobs"], abs=1e-6)


def test_the_divergence_in_the_reward_may_be_charged_to_single_tokens(tmp_path: Path) -> None:
    """As OpenRLHF does for RLOO: after the baseline, each token pays for itself and all later ones."""
    chosen = config(
        tmp_path / "charged",
        *("algorithm.preset=rloo", "algorithm.convention=openrlhf", "algorithm.kl.coefficient=0.5"),
        *("training.max_steps=3", "placement=shared"),
    )
    train(chosen)
    groups: dict[int, list[dict[str, Any]]] = {}
    for episode in episodes(chosen):
        groups.setdefault(episode["group"], []).append(episode)
    charges = []
    for group in groups.values():
        rewards = [episode["reward"] for episode in group]
        for episode in group:
            others = (sum(rewards) - episode["reward"]) / (len(rewards) - 1)
            costs = [one - other for one, other in zip(episode["logprobs"], episode["ref_logprobs"], strict=True)]
            to_go = [sum(costs[place:]) for place in range(len(costs))]
            charges.append(0.5 * sum(to_go) / len(to_go))
            assert episode["advantage"] == pytest.approx(episode["reward"] - others - charges[-1], abs=1e-5)
            assert episode["parts"]["kl"] == pytest.approx(-sum(costs), abs=1e-5)
    assert max(map(abs, charges)) > 1e-4, "after the first step the policy has left its reference"


def test_rewards_whose_processes_die_are_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    reward = "rewards.functions=[{kind: 'grpo_rewards:dies_sometimes', name: even}]"
    zero = config(tmp_path / "zero", reward, "training.max_steps=3")
    train_here(zero)
    assert sum(metrics(zero, "rollout/num_failed")) > 0
    assert any(episode["failures"] and episode["reward"] == 0.0 for episode in episodes(zero))


def test_a_reward_that_always_raises_is_named_and_what_it_was_given_can_be_read(tmp_path: Path) -> None:
    reward = "rewards.functions=[{kind: 'grpo_rewards:raises', name: even}]"
    chosen = config(
        tmp_path / "raises",
        *(reward, "rollout.max_no_signal_groups=6", "evaluation.fraction=0.1", "record.report=true"),
    )
    with pytest.raises(RolloutError, match="6 groups in a row") as caught:
        train_here(chosen)
    assert "rewards failed on 18 of 18 completions, most often (18 times) 'even': LookupError" in caught.value.value
    folder = run_dir(chosen)
    assert str(caught.value.repair).startswith(f"look at {folder / 'rollouts' / 'fruitless_000001.jsonl'}; correct the")
    for name in ("fruitless_000001.jsonl", "evaluation_000000.jsonl"):
        lines = [json.loads(line) for line in (folder / "rollouts" / name).read_text().splitlines()]
        assert lines
        assert all("LookupError" in line["failures"]["even"] and line["text"] for line in lines)
    assert {(line.step, line.outcome) for line in ledger(chosen)} == {(1, "no_signal")}
    assert (folder / "report.html").stat().st_size > 10_000
    assert set(kept_buffer(chosen)["pending"]) >= {line.group for line in ledger(chosen)}


def test_a_reward_may_stop_the_run_and_nothing_is_lost(tmp_path: Path) -> None:
    reward = "rewards.functions=[{kind: 'grpo_rewards:fails_sometimes', name: even}]"
    chosen = config(tmp_path / "stop", reward, "rewards.on_error=stop")
    with pytest.raises(RewardError, match="cannot be scored") as caught:
        train_here(chosen)
    assert caught.value.path == "rewards.on_error"
    state = kept_buffer(chosen)
    check_ledger(ledger(chosen), pending=state["pending"], next_number=state["next_number"])


def test_a_step_that_is_not_finite_ends_the_run_with_its_state_before_that_step(tmp_path: Path) -> None:
    chosen = config(tmp_path / "nan", "training.learning_rate=1e30")
    with pytest.raises(NonFiniteError, match="step 2"):
        train_here(chosen)
    state = kept_buffer(chosen)
    assert (state["num_taken"], state["pending"]) == (1, [2, 3])
    check_ledger(ledger(chosen), pending=state["pending"], next_number=state["next_number"])


def test_prompts_that_leave_no_room_are_left_out(tmp_path: Path) -> None:
    prompts = tmp_path / "long.jsonl"
    lines = [{"prompt": "x " * 200, "answer": "1"}, *({"prompt": f"{n}", "answer": "1"} for n in range(7))]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    chosen = config(tmp_path / "long", "~training.max_steps", f"prompts.sources=[{{path: {prompts}}}]")
    assert train_here(chosen).step == 4
    assert sorted(line.outcome for line in ledger(chosen)) == ["refused", *["trained"] * 7]


def test_what_goes_wrong_at_the_start_is_raised_as_it_is(tmp_path: Path) -> None:
    """Not in groups of the tasks that start everyone: the application shows it in four lines, and exits with 2."""
    with pytest.raises(ConfigError) as caught:
        train(
            config(tmp_path / "split", "generator.kv_cache_dtype=fp8", "placement=shared")
        )  # only the generator's process can tell
    assert caught.value.path == "generator.kv_cache_dtype"


def test_generators_under_way_at_an_update_go_on_as_the_mode_says(tmp_path: Path) -> None:
    """With `abort` completions are cut at every update, and go on with the new weights: spans show both."""
    chosen = config(
        tmp_path / "abort",
        *("rollout.staleness=3", "generator.update.mode=abort", "generator.sampling.max_tokens=24"),
        *("training.max_steps=8", "generator.sampling.ignore_eos=true", "generator.max_batch=3"),
    )
    train_here(chosen)
    seen = list(episodes(chosen))
    assert all(len(episode["token_ids"]) == 24 for episode in seen)
    for episode in seen:
        places = [place for _, start, end in episode["versions"] for place in range(start, end)]
        assert places == list(range(24))


def test_the_model_that_comes_out_is_the_one_that_was_trained(plain: GRPOConfig) -> None:
    weights = load_file(run_dir(plain) / "checkpoints" / "hf" / "model.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())
