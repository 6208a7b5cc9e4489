"""`evaluate`: run the samples of an evaluation that are not there yet, and compute its figures."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forge.config import EpisodeLimits, EvalConfig, save
from forge.envs.limits import Fault
from forge.errors import ActorFailure, CallTimeout, ConfigError, EngineDead, EvalError, PromptError
from forge.loops.agents import check_evaluated_agents
from forge.loops.evals.record import (
    EvalRecord,
    check_record,
    open_record,
    stamped,
    task_order,
)
from forge.loops.evals.results import EvalResult, solved_by, summarize
from forge.loops.evals.settings import code_version, eval_settings
from forge.loops.evals.targets import EvalTarget, Started, find_target, program_of, start_target
from forge.loops.evals.tasks import EvalTasks, open_tasks
from forge.loops.run_paths import load_tokenizer
from forge.loops.showing import log_files
from forge.loops.worker_checks import eval_worker_errors
from forge.rewards import check as check_rewards
from forge.rollout.record import EpisodeLines, encode_line
from forge.runtime import run
from forge.trainer.checkpoint_folder import WriterLock
from forge.types import Episode

_log = logging.getLogger("forge.eval")

_FAULTS: Final = (Fault, ActorFailure, CallTimeout, EngineDead, PromptError)
_FIRST_WAIT_S: Final = 0.25
_MAX_MESSAGE: Final = 2_000


@dataclass(frozen=True, slots=True)
class EvalProgress:
    """How far an evaluation is.

    Attributes:
        num_done: samples that are scored, those of an earlier process included.
        num_total: samples in all.
        num_failed: samples that faults ended in this process as often as is allowed.
        solved: the part of scored samples that is solved; NaN where there is none yet.
    """

    num_done: int
    num_total: int
    num_failed: int
    solved: float


ProgressFunction = Callable[[EvalProgress], object]


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """An evaluation, decided and checked."""

    config: EvalConfig
    folder: Path
    target: EvalTarget
    tasks: EvalTasks
    settings: Mapping[str, Any]


async def evaluate(
    config: EvalConfig, *, overwrite: bool = False, on_progress: ProgressFunction | None = None
) -> EvalResult:
    """Run an evaluation as a configuration says, and return its figures. Everything that it starts is gone then.

    The folder is `run.output_dir`/`run.name`. Samples that are there already are not run again, so that the same call
    continues after a kill. A folder with samples of other settings raises `EvalError`, unless `overwrite`. Faults are
    retried `episode.max_retries` times; what is missing then is reported in the result, and tried again by the next
    call.
    """
    plan = await plan_eval(config, overwrite=overwrite)
    with _locked(plan.folder), log_files(plan.folder, config.run), _opened(plan, overwrite=overwrite) as record:
        save(config, plan.folder)
        work = _Work(plan, record, on_progress)
        try:
            if work.is_left:
                async with run(config.launcher), start_target(config, plan.target, folder=plan.folder) as started:
                    await work.run(started)
        finally:
            result = work.result()
            record.write_results(stamped(result.plain()))
    return result


async def plan_eval(config: EvalConfig, *, overwrite: bool = False) -> EvalPlan:
    """Work out an evaluation, and refuse whatever would fail later. Starts nothing and writes nothing."""
    _check_scoring(config)
    if config.eval.endpoint is None:
        for error in eval_worker_errors(config):
            raise error
    tasks = await asyncio.to_thread(open_tasks, config)
    target = await find_target(config)
    if target.model is not None:
        tokenizer = await asyncio.to_thread(
            load_tokenizer, target.model, chat_template=config.generator.chat_template, purpose="an evaluation"
        )
        if (config.episode.kind is not None or config.prompts.chat) and not tokenizer.has_chat_template:
            raise ConfigError(
                "the tokenizer has no chat template",
                path="generator.chat_template",
                value=None,
                rule="a file with a Jinja template, if the tokenizer has none",
                repair="set generator.chat_template=FILE, or prompts.chat=false for text to continue",
            )
    settings = eval_settings(config, tasks, target.facts)
    folder = config.run.output_dir / config.run.name
    if not overwrite:
        check_record(folder, settings)
    return EvalPlan(config, folder, target, tasks, settings)


def _check_scoring(config: EvalConfig) -> None:
    section = config.eval
    if config.episode.kind is not None:
        check_evaluated_agents(config, program_of(config))
        return
    limits = config.episode.limits.model_dump(exclude={"turn_timeout_s"})
    default = EpisodeLimits().model_dump()
    chosen = [key for key in config.episode.chosen_keys if key not in ("max_retries", "max_failed_groups", "limits")]
    chosen += [f"limits.{key}" for key, value in limits.items() if value != default[key]]
    if chosen:
        raise ConfigError(
            "keys of `episode` have no effect without a program",
            path=f"episode.{chosen[0]}",
            value=limits.get(chosen[0].removeprefix("limits."), getattr(config.episode, chosen[0], None)),
            rule="only with episode.kind",
            repair="name a program with --episode module:attribute, or remove it",
        )
    labels = [function.label for function in config.rewards.functions]
    if not labels:
        raise ConfigError(
            "nothing scores the answers",
            path="rewards.functions",
            value=(),
            rule="at least one reward, or a program",
            repair="give --reward KIND, --episode module:attribute, --run RUN, or --config FILE with rewards.functions",
        )
    check_rewards(config.rewards)
    if section.reward is not None and section.reward not in labels:
        raise ConfigError(
            "eval.reward does not name a reward of this evaluation",
            path="eval.reward",
            value=section.reward,
            rule=f"one of {', '.join(labels)}",
            repair="name one of them, or null for the sum of all",
        )
    if section.num_samples > 1 and config.generator.sampling.temperature == 0:
        raise ConfigError(
            "samples at temperature 0 would all be the same",
            path="eval.num_samples",
            value=section.num_samples,
            rule="1 with generator.sampling.temperature 0",
            repair="set a temperature, such as --temperature 1, or one sample",
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    lock = WriterLock(folder)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _opened(plan: EvalPlan, *, overwrite: bool) -> Iterator[EvalRecord]:
    record = open_record(plan.folder, plan.settings, overwrite=overwrite)
    try:
        yield record
    finally:
        record.close()


class _Work:
    """The samples that are left of an evaluation."""

    def __init__(self, plan: EvalPlan, record: EvalRecord, on_progress: ProgressFunction | None) -> None:
        self._plan, self._record, self._on_progress = plan, record, on_progress
        self._config = plan.config
        num_samples = plan.config.eval.num_samples
        self._left = [
            (index, sample)
            for index in plan.tasks.indices
            for sample in range(num_samples)
            if (index, sample) not in record.scores
        ]
        self._num_total = len(plan.tasks) * num_samples
        self._is_solved = solved_by(plan.config.eval)
        self._num_solved = sum(map(self._is_solved, record.scores.values()))
        self._last_faults: dict[tuple[int, int], str] = {}
        self._num_failed = self._num_failed_in_a_row = 0
        self._writing = asyncio.Lock()

    @property
    def is_left(self) -> bool:
        return bool(self._left)

    async def run(self, started: Started) -> None:
        """Run all samples that are left, `started.at_once` at the same time."""
        waiting = iter(self._left)
        lines = EpisodeLines(started.decode)
        self._report()

        async def work() -> None:
            for index, sample in waiting:  # shared by all: each sample is taken once
                await self._one(started, lines, index, sample)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(started.at_once, len(self._left))):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _one(self, started: Started, lines: EpisodeLines, index: int, sample: int) -> None:
        task = self._plan.tasks.read(index)
        max_retries = self._config.episode.max_retries
        for attempt in range(max_retries + 1):
            try:
                episode = await started.attempt(index, sample, task)
            except _FAULTS as error:
                kind = error.kind if isinstance(error, Fault) else _KINDS.get(type(error), "worker")
                self._note_fault(index, sample, kind, error.message)
                is_final = isinstance(error, PromptError) or kind == "prompt"
                if attempt == max_retries or is_final:
                    self._give_up(error.message)
                    return
                await asyncio.sleep(_FIRST_WAIT_S * 2**attempt)
                continue
            self._num_failed_in_a_row = 0
            async with self._writing:  # pieces of text are made on a thread: other samples go on meanwhile
                fields, line = await asyncio.to_thread(self._line, lines, index, sample, episode)
            score = self._record.add(fields, line)
            self._num_solved += self._is_solved(score)
            self._last_faults.pop((index, sample), None)
            self._report()
            return

    def _line(self, lines: EpisodeLines, index: int, sample: int, episode: Episode) -> tuple[Mapping[str, Any], bytes]:
        reported = episode.stats.get("num_sampled")
        num_tokens = episode.num_tokens if lines.has_tokens else None if reported is None else int(reported)
        place = {"step": self._plan.target.step, "group": index, "epoch": 0, "index": sample}
        fields = lines.fields(episode, {**place, "outcome": "evaluation", "reason": None, "num_tokens": num_tokens})
        return fields, encode_line(fields)

    def _note_fault(self, index: int, sample: int, kind: str, message: str) -> None:
        _log.warning("sample %d of task %d ended in a fault (%s): %s", sample, index, kind, message)
        text = message[:_MAX_MESSAGE]
        self._last_faults[index, sample] = f"{kind}: {text}"
        self._record.add_fault(index, sample, kind=kind, message=text)

    def _give_up(self, message: str) -> None:
        self._num_failed += 1
        self._num_failed_in_a_row += 1
        self._report()
        most = self._config.episode.max_failed_groups
        if self._num_failed_in_a_row >= most:
            raise EvalError(
                f"{most} samples in a row failed by faults; the last one: {message}",
                path="episode.max_failed_groups",
                value=most,
                rule=f"fewer than {most} in a row; faults so far: {self._record.num_faults}",
                repair="repair what the message names; then the same command continues",
            )

    def _report(self) -> None:
        if self._on_progress is not None:
            num_done = len(self._record.scores)
            solved = self._num_solved / num_done if num_done else math.nan
            self._on_progress(EvalProgress(num_done, self._num_total, self._num_failed, solved))

    def result(self) -> EvalResult:
        """Return the figures of what is done."""
        plan = self._plan
        return summarize(
            plan.config.eval,
            task_order(self._record.scores, plan.tasks.indices),
            plan.tasks.indices,
            folder=plan.folder,
            faults=self._record.num_faults,
            last_faults=self._last_faults,
            notes=_notes(plan),
            about={
                "target": dict(plan.target.facts),
                "indices": sorted(plan.tasks.indices),
                "settings": plan.settings,
                "code": code_version(),
                "counting": plan.config.eval.model_dump(
                    mode="json", include={"solved_at", "reward", "pass_at", "confidence", "allow_missing"}
                ),
                "time": time.time(),
                "is_complete": len(self._record.scores) >= self._num_total,
            },
        )


_KINDS: Final[Mapping[type[Exception], str]] = {PromptError: "prompt", EngineDead: "generator"}


def _notes(plan: EvalPlan) -> Sequence[str]:
    notes = list(plan.target.notes)
    if plan.tasks.dataset.num_skipped:
        notes.append(f"{plan.tasks.dataset.num_skipped} records of the sources cannot be read and are left out")
    return notes
