"""What `forge episode try` and `forge env check` are given: the program, its configuration and its tasks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge.errors import ConfigError, DataError
from forge.recipes import find_config

if TYPE_CHECKING:
    from forge.config import GRPOConfig
    from forge.envs.episode import EpisodeProgram
    from forge.types import Task

_PLACE = "command line"
"""The id of a task that is not from a file."""
_TASK_REPAIR = """write it like '{"messages": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}'"""


@dataclass(frozen=True, slots=True)
class ChosenProgram:
    """The program that a command line names.

    Attributes:
        kind: its name, `module:attribute`.
        found: the object of that name: an episode, a coroutine function or an environment's class.
        program: the same as an episode, with its arguments.
        config: the configuration of the run that it is part of; defaults where no file was given.
    """

    kind: str
    found: Any
    program: EpisodeProgram
    config: GRPOConfig


def add_program_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the program, its arguments and its configuration."""
    parser.add_argument(
        "words",
        metavar="MODULE:ATTRIBUTE|NAME=VALUE|OVERRIDE",
        nargs="*",
        help="the episode's program (default: episode.kind of --config), its arguments, and a.b=c for any other key",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=find_config,
        action="append",
        default=[],
        help="a GRPO run's YAML, or a recipe; later ones win",
    )


def read_program(
    arguments: argparse.Namespace, options: Mapping[str, str | float | None], *, command: str
) -> ChosenProgram:
    """Return the program that a command line asks for. `options` are values of options by key, None where not given.

    Overrides win over options, and options over files.
    """
    from forge.cli.chat import as_yaml
    from forge.config import GRPOConfig, add_module_folders, load
    from forge.envs.environment import as_program
    from forge.registry import EPISODES

    kinds, overrides = _split(arguments.words)
    if len(kinds) > 1 or not (kinds or arguments.config):
        raise ConfigError(
            f"{command} needs one program",
            path="MODULE:ATTRIBUTE",
            value=kinds,
            rule="the module and the name of an @forge.episode or an environment's class, or --config FILE",
            repair=f"{command} my_module:solve",
        )
    add_module_folders(arguments.config)
    chosen = {"episode.kind": kinds[0] if kinds else None, **options}
    given = [f"{key}={as_yaml(value)}" for key, value in chosen.items() if value is not None]
    config = load(GRPOConfig, files=arguments.config, overrides=[*given, *overrides])
    kind = config.episode.kind
    if kind is None:
        raise ConfigError(
            "the configuration names no program",
            path="episode.kind",
            value=None,
            rule="the module and the name of an episode; prompts with rewards are not one",
            repair=f"set episode.kind in the file, or name the program: {command} my_module:solve --config FILE",
        )
    found = EPISODES.find(kind, path="episode.kind")
    return ChosenProgram(kind, found, as_program(found, name=kind).with_args(config.episode.args), config)


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split words into programs and overrides. `NAME=VALUE` with a plain name is an argument of the program."""
    kinds, overrides = [], []
    for word in words:
        name, equals, _ = word.partition("=")
        if not equals and not word.startswith("~"):
            kinds.append(word)
        else:
            overrides.append(f"episode.args.{word}" if name.isidentifier() else word)
    return kinds, overrides


# ---- Tasks ----------------------------------------------------------------------------------------------------------


def read_task(text: str, config: GRPOConfig, *, path: str = "--task") -> Task:
    """Return the task that an option gives: JSON of a record, `@FILE` or `@FILE:N`, or the text of a user's message.

    The configuration's system prompt and template are put around it, as in a run.
    """
    from forge.data.files import Record
    from forge.data.prompt_files import RecordReader

    if text.startswith("@"):
        file, number = _place(text[1:])
        return read_file(file, config, path=path, first=number, most=1)[0]
    if text.lstrip().startswith("{"):
        try:
            bare = RecordReader(chat=config.prompts.chat).task(Record(_PLACE, text.encode()))
        except DataError as error:
            raise ConfigError(
                "the task cannot be read: " + error.message.removeprefix(f"{_PLACE}: "),
                path=path,
                value=text,
                rule=error.rule,
                repair=_TASK_REPAIR,
            ) from None
    elif text.strip():
        bare = RecordReader(chat=config.prompts.chat).task(Record(_PLACE, {"prompt": text}))
    else:
        raise ConfigError(
            "the task is empty",
            path=path,
            value=text,
            rule="text, JSON, or @FILE",
            repair=_TASK_REPAIR,
        )
    return _rendered(bare, config)


def read_file(file: str, config: GRPOConfig, *, path: str, first: int = 1, most: int = 1) -> list[Task]:
    """Return up to `most` tasks of a file of records, from its record number `first` on, counted from 1."""
    from forge.config import PromptSourceConfig
    from forge.data.prompt_files import RecordPrompts

    records = RecordPrompts(PromptSourceConfig(path=file), chat=config.prompts.chat, lenient=False)
    if not 1 <= first <= len(records):
        raise ConfigError(
            "there is no such record in the file",
            path=path,
            value=f"@{file}:{first}",
            rule=f"a number from 1 to {len(records)}",
            repair="leave the number out for the first record",
        )
    last = min(len(records), first - 1 + most)
    return [_rendered(records.read(index), config) for index in range(first - 1, last)]


def read_numbered(config: GRPOConfig, numbers: Sequence[int], *, path: str = "--number") -> list[Task]:
    """Return the tasks of a run's groups, by their numbers."""
    from forge.data.prompts import PromptOrder, open_prompts

    for number in numbers:
        if number < 0:
            raise ConfigError(
                "there is no such group",
                path=path,
                value=number,
                rule="a whole number >= 0",
                repair="groups are counted from 0",
            )
    seed = config.run.seed
    sets = open_prompts(config.prompts, evaluation=config.evaluation, seed=seed, for_episodes=True)
    order = PromptOrder(sets.train, seed=seed, shuffle=config.prompts.shuffle)
    return [order.at(number)[1] for number in numbers]


def _place(text: str) -> tuple[str, int]:
    file, colon, number = text.rpartition(":")
    return (file, int(number)) if colon and number.isdecimal() else (text, 1)


def _rendered(task: Task, config: GRPOConfig) -> Task:
    from forge.data.prompts import Wording

    prompts = config.prompts
    return Wording(prompts.system_prompt, prompts.template, prompts.chat).render(task)
