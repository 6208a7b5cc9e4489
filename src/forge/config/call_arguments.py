"""Arguments that a configuration gives to a function, checked by the function's signature before it is called."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from forge.config.problems import Problem
from forge.errors import did_you_mean

_NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def named_arguments(function: Callable[..., Any], *, num_given: int = 0) -> dict[str, inspect.Parameter]:
    """Return the parameters that can be given by name, without the first `num_given`, which the caller gives.

    Raises ValueError for a function of C without a signature.
    """
    parameters = list(inspect.signature(function).parameters.values())
    positional = [each for each in parameters if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    return {each.name: each for each in parameters if each.kind in _NAMED and each not in positional[:num_given]}


def argument_problems(
    function: Callable[..., Any],
    args: Mapping[str, Any],
    *,
    path: str,
    what: str,
    num_given: int = 0,
    offered: Collection[str] = (),
) -> list[Problem]:
    """Return what is wrong with arguments: names that a function does not have or lacks, values of another type.

    The first `num_given` parameters are the caller's, and those named in `offered` need not be given. `what` names the
    function in messages.
    """
    try:
        known = named_arguments(function, num_given=num_given)
    except ValueError:
        return []  # A function of C without a signature: only a call can tell.
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    problems = []
    for name in args:
        if name not in known and not takes_any:
            rule = f"the arguments are {', '.join(known)}" if known else f"{what} takes no arguments"
            repair = did_you_mean(name, known) or "remove it"
            problems.append(Problem(path=f"{path}.{name}", value=args[name], rule=rule, repair=repair))
    for name, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and name not in args and name not in offered:
            problems.append(Problem(path=f"{path}.{name}", rule=f"{what} needs this argument", repair="add it"))
    present = {name: value for name, value in args.items() if name in known}
    return [*problems, *_type_problems(function, present, path=path)]


def _type_problems(function: Callable[..., Any], args: Mapping[str, Any], *, path: str) -> Iterator[Problem]:
    hints = _hints(function) if args else {}
    for name, value in args.items():
        if name not in hints:
            continue
        try:
            TypeAdapter(hints[name]).validate_python(value, strict=True)
        except (PydanticSchemaGenerationError, PydanticUserError):
            continue  # pydantic cannot check this type
        except ValidationError as error:
            rules = dict.fromkeys(fault["msg"] for fault in error.errors(include_url=False, include_input=False))
            yield Problem(
                path=f"{path}.{name}", value=value, rule="; or: ".join(rules), repair="write a value of that kind"
            )


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types that a function declares; none where they cannot be read."""
    plain = inspect.unwrap(function)
    while hasattr(plain, "func"):
        plain = plain.func
    if inspect.isclass(plain):
        plain = plain.__init__
    elif not inspect.isroutine(plain):
        plain = type(plain).__call__
    try:
        return typing.get_type_hints(plain, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}
