"""The state of requests and sequences in the engine: tokens, pages, and how results are delivered."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forge.generator.engine import Request
from forge.generator.native.pages import ROOT
from forge.models.adapter_segments import LIVE
from forge.types import INITIAL_VERSION, Completion, Delta, FinishReason, Timings, VersionSpan

if TYPE_CHECKING:
    from forge.generator.native.adapters import LoadedAdapter
    from forge.generator.native.pinned import PinnedWeights
    from forge.generator.native.sampler import SampleRow
    from forge.generator.text import TextTracker

Ngrams = dict[tuple[int, ...], int]
"""Where the token is that followed an n-gram last."""

Deliver = Callable[[Any], None]
"""Delivers a result or an exception to its caller. Called on the engine's thread."""


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One request in the engine.

    Attributes:
        request: the request.
        deliver: gets the list of completions, or the exception, once.
        deliver_delta: gets every delta, for requests that stream.
        weights: the pinned version that samples it; None for the live weights.
        adapter: the adapter that samples it on the live weights; None for what these are by themselves.
        arrived: when it came.
        completions: those that have ended, by index.
        ngrams: of its prompt, where completions are drafted from it.
    """

    request: Request
    deliver: Deliver
    deliver_delta: Deliver | None = None
    weights: PinnedWeights | None = None
    adapter: LoadedAdapter | None = None
    arrived: float = field(default_factory=time.perf_counter)
    completions: dict[int, Completion] = field(default_factory=dict)
    is_over: bool = False
    ngrams: Ngrams | None = None

    def add(self, completion: Completion) -> None:
        self.completions[completion.index] = completion
        if len(self.completions) == self.request.sampling.n and not self.is_over:
            self.is_over = True
            self.deliver([self.completions[index] for index in sorted(self.completions)])

    def fail(self, error: BaseException) -> None:
        if not self.is_over:
            self.is_over = True
            self.deliver(error)


@dataclass(slots=True, eq=False)
class ScoreJob:
    """Tokens to be scored; with `is_urgent` before everything else, with `wants_best` also the likeliest token of
    each place, with `num_top` so many of the likeliest."""

    token_ids: tuple[int, ...]
    temperature: float
    deliver: Deliver
    is_urgent: bool = False
    wants_best: bool = False
    logprobs: list[float] = field(default_factory=lambda: [0.0])
    best_ids: list[int] = field(default_factory=list)
    best_logprobs: list[float] = field(default_factory=list)
    num_top: int = 0
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)

    def add_top(self, ids: list[list[int]], logprobs: list[list[float]]) -> None:
        """Note the likeliest tokens of the next places."""
        self.top_ids += ids
        self.top_logprobs += logprobs

    def restart(self) -> None:
        """Forget what was computed."""
        self.logprobs, self.best_ids, self.best_logprobs = [0.0], [], []
        self.top_ids, self.top_logprobs = [], []


@dataclass(slots=True)
class DraftState:
    """What drafts of a completion depend on.

    Attributes:
        limit: the longest draft that is worth computing.
        ngrams: of its sampled tokens; num_indexed: how many of its tokens they cover.
        num_read: how many of its tokens a draft model has read, where that may be fewer than all but the last.
    """

    limit: int
    ngrams: Ngrams = field(default_factory=dict)
    num_indexed: int = 0
    num_read: int | None = None


@dataclass(slots=True, eq=False)
class SequenceState:
    """One completion, or one sequence of tokens to be scored.

    Attributes:
        ids: prompt and sampled tokens.
        num_prompt: how many of them are the prompt.
        max_len: the length at which it ends.
        pending, index, row, tracker: its request, its index among the request's completions, the sampler's row, and its
            text where that is needed token by token. None (0) for a sequence to be scored.
        score: the score that is asked for instead.
        weights: the pinned version that computes it; None for the live weights.
        siblings: completions of the same prompt, which start when the prompt has been read.
        pages, num_computed: its pages, and how many of `ids` have keys and values in them.
        mark, num_sealed: how far its pages are known as a prefix that others may share.
        is_pure: whether all of its keys and values are of the current weights, or of its pinned version.
        slot: its row in the table of pages, while it is running.
        version_starts: the versions that sampled its tokens, and the first token of each.
        drafts: what its drafts depend on, once it has had one.
    """

    ids: list[int]
    num_prompt: int
    max_len: int
    pending: PendingRequest | None = None
    index: int = 0
    row: SampleRow | None = None
    tracker: TextTracker | None = None
    score: ScoreJob | None = None
    weights: PinnedWeights | None = None
    siblings: list[SequenceState] = field(default_factory=list)
    stop_ids: frozenset[int] = frozenset()
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    mark: int = 0
    num_sealed: int = 0
    is_pure: bool = True
    slot: int = -1
    num_shared: int = 0
    num_delivered: int = 0
    fresh_text: str = ""
    logprobs: list[float] = field(default_factory=list)
    full_logprobs: list[float] = field(default_factory=list)
    version_starts: list[tuple[int, int]] = field(default_factory=list)
    began: float | None = None
    first_token: float | None = None
    drafts: DraftState | None = None

    @property
    def root(self) -> int:
        """The mark of the empty prefix of its weights, or of its adapter."""
        whose = self.weights or self._adapter
        return ROOT if whose is None else whose.root

    @property
    def _adapter(self) -> LoadedAdapter | None:
        return None if self.pending is None else self.pending.adapter

    @property
    def is_live(self) -> bool:
        """Whether updates of the live weights change what it is computed with."""
        return self.weights is None and not (self._adapter is not None and self._adapter.is_fixed)

    @property
    def adapter_number(self) -> int:
        """The number of the segments that compute it."""
        adapter = self._adapter
        return LIVE if adapter is None else adapter.number

    @property
    def is_urgent(self) -> bool:
        return self.score is not None and self.score.is_urgent

    @property
    def has_begun(self) -> bool:
        """Whether it runs, or has sampled tokens."""
        return self.slot >= 0 or self.num_sampled > 0

    @property
    def is_wanted(self) -> bool:
        return self.pending is None or not self.pending.is_over

    @property
    def num_sampled(self) -> int:
        return len(self.ids) - self.num_prompt

    @property
    def is_being_read(self) -> bool:
        """Whether more than the last sampled token must be computed before the next token can be sampled."""
        return self.num_sampled == 0 or self.num_computed + 1 < len(self.ids)

    def add_token(self, token: int, logprob: float, full_logprob: float, version: int) -> FinishReason | None:
        """Append a sampled token. Return why the completion ends with it, or None."""
        assert self.row is not None
        if self.first_token is None:
            self.first_token = time.perf_counter()
        self.ids.append(token)
        self.row.token_ids.append(token)
        self.logprobs.append(logprob)
        self.full_logprobs.append(full_logprob)
        num_sampled = len(self.row.token_ids)
        if self._adapter is not None and self._adapter.is_fixed:
            version = INITIAL_VERSION
        if not self.version_starts or self.version_starts[-1][0] != version:
            self.version_starts.append((version, num_sampled - 1))
        if token in self.stop_ids and num_sampled > self.row.sampling.min_tokens:
            return "stop"
        if self.tracker is not None and self._stop_string(token):
            return "stop"
        return "length" if len(self.ids) >= self.max_len else None

    def _stop_string(self, token: int) -> bool:
        assert self.tracker is not None
        self.fresh_text += self.tracker.add([token])
        return self.tracker.stopped is not None

    def delta(self, completion: Completion | None = None) -> Delta:
        """Return what is new since the last delta."""
        assert self.row is not None
        new = slice(self.num_delivered, None)
        self.num_delivered = len(self.row.token_ids)
        text, self.fresh_text = self.fresh_text, ""
        return Delta(
            index=self.index,
            token_ids=tuple(self.row.token_ids[new]),
            logprobs=tuple(self.logprobs[new]),
            text=text,
            version=self.version_starts[-1][0] if self.version_starts else -1,
            completion=completion,
        )

    def _spans(self) -> tuple[VersionSpan, ...]:
        ends = (*(start for _, start in self.version_starts[1:]), self.num_sampled)
        both = zip(self.version_starts, ends, strict=False)  # without tokens there is no version
        return tuple(VersionSpan(version, start, end) for (version, start), end in both)

    def completion(self, reason: FinishReason, decode: Callable[[Sequence[int]], str]) -> Completion:
        """Return the completion as it is now; it ends here."""
        assert self.row is not None
        assert self.pending is not None
        token_ids = tuple(self.row.token_ids)
        stop_reason: int | str | None = None
        if self.tracker is not None:
            ended_by_token = reason == "stop" and self.tracker.stopped is None
            self.fresh_text += self.tracker.finish()
            text, stop_reason = self.tracker.text, self.tracker.stopped
        else:
            ended_by_token = reason == "stop"
            text = decode(token_ids[:-1] if ended_by_token else token_ids)
        if ended_by_token:
            stop_reason = token_ids[-1]
        now = time.perf_counter()
        arrived = self.pending.arrived
        return Completion(
            prompt_ids=tuple(self.ids[: self.num_prompt]),
            token_ids=token_ids,
            logprobs=tuple(self.logprobs),
            full_logprobs=tuple(self.full_logprobs),
            text=text,
            finish_reason=reason,
            stop_reason=stop_reason,
            versions=self._spans(),
            timings=Timings(
                queued_s=(self.began or now) - arrived,
                first_token_s=(self.first_token or now) - arrived,
                total_s=now - arrived,
            ),
            index=self.index,
            num_shared=self.num_shared,
            adapter=None if self.pending.adapter is None else self.pending.adapter.use,
        )
