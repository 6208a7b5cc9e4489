"""What does a request of a black-box agent cost the process that runs episodes?

The same program, Python's standard library and nothing else, asks for the four turns of a conversation again and again,
in many processes at once. It talks to

- a plain aiohttp handler that reads the JSON and returns the same text to everybody: the peer, and the least that HTTP
  costs in this process,
- the endpoint of an episode, over TCP: keys, rules, branches, chat template, tokens and turns,
- the endpoint of an episode from inside a sandbox.

The policy answers at once. CPU seconds are those of this process alone, from the first program's start to the last
one's end, less those of as many programs that ask for nothing; these are the cost of starting one.

    python benchmarks/agents.py                      # 100 programs at once
    python benchmarks/agents.py --num 8 --rounds 2   # a smoke run
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from aiohttp import web

import forge
from forge import Agent, Completion, Task
from forge.config import EpisodeLimits, ModelConfig
from forge.models.locate import resolve
from forge.models.tokenizer import ChatTokenizer
from forge.testing import play
from forge.types import VersionSpan
from harness.report import machine, table

NUM_TURNS = 4
TEXT = "It is forty-two, as far as I can see from here."
PROGRAM = """
import http.client, json, os, sys
host, port = os.environ["OPENAI_BASE_URL"].split("//")[1].split("/")[0].split(":")
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
connection = http.client.HTTPConnection(host, int(port))
for number in range(int(sys.argv[1])):
    messages = [{"role": "user", "content": f"Question {number}: what is six times seven?"}]
    for turn in range(int(sys.argv[2])):
        connection.request("POST", "/v1/chat/completions", json.dumps({"model": "m", "messages": messages}), headers)
        with connection.getresponse() as response:
            assert response.status == 200, response.read()
            answer = json.load(response)["choices"][0]["message"]
        messages += [answer, {"role": "user", "content": f"Are you sure? ({turn})"}]
"""

Start = Callable[[int], Coroutine[Any, Any, None]]


class InstantPolicy:
    """Answers every prompt with the same tokens."""

    max_seq_len = 1 << 20

    def __init__(self, codec: ChatTokenizer) -> None:
        self.codec = codec
        self._ids = (*codec.encode_rendered(TEXT), codec.stop_token_ids[0])

    async def sample(self, token_ids: Sequence[int], *, options: Mapping[str, Any], session: str) -> Completion:
        """See `forge.envs.agent.Policy.sample`."""
        count = len(self._ids)
        spans = (VersionSpan(0, 0, count),)
        return Completion(tuple(token_ids), self._ids, (-1.0,) * count, None, TEXT, "stop", versions=spans)


async def run_plainly(rounds: int, environ: Mapping[str, str]) -> None:
    """Run the program as a process of its own."""
    words = (sys.executable, "-I", "-c", PROGRAM, str(rounds), str(NUM_TURNS))
    process = await asyncio.create_subprocess_exec(*words, env={**environ, "PATH": os.environ["PATH"]})
    assert await process.wait() == 0


def over_tcp(codec: ChatTokenizer) -> Start:
    """Programs that talk to the endpoint of their episode over TCP."""

    @forge.episode
    async def program(task: Task, agent: Agent, *, rounds: int) -> float:
        async with agent.endpoint() as endpoint:
            await run_plainly(rounds, endpoint.environ)
        return 1.0

    return lambda rounds: _play(program, codec, rounds)


def from_sandboxes(codec: ChatTokenizer) -> Start:
    """Programs that talk to the endpoint of their episode from inside a sandbox."""

    @forge.episode
    async def program(task: Task, agent: Agent, *, rounds: int) -> float:
        async with agent.endpoint() as endpoint, forge.sandbox(endpoint=endpoint) as box:
            result = await box.run(["python3", "-I", "-c", PROGRAM, str(rounds), str(NUM_TURNS)])
        assert result.exit_code == 0, result.stderr
        return 1.0

    return lambda rounds: _play(program, codec, rounds)


async def _play(program: Any, codec: ChatTokenizer, rounds: int) -> None:
    limits = EpisodeLimits(max_turns=None)
    run = await play(program, InstantPolicy(codec), args={"rounds": rounds}, limits=limits)
    assert len(run.turns) == rounds * NUM_TURNS
    assert run.counts.num_undelivered == 0


async def plain_server() -> tuple[Start, web.AppRunner]:
    """Programs that talk to a handler which answers everybody alike."""

    async def answer(request: web.Request) -> web.StreamResponse:
        json.loads(await request.read())
        message = {"role": "assistant", "content": TEXT}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return web.json_response({"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    environ = {"OPENAI_BASE_URL": f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "OPENAI_API_KEY": "none"}
    return lambda rounds: run_plainly(rounds, environ), runner


async def cost(start: Start, num: int, rounds: int) -> tuple[float, float]:
    """Return the CPU seconds of this process, and the time, of `num` programs at once."""
    used, began = time.process_time(), time.perf_counter()
    await asyncio.gather(*(start(rounds) for _ in range(num)))
    return time.process_time() - used, time.perf_counter() - began


async def measure(num: int, rounds: int, repeats: int) -> dict[str, dict[str, float]]:
    """Return what a request and a start cost, by way."""
    folder = resolve(ModelConfig(preset="tiny")).folder
    assert folder is not None
    codec = ChatTokenizer.load(folder)
    plain, runner = await plain_server()
    ways = {
        "plain handler": plain,
        "endpoint over TCP": over_tcp(codec),
        "endpoint from a sandbox": from_sandboxes(codec),
    }
    num_requests = num * rounds * NUM_TURNS
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for start in ways.values():
        await cost(start, 2, 1)  # what happens once
    for _ in range(repeats):
        for name, start in ways.items():
            empty_cpu, _ = await cost(start, num, 0)
            cpu, seconds = await cost(start, num, rounds)
            found[name].append(
                {
                    "request_cpu_ms": (cpu - empty_cpu) / num_requests * 1e3,
                    "start_cpu_ms": empty_cpu / num * 1e3,
                    "requests_per_s": num_requests / seconds,
                }
            )
    await runner.cleanup()
    return {name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=100, help="programs at once")
    parser.add_argument("--rounds", type=int, default=10, help="conversations of each program")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of which the median counts")
    parser.add_argument("--json", help="a file for the figures")
    args = parser.parse_args()
    found = asyncio.run(measure(args.num, args.rounds, args.repeats))
    rows = [
        [name, f"{each['request_cpu_ms']:.2f}", f"{each['start_cpu_ms']:.2f}", f"{each['requests_per_s']:.0f}"]
        for name, each in found.items()
    ]
    print(table([f"{args.num} programs at once", "CPU ms a request", "CPU ms a start", "requests/s"], rows))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine(), "options": vars(args), "ways": found}, file, indent=1)


if __name__ == "__main__":
    main()
