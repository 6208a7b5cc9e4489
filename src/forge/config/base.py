"""What every section of a configuration is: typed, closed to unknown keys, and unchangeable."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from forge.config.renames import has_old_keys, move_old_keys, thaw

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

    old_keys: ClassVar[Mapping[str, str | None]] = {}
    """Dotted keys below this section that have another name now, or none: they load with a warning."""

    def __init__(self, /, **data: Any) -> None:
        super().__init__(**(_renamed(type(self), data) if has_old_keys(type(self)) else data))

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # else every validation would call it

    @model_validator(mode="after")
    def _freeze_fields(self) -> Self:
        for name in type(self).model_fields:
            self.__dict__[name] = freeze(self.__dict__[name])
        return self


def _renamed(section: type[ConfigModel], data: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a section's constructor with old keys moved to their new places."""
    changed: dict[str, Any] = thaw(data)
    for moved in move_old_keys(section, changed):
        if moved.is_conflict:
            error = broken_rule(moved.rule, repair="remove the old key")
            details = InitErrorDetails(type=error, loc=moved.old, input=moved.value)
            raise ValidationError.from_exception_data(section.__name__, [details])
        if moved.needs_warning:
            warnings.warn(moved.message, FutureWarning, stacklevel=3)
    return changed


def broken_rule(rule: str, *, repair: str, key: str | None = None) -> PydanticCustomError:
    """What a validator raises so that the user is told rule and repair.

    `key` names the field when a validator of the whole section finds the fault. An ordinary ValueError does as well,
    with less to say.
    """
    return PydanticCustomError("broken_rule", "{rule}", {"rule": rule, "repair": repair, "key": key})
