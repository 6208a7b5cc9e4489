"""What every section of a configuration is: typed, closed to unknown keys, and unchangeable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Self, TypeVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(dict[K, V]):
    """A dict that refuses to change. It can be pickled, copied, and hashed when its values can."""

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("a loaded configuration cannot be changed; load it again with an override")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (dict(self),))


def freeze(value: object) -> object:
    """The same value with every list a tuple, every set a frozenset and every dict a FrozenDict, all the way down."""
    if isinstance(value, Mapping):
        return FrozenDict({key: freeze(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    if isinstance(value, set | frozenset):
        return frozenset(value)
    return value


class ConfigModel(BaseModel):
    """Base of every section. Derive from it to add sections of your own.

    Unknown keys are refused and nothing can be changed after construction, however deep. Annotate sequences as
    `tuple[X, ...]` and dictionaries as `Mapping[str, X]`: that is what a loaded configuration holds.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
    )

    @model_validator(mode="after")
    def _freeze_fields(self) -> Self:
        for name in type(self).model_fields:
            self.__dict__[name] = freeze(self.__dict__[name])
        return self


def broken_rule(rule: str, *, repair: str, key: str | None = None) -> PydanticCustomError:
    """What a validator raises so that the user is told rule and repair.

    `key` names the field when a validator of the whole section finds the fault. An ordinary ValueError does as well,
    with less to say.
    """
    return PydanticCustomError("broken_rule", "{rule}", {"rule": rule, "repair": repair, "key": key})
