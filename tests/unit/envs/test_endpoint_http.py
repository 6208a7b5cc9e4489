"""An episode's endpoint over plain HTTP: keys, hostile requests, clients that go away, and closing."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import aiohttp
import pytest

from endpoint_clients import LIMIT_S
from forge.envs.endpoint import open_endpoint
from forge.envs.endpoint_server import shared_server
from forge.envs.episode import episode, run_episode
from forge.envs.journal import Journal
from forge.envs.limits import EpisodeLimits, EpisodeOver, Fault, ReplayMismatch
from forge.envs.trace import rows_of
from scripted_policy import END, ScriptedPolicy, state_of

BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


@dataclass
class WaitingPolicy(ScriptedPolicy):
    """Says when a request has come, and answers when it may."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def sample(self, token_ids, *, options, session):
        self.asked.set()
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return await super().sample(token_ids, options=options, session=session)


@dataclass
class LongPolicy(ScriptedPolicy):
    """Calls a function, then answers with far more text than the buffers of a connection hold, or another size."""

    before: Callable[[], None] = lambda: None
    size: int = 30_000_000

    async def sample(self, token_ids, *, options, session):
        completion = await super().sample(token_ids, options=options, session=session)
        self.before()
        return replace(completion, text=self.size * "x")


def connection_of(endpoint):
    """A connection on which a request was sent and nothing is read."""
    host, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    found = socket.create_connection((host, int(port)), timeout=LIMIT_S)
    body = json.dumps(BODY)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {endpoint.api_key}\r\n"
    found.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    return found


def yes(codec, kind=ScriptedPolicy, **options):
    return kind(codec, lambda text: f"Yes.{END}", **options)


def url_of(endpoint):
    return f"{endpoint.base_url}/chat/completions"


def key_of(endpoint, **headers):
    return {"Authorization": f"Bearer {endpoint.api_key}", **headers}


async def post(endpoint, body=BODY, *, headers=None, **options):
    """Return (status, answer)."""
    options = options or {"json": body}
    sent = headers or key_of(endpoint)
    async with aiohttp.ClientSession() as session, session.post(url_of(endpoint), headers=sent, **options) as response:
        return response.status, await response.json()


def run(talk, make_policy, **changes):
    """Run an episode of `talk(agent, policy)` with a policy made on its event loop."""

    async def limited():
        policy = make_policy()

        @episode
        async def program(task, agent):
            return await talk(agent, policy)

        async with asyncio.timeout(LIMIT_S):
            return await run_episode(program, state_of(policy, **changes))

    return asyncio.run(limited())


@pytest.mark.parametrize(
    ("headers", "options", "status", "code"),
    [
        ({"Authorization": "Bearer sk-forge-" + 64 * "0"}, {"json": BODY}, 401, "invalid_api_key"),
        ({"Authorization": "Bearer "}, {"json": BODY}, 401, "invalid_api_key"),
        ({"Authorization": "Basic abc"}, {"json": BODY}, 401, "invalid_api_key"),
        ({"Authorization": "Bearer \u00fc"}, {"json": BODY}, 401, "invalid_api_key"),
        (None, {"data": b"{", "headers": {"Content-Type": "application/json"}}, 400, "invalid_json"),
        (None, {"data": b"[1]", "headers": {"Content-Type": "application/json"}}, 400, "invalid_json"),
        (None, {"data": b"[" * 100_000, "headers": {"Content-Type": "application/json"}}, 400, "invalid_json"),
        (None, {"data": b"hello"}, 415, "unsupported_media_type"),
        (None, {"json": {"messages": BODY["messages"]}}, 400, "missing_required_parameter"),
        (None, {"json": {**BODY, "messages": []}}, 400, "missing_required_parameter"),
        (None, {"json": {**BODY, "messages": [{"role": "king", "content": "x"}]}}, 400, "invalid_value"),
        (None, {"json": {**BODY, "messages": [{"role": "user", "content": [{"type": "image"}]}]}}, 400, None),
        (None, {"json": {**BODY, "tools": [{"type": "function"}]}}, 400, "invalid_value"),
        (None, {"json": {**BODY, "max_tokens": 0}}, 400, "invalid_value"),
        (None, {"json": {**BODY, "max_tokens": "many"}}, 400, "invalid_value"),
        (None, {"json": {**BODY, "stop": [""]}}, 400, "invalid_value"),
        (None, {"json": {**BODY, "return_token_ids": True}}, 400, "unsupported_value"),
        (None, {"data": b" " * (17 * 2**20), "headers": {"Content-Type": "application/json"}}, 413, None),
    ],
)
def test_bad_requests_get_json_and_cost_nothing(thinking, headers, options, status, code):
    async def talk(agent, policy):
        async with agent.endpoint() as endpoint:
            sent = {**(headers or key_of(endpoint)), **options.get("headers", {})}
            found, answer = await post(endpoint, **{**options, "headers": sent})
            assert found == status
            assert answer["error"]["message"]
            assert code is None or answer["error"]["code"] == code
            assert (await post(endpoint))[0] == 200
        return 1.0

    done = run(talk, lambda: yes(thinking))
    assert (len(done.turns), done.counts.num_turns, done.outcome) == (1, 1, "finished")


def test_closed_endpoints_answer_410_and_others_go_on(thinking):
    async def talk(agent, policy):
        async with agent.endpoint() as first:
            assert (await post(first))[0] == 200
        async with agent.endpoint() as second, agent.endpoint() as third:
            assert second.base_url == first.base_url == third.base_url  # one port for all
            assert len({first.api_key, second.api_key, third.api_key}) == 3
            status, answer = await post(first)
            assert (status, answer["error"]["code"]) == (410, "endpoint_closed")
            assert [(await post(each))[0] for each in (second, third)] == [200, 200]
            assert second.environ == {"OPENAI_BASE_URL": second.base_url, "OPENAI_API_KEY": second.api_key}
        assert len(await shared_server()) == 0
        return 1.0

    done = run(talk, lambda: yes(thinking))
    assert [turn.path for turn in done.turns] == [(0, 0), (1, 0), (2, 0)]


def test_models_and_unknown_pages(thinking):
    async def talk(agent, policy):
        async with agent.endpoint() as endpoint, aiohttp.ClientSession(headers=key_of(endpoint)) as session:
            async with session.get(f"{endpoint.base_url}/models") as response:
                assert [each["id"] for each in (await response.json())["data"]] == ["policy"]
            async with session.get(f"{endpoint.base_url}/models/gpt-4o") as response:
                assert (await response.json())["id"] == "gpt-4o"
            async with session.get(f"{endpoint.base_url}/models", headers={"Authorization": "Bearer x"}) as response:
                assert response.status == 401
            async with session.post(f"{endpoint.base_url}/completions", json={}) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (404, "not_found")
        return 1.0

    run(talk, lambda: yes(thinking))


def test_a_client_that_goes_away_cancels_its_request_and_is_counted(thinking):
    async def talk(agent, policy):
        async with agent.endpoint() as endpoint:
            request = asyncio.create_task(post(endpoint))
            await policy.asked.wait()
            request.cancel()
            await asyncio.wait({request})
            await policy.cancelled.wait()
            policy.may_answer.set()
            assert (await post(endpoint))[0] == 200
        return 1.0

    policies = []

    def make():
        policies.append(yes(thinking, WaitingPolicy))
        return policies[0]

    done = run(talk, make)
    assert (len(done.turns), done.counts.num_undelivered) == (1, 1)
    assert len({options["seed"] for options in policies[0].options}) == 1


def test_closing_ends_requests_under_way(thinking):
    async def talk(agent, policy):
        async with agent.endpoint() as endpoint:
            requests = [asyncio.create_task(post(endpoint)) for _ in range(2)]
            await policy.asked.wait()
        assert policy.cancelled.is_set()
        answers = [await request for request in requests]
        assert {status for status, _ in answers} == {410}
        assert (await post(endpoint))[0] == 410
        return 1.0

    done = run(talk, lambda: yes(thinking, WaitingPolicy))
    assert done.turns == ()
    assert done.counts.num_undelivered >= 1


@pytest.mark.parametrize("ending", ["answer", "limit", "close"])
def test_a_stream_that_takes_long_is_kept_alive(thinking, ending):
    async def talk(agent, policy):
        opened = open_endpoint(agent._state, path=(0,), keep_alive_s=0.001)
        async with aiohttp.ClientSession() as session:
            async with opened as endpoint:
                sent = session.post(url_of(endpoint), json={**BODY, "stream": True}, headers=key_of(endpoint))
                response = await sent
                assert (response.status, response.content_type) == (200, "text/event-stream")
                assert await response.content.readline() == b": sampling\n"
                if ending != "close":
                    policy.may_answer.set()
                    lines = (await response.text()).splitlines()
            if ending == "close":
                lines = (await response.text()).splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        if ending == "answer":
            assert [each["choices"][0]["delta"].get("content") for each in events] == ["", "Yes.", None]
            assert lines[-2] == "data: [DONE]"
        else:
            assert [each["error"]["code"] for each in events] == [
                "token_limit" if ending == "limit" else "endpoint_closed"
            ]
        return 1.0

    class Policy(WaitingPolicy):
        async def sample(self, token_ids, *, options, session):
            completion = await super().sample(token_ids, options=options, session=session)
            if ending == "limit":
                raise EpisodeOver("token_limit", "enough")
            return completion

    done = run(talk, lambda: yes(thinking, Policy))
    assert len(done.turns) == (ending == "answer")
    assert done.outcome == ("token_limit" if ending == "limit" else "finished")


def test_a_cancelled_program_closes_its_endpoint(thinking):
    async def main():
        policy = yes(thinking, WaitingPolicy)
        opened = []

        @episode
        async def program(task, agent):
            async with agent.endpoint() as endpoint:
                opened.append(endpoint)
                await post(endpoint)

        task = asyncio.create_task(run_episode(program, state_of(policy)))
        await policy.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert policy.cancelled.is_set()
        assert (await post(opened[0]))[0] == 410

    asyncio.run(main())


@pytest.mark.parametrize("size", [3, 30_000_000])
def test_the_answer_to_a_client_that_left_is_not_trained_on(thinking, size):
    async def talk(agent, policy):
        async with agent.endpoint() as endpoint:
            connection = connection_of(endpoint)
            left = asyncio.Event()

            def leave():
                connection.close()
                left.set()

            policy.before, policy.size = leave, size
            await left.wait()
            policy.before = lambda: None
            assert (await post(endpoint))[0] == 200  # a turn later, the first one is marked
            assert [turn.is_delivered for turn in agent.turns] == [False, True]
        return 1.0

    done = run(talk, lambda: yes(thinking, LongPolicy))
    assert (done.counts.num_undelivered, len(rows_of(done.turns))) == (1, 1)


def test_closing_does_not_wait_for_a_client_that_does_not_read(thinking):
    async def talk(agent, policy):
        async with agent.endpoint() as endpoint:
            connection = connection_of(endpoint)
            await asyncio.to_thread(connection.recv, 1)  # and nothing more
        connection.close()
        return 1.0

    done = run(talk, lambda: yes(thinking, LongPolicy))
    assert [turn.is_delivered for turn in done.turns] == [False]
    assert (done.counts.num_undelivered, rows_of(done.turns)) == (1, [])


def test_a_retry_shows_that_the_answer_before_was_lost(thinking):
    async def talk(agent, policy):
        async with agent.endpoint() as endpoint:
            await post(endpoint)
            again = key_of(endpoint, **{"x-stainless-retry-count": "1"})
            await post(endpoint, headers=again)
            assert [turn.is_delivered for turn in agent.turns] == [False, True]
            others = {**BODY, "messages": [{"role": "user", "content": "Other"}]}
            await post(endpoint, others)
            await post(endpoint, others)
            await post(endpoint, others, headers=again)  # which of two is not known
            # The client continues the answer that seemed lost: it has it.
            lost = [*BODY["messages"], {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on"}]
            for _ in range(2):
                await post(endpoint, {**BODY, "messages": lost})
        return 1.0

    done = run(talk, lambda: yes(thinking))
    assert all(turn.is_delivered for turn in done.turns)
    assert (len(done.turns), done.counts.num_undelivered) == (7, 0)
    assert len({turn.seed for turn in done.turns}) == 7


def test_many_episodes_share_the_server_and_stay_apart(thinking):
    async def main():
        async def one(number):
            @episode
            async def program(task, agent):
                async with agent.endpoint() as endpoint:
                    body = {**BODY, "messages": [{"role": "user", "content": f"I am {number}"}]}
                    answers = await asyncio.gather(*(post(endpoint, body) for _ in range(3)))
                    assert {answer["choices"][0]["message"]["content"] for _, answer in answers} == {f"{number}!"}
                return float(number)

            policy = ScriptedPolicy(thinking, lambda text: f"{number}!{END}")
            return await run_episode(program, state_of(policy))

        async with asyncio.timeout(LIMIT_S):
            return await asyncio.gather(*map(one, range(20)))

    runs = asyncio.run(main())
    assert [done.score.reward for done in runs] == list(map(float, range(20)))
    assert {len(done.turns) for done in runs} == {3}


def test_sampling_has_the_context_of_the_program(thinking):
    place = contextvars.ContextVar("place", default="nowhere")

    class PlacedPolicy(ScriptedPolicy):
        async def sample(self, token_ids, *, options, session):
            self.answers = lambda text: f"{place.get()}{END}"
            return await super().sample(token_ids, options=options, session=session)

    async def talk(agent, policy):
        for name in ("here", "there"):
            place.set(name)
            async with agent.endpoint() as endpoint:
                _, answer = await post(endpoint)
                assert answer["choices"][0]["message"]["content"] == name
        return 1.0

    run(talk, lambda: yes(thinking, PlacedPolicy))


def test_a_turn_that_takes_too_long_is_a_fault(thinking):
    async def talk(agent, policy):
        async with agent.endpoint() as endpoint:
            status, answer = await post(endpoint)
            assert (status, answer["error"]["code"]) == (503, "turn_timeout")
        raise AssertionError("closing raises it")

    with pytest.raises(Fault, match="took longer"):
        run(talk, lambda: yes(thinking, WaitingPolicy), limits=EpisodeLimits(turn_timeout_s=0.001))


def test_a_replay_that_asks_for_something_else_starts_over(thinking):
    entries = []

    async def talk(agent, policy):
        async with agent.endpoint() as endpoint:
            status, _ = await post(endpoint, BODY)
            assert status == (410 if wrong else 200)
        return 1.0

    wrong = False
    run(talk, lambda: yes(thinking), journal=Journal(write=entries.append))
    wrong = True
    (entry,) = entries
    with pytest.raises(ReplayMismatch):
        run(talk, lambda: yes(thinking), journal=Journal([{**entry, "prompt": "another"}]))


def test_conversations_that_the_template_refuses_are_the_clients_fault(tmp_path):
    from chat_templates import ALTERNATING, chatml_folder
    from forge.models.tokenizer import ChatTokenizer

    async def talk(agent, policy):
        async with agent.endpoint() as endpoint:
            status, answer = await post(endpoint, {**BODY, "messages": BODY["messages"] * 2})
            assert status == 400
            assert "roles must alternate" in answer["error"]["message"]
        return 1.0

    codec = ChatTokenizer.load(chatml_folder(tmp_path / "model", ALTERNATING))
    assert run(talk, lambda: yes(codec)).score.reward == 1.0


def test_the_server_stops_with_its_event_loop(thinking):
    async def talk(agent, policy):
        async with agent.endpoint() as endpoint:
            await post(endpoint)
        return endpoint

    async def main():
        found = []

        @episode
        async def program(task, agent):
            found.append(await talk(agent, None))
            return 1.0

        await run_episode(program, state_of(yes(thinking)))
        return found[0]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        endpoint = asyncio.run(main())

    async def again():
        with contextlib.suppress(aiohttp.ClientConnectionError):
            await post(endpoint)
            raise AssertionError("it still listens")

    asyncio.run(again())
