"""verifiers: its environments play their tasks against the agent's endpoint, in a venv of their own.

Each episode runs in a process of its own, forked from one that has imported verifiers, which takes seconds. Whatever
the environment's agents ask the model becomes turns of the episode, in branches, with exactly the tokens that were
sampled; the environment's own rewards are the episode's. An environment that fails, crashes, hangs or gives no reward
is a `Fault`, unless a limit of the episode was the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import Field

from forge.envs.agent import Agent
from forge.envs.external.adapting import options_of, program_of
from forge.envs.external.hosted import HostedProcess, HostKind, HostOptions
from forge.errors import OptionError
from forge.types import Task

KIND: Final = HostKind("verifiers", module="verifiers")


class VerifiersOptions(HostOptions):
    """The arguments of the episode `verifiers`."""

    requirements: tuple[str, ...] = Field(
        default=("verifiers>=0.4,<0.5",), description="What pip installs into a venv of its own, once per machine."
    )
    start_limit_s: float = Field(default=300.0, gt=0, description="Seconds until the project must be imported.")
    config: Mapping[str, Any] = Field(
        description="The block `env` of a verifiers configuration: `{taskset: {id: my_taskset}, …}`."
    )
    chat: bool = Field(
        default=False,
        description="Whether agents that name no harness and runtime just talk, in the environment's process. "
        "Otherwise they have verifiers' defaults, which need an account and a network.",
    )
    model: str = Field(default="policy", description="What the environment calls the model.")
    sampling: Mapping[str, Any] = Field(default_factory=dict, description="Sampling parameters of its requests.")
    ignore: tuple[str, ...] = Field(default=(), description="Parameters of requests that have no effect.")
    allow: tuple[str, ...] = Field(default=(), description="Parameters of requests that replace the run's.")
    episode_timeout_s: float = Field(default=600.0, gt=0, description="Seconds that an episode may take.")


def _index_of(task: Task) -> int:
    index = task.metadata.get("index")
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise OptionError(
            "a task of verifiers is named by its index",
            path=f"task {task.id}: index",
            value=index,
            rule="a whole number of at least 0: the task's place in the taskset",
            repair='write records such as {"index": 0} into the prompt source',
        )
    return index


async def _play(task: Task, agent: Agent, **args: Any) -> None:
    options = options_of(VerifiersOptions, args)
    index = _index_of(task)
    process = HostedProcess(KIND, options)
    try:
        await process.start()
        async with agent.endpoint(allow=options.allow, ignore=options.ignore) as endpoint:
            reply = await process.ask(
                "run",
                limit_s=options.episode_timeout_s,
                config=options.model_dump(mode="json")["config"],
                index=index,
                base_url=endpoint.base_url,
                api_key=endpoint.api_key,
                model=options.model,
                sampling=dict(options.sampling),
                chat=options.chat,
            )
            if process.flag_in(reply, "ok"):
                rewards = reply.get("rewards")
                if not isinstance(rewards, dict) or not rewards:
                    raise process.violation("rewards: expected at least one", reply)
                for name in rewards:
                    agent.add_reward(process.number_in(rewards, name), name=name)
            elif endpoint.over is not None:
                raise endpoint.over
            elif not endpoint.has_failed:  # otherwise the endpoint raises the policy's fault
                refused = "" if endpoint.last_refusal is None else f"; a request was refused: {endpoint.last_refusal}"
                raise process.fault(f"failed: {reply.get('errors')}{refused}", "error")
    finally:
        await process.close()


verifiers_episode = program_of(_play, VerifiersOptions, "verifiers_episode")
"""Plays a task of a verifiers environment; arguments as `VerifiersOptions`. The task's metadata has its `index`."""
