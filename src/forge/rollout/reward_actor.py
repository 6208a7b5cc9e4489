"""`RewardActor`: what completions earn."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forge.config.rewards import OverlongConfig, RewardConfig, RewardsConfig
from forge.errors import ConfigError
from forge.observe import span
from forge.observe.fault_records import record_fault
from forge.rewards import is_served, judge_messages, judge_score, model_score
from forge.rollout.reward_worker_main import as_number, explain
from forge.rollout.reward_workers import RewardFailed, RewardWorkers, pack
from forge.runtime.endpoints import endpoint
from forge.service.actor import ForgeActor
from forge.types import Completion, Score, Task

if TYPE_CHECKING:
    from forge.generator.actor import Generator
    from forge.rollout.reward_model import RewardModel
    from forge.service import Service

_log = logging.getLogger("forge.rollout")

OVERLONG = "overlong"
"""The part of a score that the punishment of long completions is."""


class RewardActor(ForgeActor):
    """Scores completions: all rewards of all completions at once, over worker processes and services.

    Example:
        >>> rewards = await RewardActor.options(num_replicas=2).as_service(config.rewards)
        >>> scores = await rewards.score.route(prompt, completions)

    A reward that fails, returns no finite number, takes too long or ends its process never raises here: the score says
    so in `failures`, and that part is 0. The caller decides what follows from a failure.
    """

    def __init__(
        self,
        config: RewardsConfig,
        judge: Service[Generator] | None = None,
        reward_model: Service[RewardModel] | None = None,
    ) -> None:
        self.config = config
        self._judge, self._reward_model = judge, reward_model
        self._workers: RewardWorkers | None = None
        self._num_scored = 0
        self._num_failures: Counter[str] = Counter()

    @endpoint
    async def setup(self) -> None:
        """Start the worker processes; a function that cannot be imported raises."""
        services = {"judge": self._judge, "reward_model": self._reward_model}
        for index, function in enumerate(self.config.functions):
            if is_served(function.kind) and services[function.kind] is None:
                raise ConfigError(
                    f"no service answers the reward {function.label!r}",
                    path=f"rewards.functions[{index}].kind",
                    value=function.kind,
                    rule=f"RewardActor needs the service that is its argument `{function.kind}`",
                    repair=f"set rewards.{function.kind}, or remove the reward",
                )
        local = [function for function in self.config.functions if not is_served(function.kind)]
        self._places = {function.label: place for place, function in enumerate(local)}
        if local:
            self._workers = RewardWorkers(local, num_workers=self.config.num_workers)
            await self._workers.start()

    @endpoint(concurrent=True)
    async def close(self) -> None:
        """End the worker processes. They also end with this process, however it ends."""
        if self._workers is not None:
            await self._workers.close()

    @endpoint(retry=True, concurrent=True)
    async def score(self, prompt: Task, completions: Sequence[Completion]) -> list[Score]:
        """The score of each completion, in order. Never raises for a reward that fails."""
        with span("score", prompt=prompt.id, num_completions=len(completions)):
            return list(await asyncio.gather(*(self._score(prompt, completion) for completion in completions)))

    @endpoint(retry=True, concurrent=True)
    async def stats(self) -> dict[str, Any]:
        """Since this process began: `num_scored` completions; `num_failures` by reward; `num_killed` worker processes
        that took too long, `num_lost` that died; `worker_pids`, the processes that are up."""
        workers = self._workers
        return {
            "num_scored": self._num_scored,
            "num_failures": dict(self._num_failures),
            "num_killed": 0 if workers is None else workers.num_killed,
            "num_lost": 0 if workers is None else workers.num_lost,
            "worker_pids": [] if workers is None else workers.pids,
        }

    async def _score(self, prompt: Task, completion: Completion) -> Score:
        payload = pack(prompt, completion) if self._workers is not None else b""
        functions = self.config.functions
        answers = await asyncio.gather(
            *(self._part(function, prompt, completion, payload=payload) for function in functions)
        )
        parts: dict[str, float] = {}
        failures: dict[str, str] = {}
        for function, answer in zip(functions, answers, strict=True):
            parts[function.label] = answer if isinstance(answer, float) else 0.0
            if isinstance(answer, RewardFailed):
                failures[function.label] = answer.message
                self._count(function.label, prompt, answer)
        reward = sum(function.weight * parts[function.label] for function in functions)
        unshaped = sum(function.weight * parts[function.label] for function in self.config.task_functions)
        if self.config.overlong is not None:
            parts[OVERLONG] = overlong_part(len(completion), self.config.overlong)
            reward += parts[OVERLONG]
        self._num_scored += 1
        return Score(reward, parts, failures, unshaped=unshaped)

    def _count(self, name: str, prompt: Task, failure: RewardFailed) -> None:
        self._num_failures[name] += 1
        number = self._num_failures[name]
        if number & (number - 1) == 0:  # the first, second, fourth, eighth, …: seen, and never a flood
            text = f"the reward {name} failed for prompt {prompt.id} (failure {number} of it)"
            _log.warning("%s: %s", text, failure.message)
            record_fault("reward", failure.message, where=text, trace=failure.traceback)

    async def _part(
        self, function: RewardConfig, prompt: Task, completion: Completion, *, payload: bytes
    ) -> float | RewardFailed:
        """The reward, or why there is none."""
        try:
            if function.kind == "judge":
                return await self._ask_judge(function, prompt, completion)
            if function.kind == "reward_model":
                return await self._ask_model(function, prompt, completion)
            assert self._workers is not None
            place = self._places[function.label]
            return await self._workers.call(place, payload=payload, timeout_s=function.timeout_s)
        except RewardFailed as failure:
            return failure
        except Exception as error:  # noqa: BLE001 - a service that failed is a reward that failed
            return RewardFailed(explain(error), traceback="".join(traceback.format_exception(error)))

    async def _ask_judge(self, function: RewardConfig, prompt: Task, completion: Completion) -> float:
        judge = self._judge
        assert judge is not None  # see setup
        messages = judge_messages(prompt, completion, **function.args)
        answers = await judge.generate.options(timeout_s=function.timeout_s).route(messages=messages, n=1)
        score = judge_score(answers[0].text, scale=function.args.get("scale", 10))
        if score is None:
            raise RewardFailed(f"the judge gave no score; it ended with {answers[0].text[-200:]!r}")
        return score

    async def _ask_model(self, function: RewardConfig, prompt: Task, completion: Completion) -> float:
        model = self._reward_model
        assert model is not None  # see setup
        asked: str | list[Any] = prompt.text + completion.text if prompt.text is not None else [
            *prompt.messages, {"role": "assistant", "content": completion.text}
        ]  # fmt: skip
        number = await model.score.options(timeout_s=function.timeout_s).route(asked)
        return as_number(model_score(number, **function.args))


def overlong_part(num_tokens: int, config: OverlongConfig) -> float:
    """The soft punishment of DAPO (arXiv 2503.14476, equation 13): 0 up to max_tokens - buffer, from there falling in a
    line to -penalty at max_tokens, and -penalty beyond."""
    excess = num_tokens - (config.max_tokens - config.buffer)
    return 0.0 - config.penalty * min(max(excess / config.buffer, 0.0), 1.0)
