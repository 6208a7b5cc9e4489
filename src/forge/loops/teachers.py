"""The teacher of a run: checked before it starts, and started as the section `teacher` says."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge.config import DistributedConfig, GeneratorConfig, GRPOConfig, ModelConfig, TeacherConfig, TrainerConfig
from forge.errors import ConfigError, ForgeError
from forge.generator.actor import Generator
from forge.generator.engine import check_split, engine_class
from forge.models.locate import resolve
from forge.models.tokenizer import ChatTokenizer
from forge.models.vocabulary import check_same_vocabulary
from forge.rollout.endpoint_policy import EndpointAddress, first_model, make_client
from forge.rollout.references import LogprobsFunction
from forge.rollout.teachers import EndpointTeacher
from forge.trainer.actor import ReferenceModel
from forge.types import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from forge.memory import ResolvedRun


@dataclass(frozen=True, slots=True)
class Teacher:
    """What scores with the teacher: `logprobs` asks it, and `service` or `endpoint` is what answers."""

    logprobs: LogprobsFunction
    service: Any = None
    endpoint: EndpointTeacher | None = None


# ---- Checks ---------------------------------------------------------------------------------------------------------


def check_teacher(config: GRPOConfig, student: ChatTokenizer) -> None:
    """Raise the first of `teacher_errors`."""
    for error in teacher_errors(config, student):
        raise error


def teacher_errors(config: GRPOConfig, student: ChatTokenizer | None) -> Iterator[ForgeError]:
    """Yield an error for everything that is wrong with the teacher of a run, as far as this machine can tell.

    `student` is the policy's tokenizer; None where it could not be loaded.
    """
    section = config.teacher
    if section.path is None:
        return
    failed = False
    for error in folder_errors(section, student):
        failed = True
        yield error
    yield from () if failed else _row_errors(config)
    longest = config.generator.max_seq_len or config.training.max_seq_len
    yield from () if failed else context_errors(section, longest)


def context_errors(section: TeacherConfig, longest: int) -> Iterator[ForgeError]:
    """Yield an error for a teacher with a folder that cannot score sequences of `longest` tokens."""
    own = None if section.generator is None else section.generator.max_seq_len
    supported = resolve(ModelConfig(path=section.path)).architecture.max_seq_len
    if own is not None and own < longest:
        yield ConfigError(
            "the teacher cannot score the longest sequences",
            path="teacher.generator.max_seq_len",
            value=own,
            rule=f"at least {longest}, the tokens of the longest sequence",
            repair="remove it, or raise it",
        )
    elif supported is not None and supported < longest:
        yield ConfigError(
            "the teacher cannot score the longest sequences",
            path="teacher.path",
            value=section.path,
            rule=f"a model that reads at least {longest} tokens; this one reads {supported}, as its config.json says",
            repair=f"choose another teacher, or set training.max_seq_len={supported} and what follows from it",
        )


def _row_errors(config: GRPOConfig) -> Iterator[ForgeError]:
    """Yield an error for a student that can sample token numbers which the teacher has no row for."""
    own = resolve(config.model).architecture.vocab_size or 0
    other = resolve(ModelConfig(path=config.teacher.path)).architecture.vocab_size or 0
    if other < own:
        yield ConfigError(
            "the student can sample tokens that the teacher's output layer does not have",
            path="teacher.path",
            value=config.teacher.path,
            rule=f"vocab_size of at least {own}, as the student's config.json says; this teacher's is {other}",
            repair="choose another teacher, or distill from stored logprobs (`forge distill`)",
        )


def folder_errors(section: TeacherConfig, student: ChatTokenizer | None) -> Iterator[ForgeError]:
    """Yield an error for everything that is wrong with a teacher's folder, its tokenizer and its engine."""
    assert section.path is not None
    try:
        resolve(ModelConfig(path=section.path))
        teacher = ChatTokenizer.load(section.path)
        if student is not None:
            check_same_vocabulary(student, teacher, path="teacher.path")
    except ForgeError as error:
        if not isinstance(error, ConfigError):
            error.path = "teacher.path"
        yield error
    if section.generator is not None:
        try:
            check_split(section.generator, section.generator.tensor_parallel, path="teacher.generator.tensor_parallel")
        except ConfigError as error:
            yield error
        for each in engine_class(section.generator.engine).config_errors(section.generator):
            each.path = (each.path or "generator").replace("generator", "teacher.generator", 1)
            yield each


# ---- Start ----------------------------------------------------------------------------------------------------------


async def start_teacher(
    config: GRPOConfig, trainer: TrainerConfig, *, run: ResolvedRun, student: ChatTokenizer | None
) -> Teacher | None:
    """Start the teacher of a run; None without one. Call it inside `async with forge.run(...)`."""
    section = config.teacher
    if not section.is_given:
        return None
    if section.endpoint is not None:
        endpoint = await open_endpoint(section)
        if student is not None:
            await endpoint.check(student)
        return Teacher(endpoint.logprobs, endpoint=endpoint)
    options = config.workers.teacher.options()
    if section.generator is not None:
        longest = config.generator.max_seq_len or config.training.max_seq_len
        service = await start_generators(section, longest, on_gpu=run.teacher_on_gpu, options=options)
        return Teacher(engine_logprobs(service), service)
    forward = await start_forward(section, trainer, on_gpu=run.teacher_on_gpu, options=options)
    return Teacher(forward.forward_logprobs.route, forward)


async def open_endpoint(section: TeacherConfig) -> EndpointTeacher:
    """Return a client of the teacher's endpoint. One without a model's name is asked for it."""
    assert section.endpoint is not None
    url, api_key = section.endpoint.url, os.environ.get(section.endpoint.api_key_env) or None
    model = section.endpoint.model
    if model is None:
        async with make_client(url, api_key=api_key, timeout_s=section.timeout_s) as client:
            model = await first_model(client, url, path="teacher.endpoint")
    address = EndpointAddress(url, model, api_key, section.timeout_s)
    return EndpointTeacher(address, max_requests=section.max_requests)


async def start_generators(section: TeacherConfig, longest: int, *, on_gpu: bool, options: dict[str, Any]) -> Any:
    """Start the engine that scores with the teacher's model, with a context of at least `longest` tokens."""
    assert section.generator is not None
    made = section.generator.model_copy(
        update={"weights": "teacher", "max_seq_len": section.generator.max_seq_len or longest}
    )
    return await Generator.options(
        procs=made.tensor_parallel,
        num_replicas=made.num_replicas,
        num_threads=made.num_threads,
        with_gpus=on_gpu,
        routing="least_loaded",
        mesh_name="teacher",
        **options,
    ).as_service(GeneratorConfig.of(ModelConfig(path=section.path), made))


async def start_forward(
    section: TeacherConfig, trainer: TrainerConfig, *, on_gpu: bool, options: dict[str, Any]
) -> Any:
    """Start copies of the training engine that hold the teacher's weights and never learn.

    Its logits are rounded as the student's are (`model.head_precision`).
    """
    model = ModelConfig(path=section.path, head_precision=trainer.model.head_precision)
    return await ReferenceModel.options(
        num_replicas=section.num_replicas,
        num_threads=section.num_threads,
        with_gpus=on_gpu,
        routing="least_loaded",
        mesh_name="teacher",
        **options,
    ).as_service(frozen_config(trainer, model, on_gpu=on_gpu))


def frozen_config(trainer: TrainerConfig, model: ModelConfig, *, on_gpu: bool) -> TrainerConfig:
    """Return what a model that only scores is made from. It computes as the trainer does, in one process of its own
    however many ranks the trainer has."""
    alone = DistributedConfig(precision=trainer.distributed.precision, with_gpus=on_gpu)
    frozen = {"model": model, "adapter": None, "frozen": True, "checkpoint_dir": None, "distributed": alone}
    return trainer.model_copy(update=frozen)


def engine_logprobs(service: Any) -> LogprobsFunction:
    """Return what asks the generators of a teacher for the logprobs of a batch's tokens."""

    async def logprobs(batch: Batch, temperature: float) -> list[Tensor]:
        import torch

        tokens = [sample.token_ids.tolist() for sample in batch.samples()]
        found = await service.score.route(tokens, temperature=temperature)
        return [torch.tensor(values, dtype=torch.float32) for values in found]

    return logprobs


def engine_tops(service: Any) -> Callable[[Batch, int], Awaitable[list[tuple[Tensor, Tensor]]]]:
    """Return what asks the generators of a teacher for the likeliest tokens at the places that count."""

    async def tops(batch: Batch, k: int) -> list[tuple[Tensor, Tensor]]:
        import torch

        samples = list(batch.samples())
        found = await service.score_top.route([sample.token_ids.tolist() for sample in samples], k)
        answers = []
        for sample, scores in zip(samples, found, strict=True):
            counted = sample.loss_weights != 0
            logprobs, ids = torch.tensor(scores.logprobs), torch.tensor(scores.ids)
            answers.append((logprobs.reshape(len(sample), k)[counted], ids.reshape(len(sample), k)[counted]))
        return answers

    return tops


def describe_teacher(section: TeacherConfig) -> str:
    """Return in words what scores, for a dry run."""
    if section.endpoint is not None:
        return f"{section.endpoint.model or 'the first model'} at {section.endpoint.url}; it was not contacted"
    by = f"engine {section.generator.engine}" if section.generator is not None else "forward passes"
    return f"{section.path}, by {by}"
