"""Rewards by name: the built-in ones, and `package.module:function` of a user."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from forge.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """Where a built-in reward lives: its module and function, and the function that checks its arguments together.

    `served` says that a model behind a service gives the reward; its function only tells the arguments.
    """

    module: str
    function: str
    check: str | None = None
    served: bool = False


_BUILT_INS = {
    "answer_in_tags": BuiltIn("answers", "answer_in_tags"),
    "code": BuiltIn("code", "code", check="check_code"),
    "contains": BuiltIn("matching", "contains"),
    "countdown": BuiltIn("countdown", "countdown"),
    "exact": BuiltIn("matching", "exact"),
    "fuzzy": BuiltIn("matching", "fuzzy"),
    "judge": BuiltIn("served", "judge", check="check_judge", served=True),
    "length": BuiltIn("form", "length", check="check_length"),
    "math": BuiltIn("answers", "math"),
    "number": BuiltIn("answers", "number"),
    "reasoning_gym": BuiltIn("gym", "reasoning_gym", check="check_installed"),
    "regex": BuiltIn("matching", "regex", check="check_regex"),
    "reward_model": BuiltIn("served", "reward_model", served=True),
    "tags": BuiltIn("form", "tags", check="check_tags"),
}


def names() -> list[str]:
    """The built-in rewards, in the order of the alphabet."""
    return sorted(_BUILT_INS)


def built_in(kind: str) -> BuiltIn | None:
    """The built-in reward of that name, or None."""
    return _BUILT_INS.get(kind)


def is_served(kind: str) -> bool:
    """Whether a model behind a service gives this reward, so that there is no function to call."""
    entry = _BUILT_INS.get(kind)
    return entry is not None and entry.served


def find(kind: str) -> Callable[..., float]:
    """The function of a reward: a built-in name, or `package.module:function`.

    Raises ConfigError for an unknown name, a module that cannot be imported, and what is no plain function of a prompt
    and a completion. Modules are imported now, and only the one that is asked for.
    """
    if is_served(kind):
        raise _refusal(
            f"The reward {kind!r} is not a function.",
            kind=kind,
            rule="a model behind a service gives it",
            repair="use it in `rewards.functions` of a run, with the section rewards."
            + ("judge" if kind == "judge" else "reward_model"),
        )
    function = specification(kind)
    _check_callable(function, kind=kind)
    found: Callable[..., float] = function
    return found


def specification(kind: str) -> Callable[..., Any]:
    """What tells the arguments of a reward: its function, or for a served one the function that stands for it."""
    entry = _BUILT_INS.get(kind)
    if entry is not None:
        return getattr(import_module(f"forge.rewards.{entry.module}"), entry.function)  # type: ignore[no-any-return]
    if ":" not in kind:
        raise _unknown(kind)
    module_name, _, attribute = kind.partition(":")
    module = found = _imported(kind, module_name)
    for step in attribute.split("."):
        if not hasattr(found, step):
            raise _refusal(
                f"The module {module_name} ({getattr(module, '__file__', 'built in')}) has no {attribute!r}.",
                kind=kind,
                rule="must be `package.module:function`",
                repair=_hidden(module_name, module)
                or _suggestion(step, dir(found))
                or "check the name of the function",
            )
        found = getattr(found, step)
    return found  # type: ignore[no-any-return]


def _imported(kind: str, module_name: str) -> Any:
    well_formed = all(part.isidentifier() for part in module_name.split("."))
    if not well_formed:
        raise _refusal(
            "This names no module.",
            kind=kind,
            rule="must be `package.module:function`",
            repair="write the module's dotted name, not its file",
        )
    try:
        return import_module(module_name)
    except Exception as error:
        raise _refusal(
            f"The module {module_name} cannot be imported: {type(error).__name__}: {error}",
            kind=kind,
            rule="the module must be importable in every process that runs rewards",
            repair=_import_repair(module_name, error),
        ) from error


def _import_repair(module_name: str, error: Exception) -> str:
    """Say what to do about a module that cannot be imported: it is not found, or something in it fails."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        if module_name.endswith(".py"):
            return f"write {module_name.removesuffix('.py')}, the module's name, not its file"
        if f"{module_name}.".startswith(f"{error.name}."):
            return (
                "put it beside the script, beside the configuration, in the working directory or on PYTHONPATH, "
                "or install it"
            )
        return f"the module was found, but not {error.name}, which it imports: install it, or put it beside the module"
    if isinstance(error, SyntaxError):
        return f"correct {error.filename}, line {error.lineno}"
    raised = traceback.extract_tb(error.__traceback__)[-1]
    return f"correct the module; the error comes from {raised.filename}, line {raised.lineno}"


def _hidden(module_name: str, module: object) -> str | None:
    """Name a file of the user that a module of the same name, found earlier, keeps from being imported."""
    used = os.path.realpath(getattr(module, "__file__", None) or "")
    inside = module_name.replace(".", os.sep)
    for folder in sys.path:
        for place in (f"{inside}.py", os.path.join(inside, "__init__.py")):
            file = os.path.join(folder or os.curdir, place)
            if os.path.isfile(file) and os.path.realpath(file) != used:
                return f"rename {file}: {module_name} is found elsewhere first"
    return None


def _check_callable(function: object, *, kind: str) -> None:
    """Refuse what cannot be called with a prompt and a completion."""
    rule, repair = "must be a plain function (prompt, completion, **arguments) -> float", "write it as a function"
    if not callable(function):
        raise _refusal("This is not a function.", kind=kind, rule=rule, repair=repair)
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called):
        raise _refusal("This is a coroutine.", kind=kind, rule=rule, repair="write `def` instead of `async def`")
    if inspect.isgeneratorfunction(function):
        raise _refusal("This is a generator.", kind=kind, rule=rule, repair="return one number")
    try:
        inspect.signature(function).bind_partial(None, None)
    except TypeError as error:
        raise _refusal(
            f"This cannot be called with a prompt and a completion: {error}.", kind=kind, rule=rule, repair=repair
        ) from error
    except ValueError:
        return  # A function of C without a signature: only a call can tell.


def _unknown(kind: str) -> ConfigError:
    return _refusal(
        f"There is no reward {kind!r}.",
        kind=kind,
        rule=f"must be one of {', '.join(names())}, or `package.module:function`",
        repair=_suggestion(kind, names()) or "`forge rewards` lists the built-in ones",
    )


def _suggestion(word: str, known: list[str]) -> str | None:
    from forge.config.suggest import did_you_mean

    return did_you_mean(word, [name for name in known if not name.startswith("_")])


def _refusal(message: str, *, kind: str, rule: str, repair: str) -> ConfigError:
    return ConfigError(message, path="kind", value=kind, rule=rule, repair=repair)
