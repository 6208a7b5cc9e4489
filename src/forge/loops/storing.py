"""Store a teacher's top-k logprobs of the data of a run: `forge distill`.

    files ──Sample──▶ batches ──▶ teacher (service or endpoint) ──top k──▶ data.LogprobWriter ──▶ shards

Every sample of the training and validation data is asked about once, whatever its source's weight. Samples that are in
the folder already are left out, so a command that was stopped continues.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from forge.config import DistillConfig, DistributedConfig, ModelConfig, TrainerConfig
from forge.data.formats import CONVERSATIONS
from forge.data.opening import open_indexed_corpus
from forge.data.samples import Counters, Encoder
from forge.data.teacher_logprobs import LogprobWriter, StoreFacts, sample_key
from forge.errors import ConfigError
from forge.loops.agents import shut_down
from forge.loops.run_paths import load_tokenizer, locked_folder
from forge.loops.stored_teacher import store_folder
from forge.loops.teachers import (
    context_errors,
    engine_tops,
    folder_errors,
    open_endpoint,
    start_forward,
    start_generators,
)
from forge.models.locate import resolve
from forge.models.tokenizer import ChatTokenizer
from forge.models.vocabulary import vocabulary_digest
from forge.runtime.lifetime import run
from forge.runtime.placement import wants_gpus
from forge.types import Batch, Sample

if TYPE_CHECKING:
    from torch import Tensor

TopFunction = Callable[[Batch, int], Awaitable["list[tuple[Tensor, Tensor]] | None"]]
"""Returns the k likeliest tokens at the places of each sample that count: logprobs [C, k] and ids [C, k]."""

_log = logging.getLogger("forge.distill")
_AT_ONCE = 4
"""Batches in flight for each replica of the teacher: one is computed while others are on their way."""


async def store_logprobs(
    config: DistillConfig, *, report: Callable[[StoreFacts, int], None] = lambda facts, total: None
) -> StoreFacts:
    """Ask the teacher about all samples that are not stored yet, and return what is in the store then.

    `report` is called after every batch with what is stored, and with the number of samples in the data.
    """
    model = resolve(config.model)
    tokenizer = load_tokenizer(model, chat_template=config.data.chat_template, purpose="distillation")
    check_stored_teacher(config, tokenizer)
    samples = list(read_samples(config, tokenizer))
    section = config.distillation
    facts = StoreFacts(section.top_k, section.dtype, teacher_name(config), vocabulary_digest(tokenizer))
    with locked_folder(store_folder(config)):
        writer = LogprobWriter(store_folder(config), facts)
        missing = [sample for sample in _distinct(samples) if not writer.has(sample_key(sample))]
        if missing:
            async with run(config.launcher), _teacher(config, tokenizer) as top:
                await _ask_about(missing, top, writer, config=config, report=lambda: report(writer.facts, len(samples)))
        return writer.finish()


def check_stored_teacher(config: DistillConfig, tokenizer: ChatTokenizer) -> None:
    """Refuse a teacher that logprobs cannot be stored of."""
    if not config.teacher.is_given:
        raise ConfigError(
            "there is no teacher to ask",
            path="teacher.path",
            value=None,
            rule="a model's folder, or teacher.endpoint",
            repair="name the teacher; a run that only trains from stored logprobs does not need it",
        )
    if config.teacher.path is not None:
        for error in folder_errors(config.teacher, tokenizer):
            raise error
        for error in context_errors(config.teacher, config.training.max_seq_len):
            raise error


def teacher_name(config: DistillConfig) -> str:
    """Return what the store calls the teacher."""
    endpoint = config.teacher.endpoint
    return str(config.teacher.path) if endpoint is None else f"{endpoint.model or 'the model'} at {endpoint.url}"


def read_samples(config: DistillConfig, tokenizer: ChatTokenizer) -> Iterator[Sample]:
    """Yield every sample of the training and validation data once, as training makes them."""
    encoder = Encoder(tokenizer, data=config.data, max_seq_len=config.training.max_seq_len)
    for sources in (config.data.sources, config.validation.sources):
        if not sources and sources is not config.data.sources:
            continue
        corpus = open_indexed_corpus(sources, data=config.data, seed=config.run.seed, formats=CONVERSATIONS)
        counters = Counters()
        for number in range(len(corpus)):
            drawn = corpus.at(number)
            yield from encoder.encode_all(drawn.record, layout=corpus.layouts[drawn.source], counters=counters)


def _distinct(samples: Sequence[Sample]) -> list[Sample]:
    return list({sample_key(sample): sample for sample in samples}.values())


async def _ask_about(
    samples: Sequence[Sample],
    top: TopFunction,
    writer: LogprobWriter,
    *,
    config: DistillConfig,
    report: Callable[[], None],
) -> None:
    """Ask about samples in batches, some at a time, and write the answers in the order of the samples.

    Answers that are here when something fails are written, so that they are not asked for again.
    """
    batches = list(_batches(samples, max_tokens=config.training.microbatch_tokens or config.training.max_seq_len))
    num_replicas = config.teacher.generator.num_replicas if config.teacher.generator else config.teacher.num_replicas
    asked: list[asyncio.Future[list[tuple[Tensor, Tensor]] | None]] = []
    try:
        for number, batch in enumerate(batches):
            while len(asked) < min(len(batches), number + _AT_ONCE * num_replicas):
                asked.append(asyncio.ensure_future(top(Batch.of(batches[len(asked)]), config.distillation.top_k)))
            answers = await asked[number]
            assert answers is not None  # rank 0 answers
            for sample, (logprobs, ids) in zip(batch, answers, strict=True):
                writer.add(sample_key(sample), logprobs, ids)
            report()
    finally:
        for task in asked:
            task.cancel()
        writer.flush()


def _batches(samples: Sequence[Sample], *, max_tokens: int) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    for sample in samples:
        if batch and sum(map(len, batch)) + len(sample) > max_tokens:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


@asynccontextmanager
async def _teacher(config: DistillConfig, tokenizer: ChatTokenizer) -> AsyncIterator[TopFunction]:
    """Start the teacher that the section says, and end it with the block."""
    section, options = config.teacher, config.workers.teacher.options()
    if section.endpoint is not None:
        endpoint = await open_endpoint(section)
        try:
            await endpoint.check(tokenizer)
            yield endpoint.top_logprobs
        finally:
            await endpoint.close()
        return
    if section.generator is not None:
        on_gpu = wants_gpus(section.generator.with_gpus)
        supported = resolve(ModelConfig(path=section.path)).architecture.max_seq_len
        longest = min(
            config.training.max_seq_len + 1, supported or config.training.max_seq_len + 1
        )  # vLLM needs one more
        service = await start_generators(section, longest, on_gpu=on_gpu, options=options)
        top: TopFunction = engine_tops(service)
    else:
        on_gpu = wants_gpus(section.with_gpus)
        trainer = TrainerConfig(
            model=resolve(config.model).architecture,
            training=config.training,
            distributed=DistributedConfig(precision=config.distributed.precision),
            seed=config.run.seed,
        )
        service = await start_forward(section, trainer, on_gpu=on_gpu, options=options)
        top = service.forward_top_logprobs.route
    try:
        yield top
    finally:
        await shut_down([service])
