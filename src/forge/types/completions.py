"""What generators return: completions, with the weights that made each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

INITIAL_VERSION = -1
"""The version of weights that were never published: those of the model's folder."""

FinishReason = Literal["stop", "length", "abort"]
"""Why a completion ended: an end token or stop string; no room for more; or it was cut short by an update or a
cancellation, and may be continued."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The weights of `version` made the tokens [start, end) of a completion."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Timings:
    """How long a completion took, in seconds from its arrival at the engine.

    Attributes:
        queued_s: until its prompt began to be read.
        first_token_s: until its first token was drawn.
        total_s: until its last.
    """

    queued_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """The LoRA adapter that a completion was sampled with: its name, and the digest of its files."""

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class Completion:
    """What a generator made of one prompt. What was sampled is what is here: nothing is tokenised again.

    Attributes:
        prompt_ids: the P tokens of the prompt.
        token_ids: the T tokens that were drawn, an end token included.
        logprobs: T numbers: the logarithm of the probability with which each token was drawn, after temperature,
            penalties and truncation. At temperature 0 they are those of temperature 1.
        full_logprobs: the same before penalties and truncation, at the same temperature: what a trainer computes for
            these tokens. None where the engine cannot tell.
        text: the tokens as text, without special tokens, and without what ended it.
        finish_reason: why it ended; `stop_reason` is the token or the string that ended it.
        versions: which weights made which tokens; together they cover all T.
        timings: how long it took.
        index: which of the n completions of its prompt.
        num_shared: tokens of the prompt that had been computed before, for this or another request.
        adapter: the loaded adapter that sampled it on top of those weights; None for none.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    full_logprobs: tuple[float, ...] | None
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    versions: tuple[VersionSpan, ...] = ()
    timings: Timings = Timings()
    index: int = 0
    num_shared: int = 0
    adapter: AdapterUse | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def version(self) -> int:
        """The oldest weights that made a token of it."""
        return min((span.version for span in self.versions), default=INITIAL_VERSION)

    def continued(self, later: Completion) -> Completion:
        """Return this completion and the one whose prompt was this one's prompt and tokens, as one."""
        if later.prompt_ids != self.prompt_ids + self.token_ids:
            raise ValueError("the later completion's prompt must be this one's prompt and tokens")
        offset = len(self.token_ids)
        full = None
        if self.full_logprobs is not None and later.full_logprobs is not None:
            full = self.full_logprobs + later.full_logprobs
        return Completion(
            prompt_ids=self.prompt_ids,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
            full_logprobs=full,
            text=self.text + later.text,
            finish_reason=later.finish_reason,
            stop_reason=later.stop_reason,
            versions=joined_spans(self.versions, later.versions, offset=offset),
            timings=Timings(
                self.timings.queued_s, self.timings.first_token_s, self.timings.total_s + later.timings.total_s
            ),
            index=self.index,
            num_shared=self.num_shared,
            adapter=self.adapter,
        )


def joined_spans(
    earlier: Sequence[VersionSpan], later: Sequence[VersionSpan], *, offset: int
) -> tuple[VersionSpan, ...]:
    """Spans one after the other, the later ones moved by `offset`; neighbours of one version become one."""
    spans = list(earlier)
    for span in later:
        moved = VersionSpan(span.version, span.start + offset, span.end + offset)
        if spans and spans[-1].version == moved.version and spans[-1].end == moved.start:
            moved = VersionSpan(moved.version, spans.pop().start, moved.end)
        spans.append(moved)
    return tuple(spans)


@dataclass(frozen=True, slots=True)
class Delta:
    """What a streaming generator made since the last one, for one of the n completions of a prompt.

    Attributes:
        index: which of the n completions.
        token_ids, logprobs: the tokens that are new. They may come before their text, or the text before them when a
            stop string was ruled out.
        text: the text that is new and final.
        version: the weights that made these tokens.
        completion: the whole completion, with the last delta of it.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    version: int
    completion: Completion | None = None
