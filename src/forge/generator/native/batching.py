"""One step after another: what is computed, what is drawn from it, and who is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from forge.config import GeneratorConfig, Sampling, UpdateMode
from forge.errors import NonFiniteError
from forge.generator.engine import EngineStats
from forge.generator.native.pages import PagePool
from forge.generator.native.randomness import completion_seed, fresh_seed
from forge.generator.native.runner import ModelRunner
from forge.generator.native.sampler import Drawn, Sampler, SampleRow
from forge.generator.native.schedule import Piece, Scheduler
from forge.generator.native.sequences import Running, ScoreJob, Ticket
from forge.generator.text import TextTracker
from forge.models.locate import ResolvedModel
from forge.types import FinishReason

if TYPE_CHECKING:
    from forge.models.tokenizer import ChatTokenizer

Message = tuple[Callable[[Any], None], Any]
_CHUNK_TOKENS = {"cpu": 512, "cuda": 8192}


@dataclass(slots=True)
class _Counts:
    """What has been done since the start."""

    num_done: int = 0
    num_aborted: int = 0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_score_tokens: int = 0


class Batching:
    """The state of the engine, used by its thread alone.

    Args:
        config: what the generator was configured with.
        model: the model, resolved.
        tokenizer: makes text of tokens.
        max_seq_len: longest sequence.
        shared: weights of a trainer in this process.
        send: tells those who wait; it is given what has come up since the last `flush`.
    """

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
        self.sampler = Sampler(model.facts.vocab_size or 0, self.runner.device)
        self.scheduler = Scheduler(
            PagePool(self.runner.num_pages, sharing=config.prefix_sharing),
            max_batch=config.max_batch,
            chunk_tokens=config.prefill_chunk_tokens or _CHUNK_TOKENS[self.runner.device.type],
            max_pages=self.runner.max_pages,
        )
        self.counts = _Counts()
        self._tokenizer = tokenizer
        self._model_stops = () if tokenizer is None else tokenizer.stop_token_ids
        self._send, self._messages = send, list[Message]()

    def flush(self) -> None:
        """Tell what has come up."""
        if self._messages:
            messages, self._messages = self._messages, []
            self._send(messages)

    # ---- Coming and going ---------------------------------------------------------------------------------------

    def enter(self, ticket: Ticket) -> None:
        """Take a request in. Its completions begin together where they fit; each prompt is then read once."""
        request, limit = ticket.request, self.config.max_batch
        tell, tell_delta = ticket.tell, ticket.tell_delta
        ticket.tell = lambda found: self._messages.append((tell, found))
        if tell_delta is not None:
            ticket.tell_delta = lambda delta: self._messages.append((tell_delta, delta))
        seed = request.sampling.seed if request.sampling.seed is not None else fresh_seed()
        each = [self._completion(ticket, index, seed) for index in range(request.sampling.n)]
        for start in range(0, len(each), limit):
            leader = each[start]
            leader.siblings = each[start + 1 : start + limit]
            self.scheduler.waiting.append(leader)
        self.counts.num_prompt_tokens += len(request.prompt_ids)

    def _completion(self, ticket: Ticket, index: int, seed: int) -> Running:
        request = ticket.request
        sampling, prompt = request.sampling, request.prompt_ids
        stops = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._model_stops))
        room = self.max_seq_len - len(prompt)
        return Running(
            ids=list(prompt),
            num_prompt=len(prompt),
            max_len=len(prompt) + (room if sampling.max_tokens is None else min(room, sampling.max_tokens)),
            ticket=ticket,
            index=index,
            row=SampleRow(
                sampling=sampling,
                seed=completion_seed(seed, index),
                prompt_ids=prompt,
                token_ids=[],
                stop_ids=stops,
            ),
            tracker=self._tracker(sampling, always=ticket.tell_delta is not None),
            stop_ids=frozenset(stops),
        )

    def _tracker(self, sampling: Sampling, *, always: bool) -> TextTracker | None:
        """Text is followed token by token only where it is asked for: it costs time."""
        if self._tokenizer is None or not (always or sampling.stop):
            return None
        return TextTracker(self._tokenizer, sampling)

    def enter_score(self, job: ScoreJob) -> None:
        """Take in tokens to be scored."""
        tell = job.tell
        job.tell = lambda found: self._messages.append((tell, found))
        if len(job.token_ids) < 2:
            job.tell(job.logprobs[: len(job.token_ids)])
            return
        ids = list(job.token_ids[:-1])
        queue = self.scheduler.urgent if job.is_urgent else self.scheduler.waiting
        queue.append(Running(ids=ids, num_prompt=len(ids), max_len=len(ids), score=job))

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for a request any more."""
        if ticket.is_over:
            return
        ticket.is_over = True
        for sequence in [sequence for sequence in self.scheduler.sequences() if sequence.ticket is ticket]:
            self.scheduler.end(sequence)
            self.counts.num_aborted += 1

    def cancel_score(self, job: ScoreJob) -> None:
        """Nobody waits for these logprobs any more."""
        for sequence in [sequence for sequence in self.scheduler.sequences() if sequence.score is job]:
            self.scheduler.end(sequence)

    def abort_all(self) -> int:
        """End every completion as it is; those that have not begun too. How many there were."""
        return self._abort(list(self.scheduler.sequences()))

    def _abort(self, sequences: Sequence[Running]) -> int:
        completions = [sequence for sequence in sequences if sequence.score is None]
        for sequence in completions:
            self._finish(sequence, "abort")
        return len(completions)

    def fail_all(self, error: BaseException) -> None:
        """End everything with an error."""
        for sequence in list(self.scheduler.sequences()):
            self.scheduler.end(sequence)
            if sequence.ticket is not None:
                sequence.ticket.fail(error)
            elif sequence.score is not None:
                sequence.score.tell(error)

    def weights_changed(self, mode: UpdateMode) -> int:
        """The weights are others now: what follows for completions under way. How many were cut short."""
        scheduler = self.scheduler
        scheduler.pool.forget()
        num_aborted = 0
        begun = [sequence for sequence in scheduler.sequences() if sequence.slot >= 0 or sequence.num_drawn > 0]
        if mode == "abort":
            with_siblings = [each for one in begun if one.score is None for each in (one, *one.siblings)]
            num_aborted = self._abort(list(dict.fromkeys(with_siblings)))
        if mode in ("recompute", "abort"):
            scheduler.preempt_all()
            return num_aborted
        # One answer is of one version; and spans do not tell who read a text: one that is not read yet is read whole.
        scheduler.begin_again([each for each in scheduler.running if each.score is not None or each.is_being_read])
        for sequence in begun:
            sequence.is_pure = sequence.slot < 0
        return num_aborted

    def give_back(self) -> None:
        """Free the cache. Whatever is under way is read again later."""
        self.scheduler.preempt_all()
        self.scheduler.pool.forget()
        self.sampler = Sampler(self.sampler.vocab_size, self.runner.device)  # its buffers only grow
        self.runner.give_back()

    # ---- Steps --------------------------------------------------------------------------------------------------

    def step(self, version: int, *, admit: bool = True) -> None:
        """Compute the next pieces and draw from them."""
        pieces = self.scheduler.plan(admit=admit)
        if not pieces:
            return
        self.counts.num_steps += 1
        if self.runner.on_gpu:
            decodes: list[Piece] = []
            others: list[Piece] = []
            for piece in pieces:
                is_decode = piece.end - piece.start == 1 and piece.draws
                (decodes if is_decode else others).append(piece)
            if others:
                self._compute(others, version)
            if decodes:
                logits = self.runner.decode_logits(decodes, self.scheduler.table)
                self._draw(decodes, logits, version)
        elif all(piece.end - piece.start == 1 and piece.draws for piece in pieces):
            self._draw(pieces, self.runner.decode_logits(pieces, self.scheduler.table), version)
        else:
            self._compute(pieces, version)

    def _compute(self, pieces: list[Piece], version: int) -> None:
        """All pieces in one row: logits where a token is drawn, logprobs where tokens are scored."""
        drawing = [piece for piece in pieces if piece.draws]
        scoring = [piece for piece in pieces if piece.sequence.score is not None]
        ends: dict[int, int] = {}
        total = 0
        for piece in pieces:
            total += piece.end - piece.start
            ends[id(piece)] = total
        index = [ends[id(piece)] - 1 for piece in drawing]
        for piece in scoring:
            end = ends[id(piece)]
            index += range(end - (piece.end - piece.start), end)
        hidden = self.runner.hidden(pieces, self.scheduler.table, index)
        for piece in pieces:
            if not piece.draws and piece.sequence.score is None:
                self.scheduler.computed(piece)
        place = len(drawing)
        for piece in scoring:
            size = piece.end - piece.start
            self._scored(piece, hidden[place : place + size])
            place += size
        if drawing:
            self._draw(drawing, self.runner.logits(hidden[: len(drawing)]), version)

    def _scored(self, piece: Piece, hidden: Tensor) -> None:
        sequence = piece.sequence
        job = sequence.score
        assert job is not None
        targets = job.token_ids[piece.start + 1 : piece.end + 1]
        job.logprobs += self.runner.logprobs(hidden, targets, temperature=job.temperature)
        self.scheduler.computed(piece)
        self.counts.num_score_tokens += len(targets)
        if sequence.num_computed == len(sequence.ids):
            found = job.logprobs
            self.scheduler.end(sequence)
            job.tell(found)

    def _draw(self, pieces: Sequence[Piece], logits: Tensor, version: int) -> None:
        """Draw the next token of every piece, and the first one of the siblings that begin here."""
        sequences: list[Running] = []
        index: list[int] = []
        copies: list[tuple[int, int]] = []
        for number, piece in enumerate(pieces):
            self.scheduler.computed(piece)
            siblings = piece.sequence.siblings
            if siblings:
                copies += self.scheduler.fork(piece.sequence)
            begun = [piece.sequence, *(sibling for sibling in siblings if sibling.slot >= 0)]
            sequences += begun
            index += [number] * len(begun)
        self.runner.copy_pages(copies)
        if len(index) > len(pieces):
            logits = logits[torch.tensor(index, device=logits.device)]
        drawn = self.sampler.draw(logits, [sequence.row for sequence in sequences if sequence.row is not None])
        self._take_tokens(sequences, drawn, version)

    def _take_tokens(self, sequences: Sequence[Running], drawn: Drawn, version: int) -> None:
        broken: tuple[int, ...] = ()
        try:
            found = drawn.fetch()
        except NonFiniteError as error:
            broken = cast("tuple[int, ...]", error.value)
            found = drawn.fetch(skip=broken)
            for place in broken:
                self._fail(sequences[place], error)
        for place, (sequence, token, logprob, full) in enumerate(zip(sequences, *found, strict=True)):
            if place in broken or not sequence.is_wanted:
                continue
            self.counts.num_tokens += 1
            reason = sequence.add_token(token, logprob, full, version)
            if reason is not None:
                self._finish(sequence, reason)
            elif sequence.ticket is not None and sequence.ticket.tell_delta is not None:
                sequence.ticket.tell_delta(sequence.delta())

    def _fail(self, sequence: Running, error: BaseException) -> None:
        """End a completion, and the others of its request, with an error."""
        assert sequence.ticket is not None
        ticket = sequence.ticket
        for each in [each for each in self.scheduler.sequences() if each.ticket is ticket]:
            self.scheduler.end(each)
        ticket.fail(error)

    def _finish(self, sequence: Running, reason: FinishReason) -> None:
        assert sequence.ticket is not None
        completion = sequence.completion(reason, self._decode)
        self.scheduler.end(sequence)
        if reason == "abort":
            self.counts.num_aborted += 1
        else:
            self.counts.num_done += 1
        if sequence.ticket.tell_delta is not None:
            sequence.ticket.tell_delta(sequence.delta(completion))
        sequence.ticket.add(completion)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(token_ids, skip_special=True)

    def stats(self, version: int, *, is_asleep: bool, num_open: int) -> EngineStats:
        """May be called from another thread: every figure is read at once, but not all of them together."""
        counts, scheduler = self.counts, self.scheduler
        running = len(scheduler.running)
        return EngineStats(
            version=version,
            num_running=running,
            num_waiting=max(0, num_open - running),
            num_done=counts.num_done,
            num_aborted=counts.num_aborted,
            num_prompt_tokens=counts.num_prompt_tokens,
            num_shared_tokens=scheduler.num_shared_tokens,
            num_tokens=counts.num_tokens,
            num_preempted=scheduler.num_preempted,
            cache_used=scheduler.pool.num_held / scheduler.pool.num_pages,
            is_asleep=is_asleep,
            more={
                "num_steps": counts.num_steps,
                "num_score_tokens": counts.num_score_tokens,
                "num_pages": scheduler.pool.num_pages,
                "device": str(self.runner.device),
            },
        )


def is_fatal(error: Exception) -> bool:
    """Whether nothing can be computed after this error: a device that reported one reports it for ever."""
    return isinstance(error, torch.AcceleratorError)
