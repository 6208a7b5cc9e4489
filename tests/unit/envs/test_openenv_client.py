"""OpenEnv's protocol, against a server that does what it should, and everything that it should not."""

from __future__ import annotations

import asyncio
import json
import re
import socket as sockets
from typing import Any

import pytest

from fake_openenv import FakeServer, error, seen
from forge import Fault, Task
from forge.envs.environment import Env, load_program
from forge.envs.external.openenv import OpenEnv
from forge.envs.limits import EpisodeLimits
from forge.errors import ConfigError, OptionError
from forge.testing import play

TASK = Task("task:1", ({"role": "user", "content": "Talk."},))


def echo(message: dict[str, Any]) -> Any:
    """Echo, and end with "bye"."""
    if message["type"] == "reset":
        return seen("Hello.")
    text = message["data"]["message"]
    return seen(text, reward=float(len(text)), done=text == "bye")


def run(
    server: FakeServer, answers: Any, *, task: Task = TASK, limits: EpisodeLimits | None = None, **args: Any
) -> Any:
    """Play one episode and check that its connection is gone."""

    async def body() -> Any:
        async with asyncio.timeout(60), server.running():
            try:
                program = load_program("openenv", {"url": server.url, **args})
                return await play(program, answers, task=task, limits=limits)
            finally:
                while server.num_open:  # noqa: ASYNC110 - the server notices when it does
                    await asyncio.sleep(0.01)

    return asyncio.run(body())


def fault_of(server: FakeServer, answers: Any = ("hi", "bye"), **args: Any) -> Fault:
    with pytest.raises(Fault) as found:
        run(server, answers, **args)
    return found.value


def test_an_episode_is_a_session_and_each_answer_a_step() -> None:
    server = FakeServer(echo)
    done = run(server, ["hi", "bye"])
    assert (done.score.reward, dict(done.turn_rewards), done.outcome) == (5.0, {0: 2.0, 1: 3.0}, "finished")
    assert [turn.messages[0]["content"] for turn in done.turns] == ["Talk.\n\nHello.", "hi"]
    assert server.types() == ["reset", "step", "step", "close"]
    assert server.received[1]["data"] == {"message": "hi"}


def test_the_seed_is_that_of_the_task_and_the_same_for_all_of_a_group() -> None:
    server = FakeServer(echo)
    for task in (TASK, TASK, Task("task:2"), Task("task:3", metadata={"seed": 7, "reset": {"level": 2}})):
        run(server, ["bye"], task=task, reset={"level": 1, "size": 3})
    first, again, other, given = (message["data"] for message in server.received if message["type"] == "reset")
    assert first == again
    assert first["seed"] != other["seed"]
    assert 0 <= first["seed"] < 2**31
    assert (given["seed"], given["level"], given["size"]) == (7, 2, 3)
    assert server.num_schemas == 4  # one for each event loop


def test_a_full_server_is_asked_again() -> None:
    server = FakeServer(echo, num_refused=2)
    assert run(server, ["bye"]).score.reward == 3.0
    assert (server.num_connections, server.num_refused) == (3, 0)
    full = fault_of(FakeServer(echo, num_refused=1000), capacity_timeout_s=0.2)
    assert full.kind == "openenv_capacity"
    assert "full" in full.message


def test_a_server_that_cannot_be_reached() -> None:
    with sockets.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # it does not listen
        program = load_program(
            "openenv", {"url": f"http://127.0.0.1:{unused.getsockname()[1]}", "connect_timeout_s": 1.0}
        )
        with pytest.raises(Fault, match="cannot be reached within 1 s: ClientConnectorError") as fault:
            asyncio.run(play(program, ["hi"], task=TASK))
    assert fault.value.kind == "openenv_unreachable"


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        (RuntimeError(), "lost", r"closed the connection \(code 1011\)"),
        (None, "timeout", "took longer than 0.5 s"),
        ("x" * 5000, "too_large", "more than 4096 bytes"),
        ("{", "schema", "not JSON"),
        ("[]", "schema", "data: expected an object"),
        (b"{}", "schema", "bytes"),
        ({"type": "state", "data": {}}, "schema", 'type: expected "observation"'),
        ({"type": "observation", "data": {}}, "schema", "data.observation: expected an object"),
        ('{"type": "observation", "data": {"observation": {"text": "a"}, "reward": NaN}}', "schema", "data.reward"),
        ({**seen("a"), "data": {**seen("a")["data"], "done": "no"}}, "schema", "data.done"),
        ({"type": "observation", "data": {"observation": {"text": 3}}}, "schema", "data.observation.text: expected"),
        ({"type": "observation", "data": {"observation": {}}}, "schema", "data.observation.text: it is missing"),
        ({"type": "observation", "data": {"observation": {"text": "", "x": 1}}}, "schema", "data.observation.x: there"),
        (error("EXECUTION_ERROR", "the dice are gone"), "error", "the dice are gone"),
        (error("SESSION_ERROR"), "error", "SESSION_ERROR"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("when", ["reset", "step"])
def test_what_a_server_does_wrong_is_a_fault(when: str, reply: Any, kind: str, words: str) -> None:
    def answer(message: dict[str, Any]) -> Any:
        if message["type"] != when:
            return echo(message)
        if isinstance(reply, Exception):
            raise reply
        return reply

    limit_s = 0.5 if kind == "timeout" else 30.0
    fault = fault_of(FakeServer(answer), step_timeout_s=limit_s, max_message_bytes=4096)
    assert fault.kind == f"openenv_{kind}", fault
    assert re.search(words, fault.message), fault.message


def test_observations_are_not_checked_where_they_need_not_fit() -> None:
    def answer(message: dict[str, Any]) -> Any:
        return {
            "type": "observation",
            "data": {"observation": {"n": 1}, "reward": 1, "done": message["type"] == "step"},
        }

    done = run(FakeServer(answer), ["hi"], check_observations=False)
    assert done.turns[0].messages[0]["content"] == 'Talk.\n\n{"n": 1}'


def test_a_server_that_talks_without_being_asked() -> None:
    def answer(message: dict[str, Any]) -> Any:
        return seen("Hello.") if message["type"] == "reset" else None

    async def body() -> None:
        server = FakeServer(answer)

        async def chatter(socket: Any, reply: Any) -> None:
            for _ in range(5):
                await socket.send_json(seen("Hello."))

        server._send = chatter  # type: ignore[method-assign]
        async with server.running():
            program = load_program("openenv", {"url": server.url})
            with pytest.raises(Fault, match="without being asked") as fault:
                await play(program, lambda prompt: "hi", task=TASK)
            assert fault.value.kind == "openenv_schema"

    asyncio.run(body())


def test_the_connection_is_kept_alive_while_the_policy_generates() -> None:
    async def body() -> None:
        server = FakeServer(echo)
        async with asyncio.timeout(60), server.running():
            env = OpenEnv(url=server.url, keep_alive_s=0.01)
            assert isinstance(env, Env)
            await env.reset(TASK)
            await server.pinged.wait()
            assert (await env.step({"role": "assistant", "content": "bye"})).terminated
            await env.close()
            await env.close()

    asyncio.run(body())


def test_an_answer_that_does_not_fit_the_action_is_answered_with_text() -> None:
    action = {"properties": {"message": {"enum": ["left", "bye"], "type": "string"}}, "required": ["message"]}
    server = FakeServer(echo, action=action)
    done = run(server, ["up", " bye\n"])
    assert done.turns[1].messages[0]["content"] == (
        'Error: this is not a valid answer: message: expected one of ["left", "bye"], got "up".'
    )
    assert (done.score.reward, server.types()) == (3.0, ["reset", "step", "close"])


def test_what_only_the_server_finds_wrong_with_an_action_is_text_too() -> None:
    def answer(message: dict[str, Any]) -> Any:
        if message["type"] == "step" and message["data"]["message"] != "bye":
            return error("VALIDATION_ERROR" if message["data"]["message"] == "bad" else "EXECUTION_ERROR", "too short")
        return echo(message)

    done = run(FakeServer(answer), ["bad", "bye"])
    assert done.turns[1].messages[0]["content"] == "Error: too short"
    assert fault_of(FakeServer(answer), ["odd"]).kind == "openenv_error"
    assert run(FakeServer(answer), ["odd", "bye"], errors="text").score.reward == 3.0


MOVE = {
    "type": "object",
    "description": "Move a piece.",
    "properties": {"row": {"type": "integer", "minimum": 0}, "column": {"type": "integer"}, "metadata": {}},
    "required": ["row", "column"],
    "additionalProperties": False,
}


def move(*rows: int) -> str:
    return "".join(
        f"<tool_call>{json.dumps({'name': 'act', 'arguments': {'row': row, 'column': 1}})}</tool_call>" for row in rows
    )


def board(message: dict[str, Any]) -> Any:
    """End in row 3; each move is worth its row."""
    if message["type"] == "reset":
        return seen("A board.", reward=0.5)
    row = message["data"]["row"]
    return seen(f"Row {row}.", reward=float(row), done=row == 3)


def test_an_action_of_several_fields_is_a_tool() -> None:
    server = FakeServer(board, action=MOVE)
    done = run(server, [move(1), move(-1), "I think.", move(2, 3, 4)])
    assert [turn.messages[0]["content"] for turn in done.turns[1:]] == [
        "Row 1.",
        "Error: bad arguments of act: row: expected at least 0, got -1.",
        "Error: an answer must call a tool: act.",
    ]
    assert dict(done.turn_rewards) == {0: 1.0, 3: 5.0}
    assert done.score.reward == 6.5
    assert [message["data"]["row"] for message in server.received if message["type"] == "step"] == [1, 2, 3]
    assert (done.outcome, dict(done.counts.tool_errors)) == ("finished", {"bad_arguments": 1})


def test_limits_hold_for_actions_that_are_tools() -> None:
    done = run(FakeServer(board, action=MOVE), lambda prompt: move(1), limits=EpisodeLimits(max_turns=2))
    assert (done.outcome, done.score.reward) == ("turn_limit", 2.5)
    done = run(FakeServer(board, action=MOVE), lambda prompt: move(1), limits=EpisodeLimits(max_tool_calls=1))
    assert done.outcome == "tool_call_limit"
    done = run(FakeServer(board, action=MOVE), lambda prompt: move(1), max_steps=3)
    assert (done.outcome, done.score.reward, len(done.turns)) == ("finished", 3.5, 3)
    assert len(run(FakeServer(echo), lambda prompt: "hi", max_steps=3).turns) == 3


def as_move(message: dict[str, Any]) -> dict[str, int]:
    return {"row": int(message["content"]), "column": 0}


def as_letters(observation: dict[str, Any]) -> str:
    return " ".join(observation["text"])


def test_functions_of_your_own_make_actions_and_texts() -> None:
    server = FakeServer(board, action=MOVE)
    done = run(server, ["2", "3"], action="test_openenv_client:as_move", observe="test_openenv_client:as_letters")
    assert done.turns[1].messages[0]["content"] == "R o w   2 ."
    assert server.received[1]["data"] == {"row": 2, "column": 0}
    with pytest.raises(ConfigError, match="nothing"):
        run(server, [], action="test_openenv_client:nothing")


def test_long_observations_lose_their_middle() -> None:
    done = run(FakeServer(lambda m: seen("na" * 500, reward=1.0, done=m["type"] == "step")), ["x"], max_chars=100)
    text = done.turns[0].messages[0]["content"]
    assert "the text has 1000 characters" in text
    assert len(text) < 200


def test_episodes_are_spread_over_servers_and_one_schema_serves_all() -> None:
    async def body() -> None:
        servers = [FakeServer(echo), FakeServer(echo)]
        async with asyncio.timeout(60), servers[0].running(), servers[1].running():
            envs = [OpenEnv(url=[each.url for each in servers]) for _ in range(6)]
            await asyncio.gather(*(env.reset(TASK) for env in envs))
            assert [server.num_connections for server in servers] == [3, 3]
            assert [server.num_schemas for server in servers] == [1, 1]
            await asyncio.gather(*(env.close() for env in envs))

    asyncio.run(body())


@pytest.mark.parametrize(
    ("args", "path"),
    [
        ({}, "episode.args"),
        ({"url": "http://a", "server": {"app": "a:b"}}, "episode.args"),
        ({"url": []}, "episode.args"),
        ({"url": "http://a", "step_timeout_s": -1}, "episode.args.step_timeout_s"),
        ({"server": {"app": "a:b", "instances": 0}}, "episode.args.server.instances"),
        ({"server": {}}, "episode.args.server.app"),
    ],
)
def test_wrong_arguments_are_named(args: dict[str, Any], path: str) -> None:
    with pytest.raises(OptionError) as found:
        asyncio.run(play(load_program("openenv", args), [], task=TASK))
    assert found.value.path == path
    with pytest.raises(OptionError, match="speed"):
        load_program("openenv", {"url": "http://a", "speed": 3})


def test_a_schema_that_is_none() -> None:
    fault = fault_of(FakeServer(echo, schema={"action": []}))
    assert (fault.kind, fault.path is not None) == ("openenv_schema", True)
