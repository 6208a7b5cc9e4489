"""`forge chat`: talk to a model, on a terminal or through a pipe."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from forge.cli.config import AnyOrderParser
from forge.errors import ConfigError
from forge.log_levels import add_log_flags
from forge.recipes import find_config

if TYPE_CHECKING:
    from forge.config import PolicyConfig
if TYPE_CHECKING:
    from forge.config import PolicyConfig


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """The model's folder, files, overrides and the engine."""
    parser.__class__ = AnyOrderParser  # add_parser() makes its own class; overrides may stand between options
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=find_config,
        action="append",
        default=[],
        help="a YAML file or a recipe; later ones win",
    )
    parser.add_argument("--engine", metavar="ENGINE", help="native (the default), vllm, or module:attribute")
    parser.add_argument(
        "words", metavar="MODEL_DIR|OVERRIDE", nargs="*", help="the model's folder, and a.b=c or ~a.b for any other key"
    )


def read_policy(
    arguments: argparse.Namespace, given: Mapping[str, str | float | None], *, command: str
) -> PolicyConfig:
    """The configuration that a command line asks for; `given` are values of options by key, None where not given.

    Overrides win over options, and options over files.
    """
    from forge.config import PolicyConfig, load, split_words

    folders, overrides = split_words(arguments.words)
    if len(folders) > 1 or not (folders or arguments.config or overrides):
        raise ConfigError(
            f"{command} needs one model",
            path="MODEL_DIR",
            value=folders,
            rule="one folder with the model's files, or --config FILE, or overrides that name the model",
            repair=f"{command} models/qwen3-0.6b, or {command} model.preset=tiny for a model of random weights",
        )
    chosen = {
        "model.path": model_folder(folders[0]) if folders else None,
        "generator.engine": arguments.engine,
        **given,
    }
    options = [f"{key}={as_yaml(value)}" for key, value in chosen.items() if value is not None]
    return load(PolicyConfig, files=arguments.config, overrides=[*options, *overrides])


def model_folder(given: str) -> str:
    """Return the folder of the model that is meant: of a run's folder, the model that the run wrote, which is printed.

    A run without one raises. Any other folder is returned as it is, to be refused by the model's own rules.
    """
    folder = Path(given).expanduser()
    if folder.suffix in (".yaml", ".yml") and folder.is_file():
        raise ConfigError(
            "a configuration was given in place of the model's folder",
            path="MODEL_DIR",
            value=given,
            rule="a folder with the model's files, and a configuration after --config",
            repair=f"--config {shlex.quote(given)}",
        )
    if (folder / "config.json").is_file():
        return given
    candidates = [folder / "checkpoints" / "hf", folder / "hf"]
    for place in candidates:
        if (place / "config.json").is_file():
            print(f"{given} is the folder of a run: using its model, {place}", file=sys.stderr)
            return str(place)
    if (folder / "metrics.jsonl").is_file() or (folder / "checkpoints").is_dir():
        raise ConfigError(
            "this is the folder of a run that has not written a model",
            path="MODEL_DIR",
            value=given,
            rule=f"a model is in {candidates[0]} once the run has ended",
            repair="let the run finish (--resume continues a stopped run), or name the folder of another model",
        )
    return given


def as_yaml(value: str | float) -> str:
    """The value as YAML that means this and nothing else."""
    if not isinstance(value, str):
        return str(value)
    import yaml

    return str(yaml.safe_dump(value, default_style='"', allow_unicode=True, width=sys.maxsize)).rstrip("\n")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `chat`."""
    parser = subparsers.add_parser(
        "chat",
        help="chat with a model",
        description="Start a generator and chat with it. Answers are streamed; /help lists the commands. With "
        "piped input, each line is a question, and only the answers are printed.",
        epilog="example: forge chat models/qwen3-0.6b --temperature 0.7 generator.engine=vllm",
    )
    add_policy_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--temperature", metavar="X", help="0 for greedy decoding; default: 1")
    parser.add_argument("--max-tokens", metavar="N", help="longest answer; default: what fits into the context")
    parser.add_argument("--seed", metavar="N", help="sample the same answers each time")
    add_log_flags(parser)
    parser.set_defaults(handler=_chat)


_NUMBERS = {
    "temperature": "generator.sampling.temperature",
    "max_tokens": "generator.sampling.max_tokens",
    "seed": "generator.sampling.seed",
}


def _chat(arguments: argparse.Namespace) -> int:
    return chat(configure(arguments))


def configure(arguments: argparse.Namespace) -> PolicyConfig:
    """The configuration that the command line asks for. Overrides win over options, and options over files."""
    numbers = {key: parse_number(getattr(arguments, name)) for name, key in _NUMBERS.items()}
    return read_policy(arguments, {"system_prompt": arguments.system, **numbers}, command="forge chat")


def parse_number(text: str | None) -> str | float | None:
    """The number that a text means; what means none is left to be refused by the key's own rule."""
    for kind in (int, float):
        try:
            return None if text is None else kind(text)
        except ValueError:
            continue
    return text


def chat(config: PolicyConfig) -> int:
    """Talk to the policy of a configuration, on this process's terminal or pipes, and return the exit code.

    0: the session ended as it should. 1: input was piped, and a line of it could not be answered or carried out. What
    the input got wrong raises one of `INPUT_ERRORS` before the first question.
    """
    import asyncio

    from forge.cli.chat_terminal import converse
    from forge.observe.console import discard_output, open_missing_streams
    from forge.observe.logs import start_logging

    open_missing_streams()

    start_logging("warning")
    try:
        return asyncio.run(converse(config))
    except BrokenPipeError:  # the answers are no longer read
        discard_output()
        return 1
