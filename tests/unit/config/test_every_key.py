"""No key is decorative: changing one changes what is resolved, what workers are started with, or is refused; and every
key is read by name, from its own section, by code outside `forge.config`."""

from __future__ import annotations

import ast
import asyncio
import functools
import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from annotated_types import Ge, Gt
from pydantic.fields import FieldInfo

import forge
from forge.config import (
    EvalConfig,
    ForgeConfig,
    GRPOConfig,
    InvalidConfig,
    ModelConfig,
    PolicyConfig,
    PreferenceConfig,
    RewardTrainingConfig,
    SFTConfig,
    load,
)
from forge.config.fields import _options, elements_of, sections_of, walk_fields
from forge.config.grpo import GRPOWorkersConfig
from forge.errors import ForgeError
from forge.loops import volumes, workers
from forge.loops.planning import GRPOPlan, episode_options, plan_run
from forge.memory import Card, resolve_run
from forge.models.locate import resolve
from forge.models.tiny import make_tiny
from forge.models.tokenizer import ChatTokenizer
from forge.service import ForgeActor

SRC = Path(forge.__file__).parent
SECTIONS_SEEN_BY_WORKERS = (
    *("run.seed", "model", "placement", "training", "distributed", "checkpointing", "generator", "reference"),
    *("rewards", "store", "workers", "rollout", "algorithm", "teacher"),
)


def leaves(schema: type[ForgeConfig]) -> Iterator[tuple[str, FieldInfo]]:
    """Every key that holds a value and not a section, with its dotted path."""
    for path, info in walk_fields(schema):
        below = [element for _, element in elements_of(info.annotation)]
        if not any(True for annotation in (info.annotation, *below) for _ in sections_of(annotation)):
            yield ".".join(path), info


# ---- Read by name ---------------------------------------------------------------------------------------------------

ALIASES = {"config", "_config", "section", "given", "rules", "wanted", "_slurm", "_data", "chosen"}
"""What code calls a section where it does not call it by its own name."""

READ_OTHERWISE: Mapping[str, str] = {
    "algorithm.preset": "lays values beneath the other keys of `algorithm`: `forge.config.algorithm`",
    "algorithm.convention": "the same",
    "algorithm.loss.correction": "becomes a `Correction` whole: `forge.losses`",
    "rewards.functions.<index>.shaping": "decides `RewardsConfig.task_functions`",
    "rewards.functions.<index>.name": "`RewardConfig.label`",
    "metrics.sinks.<index>.name": "`SinkConfig.label`",
    "metrics.tensorboard": "the sink of this name: `forge.observe`",
    "metrics.wandb": "the same",
    "workers": "become options whole: `WorkerConfig.options`",
    "critic.training": "is laid over `training` whole: `CriticTrainingConfig.over`",
    "critic.path": "`CriticConfig.model_from`",
    "critic.iterations": "`GRPOConfig.critic_iterations`",
    "eval.pass_at": "`EvalSection.ks`",
    "preference.beta": "`PreferenceLossConfig.chosen_beta`",
    "preference.nll_coefficient": "`PreferenceLossConfig.chosen_nll_coefficient`",
    "reference.mode": "`PreferenceConfig.reference_mode`",
    "rewards.reward_model.precision": "`RewardModelConfig.chosen_precision`",
    "rewards.reward_model.max_seq_len": "`RewardModelConfig.limits`",
    "rewards.reward_model.microbatch_tokens": "the same",
    "run.tags": "are read from the file of the run: `forge.ui.run_summary`",
    "episode.evaluation_limits": "are `limits` in evaluations: `forge.rollout.episode_worker`",
}
"""Keys, or all keys below a section, whose names are not written where they act, and where that is."""


@functools.cache
def reads() -> Mapping[str, frozenset[str]]:
    """For every attribute that is read outside `forge.config`, the names of what it is read from."""
    found: dict[str, set[str]] = {}
    for file in SRC.rglob("*.py"):
        if file.relative_to(SRC).parts[0] != "config":
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    found.setdefault(node.attr, set()).add(_last_name(node.value))
    return {name: frozenset(bases) for name, bases in found.items()}


def _last_name(node: ast.expr) -> str:
    match node:
        case ast.Attribute():
            return node.attr
        case ast.Name():
            return node.id
        case ast.Subscript() | ast.Await():
            return _last_name(node.value)
    return ""


@pytest.mark.parametrize(
    "schema", [GRPOConfig, SFTConfig, PreferenceConfig, PolicyConfig, EvalConfig, RewardTrainingConfig]
)
def test_every_key_is_read_from_its_section(schema: type[ForgeConfig]) -> None:
    unread = []
    for key, _ in leaves(schema):
        *above, name = [part for part in key.split(".") if not part.startswith("<")]
        section = above[-1] if above else "config"
        bases = reads().get(name, frozenset()) & {section, section.removesuffix("s"), *ALIASES}
        if not bases and not any(key == known or key.startswith(f"{known}.") for known in READ_OTHERWISE):
            unread.append(key)
    assert unread == []


def test_the_exceptions_are_keys() -> None:
    known = {
        key
        for schema in (GRPOConfig, SFTConfig, PreferenceConfig, PolicyConfig, EvalConfig)
        for key, _ in leaves(schema)
    }
    for exception in READ_OTHERWISE:
        assert any(key == exception or key.startswith(f"{exception}.") for key in known), exception


# ---- Changes what happens -------------------------------------------------------------------------------------------

UNSEEN: Mapping[str, str] = {
    "algorithm.advantage": "acts when a batch is complete: tests/unit/rollout/test_advantage.py",
    "algorithm.kl.credit": "the same",
    "algorithm.distillation": "the same: tests/unit/rollout/test_teacher_credit.py",
    "episode.max_retries": "acts after a fault: tests/unit/rollout/test_episode_source.py",
    "episode.max_failed_groups": "the same",
}
"""Keys, or keys below a section, that act later than the start of workers, and the tests that show it."""

VALUES: Mapping[str, str] = {"model.num_kv_heads": "1", "model.tie_embeddings": "false"}
"""Other values of keys whose value is not the schema's default here: the preset sets them."""


def other_value(info: FieldInfo) -> str:
    """A value of the key's type that is not its default, as YAML."""
    default = info.default if isinstance(info.default, int | float) else 0
    limits = [each.ge if isinstance(each, Ge) else each.gt for each in info.metadata if isinstance(each, Ge | Gt)]
    for option in _options(info.annotation):
        if get_origin(option) is Literal:
            return str(next(choice for choice in get_args(option) if choice != info.default))
        if option is bool:
            return str(info.default is not True).lower()
        if option is int:
            return str(max(int(default), *(int(limit) for limit in limits), 1) + 1)
        if option is float:
            return str(float(default) / 2 or (0.25 + max((float(limit) for limit in limits), default=0.0)))
        if option in (str, Path):
            return "other"
        if get_origin(option) is tuple:
            return "[7]" if int in get_args(option) else "[x]"
    return "{X: y}"


class StartedService:
    """Stands for a service. The trainer's is asked which GPUs it has."""

    def __getattr__(self, name: str) -> Any:
        async def route(*args: Any) -> dict[str, Any]:
            return {"visible_gpus": None}

        return types.SimpleNamespace(route=route)

    def __repr__(self) -> str:
        return "service"


class Recorder:
    """Stands for the services of a run: keeps what each is started with."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def options(self, cls: type, **keywords: Any) -> Any:
        async def as_service(*args: Any) -> Any:
            self.calls.append(f"{cls.__name__} {sorted(keywords.items())} {args}")
            return StartedService()

        return types.SimpleNamespace(as_service=as_service)

    async def setup(self, **keywords: int) -> None:
        self.calls.append(f"store {keywords}")


async def _started(plan: GRPOPlan) -> workers.Workers:
    return await workers.start_workers(
        plan.config,
        plan.trainer,
        loss=plan.loss,
        run=plan.run,
        episodes=episode_options(plan),
        tokenizer=plan.tokenizer,
    )


@pytest.fixture(autouse=True, scope="module")
def _tokenizers_are_loaded_once() -> Iterator[None]:
    """Hundreds of runs are planned with the same tokenizer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatTokenizer, "load", functools.cache(ChatTokenizer.load))
        yield


def observed(overrides: list[str]) -> list[str]:
    """What a run with these overrides resolves to and starts; the error where it is refused."""
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForgeActor, "options", classmethod(lambda cls, **keywords: recorder.options(cls, **keywords)))
        patch.setattr(volumes.store, "setup", recorder.setup)
        try:
            config = load(GRPOConfig, overrides=overrides)
            plan = plan_run(config)
            started = asyncio.run(_started(plan))
            resolved = resolve_run(config, card=Card(80 << 30, 8), facts=plan.trainer.model)
        except InvalidConfig as error:
            return [f"{problem.path}: {problem.rule}" for problem in error.problems]
        except ForgeError as error:
            return [f"{error.path}: {error.rule}"]
    made = [
        plan.rollout,
        plan.sampling,
        plan.num_steps,
        plan.num_groups,
        plan.loss,
        plan.advantage,
        vars(getattr(started.trainer, "_trainer", started.trainer)),  # within what restores it, unless it is shared
    ]
    found = [*sorted(recorder.calls), *(repr(each) for each in (resolved, *made))]
    return [re.sub(r" at 0x[0-9a-f]+", "", each) for each in found]


def test_a_changed_key_changes_what_is_resolved_started_or_refused(tmp_path: Path) -> None:
    folder = resolve(ModelConfig(preset="tiny")).folder
    make_tiny(tmp_path / "classifier", head="scalar")
    base = [
        *("model.preset=tiny", "prompts.sources=[{task: arithmetic, num_prompts: 8}]", f"run.output_dir={tmp_path}"),
        "rewards.functions=[{kind: number}, {kind: judge}, {kind: reward_model}]",
        *(f"rewards.judge.path={folder}", f"rewards.reward_model.path={tmp_path / 'classifier'}"),
        "algorithm.kl.coefficient=0.1",
        *(f"teacher.path={folder}", "algorithm.distillation.coefficient=0.5"),
    ]
    elsewhere = ("episodes", "critic")
    assert _unseen(base, [each for each in SECTIONS_SEEN_BY_WORKERS if each != "workers"]) == []
    assert _unseen(base, [f"workers.{name}" for name in GRPOWorkersConfig.model_fields if name not in elsewhere]) == []


def test_a_changed_key_of_episodes_changes_what_workers_are_started_with(tmp_path: Path) -> None:
    base = [
        *("model.preset=tiny", "prompts.sources=[{task: arithmetic, num_prompts: 8}]", f"run.output_dir={tmp_path}"),
        "episode.kind=own_episodes:dialogue",
    ]
    assert _unseen(base, ["episode", "workers.episodes"]) == []


def test_a_changed_key_of_the_critic_changes_what_is_resolved_started_or_refused(tmp_path: Path) -> None:
    base = [
        *("model.preset=tiny", "prompts.sources=[{task: arithmetic, num_prompts: 8}]", f"run.output_dir={tmp_path}"),
        *("rewards.functions=[{kind: number}]", "algorithm.preset=ppo", "training.max_steps=9"),
        *("training.activation_checkpointing=full", "training.optimizer_dtype=bfloat16"),
    ]
    assert _unseen(base, ["critic", "workers.critic"]) == []


def _unseen(base: list[str], sections: list[str]) -> list[str]:
    """The keys of sections whose change changes nothing that can be observed."""
    present = observed(base)
    assert len(present) > 8, present
    assert observed(base) == present
    same = []
    for key, info in leaves(GRPOConfig):
        if any(key == section or key.startswith(f"{section}.") for section in sections):
            value = VALUES.get(key) or other_value(info)
            if observed([*base, f"{key.replace('<index>', '0')}={value}"]) == present:
                same.append(key)
    return [key for key in same if not key.startswith(tuple(UNSEEN))]
