"""How good a policy is on prompts that it does not learn from."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from forge.config import EvaluationConfig, Sampling
from forge.envs.limits import Fault
from forge.errors import ActorFailure, CallTimeout, ConfigError, EngineDead, PromptError
from forge.loops.evals.statistics import pass_at_k
from forge.loops.waits import Waits, Work
from forge.observe import span
from forge.observe.notebook.results import evaluation_facts, table_html
from forge.rollout.episode_source import EpisodeSource
from forge.rollout.rollouter import Policy, ScoreFunction, group_seed
from forge.types import Episode, Group, Score, Task

if TYPE_CHECKING:
    from forge.data.prompts import PromptDataset
    from forge.loops.planning import GRPOPlan
    from forge.loops.workers import Workers

_log = logging.getLogger("forge.grpo")

MAX_TRIES = 4
"""How often a prompt is asked while processes that work on it die."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        num_prompts: how many prompts were answered.
        reward: the mean reward of all completions.
        solved: the part of completions that are solved (avg@k).
        pass_at: for k = 1, 2, 4 … up to the number of samples: how likely at least one of k is solved (pass@k).
        length: tokens of a completion, on average.
        num_failed: completions of which a reward failed.
        faults: the faults of its episodes, by kind; they were run again.
    """

    num_prompts: int
    reward: float
    solved: float
    pass_at: Mapping[int, float]
    length: float
    num_failed: int = 0
    faults: Mapping[str, int] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it; `read` is the inverse."""
        return {**asdict(self), "pass_at": {str(k): value for k, value in self.pass_at.items()}}

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Evaluation:
        return cls(**{**fields, "pass_at": {int(k): value for k, value in fields["pass_at"].items()}})

    def values(self) -> dict[str, float]:
        """Return the metrics under the names that sinks and the report know."""
        most = max(self.pass_at)
        metrics = {
            "evaluation/reward": self.reward,
            f"evaluation/avg@{most}": self.solved,
            "evaluation/length": self.length,
            "evaluation/num_prompts": float(self.num_prompts),
        }
        if self.num_failed:
            metrics["evaluation/num_failed"] = float(self.num_failed)
        if self.faults:
            metrics["evaluation/num_faults"] = float(sum(self.faults.values()))
            metrics |= {f"evaluation/faults/{kind}": float(count) for kind, count in self.faults.items()}
        return metrics | {f"evaluation/pass@{k}": value for k, value in self.pass_at.items()}

    def _repr_html_(self) -> str:
        return table_html(evaluation_facts(self.values()))


AttemptFunction = Callable[[int, Task], Awaitable[list[Episode]]]
"""Makes `num_samples` episodes of a held-out prompt, which is known by its place among them."""


def num_attempts(config: EvaluationConfig) -> int:
    """Return how often a prompt is attempted: once where all attempts would be the same."""
    return 1 if config.temperature == 0 else config.num_samples


def single_turn_attempts(
    config: EvaluationConfig, *, policy: Policy, score: ScoreFunction, sampling: Sampling
) -> AttemptFunction:
    """Return what asks the policy once for all completions of a prompt, always with the same seeds.

    `sampling` is that of rollouts; only temperature, number and seed differ.
    """
    changed = sampling.model_copy(update={"temperature": config.temperature, "n": num_attempts(config)})

    async def attempt(index: int, prompt: Task) -> list[Episode]:
        seeded = changed.model_copy(update={"seed": group_seed(0, index)})
        completions = await policy.generate(prompt, sampling=seeded)
        scores = await score(prompt, completions)
        return [Episode.single(prompt, *pair) for pair in zip(completions, scores, strict=True)]

    return attempt


def episode_attempts(config: EvaluationConfig, source: EpisodeSource) -> AttemptFunction:
    """Return what runs the episodes of a prompt, with seeds of their own, and compares them with each other."""

    async def attempt(index: int, task: Task) -> list[Episode]:
        return await source.evaluate(index, task, num_members=num_attempts(config))

    return attempt


class Evaluator:
    """Asks the held-out prompts, always with the same seeds.

    Args:
        config: the section `evaluation`.
        dataset: the held-out prompts.
        attempt: makes the episodes of one of them.
        at_once: how many prompts are under way at the same time.
        take_faults: returns the faults since its last call, by kind.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        *,
        dataset: PromptDataset,
        attempt: AttemptFunction,
        at_once: int,
        take_faults: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._config, self._dataset, self._attempt, self._take_faults = config, dataset, attempt, take_faults
        self._slots = asyncio.Semaphore(at_once)
        self.num_asked = 0
        """Prompts of the evaluation under way that are done with."""

    @property
    def num_prompts(self) -> int:
        return min(len(self._dataset), self._config.max_prompts or len(self._dataset))

    async def run(
        self,
        *,
        record: Callable[[Sequence[Group]], object] | None = None,
        on_asked: Callable[[], object] = lambda: None,
    ) -> Evaluation:
        """Ask every prompt once, `num_samples` times. `record` gets the answers, a group for each prompt; `on_asked` is
        called after each of them."""
        tasks: list[asyncio.Task[Group | None]] = []
        self._take_faults()  # of an evaluation that was ended
        self.num_asked = 0

        def note(task: asyncio.Task[Group | None]) -> None:
            self.num_asked += 1
            on_asked()

        with span("evaluation"):
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._ask(index)) for index in range(self.num_prompts)]
                    for task in tasks:
                        task.add_done_callback(note)
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
        answered = [found for task in tasks if (found := task.result()) is not None]
        if not answered:
            raise PromptError(
                "no held-out prompt can be answered",
                path="evaluation",
                value=f"{len(tasks)} prompts",
                rule="at least one prompt that a generator accepts",
                repair="the warnings before this say why each was refused; shorten them, or raise training.max_seq_len",
            )
        if record is not None:
            record(answered)
        return self._summed(answered)

    async def _ask(self, index: int) -> Group | None:
        """Return the answers to a prompt; None where no generator can answer it."""
        async with self._slots:
            prompt = self._dataset.read(index)
            for tries_left in reversed(range(MAX_TRIES)):
                try:
                    return Group(index, 0, tuple(await self._attempt(index, prompt)))
                except (PromptError, Fault) as error:
                    _log.warning("held-out prompt %s is left out: %s", prompt.id, error)
                    return None
                except (ActorFailure, EngineDead, CallTimeout) as error:
                    if not tries_left:
                        raise
                    _log.warning("held-out prompt %s is asked again: %s", prompt.id, error.message)
        raise AssertionError("the last try returns or raises")

    def _summed(self, asked: Sequence[Group]) -> Evaluation:
        flat = [episode for group in asked for episode in group.episodes]
        self._check_reward([episode.score for episode in flat])
        num_samples = len(asked[0].episodes)
        solved = [sum(self._is_solved(episode.score) for episode in group.episodes) for group in asked]
        ks = sorted({2**power for power in range(num_samples.bit_length())} | {num_samples})
        return Evaluation(
            num_prompts=len(asked),
            reward=math.fsum(episode.score.reward for episode in flat) / len(flat),
            solved=sum(solved) / len(flat),
            pass_at={k: math.fsum(pass_at_k(num_samples, right, k) for right in solved) / len(solved) for k in ks},
            length=sum(episode.num_tokens for episode in flat) / len(flat),
            num_failed=sum(bool(episode.score.failures) for episode in flat),
            faults=self._take_faults(),
        )

    def _check_reward(self, scores: Sequence[Score]) -> None:
        """Warn where no episode has the reward that decides: an episode's program names its rewards as it runs."""
        name = self._config.reward
        if name is not None and not any(name in score.parts for score in scores):
            known = ", ".join(sorted({each for score in scores for each in score.parts}))
            _log.warning("evaluation.reward is %r, but held-out episodes have only %s", name, known or "none")

    def _is_solved(self, score: Score) -> bool:
        name = self._config.reward
        return (score.reward if name is None else score.parts.get(name, 0.0)) >= self._config.solved_at - 1e-9


class RunEvaluations:
    """The evaluations of a run: one of a step at most.

    Args:
        evaluator: asks the held-out prompts; None where there are none.
        config: the section `evaluation`.
        waits: shows that one is under way, and has what cuts it short.
    """

    def __init__(self, evaluator: Evaluator | None, config: EvaluationConfig, *, waits: Waits) -> None:
        self._evaluator, self._config, self._waits = evaluator, config, waits
        self._found: list[Evaluation] = []
        self.step: int | None = None
        """The step that was evaluated last."""

    @property
    def first(self) -> Evaluation | None:
        return self._found[0] if self._found else None

    @property
    def last(self) -> Evaluation | None:
        return self._found[-1] if self._found else None

    def is_due(self, step: int) -> bool:
        """Whether there is anything to ask after this step that was not asked."""
        return self._evaluator is not None and self.step != step

    async def run(self, step: int, *, record: Callable[[Sequence[Group]], object]) -> Evaluation | None:
        """Evaluate after a step, and return what was found; None where the run is asked to end meanwhile."""
        evaluator = self._evaluator
        assert evaluator is not None
        count = lambda: (evaluator.num_asked, evaluator.num_prompts)  # noqa: E731
        work = Work("held-out prompts are evaluated", "evaluating", "first evaluation", count, "prompts")
        with self._waits.shown(work):
            found = await self._waits.stop.unless(evaluator.run(record=record, on_asked=self._waits.changed))
        if found is not None:
            self._found.append(found)
            self.step = step
        return found

    def of_step(self, step: int) -> Evaluation | None:
        """Return what was found after a step; None where it was not evaluated."""
        return self.last if self.step == step else None

    def has_reached_goal(self, step: int) -> bool:
        """Whether the evaluation after this step reached `evaluation.stop_at`."""
        goal, found = self._config.stop_at, self.of_step(step)
        return goal is not None and found is not None and found.solved >= goal

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the first evaluation and the last one."""
        kept = (*self._found[:1], *self._found[1:][-1:])
        return {"evaluated_step": self.step, "evaluations": [each.plain() for each in kept]}

    def restore(self, extra: Mapping[str, Any]) -> None:
        """Resume from what a checkpoint kept."""
        self.step = extra["evaluated_step"]
        self._found = [Evaluation.read(each) for each in extra["evaluations"]]


def make_evaluator(plan: GRPOPlan, workers: Workers, source: object) -> Evaluator | None:
    """Return the evaluator of a run; None where there are no held-out prompts. `source` makes the run's groups."""
    if plan.heldout is None:
        return None
    section = plan.config.evaluation
    take_faults: Callable[[], Mapping[str, int]] = dict
    if isinstance(source, EpisodeSource):
        attempt, take_faults = episode_attempts(section, source), source.take_evaluation_faults
    else:
        assert workers.rewards is not None
        score = workers.rewards.score.route
        attempt = single_turn_attempts(section, policy=workers.policy, score=score, sampling=plan.sampling)
    return Evaluator(
        section, dataset=plan.heldout, attempt=attempt, at_once=plan.prompts_at_once, take_faults=take_faults
    )


def check_evaluation(config: EvaluationConfig, reward_names: Sequence[str]) -> None:
    """Refuse an evaluation by a reward that is not computed."""
    if config.reward is not None and config.reward not in reward_names:
        raise ConfigError(
            "evaluation.reward does not name a reward of this run",
            path="evaluation.reward",
            value=config.reward,
            rule=f"one of {', '.join(reward_names)}",
            repair="name one of them, or null for the sum of all",
        )
