"""Whole runs of the embedded engine with and without steps that are launched ahead.

The engine's state is stepped by hand, on the real model. What is done between two steps is done at the same numbers of
steps in both runs, after `finish_launched`, as the engine's thread does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import generator_models as models
from forge.config import Sampling, UpdateMode
from forge.generator.engine import Request
from forge.generator.native.batching import Batching
from forge.generator.native.sequences import PendingRequest, ScoreJob
from forge.types import INITIAL_VERSION, Completion, Delta
from generator_models import FIRST, Kind, prompt

Do = Callable[["Run"], None]


@dataclass
class Told:
    """What was told about a request."""

    pending: PendingRequest
    answers: list[Any] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)


class Run:
    """A run of the engine, and all that was told in it."""

    def __init__(
        self, kind: Kind = FIRST, *, looks_ahead: bool | None, make: type[Batching] = Batching, **settings: Any
    ) -> None:
        torch.set_num_threads(1)
        self.batching = make(
            models.config(kind, **settings),
            models.model(kind),
            tokenizer=models.tokenizer(kind),
            max_seq_len=256,
            shared=None,
            send=lambda messages: [deliver(value) for deliver, value in messages],
        )
        self.batching.looks_ahead = looks_ahead
        self.version = INITIAL_VERSION
        self.told: dict[int, Told] = {}
        self.scores: dict[int, list[Any]] = {}
        self.times: list[int] = []
        self.num_cut = 0

    def ask(self, number: int, *, length: int = 20, is_streamed: bool = True, **sampling: Any) -> None:
        chosen = Sampling.model_validate({"seed": number, "max_tokens": 30, "ignore_eos": True} | sampling)
        answers: list[Any] = []
        deltas: list[Delta] = []
        asked = Request(str(number), prompt(length, number), chosen)
        pending = PendingRequest(asked, deliver=answers.append, deliver_delta=deltas.append if is_streamed else None)
        self.told[number] = Told(pending, answers, deltas)
        self.batching.enter(pending)

    def score(self, number: int, *, length: int = 30, is_urgent: bool = False) -> None:
        self.scores[number] = []
        deliver = self.scores[number].append
        self.batching.enter_score(ScoreJob(prompt(length, number), 1.0, deliver=deliver, is_urgent=is_urgent))

    def update(self, kind: Kind, mode: UpdateMode) -> None:
        while mode == "drain" and self.batching.scheduler.has_started:
            self.batching.step(self.version, admit=False)
        self.batching.finish_launched()
        self.batching.runner.update_weights(models.weights(kind))
        self.num_cut += self.batching.weights_updated(mode)
        self.version += 1

    def deliver(self) -> None:
        self.batching.flush()

    def sleep_and_wake(self) -> None:
        self.batching.release()
        self.batching.runners.restore()

    def go_on(self, plan: list[tuple[int, Do]], *, times: list[int] | None = None) -> None:
        """Do each thing that is planned so many steps after the one before, or at `times`; then go on to the end."""
        batching = self.batching
        for number, (num_more, do) in enumerate(plan):
            due = batching.counts.num_steps + num_more if times is None else times[number]
            while batching.counts.num_steps < due and not batching.scheduler.is_idle:
                batching.step(self.version)
            batching.finish_launched()
            assert not batching.is_ahead
            self.times.append(batching.counts.num_steps)
            do(self)
        while not batching.scheduler.is_idle:
            batching.step(self.version)
        assert not batching.is_ahead
        assert batching.scheduler.pool.num_held == 0
        batching.flush()

    def completions(self) -> dict[int, list[Completion] | str | None]:
        return {number: shown(told.answers) for number, told in self.told.items()}

    def deltas(self) -> dict[tuple[int, int], list[tuple[Any, ...]]]:
        """By request and completion, in their order."""
        found: dict[tuple[int, int], list[tuple[Any, ...]]] = {}
        for number, told in self.told.items():
            for each in told.deltas:
                shown = (each.token_ids, each.logprobs, each.text, each.version, each.completion is not None)
                found.setdefault((number, each.index), []).append(shown)
        return found


def shown(answers: list[Any]) -> Any:
    """A request's one answer, without times; None for one that was cancelled."""
    assert len(answers) <= 1
    if not answers:
        return None
    if isinstance(answers[0], BaseException):
        return type(answers[0]).__name__
    return [
        (
            each.index,
            each.token_ids,
            each.logprobs,
            each.full_logprobs,
            each.text,
            each.finish_reason,
            each.stop_reason,
            each.versions,
        )
        for each in answers[0]
    ]


def both(plan: list[tuple[int, Do]], kind: Kind = FIRST, **settings: Any) -> tuple[Run, Run]:
    """The same with and without; what is planned is done after the same numbers of steps."""
    ahead = Run(kind, looks_ahead=True, **settings)
    ahead.go_on(plan)
    plain = Run(kind, looks_ahead=False, **settings)
    plain.go_on(plan, times=ahead.times)
    assert (ahead.batching.counts.num_ahead > 0, plain.batching.counts.num_ahead) == (True, 0)
    assert ahead.completions() == plain.completions()
    assert ahead.deltas() == plain.deltas()
    assert ahead.scores == plain.scores
    return ahead, plain


def assert_same_figures(ahead: Run, plain: Run) -> None:
    figures = [each.batching.stats(each.version, is_asleep=False, num_open=0) for each in (ahead, plain)]
    for each in figures:
        each.more.pop("num_ahead")
    assert figures[0] == figures[1]
