"""What is evaluated: a model's folder, a run's checkpoint or an endpoint, and how it answers one task."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forge.config import AdapterConfig, EndpointConfig, EvalConfig, ModelConfig, PolicyConfig, Sampling, TrainerConfig
from forge.config.generator import PolicyWorkersConfig
from forge.config.training import DistributedConfig
from forge.data.mixing import derive
from forge.envs.character_codec import character_limits
from forge.envs.environment import load_program
from forge.envs.limits import Fault
from forge.envs.state import EpisodeKey
from forge.envs.tool_calls import detect_format
from forge.errors import ConfigError, RewardError
from forge.loops.agents import agent_options
from forge.loops.evals.run_defaults import EvaluatedRun, open_run
from forge.loops.evals.settings import folder_digest
from forge.models.locate import ResolvedModel, resolve
from forge.rollout.endpoint_policy import NO_LIMIT, EndpointAddress, EndpointPrompts, first_model, make_client
from forge.rollout.endpoint_worker import EndpointWorker
from forge.rollout.episode_worker import EpisodeOptions, EpisodeWorker
from forge.types import Completion, Episode, Score, Task

if TYPE_CHECKING:
    from forge.envs.episode import EpisodeProgram
    from forge.loops.workers import PolicyHandle
    from forge.models.tokenizer import ChatTokenizer
    from forge.rollout.reward_actor import RewardActor
    from forge.service import Service
    from forge.trainer.checkpoint_folder import CheckpointInfo

ENDPOINT_CONCURRENCY: Final = 64
_EXPORTED: Final = "model"

Attempt = Callable[[int, int, Task], Awaitable[Episode]]
"""Makes one sample of a task: its place in the dataset, the sample's number, and the task."""


@dataclass(frozen=True, slots=True)
class EvalTarget:
    """What is evaluated, decided before anything starts.

    Attributes:
        facts: what identifies it, for settings and results: kind, name, digest, step.
        model: the model whose tokenizer and architecture are used; None for an endpoint.
        checkpoint: the weights of a run; None for those of the model's folder.
        run: the run that the checkpoint is from.
        address: the endpoint.
        notes: what a reader should know.
    """

    facts: Mapping[str, Any]
    model: ResolvedModel | None = None
    checkpoint: CheckpointInfo | None = None
    run: EvaluatedRun | None = None
    address: EndpointAddress | None = None
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """The step of the run's checkpoint; 0 for others."""
        return 0 if self.checkpoint is None else self.checkpoint.step


async def find_target(config: EvalConfig) -> EvalTarget:
    """Return what a configuration evaluates, or raise what is wrong with it. Starts nothing."""
    if config.eval.endpoint is not None:
        return await _find_endpoint(config, config.eval.endpoint)
    if config.eval.run is None and config.model.path is None and config.model.preset is None and not config.model.name:
        raise ConfigError(
            "nothing is named that could be evaluated",
            path="--model",
            value=None,
            rule="a model's folder, a run's folder or an endpoint",
            repair="give --model FOLDER, --run RUN, --endpoint URL, or model.preset=tiny for a model of random weights",
        )
    run = None if config.eval.run is None else open_run(config.eval.run)
    info = None if run is None else run.find(config.eval.step)
    section = config.model
    if run is not None and info is None:  # it left a model and no checkpoint
        section = ModelConfig(path=str(run.checkpoint_dir / "hf"))
    model = await asyncio.to_thread(resolve, section)
    if model.folder is None:
        raise ConfigError(
            "an evaluation needs a model with its tokenizer",
            path="model.path",
            value=None,
            rule="a folder with Hugging Face files, or the preset `tiny`",
            repair="download the model, and give --model FOLDER",
        )
    if info is not None:
        digest = derived_digest(info)
        facts = {"kind": "checkpoint", "name": f"{config.eval.run} step {info.step}", "digest": digest}
        return EvalTarget({**facts, "step": info.step}, model, info, run, notes=run.notes if run else ())
    digest = await asyncio.to_thread(folder_digest, model.folder)
    facts = {"kind": "model", "name": model.name, "digest": digest}
    return EvalTarget({**facts, "step": None}, model, None, run, notes=run.notes if run else ())


def derived_digest(info: CheckpointInfo) -> str:
    """Return the digest of a checkpoint, from the digests of its files."""
    text = repr(sorted((name, record.size, record.sha256) for name, record in info.files.items()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


async def _find_endpoint(config: EvalConfig, section: EndpointConfig) -> EvalTarget:
    timeout_s = _limits(config).turn_timeout_s
    api_key = os.environ.get(section.api_key_env) or None
    name = section.model
    if name is None:
        async with make_client(section.url, api_key=api_key, timeout_s=timeout_s) as client:
            name = await first_model(client, section.url)
    notes = ["tokens at an endpoint are not exact: lengths are those that it reports"]
    if config.episode.kind is not None and _limits(config).max_tokens is not None:
        notes.append("episode.limits.max_tokens is not applied at an endpoint")
    address = EndpointAddress(section.url, name, api_key, timeout_s)
    facts = {"kind": "endpoint", "name": name, "url": section.url, "digest": None, "step": None}
    return EvalTarget(facts, address=address, notes=tuple(notes))


def _limits(config: EvalConfig) -> Any:
    return config.episode.evaluation_limits or config.episode.limits


# ---- Workers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """What answers tasks.

    Attributes:
        attempt: makes one sample.
        decode: makes text of its tokens; None at an endpoint, whose tokens are not known.
        at_once: samples in progress at once.
    """

    attempt: Attempt
    decode: Callable[..., str] | None
    at_once: int


@asynccontextmanager
async def start_target(config: EvalConfig, target: EvalTarget, *, folder: Path) -> AsyncIterator[Started]:
    """Start what answers and what scores. Call it inside `async with forge.run(...)`, which ends it.

    The weights of a checkpoint are exported to `folder`/model, which is removed at the end.
    """
    if target.address is not None:
        async with _start_endpoint(config, target.address) as started:
            yield started
        return
    assert target.model is not None
    async with _exported(config, target, folder=folder) as model, _start_model(config, model) as started:
        yield started


@asynccontextmanager
async def _start_model(config: EvalConfig, model: ResolvedModel) -> AsyncIterator[Started]:
    from forge.generator.actor import start_policy
    from forge.loops.run_paths import load_tokenizer
    from forge.loops.workers import PolicyHandle

    section = config.model.model_copy(update={"path": str(model.folder)})
    template = config.generator.chat_template
    tokenizer = await asyncio.to_thread(load_tokenizer, model, chat_template=template, purpose="an evaluation")
    policy_config = PolicyConfig(
        model=section,
        generator=config.generator,
        launcher=config.launcher,
        workers=PolicyWorkersConfig(generator=config.workers.generator),
    )
    policy = PolicyHandle(await start_policy(policy_config))
    at_once = config.eval.max_concurrent or config.generator.num_replicas * config.generator.max_batch
    try:
        if config.episode.kind is None:
            async with _start_scoring(config) as score:
                yield Started(_prompt_attempt(config, _asks(policy, config), score), tokenizer.decode, at_once)
        else:
            workers = await _start_episodes(config, model, tokenizer, policy)
            try:
                yield Started(_episode_attempt(workers.run.route), tokenizer.decode, at_once)
            finally:
                await _shut_down(workers)
    finally:
        await policy.close()


async def _start_episodes(
    config: EvalConfig, model: ResolvedModel, tokenizer: ChatTokenizer, policy: PolicyHandle
) -> Service[EpisodeWorker]:
    from forge.generator.engine import context_limit

    named = config.episode.tool_format
    options = await _episode_options(
        config,
        program_of(config),
        max_seq_len=context_limit(config.generator, model.architecture),
        tool_format=detect_format(tokenizer.chat_template) if named == "auto" else named,
    )
    return await EpisodeWorker.options(
        num_replicas=config.episode.num_replicas,
        routing="least_loaded",
        mesh_name="episodes",
        **config.workers.episodes.options(),
    ).as_service(options, tokenizer, policy.service)


@asynccontextmanager
async def _start_endpoint(config: EvalConfig, address: EndpointAddress) -> AsyncIterator[Started]:
    at_once = config.eval.max_concurrent or ENDPOINT_CONCURRENCY
    if config.episode.kind is not None:
        options = await _episode_options(config, program_of(config), max_seq_len=2 * NO_LIMIT, tool_format="hermes")
        limits = character_limits(options.limits)
        workers = await EndpointWorker.options(
            num_replicas=config.episode.num_replicas,
            routing="least_loaded",
            mesh_name="episodes",
            **config.workers.episodes.options(),
        ).as_service(replace(options, limits=limits, evaluation_limits=limits), address)
        try:
            yield Started(_episode_attempt(workers.run.route), None, at_once)
        finally:
            await _shut_down(workers)
        return
    client = make_client(address.url, api_key=address.api_key, timeout_s=address.timeout_s)
    async with _start_scoring(config) as score, client:
        prompts = EndpointPrompts(client, address.model)

        async def ask(task: Task, sampling: Mapping[str, Any]) -> tuple[Completion, float | None]:
            completion, usage = await prompts.complete(task, sampling)
            return completion, None if usage is None else float(usage.num_sampled)

        yield Started(_prompt_attempt(config, ask, score), None, at_once)


async def _shut_down(service: Any) -> None:
    await service.close.options(partial=True).fanout()
    await service.shutdown()


# ---- One sample ------------------------------------------------------------------------------------------------------

Ask = Callable[[Task, Mapping[str, Any]], Awaitable[tuple[Completion, float | None]]]
"""Asks for one completion; also returns the tokens that an endpoint reports, which knows no others."""
ScoreFunction = Callable[[Task, list[Completion]], Awaitable[list[Score]]]


def eval_seed(config: EvalConfig) -> int:
    """Return what the seeds of all samples derive from, together with task and sample. No rollout has the same."""
    return derive(config.run.seed, "eval") % 2**63


def program_of(config: EvalConfig) -> EpisodeProgram:
    """Return the program that the section `episode` names."""
    assert config.episode.kind is not None
    return load_program(config.episode.kind, config.episode.args)


async def _episode_options(config: EvalConfig, program: EpisodeProgram, **fields: Any) -> EpisodeOptions:
    sampling, limits = config.generator.sampling.model_dump(exclude={"n", "seed"}), _limits(config)
    return EpisodeOptions(
        program=program,
        limits=limits,
        evaluation_limits=limits,
        sampling=sampling,
        evaluation_sampling=sampling,
        run_seed=eval_seed(config),
        agents=await agent_options(config, program),
        **fields,
    )


def _episode_attempt(run: Callable[..., Awaitable[Episode]]) -> Attempt:
    async def attempt(index: int, sample: int, task: Task) -> Episode:
        return await run(task, index, sample)

    return attempt


def _asks(policy: PolicyHandle, config: EvalConfig) -> Ask:
    base = config.generator.sampling

    async def ask(task: Task, sampling: Mapping[str, Any]) -> tuple[Completion, float | None]:
        chosen: Sampling = base.model_copy(update={"seed": sampling["seed"]})
        (completion,) = await policy.generate(task, sampling=chosen)
        return completion, None

    return ask


def _prompt_attempt(config: EvalConfig, ask: Ask, score: ScoreFunction) -> Attempt:
    """Return what asks once and scores the answer with the configuration's rewards."""
    seed, limit_s = eval_seed(config), _limits(config).turn_timeout_s
    sampling = config.generator.sampling.model_dump(exclude={"n", "seed"})

    async def attempt(index: int, sample: int, task: Task) -> Episode:
        key = EpisodeKey(seed, index, sample)
        try:
            async with asyncio.timeout(limit_s):
                completion, num_tokens = await ask(task, {**sampling, "seed": key.seed("prompt")})
        except TimeoutError:
            raise Fault(f"the completion took longer than {limit_s:g} s", kind="time", path=task.id) from None
        scored = completion
        if num_tokens is not None:  # rewards of length count tokens
            scored = replace(completion, token_ids=(0,) * int(num_tokens), logprobs=(0.0,) * int(num_tokens))
        (found,) = await score(task, [scored])
        _check_failures(config, task, found)
        stats = {} if num_tokens is None else {"num_sampled": num_tokens}
        return Episode.single(task, completion, found, member=sample, stats=stats)

    return attempt


def _check_failures(config: EvalConfig, task: Task, score: Score) -> None:
    """Treat rewards that failed as `rewards.on_error` says."""
    if not score.failures or config.rewards.on_error == "zero":
        return
    name, reason = next(iter(score.failures.items()))
    if config.rewards.on_error == "skip":
        raise Fault(f"the reward {name} failed: {reason}", kind="reward", path=task.id)
    raise RewardError(
        f"the reward {name} failed: {reason}",
        path=task.id,
        value=name,
        rule="rewards.on_error is stop",
        repair="fix the reward or the data, or set rewards.on_error to zero or skip; the same command continues",
    )


@asynccontextmanager
async def _start_scoring(config: EvalConfig) -> AsyncIterator[ScoreFunction]:
    from forge.loops.workers import start_rewards
    from forge.runtime.placement import wants_gpus

    judge = config.rewards.judge
    on_gpu = judge is not None and wants_gpus(judge.generator.with_gpus)
    rewards: Service[RewardActor] = await start_rewards(config.rewards, config.workers, judge_on_gpu=on_gpu)
    try:
        yield rewards.score.route
    finally:
        await _shut_down(rewards)


# ---- A checkpoint ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _exported(config: EvalConfig, target: EvalTarget, *, folder: Path) -> AsyncIterator[ResolvedModel]:
    """Write the weights of a checkpoint as a model's folder, which is there until the evaluation is complete.

    A process that was killed leaves it behind whole, and the next one uses it.
    """
    assert target.model is not None
    if target.checkpoint is None or target.run is None:
        yield target.model
        return
    place = folder / _EXPORTED
    stamp = place / "checkpoint.txt"
    digest = derived_digest(target.checkpoint)
    if not (stamp.is_file() and stamp.read_text().strip() == digest):
        shutil.rmtree(place, ignore_errors=True)
        await _export(config, target, place, dtype=target.run.dtype, work=folder / ".export")
        stamp.write_text(f"{digest}\n")
    model = await asyncio.to_thread(resolve, config.model.model_copy(update={"path": str(place)}))
    yield replace(model, name=target.model.name)
    shutil.rmtree(place, ignore_errors=True)


async def _export(config: EvalConfig, target: EvalTarget, place: Path, *, dtype: str, work: Path) -> None:
    from forge.trainer.actor import ReferenceModel

    assert target.model is not None
    assert target.checkpoint is not None
    adapter = AdapterConfig.of_checkpoint(target.checkpoint.extra)
    own: Any = "float32" if target.run is None else target.run.precision
    trainer = TrainerConfig(
        model=target.model.architecture,
        adapter=adapter,
        distributed=DistributedConfig(with_gpus=False, precision="float32" if adapter is None else own),
        checkpoint_dir=work,
        frozen=True,
    )
    service = await ReferenceModel.options(with_gpus=False, mesh_name="export").as_service(trainer)
    try:
        await service.load.route(str(Path.cwd() / target.checkpoint.path))
        await service.export_hf.route(Path.cwd() / place, dtype=dtype, overwrite=True)
    finally:
        await _shut_down(service)
        shutil.rmtree(work, ignore_errors=True)
