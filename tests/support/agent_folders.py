"""Folders of runs whose episodes are programs: turns with tools, branches, prefix breaks and lost answers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge.config import RecordConfig
from forge.observe import JsonlSink
from forge.rollout.record import RolloutRecorder
from forge.types import Episode, Group, MalformedCall, Score, Task, Timings, ToolCall, Turn, VersionSpan
from run_folders import END, decode, encode, rollout_values, trainer_logprobs, training_values

QUESTION = (
    {"role": "system", "content": "Use the tool lookup."},
    {"role": "user", "content": "What is 17 + 25?"},
)
RESULT = {"role": "tool", "tool_call_id": "call_0_0", "name": "lookup", "content": "it is 42"}


def make_turn(index: int, text: str, **changes: Any) -> Turn:
    """A turn whose history extends that of the turn before it, unless `changes` say otherwise."""
    ids = (*encode(text), END)
    before = index - 1 if index else None
    values: dict[str, Any] = {
        "index": index,
        "parent": before,
        "previous": before,
        "path": (),
        "messages": (),
        "context_ids": encode("add the tens"),
        "token_ids": ids,
        "logprobs": tuple(-0.1 * (place + 1) for place in range(len(ids))),
        "full_logprobs": None,
        "text": text,
        "finish_reason": "stop",
        "versions": (VersionSpan(index, 0, len(ids)),),
        "timings": Timings(total_s=0.25 * (index + 1)),
    }
    return Turn(**{**values, **changes})


def make_turns() -> tuple[Turn, ...]:
    """Five turns: a tool call; a malformed one; a new root; a fork of the first; an answer that was not delivered."""
    return (
        make_turn(0, "Let me check", messages=QUESTION, calls=(ToolCall("call_0_0", "lookup", {"sum": "17+25"}),)),
        make_turn(
            1, "wait", messages=(RESULT,), num_cached=12, calls=(MalformedCall("call_1_0", "{", "it has no end"),)
        ),
        make_turn(
            2,
            "The result is 42.",
            parent=None,
            messages=({"role": "user", "content": "Again?"},),
            context_ids=encode("<think> all of it again"),
            prefix_break="template",
        ),
        make_turn(3, "so 42", parent=0, previous=0, path=(0,), messages=(RESULT,)),
        make_turn(4, "carry one", path=(0,), finish_reason="length", is_delivered=False),
    )


def make_agent_groups(step: int, *, turns: Sequence[Turn] | None = None, group_size: int = 2) -> list[Group]:
    """One group of episodes with these turns."""
    task = Task(f"lookup:{step}", messages=QUESTION, answer="42")
    made = tuple(turns) if turns is not None else make_turns()
    num_tokens = sum(len(turn) for turn in made)
    stats = {"num_turns": 5.0, "num_sampled": float(num_tokens), "num_tool_calls": 2.0, "num_tool_errors": 1.0}
    stats |= {"num_prefix_breaks": 1.0, "prefix_breaks/template": 1.0, "tool_errors/malformed": 1.0, "seconds": 4.5}
    episodes = [
        Episode(
            task,
            made,
            Score(0.5 + index, {"right": 1.0 * index, "style": 0.5}),
            member=index,
            advantage=index - 0.5,
            token_advantages=tuple(index - 0.5 + turn.index for turn in made for _ in turn.token_ids),
            turn_rewards={0: 0.5},
            outcome="finished" if index else "turn_limit",
            stats=stats,
        )
        for index in range(group_size)
    ]
    return [Group(step - 1, 0, tuple(episodes))]


def write_agent_rollouts(folder: Path, steps: Sequence[int], *, turns: Sequence[Turn] | None = None) -> None:
    recorder = RolloutRecorder(folder / "rollouts", decode=decode, config=RecordConfig(), resume_step=None)
    for step in steps:
        groups = make_agent_groups(step, turns=turns)
        recorder.write(step, groups, trainer_logprobs(groups, seed=step))


def make_agent_run(folder: Path, *, num_steps: int = 3, turns: Sequence[Turn] | None = None) -> Path:
    """A run of episodes of several turns, with its metrics."""
    folder.mkdir(parents=True, exist_ok=True)
    chance, now = random.Random(3), [1_790_000_000.0]
    sink = JsonlSink(folder / "metrics.jsonl", clock=lambda: now[0])
    for step in range(1, num_steps + 1):
        now[0] += 1.0
        values = rollout_values(0.5, step, chance) | training_values(0.5, step / num_steps, chance)
        values |= {"episode/num_turns": 4.0 + step, "episode/num_tool_calls": 2.0, "episode/tools_s": 0.1}
        values |= {"episode/num_faults": 1.0, "episode/faults/server": 1.0, "episode/seconds": 3.0}
        values |= {"episode/outcome/finished": 0.75, "episode/outcome/turn_limit": 0.25}
        sink.write(step, values)
    sink.close()
    write_agent_rollouts(folder, range(1, num_steps + 1), turns=turns)
    return folder


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
