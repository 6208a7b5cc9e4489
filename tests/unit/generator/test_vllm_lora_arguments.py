"""Room in vLLM for the adapter that is trained, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge.config import AdapterConfig, GeneratorConfig, GRPOConfig, ModelConfig, load
from forge.errors import ConfigError
from forge.generator.vllm.arguments import make_plan
from forge.generator.vllm.engine import VllmEngine
from forge.loops.worker_checks import grpo_worker_errors
from forge.models.locate import resolve
from forge.models.tiny import make_tiny


@pytest.mark.parametrize(
    ("rank", "given", "expected"),
    [
        (4, {}, (8, 1, 2, ["q_proj", "v_proj"])),
        (16, {}, (16, 1, 2, ["q_proj", "v_proj"])),
        (300, {"max_loras": 3}, (320, 3, 4, ["q_proj", "v_proj"])),
        (4, {"enable_lora": True}, (8, 2, 3, None)),
        (4, {"enable_lora": True, "max_loras": 4, "max_lora_rank": 64, "max_cpu_loras": 9}, (64, 4, 10, None)),
    ],
)
def test_room_for_the_adapter_that_is_trained(rank: int, given: dict[str, Any], expected: Any) -> None:
    adapter = AdapterConfig(rank=rank, targets=("v_proj", "q_proj"))
    config = GeneratorConfig(engine="vllm", model=ModelConfig(preset="tiny"), adapter=adapter, engine_args=given)
    arguments = make_plan(config, resolve(config.model).architecture, Path("folder"), device="cpu").arguments
    assert arguments["enable_lora"] is True
    names = ("max_lora_rank", "max_loras", "max_cpu_loras", "lora_target_modules")
    assert tuple(arguments.get(name) for name in names) == expected


@pytest.mark.parametrize(
    ("adapter", "given", "path", "value"),
    [
        ({"rank": 513}, {}, "adapter.rank", 513),
        ({"rank": 16}, {"max_lora_rank": 8}, "generator.engine_args.max_lora_rank", 8),
        ({}, {"enable_lora": False}, "generator.engine_args.enable_lora", False),
        ({}, {"lora_target_modules": ["q_proj"]}, "generator.engine_args.lora_target_modules", ("q_proj",)),
    ],
)
def test_what_vllm_cannot_do_with_an_adapter_is_refused_before_it_starts(
    adapter: dict[str, Any], given: dict[str, Any], path: str, value: Any, tmp_path: Path
) -> None:
    make_tiny(tmp_path)
    config = GeneratorConfig(
        engine="vllm",
        model=ModelConfig(path=str(tmp_path)),
        adapter=AdapterConfig(**adapter),
        engine_args=given,
    )
    (error,) = [each for each in VllmEngine.config_errors(config) if each.path != "generator.engine"]
    assert (error.path, error.value) == (path, value)
    assert error.rule
    assert error.repair
    with pytest.raises(ConfigError) as again:
        make_plan(config, resolve(config.model).architecture, tmp_path, device="cpu")
    assert again.value.path == path


def test_the_adapters_of_experts_are_refused_and_those_of_their_attention_are_not(tmp_path: Path) -> None:
    make_tiny(tmp_path, family="qwen3_moe")

    def errors(targets: str) -> list[ConfigError]:
        adapter = AdapterConfig(targets=targets)
        config = GeneratorConfig(engine="vllm", model=ModelConfig(path=str(tmp_path)), adapter=adapter)
        return [each for each in VllmEngine.config_errors(config) if each.path != "generator.engine"]

    (error,) = errors("all")
    assert error.path == "adapter.targets"
    assert "up_proj" in error.value
    assert "attention" in error.repair
    assert errors("attention") == []


def test_a_run_is_refused_before_it_starts(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    words = [f"model.path={tmp_path}", "generator.engine=vllm", "adapter.rank=600", "training.max_steps=1"]
    errors = grpo_worker_errors(load(GRPOConfig, overrides=words))
    assert "adapter.rank" in {error.path for error in errors}
