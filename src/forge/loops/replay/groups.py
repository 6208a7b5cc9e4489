"""Samples a recorded group again with the native engine, and compares it token by token.

A completion is sampled from its prompt with its own seed. Where its weights were updated on the way, the same update is
made after the same token, as `generator.update.mode` says. So each span of tokens is sampled with the version that
sampled it. The first token that differs has one of four causes:

| cause | what is the same, and what is not |
|---|---|
| record | what was recorded of the completion does not have the digest that it was written with |
| weights | the version's digest is not that of the weights that the run published |
| kernel | the same weights give the recorded tokens other logprobs |
| sampling | weights and logprobs are the same, and another token was chosen |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from forge.config import GeneratorConfig, Sampling, UpdateMode
from forge.envs.trace import path_to
from forge.errors import ReplayError
from forge.loops.replay.recorded import RecordedRun
from forge.loops.replay.session import Session
from forge.loops.replay.steps import Replayer, open_replayer
from forge.models.locate import resolve
from forge.rollout.agent_policies import continuation_seed
from forge.rollout.rollouter import group_seed, resumed_seed
from forge.types import Episode, Group, Turn, VersionSpan

if TYPE_CHECKING:
    from torch import Tensor

    from forge.generator.native.resampling import Resampler
    from forge.generator.native.sequences import SequenceState

Cause = Literal["record", "weights", "kernel", "sampling"]

_CLOSE: Final = 1e-3
"""How far the logprob of a token may be from the recorded one where other operations compute it: on a GPU, whose
results depend on the batch, and where a token that was not sampled is scored."""


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """The first token of a span that is not as it was recorded: its place in the turn, tokens and logprobs."""

    place: int
    cause: Cause
    recorded: tuple[int, float]
    sampled: tuple[int, float]


@dataclass(frozen=True, slots=True)
class SpanResult:
    """What sampling a span again found.

    Attributes:
        member: which episode of the group.
        turn: which turn of the episode.
        version: the weights.
        start, end: its tokens among those of the turn.
        num_same: tokens that are the same, before the first that is not.
        first: the first token that differs, or whose logprob does; None where there is none.
        max_gap: the largest difference of a logprob of the same token.
        is_compared: False where an earlier span of the turn differs: what follows other tokens is not comparable.
    """

    member: int
    turn: int
    version: int
    start: int
    end: int
    num_same: int = 0
    first: TokenDifference | None = None
    max_gap: float = 0.0
    is_compared: bool = True

    @classmethod
    def of(cls, episode: Episode, turn: Turn, span: VersionSpan) -> SpanResult:
        """Return a span of which nothing was compared yet."""
        return cls(episode.member, turn.index, span.version, span.start, span.end)

    @property
    def has_other_token(self) -> bool:
        """Whether another token was sampled."""
        return self.is_compared and self.num_same < self.end - self.start

    @property
    def is_same(self) -> bool:
        """Whether every token was sampled again, with the same logprob."""
        return self.is_compared and self.first is None


@dataclass(frozen=True, slots=True)
class Version:
    """One version of the weights, computed again."""

    number: int
    digest: str
    recorded: str | None
    tensors: Mapping[str, Tensor]

    @property
    def is_same(self) -> bool:
        """Whether it has the digest that the run published."""
        return self.recorded is None or self.digest == self.recorded


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What sampling a group again found: its number, the step that learned from it, its versions and its spans."""

    number: int
    step: int
    versions: tuple[Version, ...]
    spans: tuple[SpanResult, ...]
    tolerance: float

    @property
    def is_same(self) -> bool:
        """Whether the whole group was sampled again."""
        return all(span.is_same for span in self.spans)


async def resample_group(recorded: RecordedRun, number: int, **options: Any) -> GroupResult:
    """Sample a group again. `options` are those of `open_replayer`."""
    record = recorded.find_group(number)
    session = recorded.session_of(record.step)
    if session.config.generator.engine != "native":
        raise ReplayError(
            "groups of this run cannot be sampled again",
            path="generator.engine",
            value=session.config.generator.engine,
            rule="`native`: other engines do not give the same tokens for the same seed",
            repair="replay the step that learned from the group: --step",
        )
    group = next(group for group in record.groups if group.number == number)
    numbers = sorted({span.version for episode in group.episodes for turn in episode.turns for span in turn.versions})
    async with open_replayer(recorded, **options) as replayer:
        versions = [await _find_version(recorded, replayer, version) for version in numbers]
    altered = frozenset(each.member for each in record.altered if each.group == number)
    spans, tolerance = _resample(session, group, {version.number: version for version in versions}, altered=altered)
    return GroupResult(number, record.step, tuple(versions), tuple(spans), tolerance)


async def _find_version(recorded: RecordedRun, replayer: Replayer, number: int) -> Version:
    """Compute the weights of a version again: those of a checkpoint, or trained from one."""
    from forge.store import Weights

    start = recorded.starts.get(number) or recorded.start_of(number)
    if start is None:
        raise ReplayError(
            "the weights that sampled this group cannot be computed again",
            path="--group",
            value=f"version {number}",
            rule=f"a checkpoint, or a step that can be replayed: {recorded.describe_window()}",
            repair="choose a group of a later step",
        )
    if not replayer.is_running or not start.step <= replayer.at <= number:
        await replayer.begin(start)
    while replayer.at < number:
        found = await replayer.step()
        if found.weights is None:
            raise ReplayError(
                f"the record of step {found.step} was changed: {found.differences[0]}",
                path="--group",
                value=f"version {number}",
                rule="the steps before it are recorded as they were trained",
                repair=f"forge replay {recorded.folder} --step {found.step} says what was changed",
            )
    fetched = await Weights(replayer.weights_name).fetch(version=number)
    tensors = {name: tensor.clone() for name, tensor in fetched.tensors.items()}
    digest = fetched.digest
    fetched.release()
    return Version(number, digest, recorded.weights_after(number), tensors)


# ---- Sampling ---------------------------------------------------------------------------------------------------


def _resample(
    session: Session, group: Group, versions: Mapping[int, Version], *, altered: frozenset[int]
) -> tuple[list[SpanResult], float]:
    import torch

    from forge.generator.native.resampling import Resampler
    from forge.loops.run_paths import load_tokenizer

    config, model = session.config, resolve(session.config.model)
    made = GeneratorConfig.of(model.architecture, config.generator, adapter=config.adapter)
    tokenizer = load_tokenizer(model, chat_template=config.generator.chat_template, purpose="sampling a group again")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(config.generator.num_threads or 1)
    try:
        resampler = Resampler(made, model, tokenizer)
        tolerance = _CLOSE if resampler.is_on_gpu else 0.0
        sampling = config.generator.sampling
        if group.temperature is not None:  # which may have changed while the run ran
            sampling = sampling.model_copy(update={"temperature": group.temperature})
        comparing = _Comparing(session, resampler, versions, sampling, tolerance=tolerance, altered=altered)
        found = [
            span
            for episode in group.episodes
            for turn in episode.turns
            if turn.versions
            for span in comparing.turn(group.number, episode, turn)
        ]
    finally:
        torch.set_num_threads(num_threads)
    return found, comparing.tolerance


@dataclass(frozen=True, slots=True)
class _Comparing:
    """Samples turns again, one after the other, and compares them with the recorded ones."""

    session: Session
    resampler: Resampler
    versions: Mapping[int, Version]
    sampling: Sampling
    tolerance: float
    altered: frozenset[int]
    """The members whose record was changed."""

    def turn(self, number: int, episode: Episode, turn: Turn) -> list[SpanResult]:
        """Return what was found of each span of a turn."""
        config = self.session.config
        prompt = (*_before(episode, turn), *turn.context_ids)
        is_episode = bool(episode.stats)
        seed = turn.seed if is_episode else group_seed(config.run.seed, number)
        index = 0 if is_episode else episode.member
        sampling = self.sampling.model_copy(update={"seed": seed})
        mode = config.generator.update.mode
        found: list[SpanResult] = []
        sequence: SequenceState | None = None
        offset = 0
        for place, span in enumerate(turn.versions):
            self._load(span.version, mode="recompute" if not place or mode == "abort" else mode)
            if sequence is None:
                sequence = self.resampler.start(prompt, sampling=sampling, index=index)
            elif mode == "abort":
                offset = span.start
                later = _resumed(sampling, index, offset, is_episode=is_episode)
                sequence = self.resampler.start((*prompt, *turn.token_ids[:offset]), sampling=later, index=0)
            self.resampler.run(sequence, num_tokens=span.end - offset)
            found.append(self._compared(sequence, SpanResult.of(episode, turn, span), turn, offset=offset))
            if found[-1].has_other_token:
                found[-1] = self._explained(found[-1], prompt, turn)
                left = [SpanResult.of(episode, turn, later) for later in turn.versions[place + 1 :]]
                found += [replace(each, is_compared=False) for each in left]
                break
        self.resampler.stop()
        return found

    def _load(self, version: int, *, mode: UpdateMode) -> None:
        self.resampler.update_weights(self.versions[version].tensors, version=version, mode=mode)

    def _compared(self, sequence: SequenceState, span: SpanResult, turn: Turn, *, offset: int) -> SpanResult:
        """Compare the tokens of a span, up to the first that differs. `offset` is the turn's token that `sequence`
        starts with."""
        assert sequence.row is not None
        cause: Cause = "kernel" if self.versions[span.version].is_same else "weights"
        cause = "record" if span.member in self.altered else cause
        first, gap = None, 0.0
        for place in range(span.start, span.end):
            recorded = (turn.token_ids[place], turn.logprobs[place])
            sampled = (-1, math.nan)  # it ended before
            if place - offset < len(sequence.row.token_ids):
                sampled = (sequence.row.token_ids[place - offset], sequence.logprobs[place - offset])
            is_same = sampled[0] == recorded[0]
            if is_same:
                gap = max(gap, abs(sampled[1] - recorded[1]))
            if first is None and not (is_same and abs(sampled[1] - recorded[1]) <= self.tolerance):
                first = TokenDifference(place, cause, recorded, sampled)
            if not is_same:
                return replace(span, num_same=place - span.start, first=first, max_gap=gap)
        return replace(span, num_same=span.end - span.start, first=first, max_gap=gap)

    def _explained(self, found: SpanResult, prompt: Sequence[int], turn: Turn) -> SpanResult:
        """Return a span with the cause of its difference: it is sampling where the model gives the recorded token the
        recorded logprob, and gave all tokens before it theirs."""
        place = found.start + found.num_same
        assert found.first is not None
        if found.first.cause != "kernel" or found.first.place < place:
            return found
        self.resampler.stop()
        tokens = (*prompt, *turn.token_ids[: place + 1])
        score = self.resampler.score(tokens, temperature=self.sampling.temperature)[-1]
        is_close = abs(score - turn.policy_logprobs[place]) <= _CLOSE
        cause: Cause = "sampling" if is_close else "kernel"
        return replace(found, first=replace(found.first, cause=cause))


def _resumed(sampling: Sampling, index: int, num_tokens: int, *, is_episode: bool) -> Sampling:
    """Return how a completion was continued that an update had cut short after so many tokens."""
    seed = sampling.seed or 0
    later = continuation_seed(seed, num_tokens) if is_episode else resumed_seed(seed, index, num_tokens)
    left = None if sampling.max_tokens is None else sampling.max_tokens - num_tokens
    return sampling.model_copy(update={"seed": later, "max_tokens": left, "min_tokens": 0})


def _before(episode: Episode, turn: Turn) -> list[int]:
    """Return the tokens before a turn's own context."""
    return [token for each in path_to(episode.turns, turn.parent) for token in (*each.context_ids, *each.token_ids)]
