"""Configurations of verl: what `verl.trainer.main_ppo` reads with hydra, as YAML or on a command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forge.config import GRPOConfig
from forge.migration.converting import Target
from forge.migration.reading import Form, coerce, peer_keys
from forge.migration.records import Given, Options, PeerConfig, Rule
from forge.migration.verl.algorithm_rules import ALGORITHM_RULES, CRITIC_RULES
from forge.migration.verl.engine_rules import ENGINE_RULES, ROLLOUT_RULES
from forge.migration.verl.reading import read_given, resolved
from forge.migration.verl.trainer_rules import DATA_RULES, MODEL_RULES, OPTIMIZER_RULES, TRAINER_RULES

KINDS: Final = ("grpo",)
ROOTS: Final = frozenset(("actor_rollout_ref", "ray_kwargs"))
RULES: Final[list[Rule]] = [
    *MODEL_RULES,
    *DATA_RULES,
    *ALGORITHM_RULES,
    *OPTIMIZER_RULES,
    *ENGINE_RULES,
    *ROLLOUT_RULES,
    *TRAINER_RULES,
    *CRITIC_RULES,
]
EXTRA_DEFAULTS: Final[Mapping[str, Any]] = {
    "model_engine": "dp",
    "--config-name": "ppo_trainer",
    "--config-path": "config",
    "--config-dir": None,
}
"""What hydra's command line takes besides the keys."""

OLD_KEYS: Final[Mapping[str, str]] = {
    "trainer.val_generations_to_log_to_wandb": "now trainer.log_val_generations",
    "trainer.remove_previous_ckpt_in_save": "now trainer.max_actor_ckpt_to_keep",
    "actor_rollout_ref.rollout.micro_batch_size": "now log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.ppo_max_token_len": "now ppo_max_token_len_per_gpu",
    "data.return_raw_chat_prompt": "now data.return_raw_chat",
}
"""Keys of earlier versions, and what became of them."""


def defaults() -> dict[str, Any]:
    """Return every key with its default, interpolations as they are written."""
    groups = peer_keys("verl")["groups"]
    return {**EXTRA_DEFAULTS, **groups["ppo_megatron_trainer"], **groups["ppo_trainer"]}


def open_config(text: str, form: Form, where: str, options: Options) -> tuple[PeerConfig, Target]:
    """Return what a file gives, and the table."""
    plain = defaults()
    given = read_given(text, form, where=where, defaults=plain)
    whole = resolved({**plain, **{key: each.value for key, each in given.items()}})
    known = {key: whole[key] for key in plain if key not in given} | {
        key: resolved(plain).get(key) for key in plain if key in given
    }
    found = {key: Given(coerce(whole[key], known.get(key)), each.place) for key, each in given.items()}
    config = PeerConfig(found, known, kind="grpo", num_processes=options.num_processes, where=where)
    version = str(peer_keys("verl")["version"])
    return config, Target("verl", version, "grpo", GRPOConfig, RULES, OLD_KEYS)
