"""The records that flow between the parts of a run.

All are frozen. Whatever belongs to a token lies at the index of *that* token: `logprobs[t]` is the logarithm of the
probability of `token_ids[t]` given everything before it, and `loss_weights[t]` says how much predicting it counts. The
first token of a sample is never predicted, so both are 0 there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from forge.types.completions import (
    INITIAL_VERSION,
    AdapterUse,
    Completion,
    Delta,
    FinishReason,
    Timings,
    VersionSpan,
    joined_spans,
)
from forge.types.episodes import (
    DEFAULT_AGENT,
    LIVE,
    AgentResult,
    Answer,
    Episode,
    EpisodeOutcome,
    Group,
    MalformedCall,
    PrefixBreakKind,
    Score,
    Task,
    ToolCall,
    Turn,
    labelled_version,
    version_label,
)

if TYPE_CHECKING:
    from torch import Tensor

Prompt = Task
"""The name of `Task` in release 0.1; it will be removed in the next."""

__all__ = [
    "DEFAULT_AGENT",
    "INITIAL_VERSION",
    "LIVE",
    "AdapterUse",
    "AgentResult",
    "Answer",
    "Batch",
    "Completion",
    "Delta",
    "Episode",
    "EpisodeOutcome",
    "Evaluated",
    "FinishReason",
    "Group",
    "MalformedCall",
    "PrefixBreakKind",
    "Prompt",
    "Sample",
    "Score",
    "StepResult",
    "Task",
    "Timings",
    "ToolCall",
    "Turn",
    "VersionSpan",
    "joined_spans",
    "labelled_version",
    "version_label",
]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A line of tokens to learn from: a whole sequence, or one of the root-to-leaf paths of an episode.

    Attributes:
        token_ids: int64 [L], L >= 1.
        loss_weights: float32 [L]; 0 where a token is only read. `loss_weights[0]` is 0.
        fields: further values per token, each [L], such as advantages or the sampler's logprobs, or [L, K] where a
            token has several, such as a teacher's likeliest tokens.
        identity: where it came from, for messages: "train.jsonl:17", "prompt 12, sample 3".
        sequence: which sequence of its batch it belongs to, any number; None for a sequence of its own. Losses that
            average per sequence, or have one ratio per sequence, take all samples with the same number together.
        temperature: what its tokens were sampled at, and what a trainer divides their logits by; None for what the loss
            says.
    """

    token_ids: Tensor
    loss_weights: Tensor
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    identity: str = ""
    sequence: int | None = None
    temperature: float | None = None

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
        fields: further values per token, each [T] or [T, K].
        identities: the S identities.
        sequences: S numbers: which sequence each sample belongs to. Empty where every sample is its own sequence.
        temperatures: S numbers: what the logits of each sample's tokens are divided by. Empty for what the loss says.
    """

    token_ids: Tensor
    loss_weights: Tensor
    lengths: tuple[int, ...]
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    identities: tuple[str, ...] = ()
    sequences: tuple[int, ...] = ()
    temperatures: tuple[float, ...] = ()

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Batch:
        """Lay samples end to end. All must have the same fields, and all a temperature or none.

        Sequences are numbered from 0, in the order of their first samples; not at all where each has one sample.
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
            temperatures=_temperatures(samples),
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
                self.temperatures[index] if self.temperatures else None,
            )
            start += length


def _temperatures(samples: Sequence[Sample]) -> tuple[float, ...]:
    found = [sample.temperature for sample in samples]
    known = tuple(each for each in found if each is not None)
    if known and len(known) < len(found):
        raise ValueError(f"sample {samples[found.index(None)].identity!r} has no temperature, and others have one")
    return known


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

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all logprobs as one tensor: a process would encode hundreds one by one, each with the memory of its
        whole row."""
        plain = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "logprobs"}
        if not self.logprobs:
            return _step_result, (type(self), plain, self.logprobs, None)
        import torch

        return _step_result, (type(self), plain, torch.cat(self.logprobs), [len(each) for each in self.logprobs])


def _step_result(kind: type[StepResult], plain: Mapping[str, Any], logprobs: Any, lengths: Sequence[int] | None) -> Any:
    return kind(**plain, logprobs=logprobs if lengths is None else logprobs.split(lengths))


class Evaluated(NamedTuple):
    """What an evaluation of one batch found: sums and their divisors, which add up over batches.

    Attributes:
        loss: the sum of the batch's loss, not divided yet; weight: its normalizer.
        metrics: for each metric of the loss its sum, and what that is divided by.
    """

    loss: float
    weight: float
    metrics: Mapping[str, tuple[float, float]]
