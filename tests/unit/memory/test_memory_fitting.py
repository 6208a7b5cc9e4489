"""What is proposed fits when it is applied, and what cannot fit is refused with it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config import GRPOConfig, SFTConfig, load
from forge.errors import ConfigError, LayoutError
from forge.memory import Card, check_memory, find_limits, plan_memory, propose, resolve_run
from forge.memory.checking import check_on_card
from forge.memory.constants import GIB
from forge.memory.fitting import changed_config

PRESETS = ("qwen3_0_6b", "qwen3_1_7b", "qwen3_4b", "qwen3_8b", "qwen3_30b_a3b", "llama3_1_8b")


@st.composite
def runs(draw: st.DrawFn) -> tuple[Any, Card]:
    """Configurations of both kinds, on GPUs of all sizes."""
    length = draw(st.sampled_from((512, 2048, 8192)))
    words = [
        f"model.preset={draw(st.sampled_from(PRESETS))}",
        f"distributed.shard={draw(st.sampled_from((1, 2, 8)))}",
        f"distributed.precision={draw(st.sampled_from(('float32', 'bfloat16', 'bfloat16_pure')))}",
        f"training.max_seq_len={length}",
        f"training.microbatch_tokens={length * draw(st.sampled_from((1, 4, 16)))}",
        f"training.activation_checkpointing={draw(st.sampled_from(('none', 'selective', 'full')))}",
    ]
    schema: Any = draw(st.sampled_from((SFTConfig, GRPOConfig)))
    if schema is GRPOConfig:
        words += [
            f"placement={draw(st.sampled_from(('apart', 'beside', 'turns')))}",
            f"generator.engine={draw(st.sampled_from(('native', 'vllm')))}",
            f"algorithm.kl.coefficient={draw(st.sampled_from((0, 0.1)))}",
        ]
    card = Card(draw(st.sampled_from((16, 24, 48, 80, 141))) * GIB, draw(st.sampled_from((None, 1, 4, 8, 16))))
    return load(schema, overrides=words), card


@settings(max_examples=10, deadline=None, derandomize=True)
@given(runs())
def test_every_proposal_fits_when_it_is_applied(drawn: tuple[Any, Card]) -> None:
    config, card = drawn
    plan = plan_memory(resolve_run(config, card=card), card=card)
    changes = propose(config, card=card)
    assert not (plan.fits and changes)
    for change in changes:
        applied = changed_config(config, change.words)
        again = plan_memory(resolve_run(applied, card=card), card=card)
        assert again.fits
        assert again == change.plan


def big(*words: str) -> Any:
    base = ("model.preset=qwen3_1_7b", "distributed.shard=1", "distributed.precision=bfloat16", "placement=beside")
    return load(GRPOConfig, overrides=[*base, "training.microbatch_tokens=16384", *words])


def test_what_costs_least_comes_first() -> None:
    changes = propose(big(), card=Card(80 * GIB, 1))
    assert changes
    keys = [change.words[0].partition("=")[0] for change in changes]
    order = ["generator.kv_cache_gb", "training.microbatch_tokens", "training.activation_checkpointing", "placement"]
    known = [key for key in order if key in keys]
    assert known == [key for key in keys if key in order]
    assert known[0] == "training.microbatch_tokens"


def test_several_changes_where_none_is_enough_alone() -> None:
    (change,) = propose(big(), card=Card(40 * GIB, 1))
    assert len(change.words) > 1
    assert not any(word.startswith("training.max_seq_len") for word in change.words)
    for word in change.words:  # each of them is needed
        fewer = [other for other in change.words if other != word]
        assert not plan_memory(
            resolve_run(changed_config(big(), fewer), card=Card(40 * GIB, 1)), card=Card(40 * GIB, 1)
        ).fits


def test_a_shorter_context_is_the_last_resort() -> None:
    base = ("model.preset=qwen3_0_6b", "distributed.shard=1", "distributed.precision=bfloat16_pure")
    config = load(SFTConfig, overrides=[*base, "training.max_seq_len=32768"])
    for size, is_needed in ((12, False), (7, True)):
        changes = propose(config, card=Card(size * GIB, 1))
        assert changes
        assert any(word.startswith("training.max_seq_len=") for each in changes for word in each.words) is is_needed


def test_too_few_gpus_are_a_shortage_too() -> None:
    config = big("placement=apart", "rollout.staleness=1", "training.head_cache_gb=0")
    card = Card(80 * GIB, 1)
    assert not plan_memory(resolve_run(config, card=card), card=card).has_enough_gpus
    with pytest.raises(ConfigError) as refused:
        check_memory(config, card=card)
    assert refused.value.value == 2
    assert "placement=shared rollout.staleness=0" in str(refused.value.repair)


def test_a_run_that_cannot_fit_is_refused_with_what_does() -> None:
    with pytest.raises(ConfigError) as refused:
        check_memory(big(), card=Card(80 * GIB, 1))
    error = refused.value
    assert "activations" in error.message
    assert error.rule == "at most 78.80 GiB"
    assert "while training" in str(error.value)
    assert "training.microbatch_tokens=" in str(error.repair)
    assert error.path is not None


def test_a_run_that_nothing_saves_is_refused_without_a_proposal() -> None:
    config = load(SFTConfig, overrides=["model.preset=qwen3_32b", "distributed.shard=1"])
    with pytest.raises(ConfigError) as refused:
        check_memory(config, card=Card(8 * GIB, 1))
    assert "smaller model" in str(refused.value.repair)


def started(config: Any, size: float, log: logging.Logger) -> Any:
    run = resolve_run(config, card=Card(int(size * GIB), 1))
    return check_on_card(config, card=Card(int(size * GIB), 1), facts=run.facts, log=log)


def test_at_its_start_a_run_says_what_it_will_take(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("forge.test_memory")
    with caplog.at_level(logging.INFO, logger=log.name):
        plan = started(big("placement=turns", "training.microbatch_tokens=2048"), 141, log)
    assert plan is not None
    (record,) = (each for each in caplog.records if each.levelno == logging.INFO)  # a small host is warned of besides
    assert record.getMessage().startswith("trainer + generator: ")
    assert "GiB at its fullest" in record.getMessage()


def test_at_its_start_a_run_far_too_large_is_refused_and_a_doubtful_one_warned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("forge.test_memory")
    config = big("placement=turns", "generator.kv_cache_gb=4")
    with pytest.raises(ConfigError) as refused:
        started(config, 40, log)
    assert "one of: " in str(refused.value.repair)
    card = Card(200 * GIB, 1)
    peak = plan_memory(resolve_run(config, card=card), card=card).gpus[0].peak.num_bytes
    with caplog.at_level(logging.INFO, logger=log.name):
        assert started(config, peak / GIB, log) is not None  # a card of that size has a little less
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_run_on_cpus_is_not_checked_against_gpus() -> None:
    config = big("distributed.with_gpus=false", "generator.with_gpus=false", "placement=apart")
    assert started(config, 1, logging.getLogger("forge.test_memory")) is None


def test_other_hosts_have_as_many_gpus_as_it_needs() -> None:
    config = big("placement=apart", "launcher.kind=slurm", "generator.num_replicas=8", "training.max_seq_len=512")
    plan = started(config, 141, logging.getLogger("forge.test_memory"))
    assert plan is not None
    assert plan.num_gpus == 9


def test_a_run_that_fits_gives_its_plan() -> None:
    assert check_memory(big("training.microbatch_tokens=2048"), card=Card(141 * GIB, 1)).fits


def test_limits_are_the_largest_that_fit() -> None:
    config, card = big("placement=turns"), Card(80 * GIB, 1)
    run = resolve_run(config, card=card)
    limits = find_limits(run, card=card)
    assert limits.microbatch_tokens is not None
    assert limits.max_seq_len is not None
    for tokens, fits in ((limits.microbatch_tokens, True), (limits.microbatch_tokens + 512, False)):
        changed = changed_config(config, [f"training.microbatch_tokens={tokens}"])
        assert plan_memory(resolve_run(changed, card=card), card=card).fits is fits
    assert limits.max_seq_len <= (run.facts.max_seq_len or 0)


def test_limits_of_what_does_not_fit_at_all() -> None:
    card = Card(8 * GIB, 1)
    limits = find_limits(resolve_run(big(), card=card), card=card)
    assert limits.microbatch_tokens is None
    assert limits.max_seq_len is None


def test_a_change_keeps_what_the_user_said_over_a_preset() -> None:
    config = load(SFTConfig, overrides=["model.preset=qwen3_1_7b", "model.num_layers=2"])
    assert changed_config(config, ["training.max_seq_len=64"]).model.num_layers == 2


def test_what_is_refused_for_another_reason_is_not_proposed() -> None:
    with pytest.raises(LayoutError):
        propose(big("distributed.tensor=3"), card=Card(80 * GIB, 3))
