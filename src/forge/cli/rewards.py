"""`forge rewards`: list the built-in rewards, or score one text with one of them."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.types import Completion


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `rewards` and `rewards try`."""
    from forge.cli.config import AnyOrderParser

    rewards = subparsers.add_parser("rewards", help="list the built-in rewards, or try one on a text")
    rewards.set_defaults(handler=_list)
    commands = rewards.add_subparsers(dest="rewards_command", metavar="try", parser_class=AnyOrderParser)
    attempt = commands.add_parser("try", help="score one text and print the number")
    attempt.add_argument("kind", metavar="KIND", help="a built-in reward, or package.module:function")
    attempt.add_argument("args", nargs="*", metavar="NAME=VALUE", help="arguments of the reward, such as tolerance=0.1")
    attempt.add_argument("--text", required=True, help="the completion's text; - reads it from standard input")
    attempt.add_argument("--answer", help="the right answer")
    attempt.add_argument("--question", default="", help="what was asked")
    attempt.add_argument("--metadata", default="{}", metavar="JSON", help="metadata of the prompt, as JSON")
    attempt.add_argument("--num-tokens", type=int, metavar="N", help="length in tokens (default: the number of words)")
    attempt.add_argument(
        "--config", metavar="FILE", action="append", default=[], help="also look for the module in this file's folder"
    )
    attempt.set_defaults(handler=_try)


def _list(arguments: argparse.Namespace) -> int:
    from forge.rewards import names

    for name in names():
        print(_described(name))
    print("`forge rewards try KIND --answer A --text T [NAME=VALUE …]` scores one text.")
    return 0


def _described(name: str) -> str:
    """The reward's name and arguments, and what it is in a sentence, for a terminal."""
    from forge.registry import REWARDS
    from forge.rewards import arguments

    words = []
    for parameter in arguments(name).values():
        default = parameter.default
        words.append(parameter.name if default is inspect.Parameter.empty else f"{parameter.name}={_shown(default)}")
    first = (inspect.getdoc(REWARDS.find(name, path="kind")) or "").partition("\n\n")[0].replace("\n", " ")
    head = textwrap.fill(f"{name}({', '.join(words)})", width=100, subsequent_indent=" " * (len(name) + 1))
    return f"{head}\n{textwrap.fill(first, width=100, initial_indent='    ', subsequent_indent='    ')}"


def _shown(value: object) -> str:
    """A default as one writes it in a configuration."""
    plain = dict(value) if isinstance(value, Mapping) else value
    return json.dumps(plain, default=repr)


def _try(arguments: argparse.Namespace) -> int:
    from forge.config import add_module_folders
    from forge.rewards import check_args, find
    from forge.types import Task

    add_module_folders(arguments.config)
    reward = find(arguments.kind)
    args = _read_args(arguments.args)
    check_args(arguments.kind, args)
    text = sys.stdin.read() if arguments.text == "-" else arguments.text
    prompt = Task(
        id="(command line)",
        text=arguments.question,
        answer=arguments.answer,
        metadata=_read_metadata(arguments.metadata),
    )
    print(f"{float(reward(prompt, _completion(text, arguments.num_tokens), **args)):g}")
    return 0


def _completion(text: str, num_tokens: int | None) -> Completion:
    """A completion of that text. No tokenizer is asked: only the number of its tokens means anything."""
    from forge.types import Completion

    size = len(text.split()) if num_tokens is None else max(0, num_tokens)
    return Completion((), (0,) * size, (0.0,) * size, None, text, "stop")


def _read_args(words: Sequence[str]) -> dict[str, Any]:
    import yaml

    from forge.errors import ConfigError

    args = {}
    for word in words:
        name, equals, value = word.partition("=")
        rule = "must be NAME=VALUE" if not equals or not name.isidentifier() else None
        try:
            args[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            rule = f"the value must be YAML: {error}"
        if rule:
            raise ConfigError(
                "An argument cannot be read.", path=word, value=word, rule=rule, repair="write it like tolerance=0.1"
            )
    return args


def _read_metadata(text: str) -> dict[str, Any]:
    from forge.errors import ConfigError

    try:
        metadata = json.loads(text)
    except ValueError as error:
        metadata = error
    if not isinstance(metadata, dict):
        raise ConfigError(
            "The metadata cannot be read.",
            path="--metadata",
            value=text,
            rule="must be a JSON object" + (f": {metadata}" if isinstance(metadata, ValueError) else ""),
            repair='write it like \'{"numbers": [1, 2], "target": 3}\'',
        )
    return metadata
