"""Whether the rewards of a configuration can be computed: asked before anything starts."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from forge.errors import ForgeError
from forge.rewards.catalog import built_in, find, is_served, specification

if TYPE_CHECKING:
    from forge.config import Problem, RewardsConfig

_NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check(config: RewardsConfig) -> None:
    """Refuse rewards that cannot run, all faults at once.

    Raises InvalidConfig (a ConfigError) whose problems name `rewards.functions[i].kind`, `.args.NAME` and the like: an
    unknown kind, a module that does not import, an argument that is unknown, missing or of the wrong type, a served
    reward without its section. Modules of users are imported here, so their mistakes show before processes start.
    """
    from forge.config import InvalidConfig

    problems = list(_problems(config))
    if problems:
        raise InvalidConfig(problems)


def check_args(kind: str, args: Mapping[str, Any], *, path: str = "args") -> None:
    """Refuse arguments that this reward does not take. Raises InvalidConfig with paths below `path`."""
    from forge.config import InvalidConfig

    problems = list(_argument_problems(kind, args, path=path))
    if problems:
        raise InvalidConfig(problems)


def arguments(kind: str) -> dict[str, inspect.Parameter]:
    """The arguments of a reward besides prompt and completion, by name."""
    signature = inspect.signature(specification(kind))
    named = [parameter for parameter in signature.parameters.values() if parameter.kind in _NAMED]
    if not is_served(kind):
        positional = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.KEYWORD_ONLY]
        named = [parameter for parameter in named if parameter not in positional[:2]]
    return {parameter.name: parameter for parameter in named}


def _problems(config: RewardsConfig) -> Iterator[Problem]:
    from forge.config import Problem

    if not config.functions:
        yield Problem(
            path="rewards.functions",
            value=(),
            rule="at least one reward is needed",
            repair="add one, such as {kind: number}; `forge rewards` lists the built-in ones",
        )
    for index, reward in enumerate(config.functions):
        path = f"rewards.functions[{index}]"
        if config.overlong is not None and reward.label == "overlong":
            yield Problem(
                path=f"{path}.name",
                value=reward.label,
                rule="with rewards.overlong this is the name of that part of the score",
                repair="give the reward another `name`",
            )
        try:
            if not is_served(reward.kind):
                find(reward.kind)
        except ForgeError as error:
            yield _problem(error, path=f"{path}.kind")
            continue
        if is_served(reward.kind) and getattr(config, reward.kind) is None:
            yield Problem(
                path=f"rewards.{reward.kind}",
                value=None,
                rule=f"the reward `{reward.kind}` ({path}) asks the model of this section",
                repair=f"add rewards.{reward.kind}.path, or remove the reward",
            )
        yield from _argument_problems(reward.kind, reward.args, path=f"{path}.args")


def _argument_problems(kind: str, args: Mapping[str, Any], *, path: str) -> Iterator[Problem]:
    """What is wrong with the arguments: names first, then types, then what only together makes sense."""
    try:
        known = arguments(kind)
    except ValueError:
        return  # A function of C without a signature: only a call can tell.
    function = specification(kind)
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    faults = [
        *_name_faults(args, known, path=path, takes_any=takes_any),
        *_type_faults(function, _only(args, known), path=path),
    ]
    yield from faults
    entry = built_in(kind)
    if faults or entry is None:
        return
    try:
        for name in ("within", "tag"):
            if isinstance(args.get(name), str):
                import_module("forge.rewards.form").check_tag_name(args[name], path=name)
        if entry.check is not None:
            getattr(import_module(f"forge.rewards.{entry.module}"), entry.check)(args)
    except ForgeError as error:
        place = path.rpartition(".")[0] if error.path == "kind" else path
        yield _problem(error, path=".".join(part for part in (place, error.path) if part))


def _only(args: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in args.items() if name in known}


def _name_faults(
    args: Mapping[str, Any], known: Mapping[str, inspect.Parameter], *, path: str, takes_any: bool
) -> Iterator[Problem]:
    from forge.config import Problem
    from forge.config.suggest import did_you_mean

    for name in args:
        if name not in known and not takes_any:
            yield Problem(
                path=f"{path}.{name}",
                value=args[name],
                rule=f"the arguments are {_listed(known)}" if known else "the reward takes no arguments",
                repair=did_you_mean(name, known) or "remove it",
            )
    for name, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and name not in args:
            yield Problem(path=f"{path}.{name}", rule="the reward needs this argument", repair="add it")


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)


def _type_faults(function: Callable[..., Any], args: Mapping[str, Any], *, path: str) -> Iterator[Problem]:
    """The arguments whose values do not fit what the function says of them, where it says so."""
    from pydantic import TypeAdapter, ValidationError

    from forge.config import Problem

    hints = _hints(function)
    for name, value in args.items():
        if name not in hints:
            continue
        try:
            TypeAdapter(hints[name]).validate_python(value, strict=True)
        except ValidationError as error:
            rules = dict.fromkeys(fault["msg"] for fault in error.errors(include_url=False, include_input=False))
            yield Problem(
                path=f"{path}.{name}",
                value=value,
                rule="; or: ".join(rules),
                repair="write a value of that kind",
            )


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function says about its arguments; of those that cannot be read or checked, nothing is demanded."""
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

    plain = inspect.unwrap(function)
    while hasattr(plain, "func"):
        plain = plain.func
    if not inspect.isroutine(plain):
        plain = type(plain).__call__
    try:
        hints = typing.get_type_hints(plain, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}
    checkable = {}
    for name, hint in hints.items():
        try:
            TypeAdapter(hint)
        except (PydanticSchemaGenerationError, PydanticUserError):
            continue
        checkable[name] = hint
    return checkable


def _problem(error: ForgeError, *, path: str) -> Problem:
    from forge.config import Problem

    rule = error.rule or error.message
    if error.message not in rule:
        rule = f"{rule} ({error.message.rstrip('.')})"
    return Problem(path=path, value=error.value, rule=rule, repair=error.repair or "change it")
