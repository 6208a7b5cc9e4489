"""Where the logprobs of the reference model come from in preference optimisation.

`precomputed`: a pass over the data before the first step. The trainer itself makes it, whose weights are the initial
ones then, unless the reference is another model; so no second model is in memory while training runs. `online`: a
reference model in processes of its own scores each batch, or the trainer does without its adapter, if that is new.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge.config import ModelConfig, PreferenceConfig
from forge.errors import DataError
from forge.loops.logprob_table import LogprobTable, sample_key
from forge.loops.run_kinds import CompleteBatch, unchanged
from forge.loops.run_paths import locked_folder, run_dir
from forge.losses.kto import KTO, MISMATCHED_REF
from forge.losses.policy import REF_LOGPROBS
from forge.losses.preference import COMPLETION
from forge.runtime.placement import GPU_VARIABLE, num_usable_gpus, wants_gpus
from forge.trainer.actor import ReferenceModel
from forge.trainer.handles import NEVER_REPLACED, TrainerHandle, is_rank, planned_ranks, trainer_options
from forge.types import Batch, Sample

if TYPE_CHECKING:
    from forge.loops.preflight import PreparedRun
    from forge.losses import AnyLoss

ScoreBatch = Callable[[Batch], Awaitable[list[Tensor]]]
"""Returns the reference's logprobs of every sample's tokens."""
_FindAnswers = Callable[[Sequence[Sample]], Awaitable[list[Tensor]]]

_UNWRITTEN = 4_000_000
"""Logprobs after which a pass writes what it has, so that one that is stopped does not start over."""


@asynccontextmanager
async def open_reference(
    config: PreferenceConfig, prepared: PreparedRun, trainer: TrainerHandle, *, should_stop: Callable[[], bool]
) -> AsyncIterator[CompleteBatch | None]:
    """Yield what gives batches the reference's logprobs; None if the run is to stop before they are computed.

    It is opened before the trainer loads a checkpoint: its weights must be the initial ones.
    """
    if config.reference_mode == "none":
        yield unchanged
    elif config.is_own_base:
        yield _completion(prepared.loss, _asked(trainer.base_logprobs))
    elif config.reference_mode == "online":
        async with _reference_model(config, prepared, trainer, is_beside=False) as score:
            yield _completion(prepared.loss, _asked(score))
    else:
        table = await _precomputed(config, prepared, trainer, should_stop=should_stop)
        yield None if table is None else _completion(prepared.loss, _looked_up(table))


def _completion(loss: AnyLoss, find: _FindAnswers) -> CompleteBatch:
    """Return what gives batches the fields `ref_logprobs` and, for KTO, `mismatched_ref_logprob`."""

    async def complete(batch: Batch) -> Batch:
        samples, other = list(batch.samples()), _mismatched(loss, batch)
        found = await find([*samples, *other])
        reference = torch.zeros(batch.num_tokens)
        reference[batch.fields[COMPLETION] != 0] = torch.cat(found[: len(samples)])
        made = {REF_LOGPROBS: reference}
        if other:
            totals = torch.stack([logprobs.double().sum() for logprobs in found[len(samples) :]])
            made[MISMATCHED_REF] = totals.repeat_interleave(torch.tensor(batch.lengths))
        return replace(batch, fields={**batch.fields, **made})

    return complete


def _mismatched(loss: AnyLoss, batch: Batch) -> list[Sample]:
    other = loss.mismatched(batch) if isinstance(loss, KTO) else None
    return [] if other is None else list(other.samples())


def _asked(score: ScoreBatch) -> _FindAnswers:
    """Return what asks a model for the logprobs of answers."""

    async def find(samples: Sequence[Sample]) -> list[Tensor]:
        plain = [replace(sample, loss_weights=sample.fields[COMPLETION], fields={}) for sample in samples]
        found = await score(Batch.of(plain))
        return [logprobs[sample.fields[COMPLETION] != 0] for logprobs, sample in zip(found, samples, strict=True)]

    return find


def _looked_up(table: LogprobTable) -> _FindAnswers:
    async def find(samples: Sequence[Sample]) -> list[Tensor]:
        found = []
        for sample in samples:
            logprobs = table.find(sample)
            if logprobs is None:
                raise DataError(
                    "there is no logprob of the reference model for a sample",
                    path=sample.identity,
                    rule="every sample was in the pass over the data before the first step",
                    repair="do not change the data while a run uses it; start the run again",
                )
            found.append(logprobs)
        return found

    return find


# ---- The pass before training ----------------------------------------------------------------------------------------


async def _precomputed(
    config: PreferenceConfig, prepared: PreparedRun, trainer: TrainerHandle, *, should_stop: Callable[[], bool]
) -> LogprobTable | None:
    """Return the table of all answers, computed where it is not there yet; None if the run is to stop before."""
    table = LogprobTable(run_dir(config) / "reference", _identity(config, prepared), is_writer=trainer.is_leader)
    table.load(is_resumed=prepared.checkpoint is not None)
    coverage = _coverage(config, prepared)
    (is_missing,) = await trainer.agree(not table.covers(coverage))
    if not is_missing:
        return table
    if is_rank():
        table.forget()  # ranks on hosts that do not share a disk would know different parts
    with locked_folder(run_dir(config), is_writer=trainer.is_leader):
        if config.reference.path is None:
            is_whole = await _fill(table, prepared, trainer, trainer.forward_logprobs, should_stop=should_stop)
        else:
            async with _reference_model(config, prepared, trainer, is_beside=True) as score:
                is_whole = await _fill(table, prepared, trainer, score, should_stop=should_stop)
        table.write(coverage=coverage if is_whole else None)
    return table if is_whole else None


async def _fill(
    table: LogprobTable,
    prepared: PreparedRun,
    trainer: TrainerHandle,
    score: ScoreBatch,
    *,
    should_stop: Callable[[], bool],
) -> bool:
    """Add the answers of all batches that the table lacks. Return whether the pass reached its end."""
    log, began, last = prepared.kind.logger, time.monotonic(), time.monotonic()
    if trainer.is_leader:
        log.info("computing the reference's logprobs of the data, once; %d are there", len(table))
    ask, total = _asked(score), prepared.trainer.total_steps
    for number, batch in enumerate(_all_batches(prepared)):
        (is_asked,) = await trainer.agree(should_stop())
        if is_asked:
            return False
        samples = [*batch.samples(), *_mismatched(prepared.loss, batch)]
        missing = list({sample_key(each): each for each in samples if table.find(each) is None}.values())
        if missing:
            for sample, logprobs in zip(missing, await ask(missing), strict=True):
                table.add(sample, logprobs.float().contiguous())
        if table.num_unwritten > _UNWRITTEN:
            table.write()
        if trainer.is_leader and time.monotonic() - last > 30:
            last = time.monotonic()
            log.info("reference: batch %d of %s, %d answers", number + 1, total or "?", len(table))
    if trainer.is_leader:
        log.info("the reference's logprobs of %d answers took %.1f s", len(table), time.monotonic() - began)
    return True


def _all_batches(prepared: PreparedRun) -> Iterator[Batch]:
    """Yield every batch that the run trains on, from the first one on, then those of a validation.

    With a checkpoint the batches after it come too: where settings changed they are other batches. `total_steps` is no
    limit here: of much data it is an estimate.
    """
    train, most = prepared.loaders.train, prepared.trainer.training.max_steps
    with train.from_start() as batches:
        yield from islice(batches, most)
    if prepared.checkpoint is not None:
        with train.from_start() as batches:
            batches.load_state_dict(train.state_dict())
            yield from islice(batches, most)
    if prepared.loaders.validation is not None:
        with prepared.loaders.validation.from_start() as batches:
            yield from batches


def _identity(config: PreferenceConfig, prepared: PreparedRun) -> dict[str, str]:
    """Return what the logprobs of the reference depend on besides tokens."""
    folder = prepared.model.folder if config.reference.path is None else Path(config.reference.path)
    weights = f"random, seed {config.run.seed}" if folder is None else _folder_digest(folder)
    architecture, adapter = prepared.trainer.model, None if config.reference.path is not None else config.adapter
    started_from = None if adapter is None or adapter.path is None else _folder_digest(Path(adapter.path))
    kept = {} if adapter is None or adapter.base_dtype is None else {"adapter.base_dtype": str(adapter.base_dtype)}
    return {
        "model": weights,
        "adapter": str(started_from),
        **kept,
        "distributed.precision": config.distributed.precision,
        "model.head_precision": str(architecture.head_precision),
    }


def _coverage(config: PreferenceConfig, prepared: PreparedRun) -> str:
    """Return a digest of what decides which samples a run sees, and in which batches."""
    settings = config.model_dump(mode="json", include={"data", "validation", "preference"})
    training = config.training.model_dump(
        include={"max_seq_len", "batch_size", "gradient_accumulation_steps", "num_epochs", "max_steps"}
    )
    held = prepared.loaders.validation
    corpora = [loader.state_dict()["corpus"] for loader in (prepared.loaders.train, held) if loader is not None]
    template = config.data.chat_template
    seen = {
        "settings": settings,
        "training": training,
        "corpora": corpora,
        "tokenizer": None if prepared.model.folder is None else _folder_digest(prepared.model.folder, weights=False),
        "template": None if template is None else Path(template).read_text(encoding="utf-8"),
    }
    return hashlib.blake2b(json.dumps(seen, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _folder_digest(folder: Path, *, weights: bool = True) -> str:
    """Return a digest of a model's files, whole; without `weights`, of the small ones."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".json", ".jinja", ".txt", ".model", *((".safetensors",) if weights else ())):
            continue
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(1 << 24):
                digest.update(chunk)
    return digest.hexdigest()


# ---- A model of its own ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def _reference_model(
    config: PreferenceConfig, prepared: PreparedRun, trainer: TrainerHandle, *, is_beside: bool
) -> AsyncIterator[ScoreBatch]:
    """Yield what asks a reference model, in as many processes as the trainer has and with its layout.

    With `is_beside`, or where no GPU is left, it is on the trainer's GPUs.
    """
    section, given = config.reference, prepared.trainer
    model = given.model
    if section.path is not None:  # another model, whose logits are rounded as the policy's are
        model = ModelConfig(path=section.path, head_precision=model.head_precision)
    with_gpus = wants_gpus(section.with_gpus)
    options = {name: value for name, value in trainer_options(given.distributed).items() if name not in NEVER_REPLACED}
    options |= config.workers.reference.options()
    options |= {"mesh_name": "reference", "num_threads": section.num_threads, "with_gpus": with_gpus}
    if with_gpus and (is_beside or num_usable_gpus() < 2 * planned_ranks(given.distributed)):
        gpus = (await trainer.state())["visible_gpus"]
        if gpus is not None:
            options |= {"with_gpus": False, "env": {**options["env"], GPU_VARIABLE: gpus}}
    distributed = given.distributed.model_copy(update={"with_gpus": with_gpus})
    updates = {"model": model, "distributed": distributed, "frozen": True, "checkpoint_dir": None}
    if section.path is not None:
        updates["adapter"] = None
    service = await ReferenceModel.options(**options).as_service(given.model_copy(update=updates))

    async def score(batch: Batch) -> list[Tensor]:
        logprobs = await service.forward_logprobs.route(batch)
        assert logprobs is not None  # rank 0 answers
        return logprobs

    try:
        yield score
    finally:
        await service.close.options(partial=True).fanout()
        await service.shutdown()
