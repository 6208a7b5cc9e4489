"""The records that flow between the parts of a run.

All are frozen. Whatever belongs to a token lies at the index of *that* token: `logprobs[t]` is the logarithm of the
probability of `token_ids[t]` given everything before it, and `loss_weights[t]` says how much predicting it counts. The
first token of a sample is never predicted, so both are 0 there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A line of tokens to learn from: a whole sequence, or one of the root-to-leaf paths of an episode.

    Attributes:
        token_ids: int64 [L], L >= 1.
        loss_weights: float32 [L]; 0 where a token is only read. `loss_weights[0]` is 0.
        fields: further values per token, each float32 [L], such as advantages or the sampler's logprobs.
        identity: where it came from, for messages: "train.jsonl:17", "prompt 12, sample 3".
        sequence: which sequence of its batch it belongs to, any number; None for a sequence of its own. Losses that
            average per sequence, or have one ratio per sequence, take all samples with the same number together.
    """

    token_ids: Tensor
    loss_weights: Tensor
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    identity: str = ""
    sequence: int | None = None

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The samples of one optimizer step, laid end to end. T is the number of tokens, S that of samples.

    A batch is the *global* one: every rank gets the same and takes its part, so that the number of tokens that count is
    known everywhere without asking.

    Attributes:
        token_ids: int64 [T].
        loss_weights: float32 [T].
        lengths: the S lengths, in order; they add up to T.
        fields: further values per token, each [T].
        identities: the S identities.
        sequences: S numbers: which sequence each sample belongs to. Empty where every sample is its own sequence.
    """

    token_ids: Tensor
    loss_weights: Tensor
    lengths: tuple[int, ...]
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    identities: tuple[str, ...] = ()
    sequences: tuple[int, ...] = ()

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Batch:
        """Lay samples end to end. All must have the same fields.

        Sequences are numbered from 0, in the order of their first samples.
        """
        import torch

        if not samples:
            raise ValueError("a batch needs at least one sample")
        names = set(samples[0].fields)
        for sample in samples:
            if set(sample.fields) != names:
                raise ValueError(
                    f"sample {sample.identity!r} has the fields {sorted(sample.fields)}, the first has {sorted(names)}"
                )
        return cls(
            token_ids=torch.cat([sample.token_ids for sample in samples]),
            loss_weights=torch.cat([sample.loss_weights for sample in samples]),
            lengths=tuple(len(sample) for sample in samples),
            fields={name: torch.cat([sample.fields[name] for sample in samples]) for name in samples[0].fields},
            identities=tuple(sample.identity for sample in samples),
            sequences=_numbered([sample.sequence for sample in samples]),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def sequence_numbers(self) -> tuple[int, ...]:
        """The sequence of each sample, also where every sample is its own."""
        return self.sequences or tuple(range(len(self)))

    @property
    def num_sequences(self) -> int:
        return len(set(self.sequence_numbers))

    @property
    def total_weight(self) -> float:
        """The sum of all loss weights: the number of tokens that count, where weights are 0 or 1."""
        return float(self.loss_weights.double().sum())

    def samples(self) -> Iterator[Sample]:
        """Yield the samples again, as views."""
        start = 0
        for index, length in enumerate(self.lengths):
            part = slice(start, start + length)
            yield Sample(
                self.token_ids[part],
                self.loss_weights[part],
                {name: values[part] for name, values in self.fields.items()},
                self.identities[index] if self.identities else "",
                self.sequences[index] if self.sequences else None,
            )
            start += length


def _numbered(sequences: Sequence[int | None]) -> tuple[int, ...]:
    """Return the sequences renumbered from 0 in order of appearance; nothing where each has one sample."""
    keys = [("own", index) if sequence is None else ("shared", sequence) for index, sequence in enumerate(sequences)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return () if len(numbers) == len(keys) else tuple(numbers[key] for key in keys)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did. Equal on every rank.

    Attributes:
        step: the number of optimizer steps taken so far, this one included.
        loss: the normalised loss of the whole batch, before the step.
        grad_norm: the norm of the whole gradient before clipping.
        learning_rate: the rate that this step used.
        num_tokens: tokens of the batch; num_loss_tokens: those that counted.
        skipped: True when the step was not taken because loss or gradient was not finite.
        seconds: how long the step took on this rank.
        metrics: what the loss reports (sums already divided), and the device's peak memory where it is known.
        logprobs: for each sample, float32 [L], the logprobs of its tokens before the step, where they were asked for
            and the rank is the first; 0 at tokens that do not count.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    num_loss_tokens: int
    skipped: bool = False
    seconds: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    logprobs: tuple[Tensor, ...] | None = None


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


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task for a policy.

    Attributes:
        id: names it in its source, the same in every run: "train.jsonl:17", "arithmetic:3:17".
        messages: the conversation to answer, each a mapping with `role` and `content`; it goes through the chat
            template. Empty where `text` is given.
        text: text to continue, instead of a conversation.
        answer: what rewards compare with; None where they need none.
        metadata: whatever else the source knows. Plain values: it crosses processes and is written as JSON.
    """

    id: str
    messages: tuple[Mapping[str, Any], ...] = ()
    text: str | None = None
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Score:
    """What one completion earned.

    Attributes:
        reward: the number to learn from: the weighted sum of the parts.
        parts: each reward by its name, before its weight.
        failures: the rewards that failed, by name, with what happened; their parts are 0.
        unshaped: the reward without what only shapes it (length terms, the overlong penalty, the divergence from the
            reference); None where that is the reward itself.
    """

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    unshaped: float | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """One completion of a prompt, what it earned, and how much better than expected that was.

    Attributes:
        prompt: the task.
        completion: what was sampled, with the sampler's logprobs and the weights that made each token.
        score: what it earned.
        advantage: how much better it was than its baseline; known when its group is whole. Where tokens have
            advantages of their own, their mean.
        ref_logprobs: the reference model's logprobs of the T tokens; None without a reference.
        token_advantages: the advantage of each of the T tokens; None where `advantage` is that of all of them.
    """

    prompt: Prompt
    completion: Completion
    score: Score
    advantage: float = 0.0
    ref_logprobs: tuple[float, ...] | None = None
    token_advantages: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one prompt, which are compared with each other.

    Attributes:
        number: its place in the run's order of prompts, which is its identity: no two groups of a run share it.
        epoch: how often the prompts had been gone through before it.
        episodes: in the order of their seeds; at least one.
    """

    number: int
    epoch: int
    episodes: tuple[Episode, ...]

    @property
    def prompt(self) -> Prompt:
        return self.episodes[0].prompt

    @property
    def version(self) -> int:
        """The oldest weights that made a token of it."""
        return min(episode.completion.version for episode in self.episodes)

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(episode.score.reward for episode in self.episodes)

    @property
    def unshaped_rewards(self) -> tuple[float, ...]:
        """The rewards before shaping."""
        scores = [episode.score for episode in self.episodes]
        return tuple(score.reward if score.unshaped is None else score.unshaped for score in scores)

    @property
    def num_tokens(self) -> int:
        """Tokens that were drawn."""
        return sum(len(episode.completion) for episode in self.episodes)
