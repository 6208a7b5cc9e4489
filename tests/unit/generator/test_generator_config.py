"""The section `generator`: which values it takes, and what it says of the others."""

from __future__ import annotations

import math
from typing import Any

import pytest

from forge.config import GenerationConfig, GeneratorConfig, InvalidConfig, ModelConfig, PolicyConfig, Sampling, load


@pytest.mark.parametrize(
    ("override", "path", "rule"),
    [
        ("generator.engine=sglang", "generator.engine", "native, vllm"),
        (
            "generator.engine_args={enforce_eager: true}",
            "generator.engine_args",
            "needs an engine that takes arguments",
        ),
        ("generator.pinned_versions=0", "generator.pinned_versions", "greater than or equal to 1"),
        (
            "generator={engine: vllm, pinned_versions: 1}",
            "generator.pinned_versions",
            "needs an engine that serves several versions",
        ),
        ("generator={engine: vllm, speculation: {}}", "generator.speculation", "needs an engine that checks drafts"),
        ("generator.speculation.num_tokens=0", "generator.speculation.num_tokens", "greater than or equal to 1"),
        ("generator.adapters={base: folder}", "generator.adapters", "stands for the weights without an adapter"),
        ("generator={max_adapters: 1, adapters: {a: x, b: y}}", "generator.max_adapters", "the number of `adapters`"),
        ("generator={engine: vllm, max_adapter_gb: 1}", "generator.max_adapter_gb", "reserves all of its memory"),
        (
            "generator={engine: 'own_engines:OneVersion', adapters: {a: x}}",
            "generator.adapters",
            "needs an engine that serves adapters",
        ),
        ("generator.max_batch=0", "generator.max_batch", "greater than or equal to 1"),
        ("generator.max_queue=-1", "generator.max_queue", "greater than or equal to 0"),
        ("generator.prefill_chunk_tokens=8", "generator.prefill_chunk_tokens", "greater than or equal to 16"),
        ("generator.kv_cache_gb=0", "generator.kv_cache_gb", "greater than 0"),
        ("generator.max_seq_len=1", "generator.max_seq_len", "greater than or equal to 2"),
        ("generator.precision=float8", "generator.precision", "float16"),
        ("generator.update.mode=restart", "generator.update.mode", "drain, keep, recompute, abort"),
        ("generator.update.max_attempts=0", "generator.update.max_attempts", "greater than or equal to 1"),
        ("generator.canary.bound=0", "generator.canary.bound", "greater than 0"),
        ("generator.sampling.top_p=0", "generator.sampling.top_p", "greater than 0"),
        ("generator.sampling.top_p=1.5", "generator.sampling.top_p", "less than or equal to 1"),
        ("generator.sampling.min_p=2", "generator.sampling.min_p", "less than or equal to 1"),
        ("generator.sampling.presence_penalty=3", "generator.sampling.presence_penalty", "less than or equal to 2"),
        ("generator.sampling.repetition_penalty=0", "generator.sampling.repetition_penalty", "greater than 0"),
        ("generator.sampling.seed=-1", "generator.sampling.seed", "greater than or equal to 0"),
        ("generator.sampling.stop=['']", "generator.sampling.stop", "not empty"),
        ("generator.sampling={min_tokens: 5, max_tokens: 4}", "generator.sampling.min_tokens", "at most max_tokens"),
        ("generator.sampling.structured={a: 1}", "generator.sampling.structured", "exactly one of json_schema"),
        ("generator.sampling.temprature=1", "generator.sampling.temprature", "not a key"),
        ("serve.port=70000", "serve.port", "less than or equal to 65535"),
        ("generator.tensor_parallel=0", "generator.tensor_parallel", "greater than or equal to 1"),
    ],
)
def test_values_that_are_refused(override: str, path: str, rule: str) -> None:
    with pytest.raises(InvalidConfig) as raised:
        load(PolicyConfig, overrides=[override])
    (problem,) = raised.value.problems
    assert problem.path == path
    assert rule in problem.rule
    assert problem.repair


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1])
def test_a_temperature_is_a_number(value: float) -> None:
    with pytest.raises(ValueError):
        Sampling(temperature=value)


@pytest.mark.parametrize(
    ("changes", "is_truncated"),
    [
        ({}, False),
        ({"temperature": 0.5, "seed": 3, "max_tokens": 9, "stop": ("a",), "ignore_eos": True}, False),
        ({"top_p": 0.9}, True),
        ({"top_k": 5}, True),
        ({"min_p": 0.1}, True),
        ({"top_k": 5, "temperature": 0.0}, False),
        ({"repetition_penalty": 1.1, "temperature": 0.0}, True),
        ({"presence_penalty": -0.5}, True),
        ({"frequency_penalty": 0.5}, True),
        ({"min_tokens": 1}, True),
    ],
)
def test_what_shapes_a_distribution_beyond_its_temperature(changes: dict[str, Any], is_truncated: bool) -> None:
    assert Sampling(**changes).is_truncated is is_truncated
    assert Sampling(**changes).is_greedy is (changes.get("temperature") == 0.0)


def test_a_model_and_a_section_make_the_configuration_of_a_generator() -> None:
    section = GenerationConfig(engine="vllm", engine_args={"enforce_eager": True}, sampling=Sampling(n=3))
    model = ModelConfig(preset="tiny")
    made = GeneratorConfig.of(model, section)
    assert made.model == model
    assert all(getattr(made, name) == getattr(section, name) for name in GenerationConfig.model_fields)


def test_defaults_of_a_policy() -> None:
    policy = load(PolicyConfig)
    assert (policy.generator.engine, policy.generator.num_replicas, policy.generator.tensor_parallel) == (
        "native",
        1,
        1,
    )
    assert (policy.generator.update.mode, policy.generator.canary.enabled) == ("keep", True)
    assert (policy.serve.host, policy.serve.api_key) == ("127.0.0.1", None)
