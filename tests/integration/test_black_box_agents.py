"""Programs as agents, in a real sandbox: tokens, rewards, outcomes, faults, and what keeps them apart."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import forge
from black_box_programs import PLAIN, even, settings
from chat_templates import THINKING, chatml_folder
from foreign_packages import MINI_SWE_AGENT, OPENAI_AGENTS
from forge.config import EpisodeLimits
from forge.envs import endpoint_listener
from forge.envs.episode import EpisodeRun, episode, run_episode
from forge.envs.external.venvs import VenvError, python_of
from forge.envs.limits import Fault
from forge.envs.programs import ProgramRun, ProgramSettings, program_episode, run_black_box, run_program
from forge.envs.trace import rows_of
from forge.errors import ForgeError, OptionError
from forge.models.tokenizer import ChatTokenizer
from forge.runtime.sandbox import find
from forge.types import Task
from grpo_runs import config, episodes, metrics, train_here
from scripted_policy import END, ScriptedPolicy, state_of

pytestmark = [
    pytest.mark.usefixtures("leaves_nothing"),
    pytest.mark.skipif(
        not (find("namespaces").works or find("bubblewrap").works), reason="this machine has no security boundary"
    ),
]

TASK = Task("sum:1", messages=({"role": "user", "content": "What is 2 + 2?"},), answer="4", metadata={"hint": "even"})
LIMIT_S = 500


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.load(chatml_folder(tmp_path_factory.mktemp("thinking") / "model", THINKING))


def run(program: Any, policy: ScriptedPolicy, **changes: Any) -> EpisodeRun:
    async def limited() -> EpisodeRun:
        async with asyncio.timeout(LIMIT_S):
            return await run_episode(program, state_of(policy, **{"task": TASK, **changes}))

    return asyncio.run(limited())


def script(source: str, **changes: Any) -> Any:
    """An episode of a Python program."""
    return program_episode(["python3", "-c", source], timeout_s=300.0, **changes)


def test_a_program_is_an_episode_with_exact_tokens(codec: ChatTokenizer) -> None:
    policy = ScriptedPolicy(codec, [f"5{END}", f"It is 4.{END}"])
    done = run(run_program.with_args(settings(grader="black_box_programs:right")), policy)
    (row,) = rows_of(done.turns)
    assert row.token_ids == policy.prompts[1] + done.turns[1].token_ids
    assert done.score.parts == {"right": 1.0, "written": 0.5}
    assert (done.outcome, done.counts.num_undelivered, [turn.parent for turn in done.turns]) == (
        "finished",
        0,
        [None, 0],
    )


def test_the_official_client_works_in_the_sandbox(codec: ChatTokenizer) -> None:
    source = """
import openai, sys
client = openai.OpenAI()
first = client.responses.create(model="policy", input="What is 2 + 2?")
with client.chat.completions.stream(model="policy", messages=[{"role": "user", "content": "Sure?"}]) as stream:
    print(first.output_text, stream.get_final_completion().choices[0].message.content)
"""
    program = program_episode(["python3", "-c", source], python=sys.executable, grader=_shows("4 yes"), timeout_s=300.0)
    done = run(program, ScriptedPolicy(codec, [f"4{END}", f"yes{END}"]))
    assert (done.score.reward, len(rows_of(done.turns))) == (1.0, 2)


def _shows(words: str) -> Any:
    def grade(task: Task, run: ProgramRun) -> float:
        assert run.stdout.strip() == words, run.stderr
        return 1.0

    return grade


def test_the_program_is_told_its_task_and_nothing_that_graders_know(codec: ChatTokenizer) -> None:
    source = PLAIN + (
        "ask([{'role': 'user', 'content': sys.stdin.read()}])\n"
        "task = json.load(open(os.environ['FORGE_TASK']))\n"
        "print(sorted(task), task.get('hint'), sys.argv[1:], open('given.txt').read(), sorted(os.listdir()))"
    )
    words = ["{task}", "{base_url}", "{x}", "{prompt}"]
    task = Task(
        "t", messages=TASK.messages, answer="4", metadata={"hint": "h", "secret": 1, "own": {"given.txt": "from task"}}
    )
    seen: list[ProgramRun] = []

    def keep(task: Task, run: ProgramRun) -> float:
        seen.append(run)
        return 0.0

    program = program_episode(
        ["python3", "-c", source, *words], stdin="{prompt}", task_keys=["hint"], files_key="own", grader=keep
    )
    policy = ScriptedPolicy(codec, [f"ok{END}"])
    run(program, policy, task=task)
    expected = ["/sandbox/.forge/task.json", "http://127.0.0.1:8471/v1", "{x}", "What is 2 + 2?"]
    assert seen[0].stdout == f"['hint', 'id', 'messages'] h {expected} from task ['.forge', 'given.txt']\n", seen[
        0
    ].stderr
    assert dict(seen[0].files) == {"given.txt": "from task"}
    assert "What is 2 + 2?" in codec.decode(policy.prompts[0])


@pytest.mark.parametrize(("ending", "reward"), [("", 1.0), ("sys.exit(1)", 0.0), ("os.kill(os.getpid(), 9)", 0.0)])
def test_the_exit_status_is_the_reward(codec: ChatTokenizer, ending: str, reward: float) -> None:
    source = PLAIN + "ask([{'role': 'user', 'content': 'x'}])\n" + ending
    done = run(script(source), ScriptedPolicy(codec, [f"ok{END}"]))
    assert (done.score.reward, done.outcome, len(done.turns)) == (reward, "finished", 1)


def test_a_program_without_end_is_an_outcome_and_is_graded(codec: ChatTokenizer) -> None:
    source = PLAIN + "print(ask([{'role': 'user', 'content': 'x'}])['content'], flush=True)\nwhile True: pass"
    program = program_episode(["python3", "-c", source], timeout_s=8.0, grader=lambda task, run: {"said": 0.25})
    done = run(program, ScriptedPolicy(codec, [f"ok{END}"]))
    assert (done.outcome, done.score.parts) == ("time_limit", {"said": 0.25})


def test_a_limit_is_an_outcome_and_the_program_is_graded(codec: ChatTokenizer) -> None:
    source = PLAIN + "while True: ask([{'role': 'user', 'content': 'x'}])"
    done = run(script(source), ScriptedPolicy(codec, lambda _: f"ok{END}"), limits=EpisodeLimits(max_turns=2))
    assert (done.outcome, done.score.reward, len(done.turns)) == ("turn_limit", 0.0, 2)


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise SystemExit('no such module')", "no such module"),
        (PLAIN + "ask([{'role': 'user', 'content': 'x'}], temperature=0.0)", "'temperature'.*samples with"),
        (PLAIN + "ask([{'role': 'user', 'content': 'x'}], frobnicate=1)", "Unknown parameter: 'frobnicate'"),
    ],
)
def test_a_program_that_fails_before_the_policy_has_a_part_in_it_is_a_fault(
    codec: ChatTokenizer, source: str, words: str
) -> None:
    with pytest.raises(Fault, match=rf"(?s)before the policy answered.*{words}") as caught:
        run(script(source), ScriptedPolicy(codec, []))
    assert caught.value.kind == "program_start"


def test_a_missing_program_is_a_fault(codec: ChatTokenizer) -> None:
    with pytest.raises(Fault, match="nonesuch") as caught:
        run(program_episode(["nonesuch"]), ScriptedPolicy(codec, []))
    assert caught.value.kind == "program_start"


def test_a_policy_that_fails_is_a_fault_whatever_the_program_makes_of_it(codec: ChatTokenizer) -> None:
    def fail(text: str) -> str:
        raise Fault("the generator is gone", kind="generator")

    source = PLAIN + "try: ask([{'role': 'user', 'content': 'x'}])\nexcept OSError: print('whatever')"
    with pytest.raises(Fault, match="generator is gone"):
        run(script(source), ScriptedPolicy(codec, fail))


def test_a_sandbox_that_dies_is_a_fault(codec: ChatTokenizer) -> None:
    before = set(psutil.Process().children())

    def kill(text: str) -> str:
        (server,) = [each for each in psutil.Process().children() if each not in before]
        launchers = server.children()
        for each in launchers:
            for guest in each.children():
                guest.kill()
        return f"ok{END}"

    source = PLAIN + "ask([{'role': 'user', 'content': 'x'}])\nwhile True: pass"
    with pytest.raises(Fault) as caught:
        run(script(source), ScriptedPolicy(codec, kill))
    assert caught.value.kind == "sandbox_died"


def test_connections_that_cannot_be_accepted_are_a_fault(codec: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when this process has no file descriptor left for a connection."""

    class Exhausted:
        def __init__(self, listener: Any) -> None:
            self._listener, self._num_left = listener, 1

        def fileno(self) -> int:
            return int(self._listener.fileno())

        def accept(self) -> Any:
            if self._num_left:
                self._num_left -= 1
                raise OSError(24, "Too many open files")
            return self._listener.accept()

    own = endpoint_listener.SandboxListener.__init__

    def limited(self: Any, listener: Any, *args: Any, **options: Any) -> None:
        own(self, Exhausted(listener), *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(endpoint_listener.SandboxListener, "__init__", limited)
    with pytest.raises(Fault, match="Too many open files") as caught:
        run(run_program.with_args(settings()), ScriptedPolicy(codec, lambda _: f"4{END}"))
    assert caught.value.kind == "sandbox_bridge"


# ---- isolation -------------------------------------------------------------------------------------------------------


def test_the_key_of_another_episode_is_refused_in_the_sandbox_of_this_one(codec: ChatTokenizer) -> None:
    policies = [ScriptedPolicy(codec, lambda _: f"first{END}"), ScriptedPolicy(codec, lambda _: f"second{END}")]
    keys: list[str] = []
    source = PLAIN + (
        "import urllib.error\nstatuses = []\n"
        "for key in (*sys.argv[1:], 'nonsense', os.environ['OPENAI_API_KEY']):\n"
        "    os.environ['OPENAI_API_KEY'] = key\n"
        "    try: statuses.append(ask([{'role': 'user', 'content': 'x'}])['content'])\n"
        "    except urllib.error.HTTPError as error: statuses.append(error.code)\n"
        "print(statuses)"
    )

    @episode
    async def victim(task: Task, agent: forge.Agent) -> float:
        async with agent.endpoint() as endpoint, forge.sandbox(endpoint=endpoint) as box:
            keys.append(endpoint.api_key)
            is_open.set()
            result = await box.run(["python3", "-c", source, endpoint.api_key])
            assert result.stdout == "['first', 401, 'first']\n", result.stderr
            await attacked.wait()
            assert len(endpoint.turns) == 2
            return 1.0

    @episode
    async def attacker(task: Task, agent: forge.Agent) -> float:
        async with agent.endpoint() as endpoint, forge.sandbox(endpoint=endpoint) as box:
            result = await box.run(["python3", "-c", source, keys[0]])
            attacked.set()
            assert result.stdout == "[401, 401, 'second']\n", result.stderr
            return 1.0

    is_open: asyncio.Event
    attacked: asyncio.Event

    async def main() -> list[EpisodeRun]:
        nonlocal is_open, attacked
        is_open, attacked = asyncio.Event(), asyncio.Event()

        async def attack() -> EpisodeRun:
            await is_open.wait()
            return await run_episode(attacker, state_of(policies[1]))

        async with asyncio.timeout(LIMIT_S):
            return await asyncio.gather(run_episode(victim, state_of(policies[0])), attack())

    first, second = asyncio.run(main())
    assert ({turn.text for turn in first.turns}, {turn.text for turn in second.turns}) == ({"first"}, {"second"})


def test_a_flood_of_connections_is_bounded_and_every_one_is_served(
    codec: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_listener, "MAX_CONNECTIONS", 4)
    open_at_once: list[int] = []
    serve = endpoint_listener.SandboxListener._serve

    def counted(self: Any, client: Any) -> None:
        serve(self, client)
        open_at_once.append(len(self))

    monkeypatch.setattr(endpoint_listener.SandboxListener, "_serve", counted)
    source = PLAIN + (
        "import socket\nport = int(os.environ['OPENAI_BASE_URL'].split(':')[2].split('/')[0])\n"
        "flood = [socket.create_connection(('127.0.0.1', port)) for _ in range(40)]\n"
        "for each in flood: each.sendall(b'GET /v1/nonesuch HTTP/1.0\\r\\n\\r\\n')\n"
        "print(sum(each.recv(100).startswith(b'HTTP/1.0 404') for each in flood), flush=True)\n"
        "for each in flood: each.close()\n"
        "ask([{'role': 'user', 'content': 'x'}])"
    )
    run(script(source, grader=_shows("40")), ScriptedPolicy(codec, lambda _: f"4{END}"))
    assert (max(open_at_once), len(open_at_once)) == (4, 41)


def test_more_clients_than_connections_all_get_their_answers(
    codec: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that keep their connections open do not shut out others."""
    monkeypatch.setattr(endpoint_listener, "MAX_CONNECTIONS", 3)
    source = """
import threading, openai
answers = []
def talk(number):
    client = openai.OpenAI(timeout=10_000)  # with connections of its own, which it keeps
    for turn in range(3):
        message = {"role": "user", "content": f"{number} {turn}"}
        answers.append(client.chat.completions.create(model="m", messages=[message]).choices[0].message.content)
threads = [threading.Thread(target=talk, args=(number,)) for number in range(8)]
for each in threads: each.start()
for each in threads: each.join()
print(len(answers), set(answers))
"""
    program = program_episode(
        ["python3", "-c", source], python=sys.executable, grader=_shows("24 {'ok'}"), timeout_s=LIMIT_S
    )
    done = run(program, ScriptedPolicy(codec, lambda _: f"ok{END}"))
    assert sum(turn.is_delivered for turn in done.turns) == 24


def test_requests_that_never_end_fill_no_memory_and_hold_up_no_other_episode(codec: ChatTokenizer) -> None:
    """Thirty requests of 15 MiB that lack their last byte: at most four of them are read."""
    source = (
        PLAIN
        + """
import socket, threading, time
whole = threading.Semaphore(0)
ask([{"role": "user", "content": "x"}])
port, size = int(os.environ["OPENAI_BASE_URL"].split(":")[2].split("/")[0]), 15 * 2**20
head = (
    "POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Type: application/json\\r\\n"
    f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}\\r\\nContent-Length: {size}\\r\\n\\r\\n"
).encode()
def push(connection):
    try:
        connection.sendall(head + b" " * (size - 1))
        print("sent", flush=True)
        whole.release()
    except OSError:
        pass
flood = [socket.create_connection(("127.0.0.1", port)) for _ in range(30)]
threads = [threading.Thread(target=push, args=(each,), daemon=True) for each in flood]
for each in threads: each.start()
for _ in range(4): whole.acquire()
time.sleep(1)  # for a fifth, which must not come
os._exit(0)
"""
    )
    seen: list[ProgramRun] = []

    def keep(task: Task, run: ProgramRun) -> float:
        seen.append(run)
        return 1.0

    policies = [ScriptedPolicy(codec, lambda _: f"4{END}") for _ in range(3)]
    memory = psutil.Process()

    async def main() -> tuple[list[EpisodeRun], int]:
        before = most = memory.memory_info().rss
        hostile = run_episode(script(source, grader=keep), state_of(policies[0], task=TASK))
        others = [run_episode(run_program.with_args(settings()), state_of(each, task=TASK)) for each in policies[1:]]
        running = asyncio.gather(hostile, *others)
        while not running.done():
            await asyncio.wait({running}, timeout=0.05)
            most = max(most, memory.memory_info().rss)
        return await running, most - before

    done, grown = asyncio.run(main())
    assert [each.score.reward for each in done] == [1.0, 1.0, 1.0]
    assert seen[0].stdout.count("sent") == 4, seen[0].stderr
    assert len(done[0].turns) == 1
    assert grown < 30 * 15 * 2**20 / 2, f"{grown / 2**20:.0f} MiB"


def test_many_programs_at_once(codec: ChatTokenizer) -> None:
    num_agents = 24
    policies = [ScriptedPolicy(codec, lambda _, number=number: f"I am {number}{END}") for number in range(num_agents)]
    programs = [run_program.with_args(settings(grader=_shows(f"I am {number}"))) for number in range(num_agents)]

    async def main() -> list[EpisodeRun]:
        states = [state_of(policy, task=TASK) for policy in policies]
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.gather(*map(run_episode, programs, states))

    done = asyncio.run(main())
    assert [each.score.reward for each in done] == [1.0] * num_agents
    for each, policy in zip(done, policies, strict=True):
        (row,) = rows_of(each.turns)
        assert row.token_ids == policy.prompts[-1] + each.turns[-1].token_ids


def test_a_program_that_is_cancelled_leaves_nothing(codec: ChatTokenizer) -> None:
    async def main() -> None:
        asked = asyncio.Event()

        class Silent(ScriptedPolicy):
            async def sample(self, *args: Any, **options: Any) -> Any:
                asked.set()
                await asyncio.get_running_loop().create_future()

        state = state_of(Silent(codec, []), task=TASK)
        running = asyncio.create_task(run_episode(run_program.with_args(settings()), state))
        async with asyncio.timeout(LIMIT_S):
            await asked.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        assert [each for each in asyncio.all_tasks() if "RequestHandler" in repr(each)] == []

    asyncio.run(main())


# ---- from Python and from a configuration ----------------------------------------------------------------------------


def test_a_program_inside_an_episode_of_ones_own(codec: ChatTokenizer) -> None:
    @episode
    async def both(task: Task, agent: forge.Agent) -> float:
        turn = await agent.generate([{"role": "user", "content": "Which number?"}])
        chosen = ProgramSettings(**settings(command=["python3", "agent.py", turn.text, "1"]))
        found = await run_black_box(task, agent, chosen)
        return float(found.stdout == "9\n" and found.num_turns == 1)

    policy = ScriptedPolicy(codec, [f"seven{END}", f"9{END}"])
    assert run(both, policy).score.reward == 1.0
    assert "seven" in codec.decode(policy.prompts[1])


def test_a_folder_is_copied_with_its_modes(codec: ChatTokenizer, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "talk.py").write_text(PLAIN)
    program = tmp_path / "agent"
    program.write_text("#!/usr/bin/env python3\nfrom lib.talk import *\nprint(ask([{'role':'user','content':'x'}]))\n")
    program.chmod(0o755)
    (tmp_path / "link").symlink_to("/etc/passwd")
    done = run(program_episode(["./agent"], folder=str(tmp_path)), ScriptedPolicy(codec, [f"ok{END}"]))
    assert done.score.reward == 1.0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, "`command`"),
        ({"command": "python agent.py"}, "list of words"),
        ({"command": []}, "not a command"),
        ({"command": ["true"], "comand": 1}, "comand"),
        ({"command": ["true"], "grader": "black_box_programs:nonesuch"}, "nonesuch"),
        ({"command": ["true"], "grader": "black_box_programs:PLAIN"}, "not a grader"),
        ({"command": ["true"], "folder": "/nonesuch"}, "no such folder"),
        ({"command": ["true"], "limits": {"wall_s": 3}}, "timeout_s"),
        ({"command": ["true"], "limits": {"memory_bytes": 3}}, "memory_bytes"),
        ({"command": ["true"], "timeout_s": -1}, "wall_s"),
        ({"command": ["true"], "ignore": ["messages"]}, "messages"),
        ({"command": ["true"], "python": "/usr/bin/python3", "requirements": ["x"]}, "one interpreter"),
    ],
)
def test_arguments_are_checked_before_a_run_starts(args: dict[str, Any], words: str) -> None:
    with pytest.raises(ForgeError, match=words):
        run_program.with_args(args)


def test_a_key_that_a_task_does_not_have_is_named(codec: ChatTokenizer) -> None:
    with pytest.raises(OptionError, match="task_keys"):
        run(program_episode(["true"], task_keys=["nonesuch"]), ScriptedPolicy(codec, []))


def test_reinforcement_learning_on_a_program(tmp_path: Path) -> None:
    """Bit for bit: what trainer and sampler compute for the program's turns is the same."""
    args = {**settings(grader=f"{even.__module__}:even"), "command": ["python3", "agent.py", "{prompt}", "2"]}
    chosen = config(
        tmp_path / "run",
        *("rewards.functions=[]", "episode.kind=program", f"episode.args={json.dumps(args)}"),
        *("training.max_steps=2", "rollout.group_size=2", "record.report=false"),
    )
    assert train_here(chosen).step == 2
    seen = list(episodes(chosen))
    assert len(seen) >= 2
    for each in seen:
        assert each["logprobs"] == each["trainer_logprobs"]
        assert [turn["parent"] for turn in each["turns"]] == [None, 0]
    assert metrics(chosen, "episode/num_turns") == [2.0, 2.0]
    assert set(metrics(chosen, "episode/num_faults")) == {0.0}
    assert set(metrics(chosen, "train/mismatch_max")) == {0.0}


# ---- agents of other projects, unchanged -----------------------------------------------------------------------------


def venv(*requirements: str) -> tuple[str, ...]:
    """Return requirements that are installed here. Skip the test where that cannot be done."""
    try:
        python_of(requirements)
    except VenvError as error:
        pytest.skip(f"{requirements[0]} cannot be installed here: {str(error)[-400:]}")
    return requirements


AGENTS_SDK = '''
import asyncio, sys
from agents import Agent, Runner, function_tool

@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b

async def main():
    agent = Agent(name="solver", instructions="Use the tool.", tools=[multiply], model="policy")
    plain = await Runner.run(agent, sys.argv[1])
    streamed = Runner.run_streamed(agent, plain.to_input_list() + [{"role": "user", "content": "Sure?"}])
    async for _ in streamed.stream_events():
        pass
    print(plain.final_output, streamed.final_output)

asyncio.run(main())
'''


def test_openai_agents(codec: ChatTokenizer) -> None:
    """It speaks the Responses protocol, streams and calls tools at the same time."""
    calls = "".join(
        f'<tool_call>{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'
        for a, b in ((6, 7), (2, 2))
    )
    program = program_episode(
        ["python3", "-c", AGENTS_SDK, "{prompt}"],
        requirements=venv(*OPENAI_AGENTS),
        environ={"OPENAI_AGENTS_DISABLE_TRACING": "1"},
        limits={"memory_bytes": 4 * 1024**3},
        grader=_shows("It is 42. Yes."),
        timeout_s=LIMIT_S,
    )
    policy = ScriptedPolicy(codec, [calls + END, f"It is 42.{END}", f"Yes.{END}"])
    done = run(program, policy)
    (row,) = rows_of(done.turns)
    assert row.token_ids == policy.prompts[-1] + done.turns[-1].token_ids
    assert (done.counts.num_tool_calls, done.counts.prefix_breaks.total()) == (2, 0)


def test_mini_swe_agent(codec: ChatTokenizer) -> None:
    """Its command line, with a shell as its tool, in the sandbox that it works in."""
    commands = ("sed -i s/2/4/ sum.py", "python3 sum.py", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    calls = [json.dumps({"name": "bash", "arguments": {"command": command}}) for command in commands]

    def fixed(task: Task, run: ProgramRun) -> float:
        return float(run.exit_code == 0 and run.files["sum.py"] == "print(4)\n")

    program = program_episode(
        ["mini", "-m", "openai/policy", "-t", "{prompt}", "-y", "--exit-immediately", "-o", "trajectory.json"],
        requirements=venv(*MINI_SWE_AGENT),
        files={"sum.py": "print(2)\n"},
        environ={
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/mini",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        limits={"memory_bytes": 4 * 1024**3},
        grader=fixed,
        timeout_s=LIMIT_S,
    )
    policy = ScriptedPolicy(codec, [f"<tool_call>{call}</tool_call>{END}" for call in calls])
    done = run(program, policy)
    assert (done.score.reward, done.outcome, len(done.turns)) == (1.0, "finished", 3)
    (row,) = rows_of(done.turns)
    assert row.token_ids == policy.prompts[-1] + done.turns[-1].token_ids
