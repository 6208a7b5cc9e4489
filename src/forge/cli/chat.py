"""`forge chat`: talk to a model, on a terminal or through a pipe."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from forge.cli.config import _AnyOrderParser

if TYPE_CHECKING:
    from forge.config import PolicyConfig


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `chat`."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model",
        description="Start a generator and talk to it. Answers come as they are made; /help lists the commands. With "
        "piped input, each line is a question, and only the answers are printed.",
        epilog="example: forge chat models/qwen3-0.6b --temperature 0.7 generator.engine=vllm",
    )
    parser.__class__ = _AnyOrderParser  # add_parser() makes its own class; overrides may stand between options
    parser.add_argument("--config", metavar="FILE", action="append", default=[], help="a YAML file; later ones win")
    parser.add_argument("--engine", choices=("native", "vllm"), help="what makes the tokens; default: native")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--temperature", metavar="X", help="0 takes the likeliest token; default: 1")
    parser.add_argument("--max-tokens", metavar="N", help="longest answer; default: what the context has room for")
    parser.add_argument("--seed", metavar="N", help="draw the same answers each time")
    parser.add_argument(
        "words", metavar="MODEL_DIR|OVERRIDE", nargs="*", help="the model's folder, and a.b=c or ~a.b for any other key"
    )
    parser.set_defaults(handler=_chat)


_KEYS = {
    "engine": "generator.engine",
    "temperature": "generator.sampling.temperature",
    "max_tokens": "generator.sampling.max_tokens",
    "seed": "generator.sampling.seed",
}


def _chat(arguments: argparse.Namespace) -> int:
    return chat(configure(arguments))


def configure(arguments: argparse.Namespace) -> PolicyConfig:
    """The configuration that the command line asks for. Overrides win over options, and options over files."""
    from forge.config import PolicyConfig, load, split_words
    from forge.errors import ConfigError

    folders, overrides = split_words(arguments.words)
    if len(folders) > 1 or not (folders or arguments.config or overrides):
        raise ConfigError(
            "there is no one model to talk to",
            path="MODEL_DIR",
            value=folders,
            rule="one folder with the model's files, or --config FILE, or overrides that name the model",
            repair="forge chat models/qwen3-0.6b, or forge chat model.preset=tiny for a model of random weights",
        )
    texts = {"model.path": folders[0] if folders else None, "system_prompt": arguments.system}
    options = [f"{key}={_quoted(text)}" for key, text in texts.items() if text is not None]
    options += [f"{key}={value}" for name, key in _KEYS.items() if (value := getattr(arguments, name)) is not None]
    return load(PolicyConfig, files=arguments.config, overrides=[*options, *overrides])


def _quoted(text: str) -> str:
    """The text as YAML that means this text and nothing else."""
    import yaml

    return str(yaml.safe_dump(text, default_style='"', allow_unicode=True, width=sys.maxsize)).rstrip("\n")


def chat(config: PolicyConfig) -> int:
    """Talk to the policy of a configuration, on this process's terminal or pipes, and return the exit code.

    0: the session ended as it should. 1: input was piped, and a line of it could not be answered or carried out. What
    the input got wrong raises one of `INPUT_ERRORS` before the first question.
    """
    import asyncio
    import logging
    import os

    from forge.cli.chat_terminal import converse

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        return asyncio.run(converse(config))
    except BrokenPipeError:  # whoever read the answers has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
