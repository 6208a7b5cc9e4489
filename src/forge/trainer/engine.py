"""The engine: one model on its ranks, taking optimizer steps and scoring tokens. One for CPU and GPU, SFT and RL."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from forge.config import TrainerConfig
from forge.errors import StepAbandoned
from forge.losses import AnyLoss, CrossEntropy, ValueLoss
from forge.losses.base import completed, metric_divisors
from forge.losses.head import check_temperature
from forge.models.adapters import adapters_off
from forge.models.locate import ResolvedModel, check_head, resolve
from forge.models.rows import RowRegistry
from forge.models.sizes import num_parameters
from forge.models.weights import draw_weights, load_hf, named_parameters
from forge.observe.phases import phase
from forge.trainer.adapters import EngineAdapter
from forge.trainer.assembly import (
    Assembled,
    Precision,
    assemble,
    head_function,
    keep_activations_on_host,
    use_attention,
)
from forge.trainer.bundles import large_sequences
from forge.trainer.layout import check_layout
from forge.trainer.loss_scaling import Attempt, LossScale, compute_scaled
from forge.trainer.microbatches import RowPlan, check_batch, check_fields, normalizer_of, plan_batch, scatter_back
from forge.trainer.nonfinite import bad_names, listed, nonfinite_error
from forge.trainer.optimizer import gradient_norm, scale_gradients
from forge.trainer.optimizer_choice import make_optimizer
from forge.trainer.ranks import Ranks
from forge.trainer.row_building import Row, Sums, build_rows
from forge.trainer.row_jobs import LossInput, RowJob, loss_scoring_job, scoring_job, training_job, value_job
from forge.trainer.schedules import check_schedule, rate_factor_at
from forge.trainer.split_sequences import SplitSequences, samples_of, split_sequences, split_terms
from forge.types import Batch, Evaluated, StepResult


class Engine:
    """One rank of a trainer. All ranks make the same calls with the same arguments, in the same order.

    `frozen=True` in the configuration makes a reference model: no optimizer, no gradients.
    """

    def __init__(self, config: TrainerConfig, *, loss: AnyLoss | None = None) -> None:
        self.config = config
        self.loss: AnyLoss = loss if loss is not None else CrossEntropy()
        self.model: ResolvedModel = resolve(config.model)
        if not config.frozen:
            check_head(self.model, "scalar" if isinstance(self.loss, ValueLoss) else "language")
        self.adapter = None if config.adapter is None else EngineAdapter(config.adapter, self.model.architecture)
        self.ranks = Ranks(use_gpu=config.distributed.with_gpus)
        try:
            self._build()
        except BaseException:
            self.ranks.close()
            raise

    def _build(self) -> None:
        config, device = self.config, self.ranks.device
        if not config.frozen:
            check_schedule(config.training, total_steps=self.total_steps)
        torch.manual_seed(config.seed)
        self.layout = check_layout(
            config.distributed, self.model.architecture, config.training, num_ranks=self.ranks.size
        )
        self.data_rank = self.layout.data_rank(self.ranks.rank)
        self.row_registry = RowRegistry()
        with phase("building the model"):
            self.assembled: Assembled = assemble(
                self.model.architecture,
                layout=self.layout,
                training=config.training,
                distributed=config.distributed,
                device=device,
                loss_fn=self._pipeline_loss,
                adapter=None if self.adapter is None else self.adapter.spec,
            )
        head = head_function(config.training, fp32_logits=self.model.architecture.head_precision == "float32")
        for part in self.parts:
            part.use(self.row_registry, head)
            part.train(not config.frozen)
            part.requires_grad_(not config.frozen)
        if self.adapter is not None and not config.frozen:
            self.adapter.freeze(named_parameters(self.parts))
        self.attention = use_attention(self.parts, config.training, device)
        self.load_weights(self.model.folder)
        self._parameters = {name: each for name, each in self._named_once().items() if self._is_trained(name)}
        self.optimizer = None if config.frozen else make_optimizer(self._parameters, config.training)
        self._wide = torch.promote_types(torch.float32, Precision.of(config.distributed.precision).compute)
        self.loss_scaling = config.training.loss_scaling if config.distributed.precision == "float16" else None
        self.loss_scale = LossScale(1.0 if self.loss_scaling is None else self.loss_scaling.initial_scale)
        self.step = 0
        self.should_abandon: Callable[[], bool] | None = None
        """Asked between two rows of a training step; if it says yes on some rank, all raise `StepAbandoned`."""
        self._rows: dict[int, RowJob] = {}
        self._normalizer = 1.0
        self._row_losses: dict[int, tuple[Row, Tensor, Mapping[str, Tensor]]] = {}
        self._scores: dict[int, Tensor] | None = None
        self._kept: dict[int, Tensor] | None = None
        self._split: SplitSequences | None = None

    @property
    def parts(self) -> list[Any]:
        return self.assembled.parts

    @property
    def total_steps(self) -> int | None:
        return self.config.total_steps or self.config.training.max_steps

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for its copy of the model: the last pipeline stage, the first tensor rank."""
        return self.assembled.has_last and self.ranks.rank % self.layout.tensor == 0

    def load_weights(self, folder: Path | None) -> None:
        """Load weights from a Hugging Face folder, or draw random ones where there is none."""
        if folder is not None:
            load_hf(self.parts, folder, self.model.architecture, seed=None if self.config.frozen else self.config.seed)
        else:
            draw_weights(self.parts, num_layers=self.model.architecture.num_layers or 1, seed=self.config.seed)
        if self.adapter is not None:
            self.adapter.load(self.parts, seed=self.config.seed)

    def _is_trained(self, name: str) -> bool:
        return self.adapter is None or self.adapter.is_trained(name)

    def _named_once(self) -> dict[str, nn.Parameter]:
        """This rank's parameters, each under the first of its names: tied weights have two."""
        names: dict[int, str] = {}
        for name, parameter in (named := named_parameters(self.parts)):
            names.setdefault(id(parameter), name)
        return {name: parameter for name, parameter in named if names[id(parameter)] == name}

    def own_parameters(self) -> dict[str, Tensor]:
        """Return what this rank holds, DTensors where they are split, by name."""
        return {name: parameter.detach() for name, parameter in self._named_once().items()}

    def trained_parameters(self) -> dict[str, Tensor]:
        """Return what training changes, for the store and checkpoints: everything, or the adapter."""
        return {name: tensor for name, tensor in self.own_parameters().items() if self._is_trained(name)}

    # ---- Training -----------------------------------------------------------------------------------------------

    def train_step(
        self, batch: Batch, *, keep_logprobs: bool = False, learning_rate: float | None = None
    ) -> StepResult:
        """Take one optimizer step on a batch, which is the same on every rank.

        With `keep_logprobs` the result has the logprobs that the loss saw; a loss that is a plain sum of them, or of
        values, has none. `learning_rate` is the highest rate of the schedule; None for that of the configuration.

        In float16, a batch whose gradient overflows is computed again at a lower loss scale, with the same weights. It
        is skipped if that does not help within `loss_scaling.max_retries`.

        Raises `NonFiniteError`, with everything as it was before, if loss or gradient is not finite and the
        configuration says `stop`; and `StepAbandoned`, likewise, if `should_abandon` says so.
        """
        if self.optimizer is None:
            raise RuntimeError("this engine is frozen and has no optimizer")
        began = time.perf_counter()
        training, before = self.config.training, self.loss_scale
        try:
            attempt = partial(self._attempt, batch, keep_logprobs=keep_logprobs)
            found = compute_scaled(attempt, before, config=self.loss_scaling)
            last, totals = found.last, found.last.totals
            if found.is_failure and training.on_nonfinite == "stop":
                names = bad_names(last.batch, totals, fields=self.loss.fields)
                at_floor = self.loss_scaling is not None and last.has_overflowed
                raise nonfinite_error(names, step=self.step + 1, loss=totals.loss, norm=last.norm, at_floor=at_floor)
            highest = training.learning_rate if learning_rate is None else learning_rate
            rate = highest * rate_factor_at(self.step, config=training, total_steps=self.total_steps)
            if last.is_finite:
                if (factor := last.factor(training.max_grad_norm)) != 1.0:
                    scale_gradients(self._parameters.values(), factor)
                self.optimizer.step(learning_rate=rate)
        except BaseException:
            self.optimizer.zero_grad()  # half a gradient must not reach the next step
            self.loss_scale = before
            raise
        self.optimizer.zero_grad()
        self.loss_scale = found.scale
        self.step += 1
        batch = last.batch
        return StepResult(
            step=self.step,
            loss=totals.loss,
            grad_norm=last.norm,
            learning_rate=rate,
            num_tokens=batch.num_tokens,
            num_loss_tokens=int((batch.loss_weights != 0).sum()),
            skipped=not last.is_finite,
            seconds=time.perf_counter() - began,
            metrics=self._metrics(totals, batch, finite=last.is_finite) | found.metrics,
            logprobs=None if self._kept is None else tuple(self._gathered(last.plan, self._kept)),
        )

    def _attempt(self, batch: Batch, scale: LossScale, *, keep_logprobs: bool) -> Attempt:
        """Compute the gradient of a batch at a loss scale. The gradients keep the scale."""
        assert self.optimizer is not None
        self.optimizer.zero_grad()
        self.loss_scale = scale
        has_none = isinstance(self.loss, ValueLoss) or self.loss.is_nll
        self._kept = {} if keep_logprobs and not has_none else None
        plan, batch = self._pass(batch, backward=True)
        norm_ahead = gradient_norm(self._parameters.values(), self.assembled.dims)  # before anything is waited for
        totals = self._reduce(self._sums())
        return Attempt(plan, batch, totals, float(norm_ahead) / scale.value, scale)

    def _pass(self, batch: Batch, *, backward: bool) -> tuple[RowPlan, Batch]:
        """Take a batch through the model, row by row, and through the loss; with `backward`, add up gradients.

        On a GPU it returns before the device has done it; `_sums` waits. Returns which rows there were, and the batch
        with what the loss added to it.
        """
        check_batch(batch, vocab_size=self.model.architecture.vocab_size)
        batch = whole = completed(self.loss, batch, self._policy_logprobs)
        check_fields(batch, self.loss.fields)
        self._normalizer = normalizer_of(self.loss, batch)
        self._row_losses = {}
        needs_whole = bool(getattr(self.loss, "needs_whole_sequences", False))
        self._split = self._split_large(batch) if needs_whole and batch.sequences else None
        batch = self._split.batch if self._split is not None else batch
        plan = self._plan(batch, whole_sequences=needs_whole)
        rows = [row.to(self.ranks.device) for row in build_rows(batch, plan, self.data_rank)]
        with torch.set_grad_enabled(backward):
            self._run(rows, self._training_job, backward=backward)
        return plan, whole

    def _split_large(self, batch: Batch) -> SplitSequences | None:
        """Take sequences that do not fit into one row through the model without gradients, if there are any."""
        large = large_sequences(batch, max_tokens=self._row_tokens, share_prefixes=self._shares_prefixes)
        if not large:
            return None
        scores = self.score(samples_of(batch, large), partial(loss_scoring_job, loss=self.loss))
        return split_sequences(batch, large, loss=self.loss, scores=scores, normalizer=self._normalizer)

    def _sums(self) -> Sums:
        found = sum((Sums.of_row(*row) for row in self._row_losses.values()), Sums())
        return found + self._split.sums if self._split is not None and self.data_rank == 0 else found

    def _run(self, rows: Sequence[Row], job_of: Callable[[Row], RowJob], *, backward: bool) -> None:
        try:
            if self.assembled.schedule is not None:
                self._check_abandoned(backward)
                self._through_pipeline(rows, job_of, backward=backward)
            else:
                for num_left, row in zip(reversed(range(len(rows))), rows, strict=True):
                    self._check_abandoned(backward)
                    self.assembled.expect_more(backward and num_left > 0)
                    self._through_model(job_of(row), backward=backward)
        except BaseException:
            self.assembled.give_up()
            raise
        finally:
            self.row_registry.clear()
            self._rows.clear()

    def _check_abandoned(self, is_training: bool) -> None:
        if is_training and self.should_abandon is not None and self.ranks.any(self.should_abandon()):
            raise StepAbandoned("the training step was abandoned on request", path=f"step {self.step + 1}")

    @property
    def _row_tokens(self) -> int:
        return self.config.training.microbatch_tokens or self.config.training.max_seq_len

    @property
    def _shares_prefixes(self) -> bool:
        return self.config.training.share_prefixes and self.assembled.schedule is None and not self.layout.fixed_shape

    def _plan(self, batch: Batch, *, whole_sequences: bool = False) -> RowPlan:
        layout = self.layout
        plan = plan_batch(
            batch,
            num_ranks=layout.data_parallel,
            max_tokens=self._row_tokens,
            row_multiple=layout.row_multiple,
            fixed_shape=layout.fixed_shape,
            share_prefixes=self._shares_prefixes,
            whole_sequences=whole_sequences,
            split=() if self._split is None else self._split.sequences,
        )
        return plan.rounded_up(layout.pipeline_microbatches)

    @property
    def _as_row(self) -> bool:
        """Whether the head gives answers for whole rows, as stages of a pipeline must."""
        return self.assembled.schedule is not None

    def _enter(self, job: RowJob) -> Tensor:
        key = self.row_registry.enter(job.task)
        self._rows[int(key)] = job
        return key

    def _training_job(self, row: Row) -> RowJob:
        normalizer = self._normalizer / self.loss_scale.value  # of weights that the head multiplies gradients by
        return training_job(row, self.loss, normalizer=normalizer, as_row=self._as_row, dtype=self._wide)

    def _saving(self) -> AbstractContextManager[Any]:
        return keep_activations_on_host() if self.config.training.activation_offload else nullcontext()

    def _through_model(self, job: RowJob, *, backward: bool) -> None:
        key = int(self._enter(job))
        with self._saving():
            output = self.parts[0](job.row.token_ids_L.unsqueeze(0), key)
            scaled = self._row_loss(output, key)
        if backward:
            scaled.backward()

    def _row_loss(self, output: Any, key: int) -> Tensor:
        """Return a row's part of the normalised loss times the loss scale, and note what it adds to the step's sums."""
        job, scale = self._rows[key], self.loss_scale.value
        row = job.row
        if job.task.weights is not None:
            scaled, _ = output
            self._row_losses[key] = (row, scaled.detach() / scale, {})
            return cast(Tensor, scaled)
        answers = job.answers(output)
        if self._scores is not None:
            self._scores[key] = torch.stack(answers, dim=-1)
            return answers[0].new_zeros(())
        if self._kept is not None:
            self._kept[key] = answers[0].detach().float()
        tokens = LossInput.of_row(row, answers)
        terms = tokens.terms(self.loss) if self._split is None else split_terms(self.loss, tokens)
        normalised = terms.total / self._normalizer
        self._row_losses[key] = (row, normalised.detach(), terms.metrics)
        return normalised * scale

    # ---- Pipelines ----------------------------------------------------------------------------------------------

    def _through_pipeline(self, rows: Sequence[Row], job_of: Callable[[Row], RowJob], *, backward: bool) -> None:
        assembled, at_once = self.assembled, self.layout.pipeline_microbatches
        run = assembled.schedule.step if backward else assembled.schedule.eval
        for start in range(0, len(rows), at_once):
            group = rows[start : start + at_once]
            keys = torch.cat([self._enter(job_of(row)) for row in group])
            tokens = torch.stack([row.token_ids_L for row in group])
            with self._saving():
                run(
                    *([tokens] if assembled.has_first else []),
                    key=keys,
                    target=keys if assembled.has_last else None,
                    losses=[] if assembled.has_last else None,
                )

    def _pipeline_loss(self, output: Any, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return self._row_loss(output, int(target.reshape(-1)[0])), {}

    # ---- Over all ranks -----------------------------------------------------------------------------------------

    def _reduce(self, sums: Sums) -> Sums:
        """Return the sums over all ranks, on every rank. Ranks that see the same rows count once."""
        gathered = self.ranks.gather(sums if self.is_leader else None)
        return sum((other for other in gathered if other is not None), Sums())

    def _metrics(self, totals: Sums, batch: Batch, *, finite: bool) -> dict[str, Any]:
        metrics: dict[str, Any] = totals.means(metric_divisors(self.loss, batch))
        if self.ranks.device.type == "cuda":
            metrics["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if not finite:
            metrics["bad_samples"] = listed(bad_names(batch, totals, fields=self.loss.fields))
        return metrics

    # ---- Scoring ------------------------------------------------------------------------------------------------

    def evaluate(self, batch: Batch) -> Evaluated:
        """Return the sums of a batch's loss and metrics, and what each is divided by: they add up over batches."""
        self._pass(batch, backward=False)
        totals = self._reduce(self._sums())
        parts = totals.parts(metric_divisors(self.loss, batch))
        return Evaluated(totals.loss * self._normalizer, self._normalizer, parts)

    def forward_logprobs(self, batch: Batch, *, temperature: float | None = None, base: bool = False) -> list[Tensor]:
        """Return the logprobs of every sample's tokens, float32 [L] each, in order; 0 for the first token.

        `temperature` is for all samples; None for what they say themselves, or 1. With `base` they are those of the
        model without its adapter: a reference model in the same process.
        """
        check_head(self.model, "language")
        if temperature is not None:  # on every rank: only the last stage of a pipeline would look at it
            check_temperature(temperature)
        check_batch(batch, vocab_size=self.model.architecture.vocab_size)
        with adapters_off(self.parts) if base else nullcontext():
            scores = self.score(batch, partial(scoring_job, temperature=temperature))
        return [each[..., 0].float() for each in scores]

    def _policy_logprobs(self, batch: Batch) -> list[Tensor]:  # as the loss sees them, in full precision
        return [each[..., 0] for each in self.score(batch, partial(loss_scoring_job, loss=self.loss))]

    def forward_values(self, batch: Batch) -> list[Tensor]:
        """Return the values of every sample's tokens, float32 [L] each, in order: of a model with a scalar head.

        `values[t]` is the value of what has been read up to and including token t. So a reward model's score of a
        sample is `values[-1]`. For a critic, the state in which token t was chosen has the value `values[t - 1]`, and
        `values[-1]` is that of the state in which the sample ends.
        """
        check_head(self.model, "scalar")
        check_batch(batch, vocab_size=self.model.architecture.vocab_size)
        return [each[..., 0].float() for each in self.score(batch, value_job)]

    def score(self, batch: Batch, job_of: Callable[..., RowJob]) -> list[Tensor]:
        """Return the answers about every sample's tokens, such as logprobs and entropies: [L, number of answers]."""
        self._split = None
        plan = self._plan(batch)
        rows = [row.to(self.ranks.device) for row in build_rows(batch, plan, self.data_rank)]
        self._scores = {}
        try:
            with torch.no_grad():
                self._run(rows, partial(job_of, as_row=self._as_row), backward=False)
            scores = self._scores
        finally:
            self._scores = None
        return self._gathered(plan, scores)

    def _gathered(self, plan: RowPlan, values: Mapping[int, Tensor]) -> list[Tensor]:
        """Return values per token of all ranks' rows, in the order of the batch's samples.

        Only here is the device waited for: between rows it would stand still.
        """
        mine = [values[key].cpu() for key in sorted(values)] if self.is_leader else None
        by_rank: dict[int, list[Tensor]] = {}
        for rank, found in enumerate(self.ranks.gather(mine)):
            if found is not None:
                by_rank[self.layout.data_rank(rank)] = found
        return scatter_back(plan, [by_rank[rank] for rank in range(plan.num_ranks)])

    def describe(self) -> dict[str, Any]:
        """Return where training is, in plain values."""
        return {
            "step": self.step,
            "layout": str(self.layout),
            "num_ranks": self.ranks.size,
            "device": str(self.ranks.device),
            "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES") if self.ranks.device.type == "cuda" else None,
            "device_name": torch.cuda.get_device_name() if self.ranks.device.type == "cuda" else "cpu",
            "compute_dtype": str(Precision.of(self.config.distributed.precision).compute).removeprefix("torch."),
            "attention": self.attention if self.ranks.device.type == "cuda" else "cpu",
            "num_parameters": num_parameters(self.model.architecture),  # of all stages of a pipeline
            "model": self.model.name,
            "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if self.ranks.device.type == "cuda" else None,
        }

    def close(self) -> None:
        """Leave the process groups. The engine cannot be used any more."""
        self.ranks.close()
