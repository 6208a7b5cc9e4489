"""The engine: one model on its ranks, taking optimizer steps and scoring tokens. One for CPU and GPU, SFT and RL."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from forge.config import TrainerConfig
from forge.errors import ConfigError, DataError, StepAbandoned
from forge.losses import CrossEntropy, Loss, TokenView
from forge.losses.head import check_temperature
from forge.models.attention import DocumentAttention
from forge.models.flash_attention import Situation, choose_kernel, load_kernel
from forge.models.locate import ResolvedModel, resolve
from forge.models.rows import RowRegistry, RowTask
from forge.models.sizes import num_parameters
from forge.models.weights import draw_weights, load_hf, named_parameters
from forge.trainer.assembly import Assembled, Precision, assemble, from_row, head_function, keep_activations_on_host
from forge.trainer.bundles import large_sequences
from forge.trainer.layout import check_layout
from forge.trainer.microbatches import RowPlan, check_batch, plan_batch, scatter_back
from forge.trainer.nonfinite import bad_names, listed, nonfinite_error
from forge.trainer.optimizer import Optimizer, gradient_norm, scale_gradients
from forge.trainer.ranks import Ranks
from forge.trainer.row_building import Row, Sums, build_rows
from forge.trainer.schedules import rate_factor
from forge.trainer.split_sequences import SplitSequences, samples_of, split_sequences, split_terms
from forge.types import Batch, StepResult


class Engine:
    """One rank of a trainer. All ranks make the same calls with the same arguments, in the same order.

    `frozen=True` in the configuration makes a reference model: no optimizer, no gradients.
    """

    def __init__(self, config: TrainerConfig, *, loss: Loss | None = None) -> None:
        self.config = config
        self.loss: Loss = loss if loss is not None else CrossEntropy()
        self.model: ResolvedModel = resolve(config.model)
        self.ranks = Ranks(use_gpu=config.distributed.with_gpus)
        try:
            self._build()
        except BaseException:
            self.ranks.close()
            raise

    def _build(self) -> None:
        config, device = self.config, self.ranks.device
        if not config.frozen and self.total_steps is None and config.training.schedule != "constant":
            raise ConfigError(
                "the learning rate's schedule needs to know how many steps there will be",
                path="training.max_steps",
                value=None,
                rule=f"a number, for the schedule `{config.training.schedule}`",
                repair="set it, or set training.schedule=constant",
            )
        torch.manual_seed(config.seed)
        self.layout = check_layout(
            config.distributed, self.model.architecture, config.training, num_ranks=self.ranks.size
        )
        self.data_rank = self.layout.data_rank(self.ranks.rank)
        self.row_registry = RowRegistry()
        self.assembled: Assembled = assemble(
            self.model.architecture,
            layout=self.layout,
            training=config.training,
            distributed=config.distributed,
            device=device,
            loss_fn=self._pipeline_loss,
        )
        is_wide = self.model.architecture.head_precision == "float32"
        head = head_function(config.training, fp32_logits=is_wide)
        for part in self.parts:
            part.use(self.row_registry, head)
            part.train(not config.frozen)
            part.requires_grad_(not config.frozen)
        self._choose_attention()
        self.load_weights(self.model.folder)
        self._parameters = self._named_once()
        self.optimizer = None if config.frozen else Optimizer(self._parameters, config.training)
        self._wide = torch.promote_types(torch.float32, Precision.of(config.distributed.precision).compute)
        self.step = 0
        self.should_abandon: Callable[[], bool] | None = None
        """Asked between two rows of a training step; if it says yes on some rank, all raise `StepAbandoned`."""
        self._rows: dict[int, tuple[Row, RowTask]] = {}
        self._normalizer = 1.0
        self._row_losses: dict[int, tuple[Row, Tensor, Mapping[str, Tensor]]] = {}
        self._scores: dict[int, Tensor] | None = None
        self._kept: dict[int, Tensor] | None = None
        self._split: SplitSequences | None = None

    def _choose_attention(self) -> None:
        training = self.config.training
        selective = training.activation_checkpointing == "selective"
        situation = Situation.of(self.ranks.device, saves_selectively=selective)
        self.attention = choose_kernel(training.attention, situation)
        kernel = load_kernel(self.attention)
        for part in self.parts:
            for module in part.modules():
                if isinstance(module, DocumentAttention):
                    module.kernel = kernel

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
            load_hf(self.parts, folder, self.model.architecture)
        else:
            draw_weights(self.parts, num_layers=self.model.architecture.num_layers or 1, seed=self.config.seed)

    def _named_once(self) -> dict[str, nn.Parameter]:
        """This rank's parameters, each under the first of its names: tied weights have two."""
        names: dict[int, str] = {}
        for name, parameter in (named := named_parameters(self.parts)):
            names.setdefault(id(parameter), name)
        return {name: parameter for name, parameter in named if names[id(parameter)] == name}

    def own_parameters(self) -> dict[str, Tensor]:
        """Return what this rank holds, DTensors where they are split, by name: what the store and checkpoints take."""
        return {name: parameter.detach() for name, parameter in self._named_once().items()}

    # ---- Training -----------------------------------------------------------------------------------------------

    def train_step(self, batch: Batch, *, keep_logprobs: bool = False) -> StepResult:
        """Take one optimizer step on a batch, which is the same on every rank.

        With `keep_logprobs` the result has the logprobs that the loss saw; a loss that is a plain sum of them has none.

        Raises `NonFiniteError`, with everything as it was before, if loss or gradient is not finite and the
        configuration says `stop`; and `StepAbandoned`, likewise, if `should_abandon` says so.
        """
        if self.optimizer is None:
            raise RuntimeError("this engine is frozen and has no optimizer")
        began = time.perf_counter()
        training = self.config.training
        self._kept = {} if keep_logprobs and not self.loss.is_nll else None
        try:
            plan = self._pass(batch, backward=True)
        except BaseException:
            self.optimizer.zero_grad()  # half a gradient must not reach the next step
            raise
        norm_ahead = gradient_norm(self._parameters.values(), self.assembled.dims)  # before anything is waited for
        totals = self._reduce(self._sums())
        norm = float(norm_ahead)
        rate = training.learning_rate * self._rate_factor()
        finite = math.isfinite(totals.loss) and math.isfinite(norm)
        if finite:
            if training.max_grad_norm is not None and norm > training.max_grad_norm:
                scale_gradients(self._parameters.values(), training.max_grad_norm / norm)
            self.optimizer.step(learning_rate=rate)
        self.optimizer.zero_grad()
        if not finite and training.on_nonfinite == "stop":
            names = bad_names(batch, totals, fields=self.loss.fields)
            raise nonfinite_error(names, step=self.step + 1, loss=totals.loss, norm=norm)
        self.step += 1
        return StepResult(
            step=self.step,
            loss=totals.loss,
            grad_norm=norm,
            learning_rate=rate,
            num_tokens=batch.num_tokens,
            num_loss_tokens=int((batch.loss_weights != 0).sum()),
            skipped=not finite,
            seconds=time.perf_counter() - began,
            metrics=self._metrics(totals, batch, finite=finite),
            logprobs=None if self._kept is None else tuple(self._gathered(plan, self._kept)),
        )

    def _rate_factor(self) -> float:
        training, total = self.config.training, self.total_steps
        if total is not None:
            return rate_factor(self.step, config=training, total_steps=total)
        return min(1.0, (self.step + 1) / training.warmup_steps) if training.warmup_steps else 1.0

    def _pass(self, batch: Batch, *, backward: bool) -> RowPlan:
        """Take a batch through the model, row by row, and through the loss; with `backward`, add up gradients.

        On a GPU it returns before the device has done it; `_sums` waits. Returns which rows there were.
        """
        check_batch(batch, vocab_size=self.model.architecture.vocab_size, fields=self.loss.fields)
        self._normalizer = self._normalizer_of(batch)
        self._row_losses = {}
        needs_whole = bool(getattr(self.loss, "needs_whole_sequences", False))
        self._split = self._split_large(batch) if needs_whole and batch.sequences else None
        batch = self._split.batch if self._split is not None else batch
        plan = self._plan(batch, whole_sequences=needs_whole)
        rows = [row.to(self.ranks.device) for row in build_rows(batch, plan, self.data_rank)]
        with torch.set_grad_enabled(backward):
            self._run(rows, self._loss_task, backward=backward)
        return plan

    def _split_large(self, batch: Batch) -> SplitSequences | None:
        """Take sequences that do not fit into one row through the model without gradients, if there are any."""
        large = large_sequences(batch, max_tokens=self._row_tokens, share_prefixes=self._shares_prefixes)
        if not large:
            return None
        temperature, entropy = getattr(self.loss, "temperature", 1.0), self.loss.needs_entropy
        scores = self._score(samples_of(batch, large), temperature=temperature, entropy=entropy)
        return split_sequences(batch, large, loss=self.loss, scores=scores, normalizer=self._normalizer)

    def _sums(self) -> Sums:
        found = sum((Sums.of_row(*row) for row in self._row_losses.values()), Sums())
        return found + self._split.sums if self._split is not None and self.data_rank == 0 else found

    def _normalizer_of(self, batch: Batch) -> float:
        normalizer = self.loss.normalizer(batch)
        if normalizer == 0:
            raise DataError(
                "no token of the batch counts, so there is nothing to learn from it",
                path="batch.loss_weights",
                value=0.0,
                rule="at least one weight that is not 0",
                repair="leave such batches out",
            )
        return normalizer

    def _run(self, rows: Sequence[Row], task_of: Callable[[Row], RowTask], *, backward: bool) -> None:
        try:
            if self.assembled.schedule is not None:
                self._check_abandoned(backward)
                self._through_pipeline(rows, task_of, backward=backward)
            else:
                for num_left, row in zip(reversed(range(len(rows))), rows, strict=True):
                    self._check_abandoned(backward)
                    self.assembled.expect_more(backward and num_left > 0)
                    self._through_model(row, task_of(row), backward=backward)
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

    def _enter(self, row: Row, task: RowTask) -> Tensor:
        key = self.row_registry.enter(task)
        self._rows[int(key)] = (row, task)
        return key

    def _asked(self, row: Row) -> Tensor:
        """Return the tokens of a row that are asked about: in scoring all, in training those that count."""
        return row.counted_N if self._scores is None else row.predicted_P

    def _loss_task(self, row: Row) -> RowTask:
        """Return the task of a training row: tokens that count. A plain sum of -logprobs is left to the head."""
        fused = self.loss.is_nll and self.assembled.schedule is None
        weights = row.weights_T.index_select(0, row.counted_N).to(self._wide) / self._normalizer if fused else None
        temperature = getattr(self.loss, "temperature", 1.0)
        return replace(self._task(row, temperature=temperature, entropy=self.loss.needs_entropy), weights=weights)

    def _task(self, row: Row, *, temperature: float = 1.0, entropy: bool = False) -> RowTask:
        asked, documents = self._asked(row), row.documents()
        return RowTask(
            documents=documents,
            positions=row.positions_L.unsqueeze(0),
            index=row.predictors(asked),
            targets=row.tokens_T.index_select(0, asked),
            temperature=temperature,
            entropy=entropy,
            as_row=self.assembled.schedule is not None,
            sharing=row.sharing(documents),
        )

    def _saving(self) -> AbstractContextManager[Any]:
        return keep_activations_on_host() if self.config.training.activation_offload else nullcontext()

    def _through_model(self, row: Row, task: RowTask, *, backward: bool) -> None:
        key = int(self._enter(row, task))
        with self._saving():
            output = self.parts[0](row.token_ids_L.unsqueeze(0), key)
            scaled = self._row_loss(output, key)
        if backward:
            scaled.backward()

    def _row_loss(self, output: Any, key: int) -> Tensor:
        """Return a row's part of the normalised loss, and note what it adds to the step's sums."""
        row, task = self._rows[key]
        if task.weights is not None:
            scaled, _ = output
            self._row_losses[key] = (row, scaled.detach(), {})
            return cast(Tensor, scaled)
        logprobs, entropy = from_row(output, task) if task.as_row else output
        asked = self._asked(row)
        if self._scores is not None:
            known = [logprobs, entropy] if task.entropy else [logprobs]
            self._scores[key] = torch.stack([row.align(each, asked) for each in known], dim=-1)
            return logprobs.new_zeros(())
        aligned = row.align(logprobs, asked)
        if self._kept is not None:
            self._kept[key] = aligned.detach().float()
        view = TokenView(
            logprobs_T=aligned,
            entropy_T=row.align(entropy, asked) if task.entropy else None,
            weights_T=row.weights_T,
            lengths=row.sample_lengths,
            fields=row.fields,
            sequences=row.sequences,
            sequence_weights_T=row.sequence_weights_T,
        )
        terms = self.loss(view) if self._split is None else split_terms(self.loss, view)
        scaled = terms.total / self._normalizer
        self._row_losses[key] = (row, scaled.detach(), terms.metrics)
        return scaled

    # ---- Pipelines ----------------------------------------------------------------------------------------------

    def _through_pipeline(self, rows: Sequence[Row], task_of: Callable[[Row], RowTask], *, backward: bool) -> None:
        assembled, at_once = self.assembled, self.layout.pipeline_microbatches
        run = assembled.schedule.step if backward else assembled.schedule.eval
        for start in range(0, len(rows), at_once):
            group = rows[start : start + at_once]
            keys = torch.cat([self._enter(row, task_of(row)) for row in group])
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
        extremes = ("_max", "_min")
        metrics: dict[str, Any] = {
            name: value if name.endswith(extremes) else value / batch.total_weight
            for name, value in totals.metrics.items()
        }
        if self.ranks.device.type == "cuda":
            metrics["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if not finite:
            metrics["bad_samples"] = listed(bad_names(batch, totals, fields=self.loss.fields))
        return metrics

    # ---- Scoring ------------------------------------------------------------------------------------------------

    def evaluate(self, batch: Batch) -> tuple[float, float]:
        """Return the sum of a batch's loss, not yet normalised, and its normaliser: they add up over batches."""
        self._pass(batch, backward=False)
        totals = self._reduce(self._sums())
        return totals.loss * self._normalizer, self._normalizer

    def forward_logprobs(self, batch: Batch, *, temperature: float = 1.0) -> list[Tensor]:
        """Return the logprobs of every sample's tokens, float32 [L] each, in order; 0 for the first token."""
        check_temperature(temperature)  # on every rank: only the last stage of a pipeline would look at it
        check_batch(batch, vocab_size=self.model.architecture.vocab_size)
        return [each[..., 0].float() for each in self._score(batch, temperature=temperature)]

    def _score(self, batch: Batch, *, temperature: float, entropy: bool = False) -> list[Tensor]:
        """Return the logprobs of every sample's tokens, and with `entropy` the entropies beside them: [L, 1 or 2]."""
        self._split = None
        plan = self._plan(batch)
        rows = [row.to(self.ranks.device) for row in build_rows(batch, plan, self.data_rank)]
        self._scores = {}
        try:
            with torch.no_grad():
                self._run(rows, partial(self._task, temperature=temperature, entropy=entropy), backward=False)
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
