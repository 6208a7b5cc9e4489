"""`forge episode try`: run one episode and print it turn by turn."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import TYPE_CHECKING

from forge.errors import ConfigError
from forge.log_levels import add_log_flags

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from forge.cli.episode_inputs import ChosenProgram
    from forge.cli.episode_policies import OpenedPolicy
    from forge.cli.episode_print import Attempt
    from forge.envs.state import EpisodeKey
    from forge.types import Task

_KEYS = {
    "seed": "run.seed",
    "temperature": "generator.sampling.temperature",
    "max_tokens": "generator.sampling.max_tokens",
    "max_turns": "episode.limits.max_turns",
    "tool_format": "episode.tool_format",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `episode try`."""
    from forge.cli.config import AnyOrderParser
    from forge.cli.episode_inputs import add_program_arguments

    episode = subparsers.add_parser("episode", help="run one episode of a program and print it")
    commands = episode.add_subparsers(dest="episode_command", metavar="try", required=True, parser_class=AnyOrderParser)
    attempt = commands.add_parser(
        "try",
        help="run one episode and print its turns, tool calls, rewards and outcome",
        description="Run one episode against a model on the native engine of this process, or against an "
        "OpenAI-compatible endpoint, and print it turn by turn. Exit code 1 if the episode fails.",
        epilog="example: forge episode try my_module:solve --task '2 + 2?' --model models/qwen3-0.6b --temperature 0.7",
    )
    add_program_arguments(attempt)
    attempt.add_argument(
        "--task",
        metavar="TASK",
        help="JSON of a record, @FILE or @FILE:N for the N-th record of a file, or the text of a user's message; "
        "default: the task of group --number of the configuration's prompts",
    )
    attempt.add_argument("--number", metavar="N", type=int, default=0, help="the group; default: 0")
    attempt.add_argument("--member", metavar="N", type=int, default=0, help="which of the group's episodes; default: 0")
    attempt.add_argument("--model", metavar="NAME", help="the model's folder; with --endpoint, its name there")
    attempt.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible endpoint instead of a model's folder")
    attempt.add_argument("--api-key", metavar="KEY", help="the endpoint's key; default: the variable OPENAI_API_KEY")
    attempt.add_argument("--seed", metavar="N", help="the run's seed; default: run.seed")
    attempt.add_argument("--temperature", metavar="X", help="0 for greedy decoding")
    attempt.add_argument("--max-tokens", metavar="N", help="the longest answer")
    attempt.add_argument("--max-turns", metavar="N", help="the most turns of the episode")
    attempt.add_argument("--tool-format", metavar="FORMAT", help="how tool calls are written: hermes, llama, json")
    attempt.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_log_flags(attempt)
    attempt.set_defaults(handler=_try)


def _try(arguments: argparse.Namespace) -> int:
    import asyncio

    from forge.cli.chat import model_folder, parse_number
    from forge.cli.episode_inputs import read_numbered, read_program, read_task
    from forge.cli.episode_print import EpisodePrinter, plain_attempt
    from forge.envs.state import EpisodeKey
    from forge.observe.logs import start_logging

    start_logging("warning")
    options = {key: parse_number(getattr(arguments, name)) for name, key in _KEYS.items()}
    if arguments.model is not None and arguments.endpoint is None:
        options["model.path"] = model_folder(arguments.model)
    chosen = read_program(arguments, options, command="forge episode try")
    _check(arguments, chosen)
    if arguments.task is not None:
        task = read_task(arguments.task, chosen.config)
    else:
        (task,) = read_numbered(chosen.config, [arguments.number])
    key = EpisodeKey(chosen.config.run.seed, arguments.number, arguments.member)
    attempt = asyncio.run(_run(_policy(arguments, chosen), chosen, task, key))
    if arguments.json:
        print(json.dumps(plain_attempt(attempt), indent=2, ensure_ascii=False, default=str))
    else:
        EpisodePrinter(sys.stdout).show(attempt)
    return 0 if attempt.error is None else 1


def _check(arguments: argparse.Namespace, chosen: ChosenProgram) -> None:
    for name in ("number", "member"):
        value = getattr(arguments, name)
        if value < 0:
            raise ConfigError(
                f"there is no such {'group' if name == 'number' else name}",
                path=f"--{name}",
                value=value,
                rule="a whole number >= 0",
                repair="leave it out for 0",
            )
    if arguments.task is None and not chosen.config.prompts.sources:
        raise ConfigError(
            "there is no task",
            path="--task",
            value=None,
            rule="a task, or a configuration with prompts",
            repair="give --task 'What is 2 + 2?', or --config FILE with prompts.sources",
        )
    if arguments.api_key is not None and arguments.endpoint is None:
        raise ConfigError(
            "an API key was given without an endpoint",
            path="--api-key",
            rule="only with --endpoint",
            repair="give --endpoint URL, or leave the key out",
        )
    model = chosen.config.model
    if arguments.endpoint is None and model.path is None and model.preset is None:
        raise ConfigError(
            "nothing is named that could answer",
            path="--model",
            value=None,
            rule="a model's folder, an endpoint, or a configuration with a model",
            repair="give --model FOLDER, --endpoint URL, or model.preset=tiny for a model of random weights",
        )


def _policy(arguments: argparse.Namespace, chosen: ChosenProgram) -> AbstractAsyncContextManager[OpenedPolicy]:
    from forge.cli.episode_policies import open_endpoint, open_model

    if arguments.endpoint is None:
        return open_model(chosen.config, as_in_run=bool(arguments.config))
    api_key = arguments.api_key or os.environ.get("OPENAI_API_KEY")
    return open_endpoint(chosen.config, arguments.endpoint, model=arguments.model, api_key=api_key)


async def _run(
    policy: AbstractAsyncContextManager[OpenedPolicy], chosen: ChosenProgram, task: Task, key: EpisodeKey
) -> Attempt:
    """Run the episode. What the program raises is part of the attempt."""
    import traceback

    from forge.cli.episode_policies import ProgressPolicy
    from forge.cli.episode_print import Attempt
    from forge.envs.episode import EpisodeRun, run_episode
    from forge.envs.journal import Journal
    from forge.envs.limits import Fault
    from forge.envs.state import EpisodeState
    from forge.errors import ForgeError

    async with policy as opened:
        state = EpisodeState(
            task=task,
            key=key,
            limits=opened.limits,
            policy=ProgressPolicy(opened.policy, sys.stderr) if sys.stderr.isatty() else opened.policy,
            codec=opened.codec,
            tool_format=opened.tool_format,
            sampling=opened.sampling,
            journal=Journal(),
        )
        began = time.perf_counter()
        run: EpisodeRun | None = None
        error: str | None = None
        try:
            run = await run_episode(chosen.program, state)
        except Fault as fault:
            error = f"fault ({fault.kind}): {fault}"
        except ForgeError as failure:
            error = str(failure)
        except Exception:  # noqa: BLE001 - whatever the program raises is shown
            error = traceback.format_exc()
        seconds = time.perf_counter() - began
        return Attempt(chosen.kind, chosen.program.args, opened, state, run, error, seconds)
