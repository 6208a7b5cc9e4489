"""The phases of a start inside vLLM's workers: loading weights, compiling, capturing graphs.

vLLM says little of these before they are over, and only in its own log. `report_phases` puts a phase around the
functions that do the work; a function that another version of vLLM does not have is passed over.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from forge.observe.phases import PHASES_VARIABLE, Progress, has_listener, phase, set_listener
from forge.runtime.reports import reports

_progress: list[Progress] = []
"""The phase that is under way whose progress is counted elsewhere."""
_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt")


def report_phases() -> None:
    """Report what this worker does while it starts to the root of the run, if it shows that. Call it before the model
    is loaded."""
    if os.environ.get(PHASES_VARIABLE) != "1" or has_listener():
        return
    set_listener(lambda event: reports().send("phase", (event.process, tuple(event[1:]))))
    for place, name, wrapper in (
        ("vllm.model_executor.model_loader.default_loader:DefaultModelLoader", "load_weights", _loading),
        ("vllm.model_executor.model_loader.default_loader:DefaultModelLoader", "get_all_weights", _counting),
        ("vllm.v1.worker.gpu_worker:Worker", "determine_available_memory", _named("profiling and compiling")),
        ("vllm.v1.worker.cpu_worker:CPUWorker", "determine_available_memory", _named("profiling")),
        ("vllm.v1.worker.gpu_worker:Worker", "compile_or_warm_up_model", _named("warming up")),
        ("vllm.v1.worker.cpu_worker:CPUWorker", "compile_or_warm_up_model", _named("warming up")),
        ("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "_capture_cudagraphs", _capturing),
        ("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "_warmup_and_capture", _captured),
    ):
        _wrap(place, name, wrapper)


Wrapper = Callable[..., Any]


def _wrap(place: str, name: str, wrapper: Wrapper) -> None:
    """Let `wrapper(function, *args, **kwargs)` take the place of a method that a class itself defines."""
    module, _, class_name = place.partition(":")
    try:
        owner = getattr(importlib.import_module(module), class_name)
    except (ImportError, AttributeError):  # of a build for another device
        return
    function = vars(owner).get(name)
    if not callable(function):
        return

    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        return wrapper(function, *args, **kwargs)

    setattr(owner, name, method)


def _named(name: str) -> Wrapper:
    def wrapper(function: Wrapper, *args: Any, **kwargs: Any) -> Any:
        with phase(name):
            return function(*args, **kwargs)

    return wrapper


def _loading(function: Wrapper, loader: Any, model: Any, model_config: Any) -> Any:
    with _counted("loading weights", total=_file_bytes(model_config.model), unit="B"):
        return function(loader, model, model_config)


def _counting(function: Wrapper, *args: Any, **kwargs: Any) -> Iterator[Any]:
    for name, tensor in function(*args, **kwargs):
        yield name, tensor
        _advance(tensor.nbytes)


def _capturing(function: Wrapper, runner: Any, batch_descriptors: Any, *args: Any, **kwargs: Any) -> Any:
    with _counted("capturing graphs", total=len(batch_descriptors)):
        return function(runner, batch_descriptors, *args, **kwargs)


def _captured(function: Wrapper, *args: Any, **kwargs: Any) -> Any:
    found = function(*args, **kwargs)
    _advance(1)
    return found


@contextlib.contextmanager
def _counted(name: str, *, total: float, unit: str = "") -> Iterator[None]:
    with phase(name, total=total, unit=unit) as progress:
        _progress.append(progress)
        try:
            yield
        finally:
            _progress.pop()


def _advance(amount: float) -> None:
    if _progress:
        _progress[-1].advance(amount)


def _file_bytes(folder: str) -> int:
    """Return the bytes of the weights in a folder; 0 where there are none."""
    files = next((found for pattern in _WEIGHTS if (found := list(Path(folder).glob(pattern)))), [])
    return sum(file.stat().st_size for file in files)
