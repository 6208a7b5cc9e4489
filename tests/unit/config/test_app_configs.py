"""The configurations in apps/ are valid, their comments' commands too, and each is in its README."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from forge.config import (
    DistillConfig,
    ForgeConfig,
    GRPOConfig,
    PolicyConfig,
    PreferenceConfig,
    RewardTrainingConfig,
    SFTConfig,
    load,
)
from forge.memory import Card, parse_size, plan_memory, resolve_run
from forge.models.architecture import complete
from forge.trainer.layout import check_layout

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted(path for path in (ROOT / "apps").rglob("*.yaml") if "recorded" not in path.parts)
HEALTHY = ROOT / "apps" / "diagnosis" / "healthy.yaml"
SCHEMAS: dict[str, type[ForgeConfig]] = {
    "sft": SFTConfig,
    "vllm": PolicyConfig,
    "grpo": GRPOConfig,
    "quickstart": SFTConfig,
    "dpo": PreferenceConfig,
    "reward_model": RewardTrainingConfig,
}
AGENTS = ("games", "tools", "coding", "critic", "kuhn", "tictactoe")
STAGES: dict[str, type[ForgeConfig]] = {
    "sft.yaml": SFTConfig,
    "reward_model.yaml": RewardTrainingConfig,
    "grpo.yaml": GRPOConfig,
}
GPUS = {"qwen3_1_7b": 1, "ppo_qwen3_1_7b": 1, "qwen3_1_7b_3gpu": 3, "qwen3_8b": 8, "qwen3_32b": 24}
GPUS |= {"qwen3_32b_64gpu_slurm": 64, "qwen3_32b_64gpu_kubernetes": 64}
NAMES = [path.relative_to(ROOT / "apps").as_posix() for path in FILES]


def schema_of(path: Path) -> type[ForgeConfig]:
    """Return the schema of a file: an agents' application has one for each stage."""
    if path.parent.name in AGENTS:
        return {"sft.yaml": SFTConfig, "grpo.yaml": GRPOConfig, "league.yaml": GRPOConfig}[path.name]
    if path.parent.name == "distill":
        return {"teacher": SFTConfig, "tiny_onpolicy": GRPOConfig, "qwen3_onpolicy": GRPOConfig}.get(
            path.stem, DistillConfig
        )
    if path.parent.name == "diagnosis":
        return SFTConfig if path.name == "sft.yaml" else GRPOConfig
    if path.parent.name == "rlhf":
        return next(schema for stage, schema in STAGES.items() if path.name.endswith(f"_{stage}"))
    return SCHEMAS[path.parent.name]


def files_of(path: Path) -> list[Path]:
    """Return the files of a configuration: those of runs that fail change something about one that does not."""
    is_change = path.parent == HEALTHY.parent and path not in (HEALTHY, HEALTHY.with_name("sft.yaml"))
    return [HEALTHY, path] if is_change else [path]


def comment(path: Path) -> str:
    lines = [line[1:].strip() for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    return "\n".join(lines)


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_is_valid(name: str) -> None:
    path = ROOT / "apps" / name
    config = load(schema_of(path), files=files_of(path))
    assert config.run.name
    assert config.model.preset or config.model.path


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_is_and_is_in_the_readme(name: str) -> None:
    path = ROOT / "apps" / name
    assert len(comment(path)) > 60
    readme = path.with_name("README.md")
    assert not readme.exists() or f"`{path.name}`" in readme.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_in_its_comments_are_valid(name: str) -> None:
    text = re.sub(r"\\\n", " ", comment(ROOT / "apps" / name))
    for command in re.findall(r"\bforge (?:run|plan|distill|job \w+) ([^`|>\n]*)", text):
        words = shlex.split(command)
        named = [following for word, following in pairwise(words) if word == "--config"]
        recipe = next(word for word in words if "/" in word and "=" not in word)
        files = [ROOT / name for name in named] or [ROOT / "apps" / f"{recipe}.yaml"]
        assert all(file.is_file() for file in files), command
        overrides = [word for word in words if "=" in word]
        load(schema_of(files[-1]), files=files, overrides=overrides)
    for path in re.findall(r"\bapps/[\w/]+\.\w+", text):
        assert (ROOT / path).is_file()


@pytest.mark.parametrize("name", GPUS)
def test_it_asks_for_as_many_gpus_as_it_says(name: str) -> None:
    config = load(GRPOConfig, files=[ROOT / "apps" / "grpo" / f"{name}.yaml"])
    assert config.distributed.shard > 0, "or the trainer would take them all"
    check_layout(config.distributed, complete(config.model), config.training, num_ranks=config.distributed.num_ranks)
    num_gpus = config.distributed.num_ranks
    if config.placement == "apart":
        num_gpus += config.generator.num_replicas * config.generator.tensor_parallel
        num_gpus += config.reference.num_replicas if config.algorithm.kl.coefficient > 0 else 0
    if config.algorithm.has_critic and config.critic.placement == "apart":
        num_gpus += config.critic_distributed.num_ranks
    assert num_gpus == GPUS[name]
    if config.launcher.kind == "slurm":
        assert config.launcher.slurm.nodes * config.launcher.slurm.gpus_per_node == num_gpus
    if config.launcher.kind == "kubernetes":
        assert config.launcher.kubernetes.num_hosts * config.launcher.kubernetes.gpus_per_host == num_gpus


@pytest.mark.parametrize("name", GPUS)
def test_it_fits_into_the_gpus_that_it_names(name: str) -> None:
    config = load(GRPOConfig, files=[ROOT / "apps" / "grpo" / f"{name}.yaml"])
    card = Card(parse_size("80GB"), GPUS[name])
    plan = plan_memory(resolve_run(config, card=card), card=card)
    assert plan.fits
    assert plan.num_gpus == GPUS[name]


def test_both_files_for_64_gpus_are_the_same_run() -> None:
    slurm, kubernetes = (
        load(GRPOConfig, files=[ROOT / "apps" / "grpo" / f"qwen3_32b_64gpu_{kind}.yaml"]).model_dump()
        for kind in ("slurm", "kubernetes")
    )
    assert {key for key in slurm if slurm[key] != kubernetes[key]} == {"launcher", "run", "model"}
    assert {key for key in slurm["run"] if slurm["run"][key] != kubernetes["run"][key]} == {"output_dir"}
    assert {key for key in slurm["model"] if slurm["model"][key] != kubernetes["model"][key]} == {"path"}


def test_rlhf_takes_three_gpus() -> None:
    """The policy on one, where trainer and generator take turns; the reward model and the reference on one each."""
    config = load(GRPOConfig, files=[ROOT / "apps" / "rlhf" / "qwen3_1_7b_grpo.yaml"])
    card = Card(48 << 30, 3)
    plan = plan_memory(resolve_run(config, card=card), card=card)
    assert [(device.name, device.count) for device in plan.gpus] == [
        ("trainer + generator", 1),
        ("reference", 1),
        ("reward model", 1),
    ]
    assert plan.fits
    reward_model = plan.gpus[-1].peak
    assert next(part for part in reward_model.parts if part.name == "weights").num_bytes == 2 * 1_720_577_024


@pytest.mark.parametrize("schema", [SFTConfig, PolicyConfig, GRPOConfig, PreferenceConfig, RewardTrainingConfig])
def test_the_reference_has_every_key_that_an_application_adds(schema: type[ForgeConfig]) -> None:
    page = (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    added = set(schema.model_fields) - set(ForgeConfig.model_fields)
    assert [name for name in added if f"## `{name}`\n" not in page and f"| `{name}` |" not in page] == []
