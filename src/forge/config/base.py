"""What every section of a configuration is: typed, closed to unknown keys, and unchangeable; and the kinds of text that
it may hold, each with a rule that can be said in a sentence.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, Self, TypeVar

from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from forge.config.fields import has_old_keys, move_old_keys, thaw
from forge.registry import (
    ADVANTAGES,
    CURRICULA,
    ENGINES,
    EPISODES,
    GROUP_REWARDS,
    LOSSES,
    OPTIMIZERS,
    REWARDS,
    SINKS,
    SURROGATES,
    TASKS,
    Registry,
)

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


def matches(pattern: str, *, rule: str, repair: str) -> AfterValidator:
    """A validator for text that must match a pattern as a whole; the user sees the rule, not the pattern."""
    compiled = re.compile(pattern)

    def check(text: str) -> str:
        if compiled.fullmatch(text) is None:
            raise broken_rule(rule, repair=repair)
        return text

    return AfterValidator(check)


def registered(registry: Registry[Any]) -> AfterValidator:
    """A validator for the name of an object: a built-in one, or `module:attribute`, which is imported later."""

    def check(name: str) -> str:
        problem = registry.problem(name)
        if problem is not None:
            raise broken_rule(problem[0], repair=problem[1])
        return name

    return AfterValidator(check)


LossName = Annotated[str, registered(LOSSES)]
OptimizerName = Annotated[str, registered(OPTIMIZERS)]
SurrogateName = Annotated[str, registered(SURROGATES)]
AdvantageName = Annotated[str, registered(ADVANTAGES)]
CurriculumName = Annotated[str, registered(CURRICULA)]
TaskName = Annotated[str, registered(TASKS)]
EpisodeName = Annotated[str, registered(EPISODES)]
GroupRewardName = Annotated[str, registered(GROUP_REWARDS)]
RewardName = Annotated[str, registered(REWARDS)]
EngineName = Annotated[str, registered(ENGINES)]
SinkName = Annotated[str, registered(SINKS)]


def _literal(kind: type[str] | type[Path]) -> Callable[[str | Path], str | Path]:
    def check(path: str | Path) -> str | Path:
        text = str(path)
        if text.startswith("~") or "$" in text or not text:
            rule = "must be a path as it is: neither ~ nor variables such as $HOME are expanded"
            raise broken_rule(rule, repair="write the path out, or let the shell expand it on the command line")
        return kind(path)

    return check


def _infinity(value: object) -> object:
    return float("inf") if isinstance(value, str) and value.strip().lower() in ("inf", "+inf", "infinity") else value


def _written(value: float) -> float | str:
    """JSON has no infinity."""
    return "inf" if value == float("inf") else value


Limit = Annotated[
    float,
    AllowInfNan(True),
    BeforeValidator(_infinity),
    PlainSerializer(_written, return_type=float | str, when_used="json"),
]
"""An upper bound: a number, or `inf` (also `.inf`) for no limit. Give the field a `gt` or `ge`, which refuses NaN."""

Name = Annotated[
    str,
    matches(
        r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}",
        rule="must be 1 to 128 letters, digits, `.`, `_` or `-`, and start with a letter or a digit",
        repair="choose such a name; it becomes part of file and job names",
    ),
]

Tag = Annotated[
    str,
    matches(
        r"[^\s,]{1,64}",
        rule="must be 1 to 64 characters without spaces and commas",
        repair="choose such a word, for example baseline or lr=3e-4",
    ),
]

EnvName = Annotated[
    str,
    matches(
        r"[A-Za-z_][A-Za-z0-9_]*",
        rule="must be the name of an environment variable: letters, digits and `_`, not starting with a digit",
        repair="correct the name",
    ),
]

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}


def _spell_out(name: object) -> object:
    return _SHORT_DTYPES.get(name, name) if isinstance(name, str) else name


SHORT_DTYPES = BeforeValidator(_spell_out)
"""Lets bf16, fp16, half, fp32 and fp64 stand for the dtypes' whole names."""

Directory = Annotated[Path, AfterValidator(_literal(Path))]
PathText = Annotated[str, AfterValidator(_literal(str))]

TimeLimit = Annotated[
    str,
    matches(
        r"\d+|\d+:\d{2}|\d+:\d{2}:\d{2}|\d+-\d+(:\d{2}){0,2}",
        rule="must be a SLURM time: minutes, minutes:seconds, hours:minutes:seconds or days-hours[:minutes[:seconds]]",
        repair="write for example 02:00:00 for two hours",
    ),
]

SbatchLine = Annotated[
    str,
    matches(
        r"--?[A-Za-z][^\n]*",
        rule="must be one option of sbatch, such as --constraint=a100, on one line",
        repair="leave out `#SBATCH` and give each option as an element of the list",
    ),
]

KubernetesName = Annotated[
    str,
    matches(
        r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?",
        rule="must be a Kubernetes name: lower-case letters, digits, `-` and `.`, with a letter or digit at both ends",
        repair="use the name as `kubectl get` shows it",
    ),
]


_LABEL = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"

LabelKey = Annotated[
    str,
    matches(
        rf"([a-z0-9]([-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_LABEL}",
        rule="must be the key of a Kubernetes label: at most 63 letters, digits, `-`, `_` or `.`, with a letter or "
        "digit at both ends, and perhaps a domain and a slash before it",
        repair="write for example team, or example.org/team",
    ),
]

LabelValue = Annotated[
    str,
    matches(
        rf"({_LABEL})?",
        rule="must be the value of a Kubernetes label: at most 63 letters, digits, `-`, `_` or `.`, with a letter or "
        "digit at both ends",
        repair="shorten it, and leave out spaces and other characters",
    ),
]

MountPath = Annotated[
    str,
    matches(
        r"/[^:\0]*",
        rule="must be an absolute path without `:`",
        repair="write for example /runs",
    ),
]


def _check_address(address: str) -> str:
    rule = "must be an address such as tcp://10.0.0.1:22222 (or tls://…) with a port from 1 to 65535"
    repair = "use the address that `forge worker` prints when it starts"
    match = re.fullmatch(r"(?:tcp|tls)://(?:\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5})", address)
    if match is None or not 1 <= int(match[1]) <= 65535:
        raise broken_rule(rule, repair=repair)
    return address


Address = Annotated[str, AfterValidator(_check_address)]
