"""The programs of the guide on agents over HTTP: OpenAI's clients, in this process and in one of their own."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from chat_templates import THINKING, chatml_folder
from forge.envs.episode import run_episode
from forge.envs.trace import rows_of
from forge.models.tokenizer import ChatTokenizer
from forge.types import Task
from scripted_policy import END, ScriptedPolicy, state_of

PAGE = Path(__file__).resolve().parents[2] / "docs/guides/agents_endpoint.md"
TASK = Task("product", messages=({"role": "user", "content": "What is 6 x 7?"},), answer="42")
CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>' + END


@pytest.fixture(scope="module")
def programs() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.load(chatml_folder(tmp_path_factory.mktemp("thinking") / "model", THINKING))


@pytest.mark.parametrize(
    ("name", "answers"),
    [("solve", [CALL, f"It is 42.{END}"]), ("run_program", [f"It is 42.{END}"]), ("solve_greedily", [f"42{END}"])],
)
def test_the_programs_of_the_guide_run(
    programs: dict[str, Any],
    codec: ChatTokenizer,
    name: str,
    answers: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    async def my_agent(task: Task, *, base_url: str, api_key: str) -> float:
        import openai

        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            messages: Any = list(task.messages)
            found = await client.chat.completions.create(model="m", messages=messages, temperature=0.0, seed=1)
        return float(found.choices[0].message.content == task.answer)

    programs["my_agent"] = my_agent
    policy = ScriptedPolicy(codec, answers)

    async def main() -> Any:
        async with asyncio.timeout(300):
            return await run_episode(programs[name], state_of(policy, task=TASK))

    done = asyncio.run(main())
    assert done.score.reward == 1.0
    (row,) = rows_of(done.turns)
    assert row.token_ids == policy.prompts[-1] + done.turns[-1].token_ids
    assert (len(done.turns), done.counts.num_undelivered) == (len(answers), 0)
