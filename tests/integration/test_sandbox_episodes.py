"""Episodes that use a real sandbox: tools of an agent, faults, grading apart from the policy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import forge
from forge.envs.agent import Agent
from forge.envs.episode import episode, run_episode
from forge.envs.limits import Fault
from forge.envs.sandbox import SandboxTools, grade_in_fresh_sandbox
from forge.errors import LaunchError, OptionError
from forge.models.tiny import make_tiny
from forge.models.tokenizer import ChatTokenizer
from forge.runtime.sandbox import SandboxLimits, survey
from forge.types import Task
from sandboxes import launcher_server
from scripted_policy import END, ScriptedPolicy, state_of

pytestmark = pytest.mark.usefixtures("leaves_nothing")

LIMITS = SandboxLimits(wall_s=200)


@pytest.fixture(scope="module", autouse=True)
def needs_a_boundary() -> None:
    findings = survey()[:2]
    if not any(finding.works for finding in findings):
        pytest.skip("; ".join(f"{finding.isolation}: {finding.detail}" for finding in findings))


def use(body: Callable[[SandboxTools], Awaitable[Any]], **options: Any) -> Any:
    async def inside() -> Any:
        async with asyncio.timeout(500), forge.sandbox(**{"limits": LIMITS, **options}) as box:
            return await body(box)

    return asyncio.run(inside())


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_coding_episode(tmp_path: Path) -> None:
    make_tiny(tmp_path / "model", num_layers=1, hidden_size=32, intermediate_size=32)
    codec = ChatTokenizer.load(tmp_path / "model")
    wrong = call("write_file", path="square.py", text="def square(x): return x + x\n")
    right = call("write_file", path="square.py", text="def square(x): return x * x\n")
    run = call("bash", command="python3 -c 'import square; print(square.square(3))'")
    policy = ScriptedPolicy(codec, [wrong + run + END, right + run + END, f"It works.{END}"])
    tests = {"test_square.py": "from square import square\nassert square(5) == 25\nprint('all passed')\n"}

    @episode
    async def solve(task: Task, agent: Agent) -> None:
        async with forge.sandbox(limits=LIMITS) as box:
            await agent.run_tools(task.messages, tools=[box.bash, box.write_file])
            graded = await grade_in_fresh_sandbox(
                await box.files(), "python3 test_square.py", tests=tests, limits=LIMITS
            )
            agent.add_reward(float(graded.exit_code == 0 and graded.output == "all passed\n"), name="tests")

    done = asyncio.run(run_episode(solve, state_of(policy)))
    assert (done.score.reward, done.counts.num_tool_calls, dict(done.counts.tool_errors)) == (1.0, 4, {})
    assert "6" in codec.decode(policy.prompts[1])
    assert "9" in codec.decode(policy.prompts[2])


def test_the_policy_does_not_reach_the_grader() -> None:
    hostile = {
        "solution.py": "def f(): return 1\n",
        "test.py": "print('all passed')\n",
        "json.py": "import os; os._exit(0)\n",
        "check/x": "in the way of a file of the grader",
        "data": "in the way of a folder of the grader",
    }
    tests = {"test.py": "import json, solution\nassert solution.f() == 2, 'wrong'\n", "check": "1", "data/x": "2"}

    async def body(box: SandboxTools) -> None:
        await box.put(hostile)
        await box.bash("(while :; do cp json.py solution.py; done) & sleep 0")
        graded = await grade_in_fresh_sandbox(
            await box.files(), "cat check data/x; ls; python3 test.py", tests=tests, only=["solution.*"], limits=LIMITS
        )
        assert graded.output.startswith("12check\ndata\nsolution.py\ntest.py\n"), graded
        tampered = await grade_in_fresh_sandbox(hostile, "python3 test.py", tests=tests, limits=LIMITS)
        assert tampered.exit_code == 0, "why `only` exists"
        honest = await grade_in_fresh_sandbox(
            hostile, "python3 test.py", tests=tests, only=["solution.py"], limits=LIMITS
        )
        assert (honest.exit_code, "AssertionError: wrong" in honest.output) == (1, True)

    use(body)


def test_a_folder_that_the_policy_filled_can_be_graded() -> None:
    small = SandboxLimits(wall_s=200, folder_bytes=2 * 1024**2)

    async def body(box: SandboxTools) -> None:
        await box.bash("for i in $(seq 300); do mkdir d$i; echo >d$i/f; done; cat /dev/zero >full")
        files = await box.files()
        assert len(files) == 301
        graded = await grade_in_fresh_sandbox(
            files, "cat t; ls | wc -l", tests={"t": "x" * 100_000 + "\n"}, limits=small
        )
        assert graded.output.endswith("x\n302\n")

    use(body, limits=small)


def test_a_fork_has_the_files_alone() -> None:
    async def body(box: SandboxTools) -> None:
        await box.bash("echo one >a; export X=1; cd /; sleep 1000 &")
        await box.python("y = 1")
        async with box.fork() as other:
            assert (
                await other.bash("cat a; echo $X $PWD; cat /proc/[0-9]*/comm | grep -c sleep")
            ).output == "one\n/sandbox\n0\n"
            assert "NameError" in str(await other.python("y"))
            await other.write_file("a", "two")
            assert await box.read_file("a") == "one\n"
            async with other.fork() as third:
                assert await third.files() == {"a": "two"}

    use(body)


def test_a_sandbox_that_dies_is_a_fault() -> None:
    async def body(box: SandboxTools) -> None:
        await box.bash("true")
        server = launcher_server()
        for launcher in server.children():
            launcher.kill()
        with pytest.raises(Fault) as caught:
            await box.bash("sleep 1000")
        assert caught.value.kind == "sandbox_died"

    use(body)


def test_starting_again_after_the_server_was_killed() -> None:
    async def body(box: SandboxTools) -> None:
        server = launcher_server()
        server.kill()
        server.wait(60)
        assert (await box.bash("echo alive")).output == "alive\n", "what it forked continues"
        async with box.fork() as other:
            assert (await other.bash("echo new")).output == "new\n"

    use(body)


def test_an_error_in_the_block_still_closes_it() -> None:
    async def body(box: SandboxTools) -> None:
        await box.bash("sleep 1000 &")
        raise KeyError("of the program")

    with pytest.raises(KeyError, match="of the program"):
        use(body)


def test_a_cancelled_episode_closes_its_sandbox() -> None:
    before = set(psutil.Process().children())

    async def main() -> None:
        started = asyncio.Event()

        async def program() -> None:
            async with forge.sandbox(limits=LIMITS) as box:
                await box.bash("sleep 1000 &")
                started.set()
                await box.bash("sleep 1000")

        running = asyncio.create_task(program())
        await started.wait()
        below = [each for each in psutil.Process().children(recursive=True) if each not in before]
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert psutil.wait_procs(below, timeout=60)[1] == []

    asyncio.run(main())


def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    async def program() -> None:
        async with forge.sandbox(limits=LIMITS):
            await asyncio.Event().wait()

    async def main() -> None:
        async with forge.sandbox(limits=LIMITS) as box:
            server = launcher_server()
            before = server.children()
            for num_steps in range(12):
                starting = asyncio.create_task(program())
                for _ in range(num_steps):
                    await asyncio.sleep(0)
                starting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await starting
            async with forge.sandbox(limits=LIMITS):  # by now every start before has been seen
                pass
            others = [each for each in server.children() if each not in before]
            _, left = await asyncio.to_thread(psutil.wait_procs, others, timeout=600)
            assert left == []
            assert (await box.bash("echo alive")).output == "alive\n"

    asyncio.run(main())


def test_what_cannot_be_opened_says_so() -> None:
    async def body(box: SandboxTools) -> None:
        raise AssertionError("it is not opened")

    with pytest.raises(OptionError, match="no isolation"):
        use(body, isolation="docker")
    with pytest.raises((OptionError, LaunchError)):
        use(body, python="/no/such/python")
