"""Programs that are agents, and their graders."""

from __future__ import annotations

from typing import Any

from forge.envs.programs import ProgramRun
from forge.types import Task

PLAIN = """
import json, os, sys, urllib.request

def ask(messages, **options):
    body = json.dumps({"model": "policy", "messages": messages, **options}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]
"""
"""How a program without any library asks."""

DIALOGUE = (
    PLAIN
    + """
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(int(sys.argv[2])):
    answer = ask(messages)
    messages += [answer, {"role": "user", "content": "Again?"}]
print(answer["content"])
with open("answer.txt", "w") as file:
    file.write(answer["content"])
"""
)
"""Asks a few times, and says and writes what it was told last."""


async def right(task: Task, run: ProgramRun) -> dict[str, float]:
    """Whether the answer is right, and whether it was written."""
    return {"right": float(task.answer in run.stdout), "written": 0.5 * ("answer.txt" in run.files)}


def even(task: Task, run: ProgramRun) -> float:
    """A reward that differs between the members of a group."""
    return float(len(run.stdout) % 2 == 0)


def settings(**changes: Any) -> dict[str, Any]:
    """Arguments of the episode for the dialogue."""
    own = {"command": ["python3", "agent.py", "{prompt}", "2"], "files": {"agent.py": DIALOGUE}, "timeout_s": 300.0}
    return {**own, **changes}
