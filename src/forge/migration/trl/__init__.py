"""Configurations of TRL: what `trl grpo --config` reads, its Python classes, and its command lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from forge.config import ForgeConfig, GRPOConfig, PreferenceConfig, RewardTrainingConfig, SFTConfig
from forge.errors import ConfigError
from forge.migration.converting import Target
from forge.migration.reading import Form, coerced, flat_values, peer_keys, read_sections
from forge.migration.records import Given, Options, PeerConfig, Rule
from forge.migration.trl.model_rules import MODEL_RULES
from forge.migration.trl.python_files import CLASSES, read_python
from forge.migration.trl.rl_rules import RL_RULES
from forge.migration.trl.shell_files import read_shell
from forge.migration.trl.supervised_rules import SUPERVISED_RULES
from forge.migration.trl.trainer_rules import common_rules

_SCHEMAS: Final[Mapping[str, tuple[str, type[ForgeConfig]]]] = {
    "grpo": ("grpo", GRPOConfig),
    "rloo": ("grpo", GRPOConfig),
    "sft": ("sft", SFTConfig),
    "dpo": ("dpo", PreferenceConfig),
    "kto": ("dpo", PreferenceConfig),
    "reward": ("reward_model", RewardTrainingConfig),
}
"""For each kind of TRL, the kind of ours and its schema."""

KINDS: Final = tuple(_SCHEMAS)
ROOTS: Final = frozenset(("per_device_train_batch_size", "model_name_or_path", "dataset_name", "num_train_epochs"))

EXTRA_DEFAULTS: Final[Mapping[str, Any]] = {
    "num_processes": None,
    "num_machines": 1,
    "accelerate_config": None,
    "env": None,
    "config": None,
    "dataset_changes": None,
    "warmup_ratio": 0.0,
}
"""Keys besides those of the classes: of `accelerate launch`, of this reader, and of earlier versions."""

OLD_KEYS: Final[Mapping[str, str]] = {
    "evaluation_strategy": "now eval_strategy",
    "max_seq_length": "now max_length",
    "torch_dtype": "now dtype",
    "group_by_length": "now train_sampling_strategy: group_by_length",
    "use_liger_loss": "removed from TRL",
    "vllm_guided_decoding_regex": "now vllm_structured_outputs_regex",
    "vllm_device": "removed from TRL: see vllm_mode",
    "vllm_dtype": "removed from TRL",
    "logging_dir": "removed from transformers: run.output_dir holds the logs",
    "overwrite_output_dir": "removed from transformers: choose another run.name",
    "save_safetensors": "removed from transformers: weights are always safetensors",
    "tokenizer": "now processing_class",
    "max_target_length": "removed from TRL",
}
"""Keys of earlier versions, and what became of them."""


def defaults_of(kind: str) -> dict[str, Any]:
    """Return every key of a kind of run with its default."""
    groups = peer_keys("trl")["groups"]
    script, extra = dict(groups["ScriptArguments"]), dict(EXTRA_DEFAULTS)
    if kind in RL_RULES:
        script |= groups["GRPOScriptArguments"]
        extra["max_prompt_length"] = None
    return {
        **extra,
        **groups["ModelConfig"],
        **script,
        **groups["DatasetMixtureConfig"],
        **groups["TrainingArguments"],
        **groups[CLASSES[kind]],
    }


def rules_of(kind: str) -> list[Rule]:
    """Return the table of a kind of run."""
    own = RL_RULES[kind] if kind in RL_RULES else SUPERVISED_RULES[kind]
    covered = {key for rule in own for key in rule.theirs}
    shared = [rule for rule in (*common_rules(), *MODEL_RULES) if not covered & set(rule.theirs)]
    known = defaults_of(kind)
    return [found for rule in (*shared, *own) if (found := _known_keys(rule, known)) is not None]


def _known_keys(rule: Rule, known: Mapping[str, Any]) -> Rule | None:
    """The rule with the keys that a class has; None where it has none of them."""
    keys = tuple(key for key in rule.theirs if key in known or key.endswith(".*"))
    return replace(rule, theirs=keys) if keys or not rule.theirs else None


def open_config(text: str, form: Form, where: str, options: Options) -> tuple[PeerConfig, Target]:
    """Return what a file gives, and the table for its kind of run."""
    found: str | None = None
    if form == "python":
        found, given = read_python(text, where=where, kind=options.kind)
    elif form == "shell":
        found, given = read_shell(text, where=where)
    else:
        data, lines = read_sections(text, form, where=where)
        given = dict(flat_values(data, lines, where=where, known=data))
    kind = options.kind or found or _kind_of(given, where=where)
    defaults = defaults_of(kind)
    config = PeerConfig(coerced(given, defaults), defaults, kind=kind, num_processes=options.num_processes, where=where)
    ours, schema = _SCHEMAS[kind]
    version = str(peer_keys("trl")["version"])
    return config, Target("trl", version, ours, schema, rules_of(kind), OLD_KEYS)


def _kind_of(given: Mapping[str, Given], *, where: str) -> str:
    """Return the kind whose class knows most of the keys; of GRPO and RLOO, which differ by few, GRPO.

    Raises `ConfigError` where the keys say nothing.
    """
    unknown = {kind: sum(key not in defaults_of(kind) for key in given) for kind in KINDS}
    best = [kind for kind in KINDS if unknown[kind] == min(unknown.values())]
    if min(unknown.values()) == len(given):  # another project's: that is said with the keys
        return KINDS[0]
    if len(best) == 1 or best == ["grpo", "rloo"]:
        return best[0]
    raise ConfigError(
        "The keys do not tell which trainer of TRL this is for.",
        path=where,
        value=best,
        rule="a key that only one of its configurations has, such as num_generations or packing",
        repair=f"add --kind {'|'.join(best)}",
    )
