"""Objects that a configuration names: a built-in by its name, or `module:attribute` of your own.

Every extension point has one `Registry` here, with the names of what the library brings along. An object that is made
for a run (a loss, a task, an engine, a sink) is called with the user's arguments, and with whatever the run offers that
its signature asks for by name: see `call`.
"""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final, Generic, TypeVar, cast

from forge.errors import ConfigError, did_you_mean

T = TypeVar("T")

ANY_NAME: Final = "/NAME"
"""Ends the name of a built-in that stands for a family: `reasoning_gym/NAME`."""


class Registry(Generic[T]):
    """The objects of one kind, by name.

    Args:
        kind: what one of them is called in messages.
        built_in: the objects of the library, or where each is found (`module:attribute`); imported when asked for.
        rule: what an object of this kind must be, for messages.
        accepts: whether an object is of this kind.
        repair: what to do about an unknown name that resembles none of these.
    """

    def __init__(
        self,
        kind: str,
        built_in: Mapping[str, T | str],
        *,
        rule: str = "must be a function or a class",
        accepts: Callable[[Any], bool] = callable,
        repair: str = "choose one of them",
    ) -> None:
        self.kind = kind
        self._built_in = dict(built_in)
        self._rule, self._accepts, self._repair = rule, accepts, repair

    @property
    def names(self) -> list[str]:
        """The built-in names, in alphabetical order."""
        return sorted(self._built_in)

    def is_built_in(self, name: str) -> bool:
        """Whether this is the name of an object of the library."""
        return self._entry(name) is not None

    def problem(self, name: str) -> tuple[str, str] | None:
        """Return rule and repair for a name that is neither built in nor of the form `module:attribute`."""
        if self.is_built_in(name) or ":" in name:
            return None
        if not self._built_in:
            return "must be `module:attribute`", f"write the module of your {self.kind}, a colon, and its name"
        rule = f"must be one of {', '.join(self.names)}, or `module:attribute` of your own"
        return rule, did_you_mean(name, self.names) or self._repair

    def find(self, name: str, *, path: str) -> T:
        """Return the object of that name. `path` is the configuration key, for errors.

        Raises ConfigError for an unknown name, a module that cannot be imported, an attribute that the module does not
        have, and an object of another kind. Only the module that is asked for is imported.
        """
        unknown = self.problem(name)
        if unknown is not None:
            rule, repair = unknown
            raise ConfigError(f"there is no {self.kind} {name!r}", path=path, value=name, rule=rule, repair=repair)
        entry = self._entry(name)
        if entry is not None and not isinstance(entry, str):
            return entry
        found = import_attribute(entry or name, path=path)
        if not self._accepts(found):
            raise ConfigError(
                f"{name} cannot be used as {self._one}: it is of type {type(found).__name__}",
                path=path,
                value=name,
                rule=self._rule,
                repair=f"write {self._one}" + (f", or name one of {', '.join(self.names)}" if self.names else ""),
            )
        return cast("T", found)

    @property
    def _one(self) -> str:
        return f"{'an' if self.kind[0] in 'aeiou' else 'a'} {self.kind}"

    def _entry(self, name: str) -> T | str | None:
        family, slash, _ = name.partition("/")
        return self._built_in.get(name, self._built_in.get(family + ANY_NAME) if slash else None)


def call(function: Callable[..., Any], *given: Any, args: Mapping[str, Any], offered: Mapping[str, Any]) -> Any:
    """Call a function with `given`, the user's `args`, and those of `offered` that its signature names.

    What the user gives wins over what is offered.
    """
    wanted = parameter_names(function)
    return function(*given, **{name: value for name, value in offered.items() if name in wanted} | dict(args))


def parameter_names(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names that a function can be called with; none for a function of C without a signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return frozenset()
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return frozenset(parameter.name for parameter in parameters if parameter.kind in named)


def import_attribute(name: str, *, path: str) -> Any:
    """Return the object that `module:attribute` names. `path` is the configuration key, for errors."""
    module_name, _, attribute = name.partition(":")
    module = found = _import_module(name, module_name, path=path)
    for step in attribute.split("."):
        if not hasattr(found, step):
            raise ConfigError(
                f"the module {module_name} ({getattr(module, '__file__', 'built in')}) has no {attribute!r}",
                path=path,
                value=name,
                rule="must be `module:attribute`",
                repair=_hidden(module_name, module) or _suggest(step, dir(found)) or "check the name behind the colon",
            )
        found = getattr(found, step)
    return found


def _suggest(word: str, known: Sequence[str]) -> str | None:
    return did_you_mean(word, [name for name in known if not name.startswith("_")])


def _import_module(name: str, module_name: str, *, path: str) -> Any:
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(
            f"{module_name!r} is not the name of a module",
            path=path,
            value=name,
            rule="must be `module:attribute`",
            repair="write the module's dotted name, not its file",
        )
    try:
        return import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"the module {module_name} cannot be imported: {type(error).__name__}: {error}",
            path=path,
            value=name,
            rule="the module must be importable in every process of the run",
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


# ---- The extension points -------------------------------------------------------------------------------------------

Factory = Callable[..., Any]

LOSSES: Final[Registry[Factory]] = Registry(
    "loss",
    {"policy": "forge.losses.policy:policy_loss", "cross_entropy": "forge.losses.base:CrossEntropy"},
    rule="must be a class or function that returns a forge.losses.Loss",
)
OPTIMIZERS: Final[Registry[Factory]] = Registry(
    "optimizer",
    {"adamw": "forge.trainer.optimizer:AdamWOptions", "muon": "forge.trainer.muon:MuonOptions"},
    rule="must be a class or function that makes a torch.optim.Optimizer from groups of parameters",
)
SURROGATES: Final[Registry[Factory]] = Registry(
    "surrogate",
    {name: f"forge.losses.surrogates:{name}" for name in ("clip", "gspo", "cispo", "sapo", "reinforce")},
    rule="must be a function (logprobs, log_ratio, advantages) -> the loss of each token",
)
ADVANTAGES: Final[Registry[Factory]] = Registry(
    "advantage function",
    {
        "baseline": "forge.rollout.credit:baseline",
        "gae": "forge.rollout.value_credit:gae",
        "gigpo": "forge.rollout.state_credit:gigpo",
        "turn": "forge.rollout.turn_credit:turn",
    },
    rule="must be a function of groups that returns, for each group, a number for each episode",
)
CURRICULA: Final[Registry[Factory]] = Registry(
    "curriculum",
    {name: f"forge.rollout.curriculum_rules:{name}_weights" for name in ("prioritised", "range", "staged")},
    rule="must be a function (history, **arguments) -> a weight for each prompt",
)
TASKS: Final[Registry[Factory]] = Registry(
    "task",
    {
        "arithmetic": "forge.data.tasks.arithmetic:Arithmetic",
        "countdown": "forge.data.tasks.countdown:Countdown",
        f"reasoning_gym{ANY_NAME}": "forge.data.tasks.gym:GymTask",
    },
    rule="must be a class or function that returns a forge.data.tasks.TaskGenerator",
)
EPISODES: Final[Registry[Any]] = Registry(
    "episode",
    {
        "gymnasium": "forge.envs.external.gymnasium:gymnasium_episode",
        "openenv": "forge.envs.external.openenv:openenv_episode",
        "program": "forge.envs.programs:run_program",
        "reasoning_gym": "forge.envs.external.reasoning_gym:reasoning_gym_episode",
        "textarena": "forge.envs.external.textarena:textarena_episode",
        "verifiers": "forge.envs.external.verifiers:verifiers_episode",
    },
    rule="must be an @forge.episode, or a class with the methods reset, step and close",
)
GROUP_REWARDS: Final[Registry[Callable[..., Any]]] = Registry(
    "group reward",
    {},
    rule="must be a function (task, episodes) -> a number for each episode",
)
REWARDS: Final[Registry[Callable[..., float]]] = Registry(
    "reward",
    {
        "answer_in_tags": "forge.rewards.answers:answer_in_tags",
        "code": "forge.rewards.code:code",
        "contains": "forge.rewards.matching:contains",
        "countdown": "forge.rewards.countdown:countdown",
        "exact": "forge.rewards.matching:exact",
        "fuzzy": "forge.rewards.matching:fuzzy",
        "judge": "forge.rewards.served:judge",
        "length": "forge.rewards.form:length",
        "math": "forge.rewards.answers:math",
        "number": "forge.rewards.answers:number",
        "reasoning_gym": "forge.rewards.gym:reasoning_gym",
        "regex": "forge.rewards.matching:regex",
        "reward_model": "forge.rewards.served:reward_model",
        "tags": "forge.rewards.form:tags",
    },
    rule="must be a plain function (prompt, completion, **arguments) -> float",
    repair="`forge rewards` lists the built-in ones",
)
ENGINES: Final[Registry[Any]] = Registry(
    "engine",
    {"native": "forge.generator.native.engine:NativeEngine", "vllm": "forge.generator.vllm.engine:VllmEngine"},
    rule="must be a class that has the methods of forge.generator.engine.GenerationEngine, and its `capabilities`",
    accepts=lambda found: hasattr(found, "capabilities"),
)
SINKS: Final[Registry[Factory]] = Registry(
    "sink",
    {
        "jsonl": "forge.observe.jsonl:JsonlSink",
        "mlflow": "forge.observe.mlflow:MlflowSink",
        "tensorboard": "forge.observe.tensorboard:TensorBoardSink",
        "trackio": "forge.observe.trackio:TrackioSink",
        "wandb": "forge.observe.wandb:WandbSink",
    },
    rule="must be a class or function that returns a forge.observe.Sink",
)
