"""`forge chat`: talk to a model, on a terminal or through a pipe."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from forge.cli.policy_words import add_policy_arguments, read_policy

if TYPE_CHECKING:
    from forge.config import PolicyConfig


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
    numbers = {key: _number(getattr(arguments, name)) for name, key in _NUMBERS.items()}
    return read_policy(arguments, {"system_prompt": arguments.system, **numbers}, command="forge chat")


def _number(text: str | None) -> str | float | None:
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
    import logging

    from forge.cli.chat_terminal import converse
    from forge.observe.console import discard_output, open_missing_streams

    open_missing_streams()

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        return asyncio.run(converse(config))
    except BrokenPipeError:  # the answers are no longer read
        discard_output()
        return 1
