"""The agents of a run's episodes: what the section `episode.agents` allows, and what answers for each."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.config import (
    AdapterConfig,
    AgentConfig,
    AlgorithmConfig,
    DistributedConfig,
    EvalConfig,
    GeneratorConfig,
    GRPOConfig,
    LeagueConfig,
    ModelConfig,
    TrainerConfig,
)
from forge.config.generator import BASE_ADAPTER
from forge.envs.episode import EpisodeProgram
from forge.envs.tool_calls import detect_format
from forge.errors import ConfigError, ForgeError
from forge.generator.actor import Generator
from forge.generator.engine import context_limit
from forge.loops.bound_versions import own_weights_name, starts_generators
from forge.loops.run_paths import load_tokenizer, run_dir
from forge.models.locate import ResolvedModel, resolve
from forge.rollout.agent_credit import AgentCredit
from forge.rollout.agent_policies import AgentGenerators, AgentOptions
from forge.rollout.endpoint_policy import EndpointAddress, first_model, make_client
from forge.trainer.checkpoint_folder import CheckpointInfo, read_checkpoint

if TYPE_CHECKING:
    from forge.memory import ResolvedRun

_FOLDER = "agents"


def check_agents(config: GRPOConfig, program: EpisodeProgram) -> None:
    """Raise the first of `agent_errors`."""
    for error in agent_errors(config, program):
        raise error


def check_evaluated_agents(config: EvalConfig, program: EpisodeProgram) -> None:
    """Refuse agents that an evaluation cannot have."""
    for error in _name_errors(config.episode.agents, program):
        raise error
    for name, agent in config.episode.agents.items():
        if agent.has_own_generators or agent.version is not None or agent.adapter is not None:
            lacks = "starts no generators for single agents" if agent.version is None else "has no versions of a run"
            raise ConfigError(
                f"an evaluation {lacks}",
                path=f"episode.agents.{name}",
                value=_label(agent, None),
                rule="the evaluated model, or an endpoint",
                repair=f"serve that model with `forge serve`, and set episode.agents.{name}.endpoint.url",
            )


def agent_errors(config: GRPOConfig, program: EpisodeProgram) -> Iterator[ConfigError]:
    """Yield an error for everything that is wrong with the section `episode.agents` of a run of this program."""
    section = config.episode.agents
    yield from _name_errors(section, program)
    if program.agents and not any(is_trained(section, name) for name in program.agents):
        yield ConfigError(
            "no agent learns",
            path="episode.agents",
            value=dict.fromkeys(program.agents, "learns: false"),
            rule="at least one agent is the live policy and learns",
            repair="remove learns: false from one of them",
        )
    yield from _advantage_errors(config, program)
    for name, agent in section.items():
        yield from _source_errors(f"episode.agents.{name}", agent)
        yield from _adapter_errors(f"episode.agents.{name}.adapter", agent, config)
    if config.episode.league is not None:
        yield from _league_errors(config, config.episode.league, program)


def _league_errors(config: GRPOConfig, league: LeagueConfig, program: EpisodeProgram) -> Iterator[ConfigError]:
    """Yield an error for everything in the section `episode.league` that its program and agents do not allow."""
    names = league_agents(league, program)
    if len(names) < 2 or set(names) - set(program.agents) or (league.learner or names[0]) not in names:
        yield ConfigError(
            "a league needs agents of the program: one that learns, and opponents",
            path="episode.league",
            value={"agents": list(league.agents), "learner": league.learner},
            rule=f"names among {', '.join(program.agents)}" if program.agents else f"{program.name} declares no agents",
            repair="name agents of the program"
            if len(program.agents) > 1
            else 'declare at least two: @episode(agents=["first", "second"])',
        )
    for name, agent in config.episode.agents.items():
        if name in names and (not agent.is_live or agent.learns is not None or agent.advantage == "zero_sum"):
            yield ConfigError(
                "the league decides what answers for this agent and when it learns",
                path=f"episode.agents.{name}",
                value=agent.model_dump(exclude_defaults=True),
                rule="neither another model nor `learns`, and advantage `group` or `baseline`: only one side learns",
                repair=f"remove them, or leave {name} out of episode.league.agents",
            )
    if not config.generator.capabilities.pinned_versions:
        yield ConfigError(
            "the generators of this run cannot serve earlier versions of the policy",
            path="generator.engine",
            value=config.generator.engine,
            rule="with episode.league an engine that serves pinned versions",
            repair="set generator.engine: native",
        )
    for number, folder in enumerate(league.checkpoints):
        yield from _source_errors(f"episode.league.checkpoints.{number}", AgentConfig(checkpoint=folder), key="")


def league_agents(league: LeagueConfig, program: EpisodeProgram) -> tuple[str, ...]:
    """Return the agents that take part in a league, in the order of the program."""
    return tuple(league.agents) or program.agents


def _name_errors(section: Mapping[str, AgentConfig], program: EpisodeProgram) -> Iterator[ConfigError]:
    for name in section:
        if name not in program.agents:
            yield ConfigError(
                "the program has no such agent",
                path=f"episode.agents.{name}",
                value=name,
                rule=f"one of {', '.join(program.agents)}" if program.agents else f"{program.name} declares no agents",
                repair="name an agent of the program"
                if program.agents
                else 'declare them: @episode(agents=["solver", "critic"])',
            )


def is_trained(section: Mapping[str, AgentConfig], name: str) -> bool:
    """Return whether an agent's turns are trained on; without settings they are."""
    return name not in section or section[name].is_trained


def _advantage_errors(config: GRPOConfig, program: EpisodeProgram) -> Iterator[ConfigError]:
    section = config.episode.agents
    for name, agent in section.items():
        if agent.advantage != "group":
            yield from _left_out_errors(f"episode.agents.{name}.advantage", agent, config.algorithm)
        if agent.advantage == "zero_sum":
            yield from _opponent_errors(name, config, program)
    for name in program.agents if config.compares_with_itself else ():
        if is_trained(section, name) and (name not in section or section[name].advantage == "group"):
            yield ConfigError(
                f"{name} would be compared with itself alone, and never learn",
                path="rollout.group_size",
                value=1,
                rule="at least 2 where an agent is compared within its group",
                repair=f"raise it, or set episode.agents.{name}.advantage: baseline",
            )


def _left_out_errors(path: str, agent: AgentConfig, algorithm: AlgorithmConfig) -> Iterator[ConfigError]:
    """Yield an error for every part of the algorithm that an advantage other than `group` would leave out."""
    if algorithm.charges_tokens:
        yield ConfigError(
            "this advantage leaves out what the divergence from the reference costs",
            path=path,
            value=agent.advantage,
            rule=f"`group` with algorithm.kl.credit `{algorithm.kl.credit}`",
            repair="set algorithm.kl.credit: completion, or advantage: group",
        )
    elif agent.advantage == "zero_sum" and algorithm.kl.coefficient > 0 and algorithm.kl.place == "reward":
        yield ConfigError(
            "rewards do not add up to 0 when the divergence from the reference is taken from them",
            path=path,
            value=agent.advantage,
            rule="`group` or `baseline` with algorithm.kl.place `reward`",
            repair="set algorithm.kl.place: loss, or advantage: group",
        )
    if algorithm.distillation.is_used:
        yield ConfigError(
            "this advantage leaves out what the teacher adds",
            path=path,
            value=agent.advantage,
            rule="`group` with algorithm.distillation.coefficient above 0",
            repair="set advantage: group, or remove the teacher",
        )


def _opponent_errors(name: str, config: GRPOConfig, program: EpisodeProgram) -> Iterator[ConfigError]:
    """Yield an error where there is no advantage of an opponent that `zero_sum` could negate."""
    section, advantage = config.episode.agents, config.algorithm.advantage
    others = [other for other in program.agents if other != name]
    rules = [section[other].advantage if other in section else "group" for other in others]
    is_of_tokens = advantage.function in ("turn", "gigpo") or advantage.gamma != 1
    if len(others) != 1 or rules == ["zero_sum"] or (rules == ["group"] and is_of_tokens):
        yield ConfigError(
            "this agent has no opponent whose advantage could be negated",
            path=f"episode.agents.{name}.advantage",
            value="zero_sum",
            rule="a program with two agents, of which the other has baseline, or group with one advantage per episode "
            "(neither algorithm.advantage.function `turn` or `gigpo` nor algorithm.advantage.gamma)",
            repair="set zero_sum for one of two agents, or use group",
        )


def _source_errors(path: str, agent: AgentConfig, *, key: str | None = None) -> Iterator[ConfigError]:
    try:
        if agent.model is not None:
            resolve(ModelConfig(path=agent.model))
        if agent.checkpoint is not None:
            read_checkpoint(Path(agent.checkpoint))
    except ForgeError as error:
        name, value = ("model", agent.model) if agent.model is not None else ("checkpoint", agent.checkpoint)
        yield ConfigError(
            f"this {'agent' if key is None else 'member'} cannot be loaded: {error.message}",
            path=f"{path}.{name}" if key is None else path,
            value=value,
            rule="a model's folder" if name == "model" else "the folder of a complete checkpoint of this model",
            repair="correct the path",
        )


def _adapter_errors(path: str, agent: AgentConfig, config: GRPOConfig) -> Iterator[ConfigError]:
    if agent.adapter is None:
        return
    names = (*sorted(config.generator.adapters), BASE_ADAPTER)
    if agent.adapter not in names:
        yield ConfigError(
            "the generators of this run have no such adapter",
            path=path,
            value=agent.adapter,
            rule=f"one of {', '.join(names)}",
            repair="name its folder in generator.adapters",
        )
    if config.adapter is None:
        yield ConfigError(
            "this run trains the weights below the adapter, so that the agent would change with every step",
            path=path,
            value=agent.adapter,
            rule="null in a run that trains all weights",
            repair="train an `adapter`, or merge this one and bind the agent to that folder with `model`",
        )


# ---- What answers ---------------------------------------------------------------------------------------------------


async def agent_options(config: GRPOConfig | EvalConfig, program: EpisodeProgram) -> dict[str, AgentOptions]:
    """Return how the agents of a program are bound. Endpoints without a model's name are asked for it."""
    found = {}
    for name in program.agents:
        agent = config.episode.agents.get(name, AgentConfig())
        address = None if agent.endpoint is None else await _address(config, agent, name)
        version = None if isinstance(config, GRPOConfig) and starts_generators(config, agent) else agent.version
        label = _label(agent, address)
        found[name] = AgentOptions(agent.is_trained, label, agent.limits, address, version, agent.adapter)
    return found


def _label(agent: AgentConfig, address: EndpointAddress | None) -> str:
    if address is not None:
        return f"endpoint {address.url} ({address.model})"
    if agent.version is not None:
        return f"version {agent.version}"
    if agent.adapter is not None:
        return f"adapter {agent.adapter}"
    if agent.checkpoint is not None:
        return f"checkpoint {agent.checkpoint}"
    return "live" if agent.model is None else f"model {agent.model}"


async def _address(config: GRPOConfig | EvalConfig, agent: AgentConfig, name: str) -> EndpointAddress:
    assert agent.endpoint is not None
    section, timeout_s = agent.endpoint, config.episode.limits.turn_timeout_s
    api_key = os.environ.get(section.api_key_env) or None
    model = section.model
    if model is None:
        async with make_client(section.url, api_key=api_key, timeout_s=timeout_s) as client:
            model = await first_model(client, section.url, path=f"episode.agents.{name}.endpoint")
    return EndpointAddress(section.url, model, api_key, timeout_s)


def agent_credit(config: GRPOConfig, program: EpisodeProgram | None) -> AgentCredit:
    """Return how a run credits the agents of its episodes."""
    return AgentCredit(config.episode.agents, () if program is None else program.agents)


async def start_agents(config: GRPOConfig, trainer: TrainerConfig, *, run: ResolvedRun) -> dict[str, AgentGenerators]:
    """Start the generators of agents with a model of their own, and of the checkpoints of the league. Call it inside
    `async with forge.run(...)`."""
    section = config.episode
    own = {name: (name, agent) for name, agent in section.agents.items() if starts_generators(config, agent)}
    for number, folder in enumerate(() if section.league is None else section.league.checkpoints):
        agent = AgentConfig(checkpoint=folder)
        own[_label(agent, None)] = (f"league_{number}", agent)
    async with asyncio.TaskGroup() as tasks:
        starting = {
            key: tasks.create_task(_start_agent(config, trainer, agent, name=name, run=run))
            for key, (name, agent) in own.items()
        }
    return {key: task.result() for key, task in starting.items()}


async def _start_agent(
    config: GRPOConfig, trainer: TrainerConfig, agent: AgentConfig, *, name: str, run: ResolvedRun
) -> AgentGenerators:
    path = f"episode.agents.{name}"
    folder = agent.model
    if agent.checkpoint is not None:
        info = await asyncio.to_thread(read_checkpoint, Path(agent.checkpoint))
        folder = str(await _export(config, trainer, info, name=name, dtype=run.published_dtype or "float32"))
    source = trainer.model if agent.version is not None else ModelConfig(path=folder)
    model = await asyncio.to_thread(resolve, source)
    template = config.generator.chat_template if agent.model is None else None
    codec = await asyncio.to_thread(load_tokenizer, model, chat_template=template, purpose=path)
    # No other weights that the trainer publishes reach it: they have another name.
    weights = own_weights_name(config, agent, name=name)
    changes = {"weights": weights, "chat_template": template, "pinned_versions": None}
    section = config.generator.model_copy(update=changes | {"max_seq_len": _context(config, model)})
    service = await Generator.options(
        procs=section.tensor_parallel,
        num_replicas=agent.num_replicas,
        num_threads=section.num_threads,
        with_gpus=run.generator_on_gpu,
        routing="least_loaded",
        mesh_name=f"agent_{name}",
        **config.workers.generator.options(),
    ).as_service(GeneratorConfig.of(source, section))
    most = context_limit(section, model.architecture)
    named = config.episode.tool_format
    return AgentGenerators(service, codec, most, detect_format(codec.chat_template) if named == "auto" else named)


def _context(config: GRPOConfig, model: ResolvedModel) -> int | None:
    """Return the context of an agent's own generators: the policy's, or less where its model has less."""
    own, wanted = model.architecture.max_seq_len, config.generator.max_seq_len
    return wanted if own is None or wanted is None else min(own, wanted)


async def _export(config: GRPOConfig, trainer: TrainerConfig, info: CheckpointInfo, *, name: str, dtype: str) -> Path:
    """Write the weights of a checkpoint of the same architecture as a model's folder, and return it."""
    from forge.trainer.actor import ReferenceModel

    place, work = (Path.cwd() / run_dir(config) / _FOLDER / part for part in (name, f".{name}"))
    adapter = AdapterConfig.of_checkpoint(info.extra)
    precision = "float32" if adapter is None else trainer.distributed.precision  # of the weights below the adapter
    export = TrainerConfig(
        model=trainer.model,
        adapter=adapter,
        distributed=DistributedConfig(with_gpus=False, precision=precision),
        checkpoint_dir=work,
        frozen=True,
    )
    service = await ReferenceModel.options(with_gpus=False, mesh_name=f"export_{name}").as_service(export)
    try:
        await service.load.route(str(Path.cwd() / info.path))
        await service.export_hf.route(place, dtype=dtype, overwrite=True)
    finally:
        await shut_down([service])
        shutil.rmtree(work, ignore_errors=True)
    return place


async def shut_down(services: Sequence[Any]) -> None:
    """Close the replicas of services, then end them."""
    for service in services:
        await service.close.options(partial=True).fanout()
        await service.shutdown()
