"""`VllmEngine`: vLLM behind the same seam as the native engine.

requests ──▶ VllmEngine (this process) ──▶ AsyncLLM ══ zmq ══▶ EngineCore (a process) ──▶ workers
                 │ update                                                                    │ transfer.py
                 └─ which version? ──▶ store ◀── fetch, check, load ─────────────────────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import signal
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from forge import _amx
from forge.config import GeneratorConfig, Sampling, UpdateMode
from forge.errors import ConfigError, EngineDead, ModelError, OptionError
from forge.generator.engine import EngineCapabilities, EngineStats, OpenCompletions, Request, TopScores, UpdateReport
from forge.generator.vllm.adapters import Adapters
from forge.generator.vllm.arguments import Plan, check_owned, make_plan, to_plain
from forge.generator.vllm.environment import Build, installed_build
from forge.generator.vllm.lora_arguments import check_live_adapter
from forge.generator.vllm.named_adapters import with_named_adapters
from forge.generator.vllm.process import (
    Counts,
    Watch,
    build,
    check_amx,
    check_device,
    counter,
    end,
    unlink_shared_memory,
)
from forge.generator.vllm.translation import (
    Reader,
    SpanFinder,
    check_speculation,
    dead,
    prompt_room,
    refusals,
    sampling_params,
    score_one,
    top_one,
    translated,
)
from forge.generator.vllm.weights import Updates, WeightSource
from forge.models.architecture import ARCHITECTURE_KEYS
from forge.models.peft_files import resolve_adapter
from forge.observe.phases import phase
from forge.types import INITIAL_VERSION, Completion, Delta

if TYPE_CHECKING:
    from forge.config import GenerationConfig
    from forge.models.locate import ResolvedModel
    from forge.models.tokenizer import ChatTokenizer

_log = logging.getLogger("forge.generator.vllm")


class VllmEngine:
    """vLLM's AsyncLLM, with its EngineCore in a process of its own. One event loop.

    `died` is set when that process has ended unexpectedly. Every request then raises `EngineDead`, and the engine
    cannot be restarted: the process that owns it should end, and be replaced.
    """

    capabilities: ClassVar = EngineCapabilities(
        tensor_parallel=True,
        adapters=True,
        live_adapter=True,
        structured_output=True,
        engine_args=True,
        top_logprobs=True,
        reserves_gpu_share=True,
    )

    @staticmethod
    def config_errors(config: GenerationConfig) -> Sequence[ConfigError]:
        """See `GenerationEngine.config_errors`: vLLM is not installed, an argument is not the user's to set, or the
        adapter that is trained is one that vLLM cannot update."""
        found = []
        for check in (installed_build, lambda: check_owned(config.engine_args), lambda: check_live_adapter(config)):
            try:
                check()
            except ConfigError as error:
                found.append(error)
        return found

    def __init__(
        self,
        config: GeneratorConfig,
        *,
        model: ResolvedModel,
        tokenizer: ChatTokenizer | None,
        tensor_parallel: int = 1,
        devices: Sequence[str] = (),
        on_death: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`devices` are the GPUs of the engine, as CUDA_VISIBLE_DEVICES names them; none for what is visible.

        `on_death` is called once, on the event loop, when `died` is set.
        """
        self.config, self.model, self._tokenizer = with_named_adapters(config), model, tokenizer
        self._on_death = on_death
        self.tensor_parallel, self.devices = tensor_parallel, tuple(devices)
        self.died = asyncio.Event()
        self.counts = Counts()
        self.workers: list[dict[str, Any]] = []
        self._llm: Any = None
        self._plan: Plan | None = None
        self._watches: list[Watch] = []
        self._updates: Updates | None = None
        self._adapters: Adapters | None = None
        self._device: Build = "cpu"
        self._numbers = itertools.count()
        self._completions = OpenCompletions(config)
        self._num_cancelled = 0
        self._stepped = asyncio.Event()
        self._is_asleep = False

    # ---- Lifetime --------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return INITIAL_VERSION if self._updates is None else self._updates.version

    @property
    def max_seq_len(self) -> int:
        """The longest prompt and completion together."""
        assert self._plan is not None, "start() comes first"
        return self._plan.max_seq_len

    async def start(self) -> None:
        installed = installed_build()
        with phase("importing vLLM"):
            facts = await asyncio.to_thread(self._prepare, installed)
        given = to_plain(self.config.engine_args)
        building = asyncio.ensure_future(asyncio.to_thread(self._build, given))
        try:
            await asyncio.shield(building)
            with phase("warming up"):
                await self._open(facts, has_named=bool(given.get("enable_lora")))
        except BaseException:
            await asyncio.wait([building])  # what it starts must be ended, also when the caller was cancelled
            llm, self._llm = self._llm, None
            if llm is not None:
                await self._end(llm)
            raise

    async def _open(self, facts: dict[str, Any], *, has_named: bool) -> None:
        """Set up watches, weight updates and adapters of an engine that runs, and generate a first token."""
        llm = self._llm
        self.workers = await llm.collective_rpc("forge_facts")
        self._watches = [Watch(pid, self._on_end) for pid in self._pids]
        unlink_shared_memory(name for worker in self.workers for name in worker["shm_names"])
        chosen, adapter = self.config, self.config.adapter
        source = WeightSource(chosen.weights, facts, verify=chosen.update.verify)
        if adapter is not None:
            spec = resolve_adapter(adapter, self.model.architecture)
            source = replace(source, adapter=spec, adapter_path=adapter.path)
        self._updates = Updates(llm, source, counts=self.counts, died=self.died, fail=self._fail)
        await self._updates.open()
        self._adapters = Adapters(llm, is_enabled=has_named, is_live=adapter is not None)
        await self._warm_up()

    def _prepare(self, installed: Build) -> dict[str, Any]:
        """Decide on the arguments; return the facts of the model's architecture."""
        import torch

        has_gpu = bool(self.devices) or torch.cuda.is_available()
        self._device = check_device(self.config.with_gpus, installed, has_gpu=has_gpu)
        model = self.model
        if model.folder is None:
            raise ModelError(
                "vLLM needs a folder with the model's files.",
                path="model.path",
                value=None,
                rule="a folder with config.json, weights and tokenizer",
                repair="fetch one with `forge download`, or choose engine: native, which can begin with random weights",
            )
        facts, ranks = model.architecture, self.tensor_parallel
        self._plan = make_plan(self.config, facts, model.folder, device=self._device, tensor_parallel=ranks)
        quantization = self.config.engine_args.get("quantization")
        check_amx(self._plan.precision, self._device, _amx.verdict(), quantization=quantization)
        return facts.model_dump(mode="json", include=set(ARCHITECTURE_KEYS))

    def _build(self, given: Mapping[str, Any]) -> None:
        """Build vLLM's engine. Nothing is returned: the thread's future would keep vLLM's object alive."""
        assert self._plan is not None
        self._llm = build(
            self._plan,
            given,
            device=self._device,
            devices=self.devices,
            counter=lambda: counter(self.counts, self._stepped),
        )

    async def _warm_up(self) -> None:
        """Generate one token: it proves that the engine works, and triggers vLLM's lazy initialisation."""
        request = Request("warm-up", (0,), Sampling(temperature=0.0, max_tokens=1, ignore_eos=True))
        await self.generate(request)
        self.counts.reset()

    @property
    def _pids(self) -> list[int]:
        """The process ids of EngineCore, and of the workers where they have their own processes."""
        workers = [int(worker["pid"]) for worker in self.workers]
        return workers if self.tensor_parallel == 1 else [int(self.workers[0]["parent"]), *workers]

    def _on_end(self, pid: int) -> None:
        """Fail at once when one of the processes has ended. vLLM takes ten seconds to notice."""
        self._fail(dead(f"has ended: its process {pid} is gone"))

    def _fail(self, error: BaseException) -> None:
        _log.error("%s", error)
        self._stop_watching()
        self.died.set()
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._on_death is not None:
            self._on_death(error)

    def _stop_watching(self) -> None:
        while self._watches:
            self._watches.pop().close()

    async def _end(self, llm: Any) -> None:
        self._stop_watching()
        shm_names = {str(name) for worker in self.workers for name in worker["shm_names"]}
        await asyncio.to_thread(end, llm, self._pids if self.workers else (), shm_names=shm_names)

    async def close(self) -> None:
        """End the engine's processes. Completions in progress finish as aborted, those of a sleeping engine too."""
        if self._llm is None:
            return
        llm, self._llm = self._llm, None
        self._stop_watching()
        if not self.died.is_set():
            with contextlib.suppress(TimeoutError, EngineDead):
                async with asyncio.timeout(10), translated():
                    await llm.pause_generation(mode="abort", clear_cache=False)
                    while llm.get_num_unfinished_requests():  # their last outputs are on the way
                        self._stepped.clear()
                        await self._stepped.wait()
        if self._updates is not None:
            self._updates.close()
        self._adapters = None
        await self._end(llm)
        del llm
        gc.collect()  # vLLM's object refers to itself, and complains when it goes with the interpreter

    # ---- Requests ----------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> list[Completion]:
        reader = self._reader(request)
        with self._admitted(request):
            async with contextlib.aclosing(self._outputs(request, is_stream=False)) as outputs:
                (last,) = [output async for output in outputs]
        completions = [reader.completion(last, part) for part in last.outputs]
        return reader.repeated(sorted(completions, key=lambda completion: completion.index))

    async def stream(self, request: Request) -> AsyncGenerator[Delta, None]:
        reader = self._reader(request)
        grown = [reader.begin() for _ in range(request.sampling.n)]
        with self._admitted(request):
            spans = SpanFinder(self._alive())
            async with contextlib.aclosing(self._outputs(request, is_stream=True)) as outputs:
                async for output in outputs:
                    for part in output.outputs:
                        starts = spans.starts(output.request_id, part.index) or [(str(self.version), 0)]
                        starts = starts if reader.version is None else [(str(reader.version), 0)]
                        for delta in reader.repeated(reader.deltas(output, part, grown[part.index], starts)):
                            yield delta

    def _reader(self, request: Request) -> Reader:
        shaped = request.sampling.is_truncated or bool(self.config.engine_args.get("logits_processors"))
        assert self._tokenizer is not None, "a model in a folder has one"
        self._alive()  # else there are no adapters, either
        assert self._adapters is not None
        version = self._adapters.fixed_version(request.sampling.adapter)
        return Reader(request, self._tokenizer, has_full=not shaped, version=version)

    async def _outputs(self, request: Request, *, is_stream: bool) -> AsyncGenerator[Any, None]:
        from vllm.inputs.engine import tokens_input

        llm, sampling = self._alive(), request.sampling
        assert self._updates is not None
        assert self._adapters is not None
        adapter = self._adapters.find(sampling.adapter)
        room = prompt_room(request, max_seq_len=self.max_seq_len)
        if self._speculates_on_cpu:
            check_speculation(sampling)
        with refusals(request):
            params = sampling_params(sampling, room=room, is_stream=is_stream)
        prompt = tokens_input(list(request.prompt_ids), cache_salt=self._adapters.salt(self._updates.epoch))
        name = f"{request.id}#{next(self._numbers)}"
        async with translated(request):
            stream = llm.generate(prompt, params, name, lora_request=adapter)
            async with contextlib.aclosing(stream):
                async for output in stream:
                    yield output

    @property
    def _speculates_on_cpu(self) -> bool:
        given = self.config.engine_args
        return self._device == "cpu" and any(given.get(name) for name in ("speculative_config", "spec_method"))

    @contextlib.contextmanager
    def _admitted(self, request: Request) -> Iterator[None]:
        """Count the completions of a request while it is in progress; refuse it where there would be too many."""
        num = request.sampling.n
        with self._completions.opened(num):
            try:
                yield
            except (asyncio.CancelledError, GeneratorExit):
                self._num_cancelled += num
                raise

    def _alive(self) -> Any:
        if self._llm is None or self.died.is_set():
            raise dead("was closed" if not self.died.is_set() else "has ended")
        return self._llm

    # ---- Scores ------------------------------------------------------------------------------------------------------

    async def differing(self, version: int) -> Mapping[str, tuple[int, int]] | None:
        """See `GenerationEngine.differing`. Of a model's weights vLLM cannot tell: it packs them."""
        self._alive()
        assert self._updates is not None
        async with translated():
            return await self._updates.differing(version)

    async def score(
        self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0, urgent: bool = False
    ) -> list[list[float]]:
        if temperature != 1.0:
            raise OptionError(
                "vLLM cannot score at this temperature.",
                path="score(temperature=)",
                value=temperature,
                rule="is 1: vLLM gives the logprobs of a prompt without a temperature",
                repair="score with the trainer's forward_logprobs, or with engine: native",
            )
        places = asyncio.Semaphore(self.config.max_batch)

        async def one(sequence: Sequence[int]) -> list[float]:
            async with places:
                name = f"score#{next(self._numbers)}"
                request = Request(name, tuple(sequence), Sampling())
                async with translated(request):
                    return await score_one(self._alive(), request, is_singly=self._scores_singly, **self._scoring)

        tasks = [asyncio.ensure_future(one(sequence)) for sequence in sequences]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def score_top(self, sequences: Sequence[Sequence[int]], k: int) -> list[TopScores]:
        """Return the k likeliest tokens at each place of each sequence; k is at most vLLM's `max_logprobs`."""
        requests = [Request(f"top#{next(self._numbers)}", tuple(sequence), Sampling()) for sequence in sequences]
        asked = (top_one(self._alive(), each, k, **self._scoring) for each in requests)
        async with translated():
            return list(await asyncio.gather(*asked))

    @property
    def _scoring(self) -> dict[str, Any]:
        assert self._adapters is not None
        return {"max_seq_len": self.max_seq_len, "adapter": self._adapters.find(None)}

    @property
    def _scores_singly(self) -> bool:
        return self._device == "cpu" and bool(self.config.engine_args.get("enable_lora"))

    # ---- Weights, memory, adapters -----------------------------------------------------------------------------------

    async def update_weights(self, version: int | Literal["latest"], mode: UpdateMode) -> UpdateReport:
        self._alive()
        assert self._updates is not None
        async with translated():
            return await self._updates.update_weights(version, mode)

    async def sleep(self) -> None:
        """Stop generating, and on a GPU move the weights to host memory and drop the cache.

        Completions in progress continue after `wake`, and their prompts are read again. On the CPU no memory is
        released, but requests wait all the same.
        """
        llm = self._alive()
        assert self._updates is not None
        async with self._updates.lock, translated():
            if not self._is_asleep:
                await llm.sleep(level=1 if self._can_release_memory else 0, mode="keep")
                self._is_asleep = self._updates.is_paused = True
                self._updates.are_weights_away = self._can_release_memory

    async def wake(self) -> None:
        llm = self._alive()
        assert self._updates is not None
        async with self._updates.lock, translated():
            if self._is_asleep:
                await llm.wake_up(None if self._can_release_memory else ["scheduling"])
                self._is_asleep = self._updates.is_paused = self._updates.are_weights_away = False

    @property
    def _can_release_memory(self) -> bool:
        assert self._plan is not None
        return self._device == "gpu" and bool(self._plan.arguments.get("enable_sleep_mode"))

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter for requests with `sampling.adapter = name`; under a name that is known, replace it."""
        self._alive()
        assert self._adapters is not None
        async with translated():
            await self._adapters.load(name, path)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Requests that use it must have ended."""
        self._alive()
        assert self._adapters is not None
        async with translated():
            await self._adapters.unload(name)

    def stats(self) -> EngineStats:
        counts = self.counts
        num_running = min(counts.num_running, self._completions.num)
        return EngineStats(
            version=self.version,
            num_running=num_running,
            num_waiting=self._completions.num - num_running,
            num_done=counts.num_done,
            num_aborted=counts.num_aborted + self._num_cancelled,
            num_prompt_tokens=counts.num_prompt_tokens,
            num_shared_tokens=counts.num_shared_tokens,
            num_prefill_tokens=counts.num_prefill_tokens,
            num_tokens=counts.num_tokens,
            num_preempted=counts.num_preempted,
            cache_used=counts.cache_used if self._completions.num else 0.0,
            is_asleep=self._is_asleep,
            more={
                "pids": tuple(self._pids),
                "adapters": () if self._adapters is None else tuple(self._adapters.names),
                "num_drafted": counts.num_drafted,
                "num_accepted": counts.num_accepted,
            },
        )
