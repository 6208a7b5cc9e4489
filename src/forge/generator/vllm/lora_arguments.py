"""The arguments of vLLM's engine for the LoRA adapter that a trainer updates (`adapter:`), and what vLLM cannot do.

Nothing here imports vLLM or torch: it is checked before anything starts, and `forge plan` counts with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from forge.config import GenerationConfig, GeneratorConfig, ModelConfig
from forge.config.adapter import TARGET_NAMES
from forge.errors import ConfigError, ForgeError
from forge.models.adapter_names import AdapterSpec, adapter_map, num_adapter_parameters

_PATH: Final = "generator.engine_args"

MAX_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of `max_lora_rank` that vLLM 0.32.0 accepts."""

LIVE_ID: Final = 1
"""The number of the adapter that is trained. Adapters with a name have those after it."""


def lora_arguments(given: Mapping[str, Any], spec: AdapterSpec) -> dict[str, Any]:
    """Return the arguments that make room for the adapter that is trained; `given` are the user's.

    Adapters with a name need the user's `enable_lora`. Without it only the layers of `spec` have room, in one slot.
    vLLM drops the adapter that it has not used for longest: there is a place in its memory for one more than it uses
    at once, because the adapter that is trained has no folder that it could be loaded from again.
    """
    has_named = bool(given.get("enable_lora"))
    num_slots = _num_slots(given)
    arguments: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": num_slots,
        "max_cpu_loras": max(num_slots, _whole(given, "max_cpu_loras") or 0) + 1,
        "max_lora_rank": _slot_rank(given, spec.rank),
    }
    if not has_named:
        arguments["lora_target_modules"] = list(spec.targets)
    return arguments


def num_slot_weights(given: Mapping[str, Any], spec: AdapterSpec, facts: ModelConfig) -> int:
    """Return the numbers in vLLM's slots for adapters, where one like `spec` is trained.

    vLLM computes queries, keys and values as one layer, gates and up projections as another: where one of them has an
    adapter, all of them have room for one.
    """
    packed = (TARGET_NAMES,) if given.get("enable_lora") else (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    targets = set(spec.targets)
    for layers in packed:
        if targets.intersection(layers):
            targets.update(layers)
    wide = replace(spec, rank=_slot_rank(given, spec.rank), targets=tuple(sorted(targets)))
    return _num_slots(given) * num_adapter_parameters(adapter_map(facts, wide))


def _num_slots(given: Mapping[str, Any]) -> int:
    return _whole(given, "max_loras") or (2 if given.get("enable_lora") else 1)


def _slot_rank(given: Mapping[str, Any], rank: int) -> int:
    fitting = next((each for each in MAX_RANKS if each >= rank), MAX_RANKS[-1])
    return _whole(given, "max_lora_rank") or fitting


def _whole(given: Mapping[str, Any], name: str) -> int | None:
    """Return a number that the user has set. What is none is reported when the engine starts, with all arguments."""
    value = given.get(name)
    return value if isinstance(value, int) and value > 0 else None


def check_live_adapter(config: GenerationConfig) -> None:
    """Raise `ConfigError` where vLLM cannot update the adapter of a configuration. What keeps model or adapter from
    being read is not reported here."""
    from forge.models.locate import resolve
    from forge.models.peft_files import resolve_adapter

    if not isinstance(config, GeneratorConfig) or config.adapter is None:
        return
    try:
        facts = resolve(config.model).architecture
        spec = resolve_adapter(config.adapter, facts)
    except ForgeError:
        return
    check_spec(spec, facts)
    check_given(config.engine_args, spec)


def check_spec(spec: AdapterSpec, facts: ModelConfig) -> None:
    """Raise `ConfigError` for an adapter that vLLM cannot compute with."""
    if spec.rank > MAX_RANKS[-1]:
        raise ConfigError(
            "vLLM has no room for an adapter of this rank.",
            path="adapter.rank",
            value=spec.rank,
            rule=f"at most {MAX_RANKS[-1]} with engine: vllm",
            repair="lower it, or set generator.engine: native",
        )
    if any(slot.base.fused is not None for slot in adapter_map(facts, spec)):
        raise ConfigError(
            "vLLM cannot update the adapters of experts.",
            path="adapter.targets",
            value=list(spec.targets),
            rule="attention layers only, for a mixture of experts with engine: vllm",
            repair="set adapter.targets: attention, or generator.engine: native",
        )


def check_given(given: Mapping[str, Any], spec: AdapterSpec) -> None:
    """Raise `ConfigError` if one of the user's arguments leaves no room for the adapter that is trained."""
    rules: dict[str, tuple[bool, str, str]] = {
        "enable_lora": (
            given.get("enable_lora") is False,
            "vLLM needs room for the adapter that is trained",
            "remove it; true makes room for adapters with a name, too",
        ),
        "max_lora_rank": (
            _slot_rank(given, spec.rank) < spec.rank,
            f"at least {spec.rank}, the rank of the adapter that is trained",
            "remove it: it follows adapter.rank",
        ),
        "lora_target_modules": (
            given.get("lora_target_modules") is not None,
            "the layers are those of adapter.targets; with enable_lora, all that vLLM supports",
            "remove it",
        ),
    }
    for name, (is_broken, rule, repair) in rules.items():
        if is_broken:
            raise ConfigError(
                "This argument of vLLM contradicts `adapter`.",
                path=f"{_PATH}.{name}",
                value=given[name],
                rule=rule,
                repair=repair,
            )
