"""Continuous batching: run steps of the model, sample from them, and deliver the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from forge.config import GeneratorConfig, UpdateMode
from forge.errors import NonFiniteError
from forge.generator.engine import EngineStats
from forge.generator.native.counts import Counts
from forge.generator.native.decode_graphs import LastSampled
from forge.generator.native.drafts import is_right, make_drafts
from forge.generator.native.intake import sequences_of
from forge.generator.native.launched import LaunchedStep
from forge.generator.native.pages import PagePool
from forge.generator.native.runner import ModelRunner
from forge.generator.native.runners import Runners
from forge.generator.native.sampler import Sampled, Sampler, SampleRow
from forge.generator.native.schedule import Piece, Scheduler, by_adapter
from forge.generator.native.sequences import PendingRequest, ScoreJob, SequenceState
from forge.generator.native.version_order import VersionOrder
from forge.models.locate import ResolvedModel
from forge.runtime.device_memory import OutOfDeviceMemory
from forge.types import FinishReason

if TYPE_CHECKING:
    from forge.generator.native.pinned import PinnedWeights
    from forge.models.tokenizer import ChatTokenizer

Message = tuple[Callable[[Any], None], Any]
_CHUNK_TOKENS = {"cpu": 512, "cuda": 8192}


class Batching:
    """The state of the engine, used by its thread alone.

    With *lookahead*, a decode step is launched before the tokens of the previous step are processed, so that a GPU has
    work while the host processes them and plans. The step's input is on the device, and its places in the cache and its
    random numbers depend only on the number of tokens. This is done only where the step is certain to be every
    completion's next token, whatever the tokens before turn out to be (`Scheduler.plan_ahead`), and where nothing but a
    temperature shapes the distribution. Completions are the same as without lookahead: a token sampled for a completion
    that had ended is discarded. Two things differ, both while a completion that has ended takes part in one more step:
    a waiting request starts one step later, and on a GPU the step may have a larger padded batch size, which can change
    the last bits of logprobs.

    Call `finish_launched` before anything but the next `step` or `stats`.

    Args:
        config: the generator's configuration.
        model: the resolved model.
        tokenizer: decodes tokens.
        max_seq_len: longest sequence.
        shared: weights of a trainer in this process.
        send: delivers the results since the last `flush`.
    """

    looks_ahead: bool | None = None
    """Whether to use lookahead; None for where decode steps are recorded as CUDA graphs."""

    def __init__(
        self,
        config: GeneratorConfig,
        model: ResolvedModel,
        *,
        tokenizer: ChatTokenizer | None,
        max_seq_len: int,
        shared: Mapping[str, Tensor] | None,
        send: Callable[[Iterable[Message]], object],
    ) -> None:
        self.config, self.max_seq_len = config, max_seq_len
        self.runner = ModelRunner(config, model, max_seq_len=max_seq_len, shared=shared)
        self.sampler = Sampler(model.architecture.vocab_size or 0, self.runner.device)
        self.scheduler = Scheduler(
            PagePool(self.runner.num_pages, sharing=config.prefix_sharing, copying=not self.runner.on_gpu),
            max_batch=config.max_batch,
            chunk_tokens=config.prefill_chunk_tokens or _CHUNK_TOKENS[self.runner.device.type],
            max_pages=self.runner.max_pages,
        )
        self.drafts = make_drafts(self.runner, self.scheduler, tokenizer)
        self.runners = Runners(self.runner, None if self.drafts is None else self.drafts.drafter.runner)
        self.order = VersionOrder(self.scheduler)
        self.counts = Counts()
        self._ahead: LaunchedStep | None = None
        self._newest: Sampled | None = None  # of the step that was launched ahead last, even if discarded
        self._tokenizer = tokenizer
        self._send, self._messages = send, list[Message]()

    def flush(self) -> None:
        """Deliver the results since the last call."""
        if self._messages:
            messages, self._messages = self._messages, []
            self._send(messages)

    # ---- Requests -----------------------------------------------------------------------------------------------

    def enter(self, pending: PendingRequest) -> None:
        """Queue a request. Its completions start together where they fit; the prompt is then read once."""
        request, limit = pending.request, self.config.max_batch
        deliver, deliver_delta = pending.deliver, pending.deliver_delta
        pending.deliver = lambda found: self._messages.append((deliver, found))
        if deliver_delta is not None:
            pending.deliver_delta = lambda delta: self._messages.append((deliver_delta, delta))
        each = sequences_of(pending, self._tokenizer, max_seq_len=self.max_seq_len)
        for start in range(0, len(each), limit):
            leader = each[start]
            leader.siblings = each[start + 1 : start + limit]
            self.scheduler.waiting.append(leader)
        self.order.is_mixed = self.order.is_mixed or pending.weights is not None
        self.counts.num_prompt_tokens += len(request.prompt_ids)

    def enter_score(self, job: ScoreJob) -> None:
        """Queue tokens to be scored."""
        deliver = job.deliver
        job.deliver = lambda found: self._messages.append((deliver, found))
        if len(job.token_ids) < 2:
            job.deliver(job.logprobs[: len(job.token_ids)])
            return
        ids = list(job.token_ids[:-1])
        queue = self.scheduler.urgent if job.is_urgent else self.scheduler.waiting
        queue.append(SequenceState(ids=ids, num_prompt=len(ids), max_len=len(ids), score=job))

    def cancel(self, pending: PendingRequest) -> None:
        """Cancel a request."""
        if pending.is_over:
            return
        pending.is_over = True
        for sequence in [sequence for sequence in self.scheduler.sequences() if sequence.pending is pending]:
            self.scheduler.end(sequence)
            self.counts.num_aborted += 1

    def cancel_score(self, job: ScoreJob) -> None:
        """Cancel a score."""
        for sequence in [sequence for sequence in self.scheduler.sequences() if sequence.score is job]:
            self.scheduler.end(sequence)

    def abort_all(self) -> int:
        """Abort every completion, waiting ones too, and return how many there were."""
        return self._abort(list(self.scheduler.sequences()))

    def _abort(self, sequences: Sequence[SequenceState]) -> int:
        completions = [sequence for sequence in sequences if sequence.score is None]
        for sequence in completions:
            self._finish(sequence, "abort")
        return len(completions)

    def fail_all(self, error: BaseException) -> None:
        """Fail everything with an error; a step that was launched ahead is discarded, and so is the cache."""
        self._ahead = None
        self.scheduler.pool.forget()
        self._mark_impure(self.scheduler.running)
        for sequence in list(self.scheduler.sequences()):
            self.scheduler.end(sequence)
            if sequence.pending is not None:
                sequence.pending.fail(error)
            elif sequence.score is not None:
                sequence.score.deliver(error)

    def weights_updated(self, mode: UpdateMode) -> int:
        """Apply an update mode to completions in progress after the live weights changed. Return how many were aborted.

        Those of pinned versions and of adapters on a fixed base, and prefixes that these computed, are not concerned.
        """
        scheduler = self.scheduler
        live = [sequence for sequence in scheduler.running if sequence.is_live]
        scheduler.pool.forget_live()
        self._mark_impure(live)
        num_aborted = 0
        begun = [each for each in scheduler.sequences() if each.is_live and each.has_begun]
        if mode == "abort":
            with_siblings = [each for one in begun if one.score is None for each in (one, *one.siblings)]
            num_aborted = self._abort(list(dict.fromkeys(with_siblings)))
        if mode in ("recompute", "abort"):
            scheduler.restart([each for each in live if each.slot >= 0])
            return num_aborted
        # One answer is of one version, and spans do not say who read a prompt: one that is half read is read again.
        scheduler.restart([each for each in live if each.score is not None or each.is_being_read])
        for sequence in begun:
            sequence.is_pure = sequence.slot < 0
        return num_aborted

    def _mark_impure(self, sequences: Iterable[SequenceState]) -> None:
        """Let what is computed so far of running sequences never become a prefix."""
        self.scheduler.take_copies()
        for sequence in sequences:
            sequence.is_pure = False

    def release(self) -> None:
        """Release cache and weights; `runners.restore` undoes it. Completions in progress are recomputed later."""
        self.scheduler.preempt_all()
        self._forget_prefixes()
        self.runners.release()

    def release_cache(self) -> None:
        """Release the cache; `runners.allocate_cache` undoes it. Completions in progress are recomputed later."""
        self.scheduler.preempt_all()
        self._forget_prefixes()
        self.runners.release_cache()

    def _forget_prefixes(self) -> None:
        self.scheduler.pool.forget()
        self.sampler = Sampler(self.sampler.vocab_size, self.runner.device)  # its buffers only grow

    # ---- Steps --------------------------------------------------------------------------------------------------

    def step(self, version: int, *, admit: bool = True) -> None:
        """Compute the next pieces, sample from them and process the tokens. The step after may be launched by then.

        `version` is that of the live weights. A step is of those, or of a pinned version: see `VersionOrder`.
        """
        launched, self._ahead = self._ahead, None
        launched = launched or self._launch(version, admit=admit)
        if launched is None:
            return
        looks_ahead = self.runner.has_recorded_steps if self.looks_ahead is None else self.looks_ahead
        try:
            if looks_ahead and self.order.continues and self.drafts is None:
                self._ahead = self._launch_ahead(launched, admit=admit)
        finally:
            self._process(launched)
        if self._ahead is not None and not self._ahead.is_of_use:
            self._ahead = None

    @property
    def is_ahead(self) -> bool:
        """Whether a step was launched whose tokens have not been processed."""
        return self._ahead is not None

    def finish_launched(self) -> None:
        """Process the tokens of a step that was launched ahead, if there is one. The device is then idle, also after a
        step that was discarded: weights and cache may be changed or released."""
        launched, self._ahead = self._ahead, None
        newest, self._newest = self._newest, None
        if launched is not None:
            self._process(launched)
        elif newest is not None:
            newest.wait()

    def _launch(self, version: int, *, admit: bool) -> LaunchedStep | None:
        """Launch the next step. Return None if it was not a pure decode step: its tokens are processed already."""
        for weights in self.order.candidates():
            if pieces := self.scheduler.plan(admit=admit, weights=weights):
                break
        else:
            return None
        self.order.computes(weights)
        if not self._use(weights):
            return None
        version = version if weights is None else weights.version
        self.counts.num_steps += 1
        self.runners.copy_pages(self.scheduler.take_copies())
        decodes: list[Piece] = []
        others: list[Piece] = []
        for piece in pieces:
            is_decode = piece.end - piece.start == 1 and piece.samples
            (decodes if is_decode else others).append(piece)
        if self.drafts is not None and decodes:
            decodes = self.drafts.attach(decodes, self.scheduler)
            others = by_adapter(others + [piece for piece in decodes if piece.draft])
            decodes = [piece for piece in decodes if not piece.draft]
        if self.drafts is not None:
            self.drafts.drafter.read(piece for piece in others + decodes if not piece.draft)
        if not others:
            return self._sample(decodes, self.runner.decode_logits(decodes, self.scheduler.table), version)
        if not self.runner.on_gpu:
            self._compute(by_adapter(others + decodes), version)
            return None
        self._compute(others, version)
        decodes = [piece for piece in decodes if piece.sequence.slot >= 0]  # another of its request may have failed
        if decodes:
            self._process(self._sample(decodes, self.runner.decode_logits(decodes, self.scheduler.table), version))
        return None

    def _use(self, weights: PinnedWeights | None) -> bool:
        """Let the runner compute with these weights. Where there is no memory for them, fail their requests."""
        try:
            self.runner.use(weights)
        except OutOfDeviceMemory as error:
            for sequence in [each for each in self.scheduler.sequences() if each.weights is weights]:
                self._fail(sequence, error)
            return False
        return True

    def _launch_ahead(self, launched: LaunchedStep, *, admit: bool) -> LaunchedStep | None:
        """Launch the step after one whose tokens are not known yet, if possible."""
        weights = self.order.current
        if self.sampler.is_shaping:
            return None
        pieces = self.scheduler.plan_ahead(launched.sequences, admit=admit, weights=weights)
        if not pieces:
            return None
        self.order.computes(weights)
        # One of these may turn out to have ended. What is then written to its page does no harm: the next owner of the
        # page writes to it in a later launch on the same stream, and only full pages are shared.
        place_of = {sequence: place for place, sequence in enumerate(launched.sequences)}
        sequences = [piece.sequence for piece in pieces]
        last = LastSampled(launched.sampled.token_ids, [place_of[sequence] for sequence in sequences])
        logits = self.runner.decode_logits(pieces, self.scheduler.table, last=last)
        self._newest = self.sampler.sample(logits, _rows(sequences), num_ahead=1)
        return LaunchedStep(sequences, self._newest, launched.version, pieces)

    def _compute(self, pieces: list[Piece], version: int) -> None:
        """Compute all pieces in one row: logits where a token is sampled, logprobs where tokens are scored."""
        decoding = [piece for piece in pieces if piece.samples]
        scoring = [piece for piece in pieces if piece.sequence.score is not None]
        ends: dict[int, int] = {}
        total = 0
        for piece in pieces:
            total += piece.size
            ends[id(piece)] = total
        index = [ends[id(piece)] - 1 - back for piece in decoding for back in range(len(piece.draft), -1, -1)]
        num_sampled = len(index)
        for piece in scoring:
            end = ends[id(piece)]
            index += range(end - (piece.end - piece.start), end)
        hidden = self.runner.hidden(pieces, self.scheduler.table, index)
        for piece in pieces:
            if not piece.samples and piece.sequence.score is None:
                self.scheduler.computed(piece)
        place = num_sampled
        for piece in scoring:
            size = piece.end - piece.start
            self._scored(piece, hidden[place : place + size])
            place += size
        if decoding:
            self._process(self._sample(decoding, self.runner.logits(hidden[:num_sampled]), version))

    def _scored(self, piece: Piece, hidden: Tensor) -> None:
        sequence = piece.sequence
        job = sequence.score
        assert job is not None
        targets = job.token_ids[piece.start + 1 : piece.end + 1]
        self.runner.score(job, hidden, targets)
        self.scheduler.computed(piece)
        self.counts.num_score_tokens += len(targets)
        if sequence.num_computed == len(sequence.ids):
            found, best, top = job.logprobs, (job.best_ids, job.best_logprobs), (job.top_ids, job.top_logprobs)
            self.scheduler.end(sequence)  # which restarts the job
            (job.best_ids, job.best_logprobs), (job.top_ids, job.top_logprobs) = best, top
            job.deliver(found)

    def _sample(self, pieces: Sequence[Piece], logits: Tensor, version: int) -> LaunchedStep:
        """Sample the next token of every piece, one after each token of its draft, and the first one of siblings that
        start here."""
        sequences: list[SequenceState] = []
        index: list[int] = []
        num_ahead: list[int] = []
        copies: list[tuple[int, int]] = []
        num_logits = 0
        for piece in pieces:
            self.scheduler.computed(piece)
            siblings = piece.sequence.siblings
            if siblings:
                copies += self.scheduler.fork(piece.sequence)
            begun = [piece.sequence, *(sibling for sibling in siblings if sibling.slot >= 0)]
            begun += [piece.sequence] * len(piece.draft)
            sequences += begun
            num_ahead += range(len(begun)) if piece.draft else [0] * len(begun)
            index += range(num_logits, num_logits + len(begun)) if piece.draft else [num_logits] * len(begun)
            num_logits += 1 + len(piece.draft)
        self.runners.copy_pages(copies)
        if len(index) > num_logits:
            logits = logits[torch.tensor(index, device=logits.device)]
        drafted = {piece.sequence: piece for piece in pieces if piece.draft}
        sampled = self.sampler.sample(logits, _rows(sequences), num_ahead=num_ahead)
        return LaunchedStep(sequences, sampled, version, drafted=drafted)

    def _process(self, launched: LaunchedStep) -> None:
        """Wait for the tokens of a step, and process those of completions that have not ended since its launch."""
        sequences, sampled = launched.sequences, launched.sampled
        if launched.pieces:
            self.counts.num_steps += 1
            self.counts.num_ahead += 1
            for piece in launched.pieces:
                if piece.sequence.slot >= 0:
                    self.scheduler.computed(piece)
        skipped = [place for place, sequence in enumerate(sequences) if sequence.slot < 0]
        broken: dict[int, NonFiniteError] = {}
        try:
            found = sampled.fetch(skip=skipped)
        except NonFiniteError as error:
            broken = dict.fromkeys(cast("tuple[int, ...]", error.value), error)
            found = sampled.fetch(skip=(*skipped, *broken))
            for place in broken:
                if sequences[place] not in launched.drafted:
                    self._fail(sequences[place], error)
        num_behind = 0
        for place, (sequence, token, logprob, full) in enumerate(zip(sequences, *found, strict=True)):
            num_behind = num_behind + 1 if place and sequences[place - 1] is sequence else 0
            if sequence.slot < 0 or not sequence.is_wanted:
                continue
            if num_behind:
                if not is_right(launched.drafted[sequence], num_behind):
                    continue
                self.scheduler.computed(Piece(sequence, len(sequence.ids) - 1, len(sequence.ids)))
            if place in broken:
                self._fail(sequence, broken[place])
                continue
            self.counts.num_tokens += 1
            reason = sequence.add_token(token, logprob, full, launched.version)
            if reason is not None:
                self._finish(sequence, reason)
            elif sequence.pending is not None and sequence.pending.deliver_delta is not None:
                sequence.pending.deliver_delta(sequence.delta())
        for piece in launched.drafted.values():
            assert self.drafts is not None
            self.drafts.note(piece)

    def _fail(self, sequence: SequenceState, error: BaseException) -> None:
        """Fail a completion, and the others of its request."""
        assert sequence.pending is not None
        pending = sequence.pending
        for each in [each for each in self.scheduler.sequences() if each.pending is pending]:
            self.scheduler.end(each)
        pending.fail(error)

    def _finish(self, sequence: SequenceState, reason: FinishReason) -> None:
        assert sequence.pending is not None
        try:
            completion = sequence.completion(reason, self._decode)
            self.scheduler.end(sequence)
        except BaseException as error:  # `fail_all` does not find the caller of a sequence that is gone
            sequence.pending.fail(error)
            raise
        if reason == "abort":
            self.counts.num_aborted += 1
        else:
            self.counts.num_done += 1
        if sequence.pending.deliver_delta is not None:
            sequence.pending.deliver_delta(sequence.delta(completion))
        sequence.pending.add(completion)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(token_ids, skip_special=True)

    def stats(self, version: int, *, is_asleep: bool, num_open: int) -> EngineStats:
        """Return the statistics. Thread-safe: each number is consistent, not all of them together."""
        found = self.counts.stats(
            self.scheduler, version, is_asleep=is_asleep, num_open=num_open, device=str(self.runner.device)
        )
        return found if self.drafts is None else replace(found, more={**found.more, **self.drafts.stats()})


def _rows(sequences: Sequence[SequenceState]) -> list[SampleRow]:
    return [sequence.row for sequence in sequences if sequence.row is not None]
