"""Our sides of `grpo_tools.py`: the program of an episode, and a process that trains on it in turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import forge
from forge import Agent, Task
from harness.grpo_ours import common_settings, say, time_split, train_in_turns
from harness.tools_plan import MAX_TURNS, ToolsPlan, is_right, open_box

SIDES = {
    "ours, 1 thread": ("placement=shared",),
    "ours, 2 threads": ("placement=shared", "distributed.num_threads=2"),
    "ours, asynchronous, staleness 1": ("placement=apart", "rollout.staleness=1"),
}
"""The first two are synchronous, with trainer and generator in one process. In the last they have a core each. Another
process runs the episodes."""


@forge.episode
async def look(task: Task, agent: Agent) -> float:
    """Open boxes with the tool, then answer. The reward is 1 for the right number, and 0 otherwise."""
    turn = await agent.run_tools(task.messages, tools=[open_box], max_turns=MAX_TURNS)
    return is_right(turn.text, str(task.answer))


def settings_of(plan: ToolsPlan, folder: Path, *, side: Sequence[str] = ()) -> list[str]:
    """Return the configuration of a run, as it would be written on the command line of `apps/grpo/main.py`."""
    return [
        *common_settings(plan, folder),
        "episode.kind=harness.tools_ours:look",
        f"generator.max_seq_len={plan.max_seq_len}",
        f"generator.sampling.temperature={plan.temperature}",
        *side,
        *plan.settings,
    ]


def serve(folder: Path, plan: ToolsPlan, name: str) -> None:
    """Train in turns until the measuring program has gone, then print how many turns the episodes had."""
    place = f"side{list(SIDES).index(name)}"
    metrics = train_in_turns(folder, plan, settings_of(plan, folder, side=SIDES[name]), place=place)
    say("done", times=time_split(metrics, plan), episodes=episode_means(metrics))


def episode_means(path: Path) -> dict[str, float]:
    """Return the means over steps of what episodes had: turns, tool calls, tokens sampled and observed."""
    from forge.observe import read_jsonl

    names = ("num_turns", "num_tool_calls", "num_tool_errors", "num_sampled", "num_observed", "num_prefix_breaks")
    lines = [line.values for line in read_jsonl(path) if "episode/num_turns" in line.values]
    return {name: statistics.mean(float(line[f"episode/{name}"]) for line in lines) for name in names}
