"""What a generation engine can do. An engine declares it; no other code asks for an engine by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Final

from forge.config.base import broken_rule
from forge.config.rules import registered
from forge.errors import MISSING, ConfigError
from forge.registry import Registry, call, import_attribute

if TYPE_CHECKING:
    from forge.config.generator import GenerationConfig


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine that a configuration can name.

    An engine class of your own declares what it can do by class attributes of the same names; what it does not declare
    is taken from the defaults here.

    Attributes:
        engine: the class or function that makes it, or where that is found (`module:attribute`).
        supports_shared_weights: whether it can compute with the weights of a trainer in its process, given as `shared`.
        supports_tensor_parallel: whether it can be split over several processes.
        supports_adapters: whether it has `load_adapter` and `unload_adapter`.
        supports_structured_output: whether it heeds `Sampling.structured`.
        supports_engine_args: whether it reads `generator.engine_args`.
        releases_cache: whether it sizes its cache by what a trainer on the same GPU leaves free, and releases it while
            the trainer works.
        reserves_gpu_share: whether it takes a fixed share of the GPU's memory when it starts.
        check: yields an error for everything that is wrong with a section before an engine is started.
    """

    engine: str | Callable[..., Any]
    supports_shared_weights: bool = False
    supports_tensor_parallel: bool = False
    supports_adapters: bool = False
    supports_structured_output: bool = False
    supports_engine_args: bool = False
    releases_cache: bool = False
    reserves_gpu_share: bool = False
    check: str | Callable[[GenerationConfig], Iterable[ConfigError]] | None = None

    def create(self, **offered: Any) -> Any:
        """Make an engine from what its signature asks for: config, model, tokenizer, devices and others."""
        return call(_imported(self.engine), args={}, offered=offered)

    def errors(self, section: GenerationConfig) -> Iterable[ConfigError]:
        """Yield what is wrong with a section before an engine is started."""
        return () if self.check is None else _imported(self.check)(section)


def _imported(found: Any) -> Any:
    return import_attribute(found, path="generator.engine") if isinstance(found, str) else found


ENGINES: Final[Registry[EngineSpec | Callable[..., Any]]] = Registry(
    "engine",
    {
        "native": EngineSpec(
            "forge.generator.native.engine:NativeEngine", supports_shared_weights=True, releases_cache=True
        ),
        "vllm": EngineSpec(
            "forge.generator.vllm.engine:VllmEngine",
            supports_tensor_parallel=True,
            supports_adapters=True,
            supports_structured_output=True,
            supports_engine_args=True,
            reserves_gpu_share=True,
            check="forge.generator.vllm.arguments:section_errors",
        ),
    },
    rule="must be an engine class, or a forge.config.EngineSpec",
    accepts=lambda found: callable(found) or isinstance(found, EngineSpec),
)
EngineName = Annotated[str, registered(ENGINES)]


def find_engine(name: str, *, path: str = "generator.engine") -> EngineSpec:
    """Return what an engine declares."""
    found = ENGINES.find(name, path=path)
    if isinstance(found, EngineSpec):
        return found
    declared = {each.name: getattr(found, each.name) for each in fields(EngineSpec)[1:] if hasattr(found, each.name)}
    return EngineSpec(found, **declared)


def require_capability(name: str, capability: str, *, key: str, repair: str) -> None:
    """Raise, for a schema, if an engine does not declare a capability. `key` is the field that the error names."""
    try:
        spec = find_engine(name)
    except ConfigError as error:
        raise broken_rule(f"{error.message}: {error.rule}", repair=str(error.repair), key=key) from error
    if not getattr(spec, capability):
        rule = f"needs an engine that declares {capability}: {engines_with(capability)}"
        raise broken_rule(rule, repair=repair, key=key)


def engines_with(capability: str) -> str:
    """Return the built-in engines that declare a capability, for messages."""
    return " or ".join(name for name in ENGINES.names if getattr(find_engine(name), capability))


def unsupported(engine: str, capability: str, *, path: str, value: object = MISSING) -> ConfigError:
    """Return the error for a key that needs a capability which an engine does not declare."""
    what = capability.removeprefix("supports_").replace("_", " ")
    return ConfigError(
        f"the engine {engine} does not support {what}",
        path=path,
        value=value,
        rule=f"only with an engine that declares {capability}: {engines_with(capability)}",
        repair=f"set generator.engine={engines_with(capability)}, or leave it out",
    )
