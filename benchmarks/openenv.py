"""How many turns a second do 256 OpenEnv sessions make, and what does a turn cost the process that runs the episodes?

The server is OpenEnv's own, with the echo environment that `openenv init` makes, in OpenEnv's venv. Its clients are
ours, as episodes use it (schemas are checked), and OpenEnv's own: the typed one that `openenv init` makes, and the
generic one. Each client is a process that opens all sessions, resets them, and then takes steps in all of them at once
without a pause. Rounds alternate, on the same server. Other programs only slow a round down, so the fastest rounds are
compared; CPU times are medians. A fourth side runs whole episodes with our client: an agent, a tokenizer and a policy
that answers at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from forge.config import EpisodeLimits, ModelConfig
from forge.envs.environment import load_program
from forge.envs.episode import run_episode
from forge.envs.external.openenv import OpenEnv, OpenEnvServer
from forge.envs.external.processes import close_servers, pool_of
from forge.envs.external.venvs import python_of
from forge.envs.journal import Journal
from forge.envs.state import EpisodeKey, EpisodeState
from forge.models.locate import resolve
from forge.models.tokenizer import ChatTokenizer
from forge.types import Completion, Task, VersionSpan
from harness.report import machine, table

GOAL = 1.0
REQUIREMENTS = ("openenv==0.10.0",)
SIDE = Path(__file__).parent / "harness" / "openenv_side"
TEXT = "What does an environment answer?"
PEERS = ("typed", "generic")
SIDES = ("ours", *PEERS, "episodes")


@dataclass(frozen=True)
class Plan:
    """How much there is to do, in each round of each side."""

    num_sessions: int = 256
    num_turns: int = 20
    num_rounds: int = 11


async def run_ours(url: str, num_sessions: int, num_turns: int) -> dict[str, float]:
    """Take steps in all sessions with our client, and return seconds and CPU seconds."""
    task = Task("echo", ({"role": "user", "content": "Talk."},), metadata={"seed": 1})
    answer = {"role": "assistant", "content": TEXT}
    envs = [OpenEnv(url=url, connect_timeout_s=120.0, step_timeout_s=120.0) for _ in range(num_sessions)]
    await asyncio.gather(*(env.reset(task) for env in envs))

    async def turns(env: OpenEnv) -> None:
        for _ in range(num_turns):
            await env.step(answer)

    cpu, began = time.process_time(), time.perf_counter()
    await asyncio.gather(*map(turns, envs))
    found = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
    await asyncio.gather(*(env.close() for env in envs))
    return found


@dataclass
class InstantPolicy:
    """Answers at once, always the same."""

    answer: tuple[int, ...]
    max_seq_len: int = 1 << 20

    async def sample(self, token_ids: Sequence[int], *, options: Mapping[str, Any], session: str) -> Completion:
        """See `forge.envs.agent.Policy.sample`."""
        return Completion(
            prompt_ids=tuple(token_ids),
            token_ids=self.answer,
            logprobs=(-1.0,) * len(self.answer),
            full_logprobs=None,
            text=TEXT,
            finish_reason="stop",
            versions=(VersionSpan(0, 0, len(self.answer)),),
        )


async def run_episodes(url: str, num_sessions: int, num_turns: int) -> dict[str, float]:
    """Run whole episodes at once, with their connections and resets, and return seconds and CPU seconds."""
    folder = resolve(ModelConfig(preset="tiny")).folder
    assert folder is not None
    codec = ChatTokenizer.load(folder)
    policy = InstantPolicy((*codec.encode_rendered(TEXT), codec.stop_token_ids[0]))
    options = {"url": url, "connect_timeout_s": 120.0, "step_timeout_s": 120.0, "max_steps": num_turns}
    program = load_program("openenv", options)

    def state(member: int) -> EpisodeState:
        return EpisodeState(
            task=Task("echo", ({"role": "user", "content": "Talk."},), metadata={"seed": 1}),
            key=EpisodeKey(0, 0, member),
            limits=EpisodeLimits(max_turns=None),
            policy=policy,
            codec=codec,
            tool_format="hermes",
            sampling={"max_tokens": 64},
            journal=Journal(),
        )

    cpu, began = time.process_time(), time.perf_counter()
    await asyncio.gather(*(run_episode(program, state(member)) for member in range(num_sessions)))
    return {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}


def command_of(side: str, url: str, plan: Plan, python: Path) -> list[str]:
    """Return the command line of one side's client."""
    counts = (str(plan.num_sessions), str(plan.num_turns))
    if side not in PEERS:
        return [sys.executable, __file__, "--client", side, url, *counts]
    return [str(python), str(SIDE / "own_client.py"), url, *counts, TEXT, side]


async def measure(plan: Plan) -> dict[str, Any]:
    """Run all rounds, and return what each side did in each."""
    python = await asyncio.to_thread(python_of, REQUIREMENTS)
    with tempfile.TemporaryDirectory(prefix="openenv-bench-") as folder:
        await _run([str(python.with_name("openenv")), "init", "echo_env", "--output-dir", folder])
        server = OpenEnvServer(
            app="echo_app:app", requirements=REQUIREMENTS, folders=(folder, str(SIDE)), start_limit_s=600.0
        )
        rounds: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        try:
            async with pool_of(server.spec()).borrow() as borrowed:
                for number in range(plan.num_rounds + 1):
                    for side in SIDES[number % len(SIDES) :] + SIDES[: number % len(SIDES)]:
                        before = _server_cpu()
                        found_in = {"PYTHONPATH": folder} if side in PEERS else {}
                        output = await _run(command_of(side, borrowed.url, plan, python), **found_in)
                        found = json.loads(output.splitlines()[-1])
                        found["server_cpu_s"] = _server_cpu() - before
                        if number:  # the first round warms up
                            rounds[side].append(found)
        finally:
            await close_servers()
    return {"plan": asdict(plan), "rounds": rounds, **_summary(plan, rounds)}


def _summary(plan: Plan, rounds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    num = plan.num_sessions * plan.num_turns
    sides = {
        side: {
            "best_turns_per_s": max(num / each["seconds"] for each in found),
            "median_turns_per_s": statistics.median(num / each["seconds"] for each in found),
            "client_ms": statistics.median(1e3 * each["cpu_s"] / num for each in found),
            "server_ms": statistics.median(1e3 * each["server_cpu_s"] / num for each in found),
        }
        for side, found in rounds.items()
    }
    ours = sides["ours"]
    ratios = {
        side: {
            "turns_per_s": ours["best_turns_per_s"] / sides[side]["best_turns_per_s"],
            "client_cpu": sides[side]["client_ms"] / ours["client_ms"],
        }
        for side in PEERS
    }
    return {"sides": sides, "ratios": ratios}


async def _run(command: Sequence[str], **environment: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment}
    )
    output, errors = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{errors.decode()[-4000:]}")
    return output.decode()


def _server_cpu() -> float:
    """Return the CPU seconds of the server so far."""
    servers = [each for each in psutil.Process().children(recursive=True) if "uvicorn" in each.cmdline()]
    return sum(sum(each.cpu_times()[:2]) for each in servers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="a smoke run of 16 sessions; figures mean little")
    parser.add_argument("--rounds", type=int, default=Plan.num_rounds, help="counted rounds of each side")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a goal is missed")
    parser.add_argument("--client", nargs=4, metavar=("SIDE", "URL", "SESSIONS", "TURNS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        side, url, num_sessions, num_turns = arguments.client
        run = run_episodes if side == "episodes" else run_ours
        print(json.dumps(asyncio.run(run(url, int(num_sessions), int(num_turns)))))
        return 0
    plan = Plan(16, 5, 2) if arguments.quick else Plan(num_rounds=arguments.rounds)
    found = asyncio.run(measure(plan))
    print(json.dumps(machine()), end="\n\n")
    names = {
        "ours": "ours",
        "typed": "OpenEnv's, typed",
        "generic": "OpenEnv's, generic",
        "episodes": "whole episodes with ours",
    }
    rows = []
    for side, name in names.items():
        figures, ratios = found["sides"][side], found["ratios"].get(side)
        speeds = [f"{figures[key]:.0f}" for key in ("best_turns_per_s", "median_turns_per_s")]
        costs = [f"{figures[key]:.3f} ms" for key in ("client_ms", "server_ms")]
        rows.append([name, *speeds, *costs, *([f"{each:.2f}×" for each in ratios.values()] if ratios else ["", ""])])
    title = f"{plan.num_sessions} sessions, {plan.num_turns} turns each, {plan.num_rounds} rounds"
    head = [title, "turns/s, best round", "median round", "client CPU a turn", "server CPU a turn"]
    print(table([*head, "our turns/s (best) over theirs", "their client CPU over ours"], rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")
    is_met = all(each["turns_per_s"] >= GOAL for each in found["ratios"].values())
    print(
        f"\nGoal: at least {GOAL:g} times the turns a second of OpenEnv's own client: {'met' if is_met else 'missed'}."
    )
    return 0 if is_met or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
