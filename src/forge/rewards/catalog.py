"""Rewards by name: the built-in ones and `module:function` of a user, with their arguments checked.

A reward may declare two things about itself, as attributes: `check_args`, a function that refuses arguments which only
together are wrong, and `is_served`, that a model behind a service gives the reward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from forge.errors import ConfigError, ForgeError
from forge.registry import REWARDS

if TYPE_CHECKING:
    from forge.config import Problem, RewardsConfig

F = TypeVar("F", bound=Callable[..., Any])


def checks(reward: Callable[..., Any]) -> Callable[[F], F]:
    """Declare that the decorated function checks the arguments of a reward, given as a mapping."""

    def declare(check: F) -> F:
        reward.__dict__["check_args"] = check
        return check

    return declare


def served(reward: F) -> F:
    """Declare that a model behind a service gives a reward: its function only tells the arguments."""
    reward.__dict__["is_served"] = True
    return reward


def names() -> list[str]:
    """Return the names of the built-in rewards, in alphabetical order."""
    return REWARDS.names


def is_served(kind: str) -> bool:
    """Return whether a model behind a service gives this reward, so that there is no function to call."""
    return REWARDS.is_built_in(kind) and getattr(REWARDS.find(kind, path="kind"), "is_served", False)


def find(kind: str) -> Callable[..., float]:
    """Return the function of a reward: a built-in name, or `package.module:function`.

    Raises ConfigError for an unknown name, a module that cannot be imported, and what is not a plain function of a
    prompt and a completion. Modules are imported now, and only the one that is asked for.
    """
    function = REWARDS.find(kind, path="kind")
    if is_served(kind):
        raise _refusal(
            f"the reward {kind!r} is not a function",
            kind=kind,
            rule="it is computed by a model behind a service",
            repair=f"use it in `rewards.functions` of a run, with the section rewards.{kind}",
        )
    _check_callable(function, kind=kind)
    return function


def arguments(kind: str) -> dict[str, inspect.Parameter]:
    """Return the arguments of a reward besides prompt and completion, by name."""
    from forge.config.problems import named_arguments

    return named_arguments(REWARDS.find(kind, path="kind"), num_given=0 if is_served(kind) else 2)


def check(config: RewardsConfig) -> None:
    """Refuse rewards that cannot run, all faults at once.

    Raises InvalidConfig (a ConfigError) whose problems name `rewards.functions[i].kind`, `.args.NAME` and the like: an
    unknown kind, a module that does not import, an argument that is unknown, missing or of the wrong type, a served
    reward without its section. Modules of users are imported here, so their mistakes show before processes start.
    """
    _raise(_problems(config))


def check_args(kind: str, args: Mapping[str, Any], *, path: str = "args") -> None:
    """Refuse arguments that this reward does not take. Raises InvalidConfig with paths below `path`."""
    _raise(_argument_problems(kind, args, path=path))


def _raise(problems: Iterator[Problem]) -> None:
    from forge.config import InvalidConfig

    found = list(problems)
    if found:
        raise InvalidConfig(found)


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
    """Yield what is wrong with the arguments: names and types first, then what only together makes sense."""
    from forge.config.problems import argument_problems

    function = REWARDS.find(kind, path="kind")
    num_given = 0 if is_served(kind) else 2
    problems = argument_problems(function, args, path=path, what="the reward", num_given=num_given)
    yield from problems
    if problems:
        return
    try:
        if REWARDS.is_built_in(kind):
            _check_tags(args)
        getattr(function, "check_args", lambda args: None)(args)
    except ForgeError as error:
        place = path.rpartition(".")[0] if error.path == "kind" else path
        yield _problem(error, path=".".join(part for part in (place, error.path) if part))


def _check_tags(args: Mapping[str, Any]) -> None:
    from forge.rewards.form import check_tag_name

    for name in ("within", "tag"):
        if isinstance(args.get(name), str):
            check_tag_name(args[name], path=name)


def _check_callable(function: Callable[..., Any], *, kind: str) -> None:
    """Refuse what cannot be called with a prompt and a completion."""
    rule, repair = "must be a plain function (prompt, completion, **arguments) -> float", "write it as a function"
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called):
        raise _refusal("this is a coroutine", kind=kind, rule=rule, repair="write `def` instead of `async def`")
    if inspect.isgeneratorfunction(function):
        raise _refusal("this is a generator", kind=kind, rule=rule, repair="return one number")
    try:
        inspect.signature(function).bind_partial(None, None)
    except TypeError as error:
        raise _refusal(
            f"this cannot be called with a prompt and a completion: {error}", kind=kind, rule=rule, repair=repair
        ) from error
    except ValueError:
        return  # A function of C without a signature: only a call can tell.


def _refusal(message: str, *, kind: str, rule: str, repair: str) -> ConfigError:
    return ConfigError(message, path="kind", value=kind, rule=rule, repair=repair)


def _problem(error: ForgeError, *, path: str) -> Problem:
    from forge.config import Problem

    rule = error.rule or error.message
    if error.message not in rule:
        rule = f"{rule} ({error.message.rstrip('.')})"
    return Problem(path=path, value=error.value, rule=rule, repair=error.repair or "change it")
