"""The side of `forge.envs.external.gymnasium` that runs where gymnasium is installed."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_HIGHLIGHT = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_DIGITS = 4


class Refused(Exception):
    """The options are wrong."""


def prepare() -> None:
    """Import what takes long."""
    importlib.import_module("gymnasium")


class Host:
    """One environment."""

    def __init__(self) -> None:
        self._gym: Any = importlib.import_module("gymnasium")
        self._env: Any = None
        self._observe: Callable[..., Any] | None = None
        self._act: Callable[..., Any] | None = None
        self._names: Sequence[str] = ()
        self._pattern: re.Pattern[str] | None = None
        self._shows_rendering = False

    def reset(
        self,
        *,
        env: str,
        make: Mapping[str, Any],
        seed: int,
        options: Mapping[str, Any] | None,
        observe: str | None,
        act: str | None,
        actions: Sequence[str],
        pattern: str | None,
    ) -> dict[str, Any]:
        """Make the environment and begin."""
        self._shows_rendering = observe == "render"
        self._observe = None if observe is None or self._shows_rendering else _attribute(observe, "observe")
        self._act = None if act is None else _attribute(act, "act")
        self._names = actions
        self._pattern = None if pattern is None else re.compile(pattern, re.DOTALL)
        extra = {"render_mode": "ansi"} if self._shows_rendering else {}
        try:
            self._env = self._gym.make(env, **{**extra, **make})
        except (self._gym.error.Error, ImportError, TypeError, ValueError) as error:
            raise Refused(f"{env}: {type(error).__name__}: {error}") from error
        self._check(env)
        seen, info = self._env.reset(seed=seed, options=options)
        self._env.action_space.seed(seed)
        return {"text": self._text(seen, info), "actions": self._choices()}

    def step(self, *, text: str) -> dict[str, Any]:
        """Take an action. One that cannot be read is answered with what is wrong, and changes nothing."""
        try:
            action = self._read(text)
        except ValueError as error:
            return {"problem": str(error)}
        seen, reward, terminated, truncated, info = self._env.step(action)
        return {
            "text": self._text(seen, info),
            "reward": float(reward),
            "terminated": bool(terminated),
            "truncated": bool(truncated),
        }

    def _check(self, env: str) -> None:
        """Refuse what cannot be shown or named in text, and names that are not one for each action."""
        space, spaces = self._env.action_space, self._gym.spaces
        known = (spaces.Discrete, spaces.Text, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)
        modes = (self._env.metadata or {}).get("render_modes", ())
        if self._shows_rendering and "ansi" not in modes:
            raise Refused(
                f"{env} cannot be drawn as text, only as {list(modes)}; leave observe out, or give a function"
            )
        if self._act is None and not isinstance(space, known):
            raise Refused(f"{env}: actions of {type(space).__name__} cannot be read from text; give act")
        if self._names and not (isinstance(space, spaces.Discrete) and len(self._names) == space.n):
            raise Refused(f"{env}: actions must name each action of {space}, in order, not {list(self._names)}")

    # ---- Actions ----------------------------------------------------------------------------------------------------

    def _choices(self) -> str:
        """Return what the policy is told about its actions."""
        space, spaces = self._env.action_space, self._gym.spaces
        if self._act is not None or isinstance(space, spaces.Text):
            return ""
        if isinstance(space, spaces.Discrete):
            first = int(space.start)
            if self._names:
                return ", ".join(f"{first + number} or {name}" for number, name in enumerate(self._names))
            return f"a whole number from {first} to {first + int(space.n) - 1}"
        return f"a JSON array of the shape {list(space.shape)}"

    def _read(self, text: str) -> Any:
        """Return the action that a text names, or raise ValueError with what is wrong."""
        if self._pattern is not None:
            found = list(self._pattern.finditer(text))
            if not found:
                raise ValueError(f"it has nothing like {self._pattern.pattern}")
            text = found[-1].group(found[-1].re.groups and 1)
        if self._act is not None:
            return self._act(text, self._env)
        space, spaces = self._env.action_space, self._gym.spaces
        if isinstance(space, spaces.Text):
            action: Any = text
        elif isinstance(space, spaces.Discrete):
            action = self._discrete(text.strip().strip("[]().!\"'`").casefold())
        else:
            action = self._array(text)
        if not space.contains(action):
            raise ValueError(f"expected {self._choices() or space}")
        return action

    def _discrete(self, word: str) -> Any:
        space = self._env.action_space
        names = [name.casefold() for name in self._names]
        if word in names:
            return space.dtype.type(int(space.start) + names.index(word))
        if not re.fullmatch(r"-?[0-9]{1,18}", word):
            raise ValueError(f"expected {self._choices()}")
        return space.dtype.type(int(word))

    def _array(self, text: str) -> Any:
        numpy: Any = importlib.import_module("numpy")
        space = self._env.action_space
        try:
            values = numpy.asarray(json.loads(text), dtype=float)
        except (ValueError, TypeError, RecursionError):
            raise ValueError(f"expected {self._choices()}") from None
        if values.shape != space.shape or not numpy.isfinite(values).all():
            raise ValueError(f"expected {self._choices()}")
        action = values.astype(space.dtype)
        if not isinstance(space, self._gym.spaces.Box) and not (action == values).all():
            raise ValueError("expected whole numbers")
        return action

    # ---- Observations -----------------------------------------------------------------------------------------------

    def _text(self, seen: Any, info: Mapping[str, Any]) -> str:
        if self._observe is not None:
            return str(self._observe(seen, info, self._env))
        if self._shows_rendering:
            return _ESCAPE.sub("", _HIGHLIGHT.sub(r"[\1]", str(self._env.render()))).strip("\n")
        return _show(seen)


def _show(value: Any) -> str:
    """Return an observation as text: a text as it is, a dict as lines, the rest as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {_show(each)}" for key, each in value.items())
    if isinstance(value, tuple):
        return ", ".join(map(_show, value))
    return json.dumps(_plain(value))


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # an array or a number of NumPy
        value = value.tolist()
    if isinstance(value, float):
        return round(value, _DIGITS) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _attribute(name: str, option: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise Refused(f"{option}: {name}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise Refused(f"{option}: {name} is not a function")
    return found  # type: ignore[no-any-return]
