"""`forge env check` finds sandboxes that episodes leave open, and none where they close them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

import forge
from forge import Agent, Task
from forge.envs.check import check_env
from forge.envs.check_records import Check
from forge.envs.environment import as_program
from forge.runtime.sandbox import survey

pytestmark = pytest.mark.usefixtures("leaves_nothing")
TASKS = [Task("task", messages=({"role": "user", "content": "Hi"},))]


@pytest.fixture(scope="module", autouse=True)
def needs_a_boundary() -> None:
    findings = survey()[:2]
    if not any(finding.works for finding in findings):
        pytest.skip("; ".join(f"{finding.isolation}: {finding.detail}" for finding in findings))


def leaks_of(program: Any, kept: AsyncExitStack, *, grace_s: float) -> Check:
    """Check a program, then close what it left open in `kept`."""

    async def check() -> Check:
        async with kept:
            report = await check_env(as_program(program, name="program"), TASKS, grace_s=grace_s)
        (found,) = [each for each in report.checks if each.name == "leaks"]
        return found

    return asyncio.run(asyncio.wait_for(check(), 600))


def test_a_sandbox_that_is_closed_is_no_leak() -> None:
    async def tidy(task: Task, agent: Agent) -> float:
        async with forge.sandbox() as box:
            await agent.generate(task.messages)
            return float((await box.bash("true")).exit_code == 0)

    found = leaks_of(tidy, AsyncExitStack(), grace_s=60.0)
    assert (found.status, found.detail) == ("pass", ())


def test_a_sandbox_that_stays_open_is_named() -> None:
    kept = AsyncExitStack()

    async def untidy(task: Task, agent: Agent) -> float:
        await kept.enter_async_context(forge.sandbox())
        await agent.generate(task.messages)
        return 0.0

    found = leaks_of(untidy, kept, grace_s=0.2)
    assert found.status == "fail"
    assert any(line.startswith("sandbox: Box(") for line in found.detail), found.detail
