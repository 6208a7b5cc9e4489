"""Our sides of `generation.py`: an engine in this process, one behind a service, and one whose weights change.

Run as a program: `generation_ours.py NAME FOLDER THREADS`.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness.generation_child import Made, Open, say, serve
from harness.generation_plan import Plan, Wanted, requests

Engine = Literal["native", "vllm"]
CACHE_GB = 1.0
NUM_SETTLING = 4
"""Tokens between two updates that only show how long a step takes."""


def _config(folder: Path, plan: Plan, engine: Engine) -> Any:
    from forge.config import GeneratorConfig, ModelConfig

    return GeneratorConfig(
        model=ModelConfig(path=str(folder)),
        engine=engine,
        max_seq_len=plan.max_seq_len,
        max_batch=plan.num_requests,
        kv_cache_gb=CACHE_GB,
        with_gpus=False,
    )


def _sampling(wanted: Wanted, *, greedy: bool = False) -> Any:
    """As on all sides: no seeds, which cost vLLM time and us none."""
    from forge.config import Sampling

    return Sampling(temperature=0.0 if greedy else 1.0, max_tokens=wanted.num_new, ignore_eos=True)


def _make_engine(folder: Path, plan: Plan, engine: Engine) -> Any:
    config = _config(folder, plan, engine)
    from forge.generator.engine import engine_class
    from forge.models.locate import resolve
    from forge.models.tokenizer import ChatTokenizer

    model = resolve(config.model)
    tokenizer = ChatTokenizer.load(folder) if engine == "vllm" else None
    return engine_class(engine)(config, model=model, tokenizer=tokenizer)


class EngineSide:
    """An engine in this process, asked for all completions at once."""

    def __init__(self, folder: Path, plan: Plan, threads: int, *, engine: Engine = "native") -> None:
        _set_threads(threads)
        self._runner = asyncio.Runner()
        self._engine = _make_engine(folder, plan, engine)
        self._runner.run(self._engine.start())
        self.about = {"torchforge": version("torchforge"), "torch": version("torch")}

    def make(self, wanted: Sequence[Wanted], *, greedy: bool = False) -> list[Made]:
        return self._runner.run(self._make(wanted, greedy))

    async def _make(self, wanted: Sequence[Wanted], greedy: bool) -> list[Made]:
        from forge.generator.engine import Request

        asked = [
            Request(str(number), each.prompt_ids, _sampling(each, greedy=greedy)) for number, each in enumerate(wanted)
        ]
        return _made(await asyncio.gather(*map(self._engine.generate, asked)))

    def close(self) -> None:
        self._runner.run(self._engine.close())
        self._runner.close()


class ServiceSide:
    """One replica of a `Generator`, called as a program's rollouts call it: a task for every request."""

    def __init__(self, folder: Path, plan: Plan, threads: int) -> None:
        self._runner = asyncio.Runner()
        self._service = self._runner.run(self._open(folder, plan, threads))
        self.about = {"torchforge": version("torchforge"), "torch": version("torch")}

    async def _open(self, folder: Path, plan: Plan, threads: int) -> Any:
        from forge.generator.actor import Generator

        options = Generator.options(procs=1, num_replicas=1, with_gpus=False, num_threads=threads)
        return await options.as_service(_config(folder, plan, "native"))

    def make(self, wanted: Sequence[Wanted], *, greedy: bool = False) -> list[Made]:
        return self._runner.run(self._make(wanted, greedy))

    async def _make(self, wanted: Sequence[Wanted], greedy: bool) -> list[Made]:
        calls = [
            self._service.generate.route(token_ids=each.prompt_ids, sampling=_sampling(each, greedy=greedy))
            for each in wanted
        ]
        return _made(await asyncio.gather(*calls))

    def close(self) -> None:
        import forge

        self._runner.run(forge.shutdown())
        self._runner.close()


def _made(answers: Sequence[Sequence[Any]]) -> list[Made]:
    return [Made(completion.token_ids, completion.logprobs) for (completion,) in answers]


def _set_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


# ---- weights that change


class UpdateSide:
    """All sequences decode while a trainer publishes versions and the engine takes them, one after the other.

    One sequence is streamed, and the time between two of its tokens is the time between two steps of all.
    """

    def __init__(self, folder: Path, plan: Plan, threads: int, engine: Engine) -> None:
        self._folder, self._plan, self._threads, self._kind = folder, plan, threads, engine
        self._arrivals: list[float] = []
        self._arrived = asyncio.Event()

    async def measure(self) -> dict[str, Any]:
        import forge
        from forge.config import ModelConfig, TrainerConfig, TrainingConfig
        from forge.trainer.actor import Trainer

        _set_threads(self._threads)
        try:
            trainer = await Trainer.options(procs=1, with_gpus=False).as_actor(
                TrainerConfig(
                    model=ModelConfig(path=str(self._folder)),
                    training=TrainingConfig(max_seq_len=self._plan.max_seq_len),
                    frozen=True,
                )
            )
            self._engine = _make_engine(self._folder, self._plan, self._kind)
            await self._engine.start()
            try:
                await trainer.publish_weights.call(0)
                await self._engine.update_weights(0, "keep")
                return await self._decode(trainer)
            finally:
                await self._engine.close()
        finally:
            await forge.shutdown()

    async def _decode(self, trainer: Any) -> dict[str, Any]:
        from forge.generator.engine import Request

        plan = self._plan
        asked = [
            Request(str(number), each.prompt_ids, _sampling(each))
            for number, each in enumerate(requests(plan, "uniform", 0))
        ]
        others = [asyncio.ensure_future(self._engine.generate(request)) for request in asked[1:]]
        watched = asyncio.ensure_future(self._watch(asked[0]))
        await self._tokens(2 * NUM_SETTLING)
        spans, updates = [], []
        for number in range(1, plan.num_updates + 1):
            published = time.perf_counter()
            await trainer.publish_weights.call(number)
            began = time.perf_counter()
            report = await self._engine.update_weights(number, "keep")
            spans.append((published, began, time.perf_counter()))
            updates.append(report)
            await self._tokens(NUM_SETTLING)
        completion = await watched
        await asyncio.gather(*others)
        seen = [span.version for span in completion.versions]
        if seen != list(range(plan.num_updates + 1)):
            raise RuntimeError(f"the streamed completion was made by versions {seen}: it ended too early")
        return self._summary(spans, updates)

    async def _watch(self, request: Any) -> Any:
        completion = None
        async for delta in self._engine.stream(request):
            if delta.token_ids:
                self._arrivals.append(time.perf_counter())
                self._arrived.set()
            completion = delta.completion or completion
        return completion

    async def _tokens(self, count: int) -> None:
        """Return when so many more tokens have come."""
        wanted = len(self._arrivals) + count
        while len(self._arrivals) < wanted:
            self._arrived.clear()
            await self._arrived.wait()

    def _summary(self, spans: Sequence[tuple[float, float, float]], updates: Sequence[Any]) -> dict[str, Any]:
        from itertools import pairwise

        gaps = list(pairwise(self._arrivals[1:]))
        quiet = [
            end - start
            for start, end in gaps
            if not any(start < done and end > published for published, _, done in spans)
        ]
        longest = [max(end - start for start, end in gaps if start < done and end > began) for _, began, done in spans]
        return {
            "step_s": statistics.median(quiet),
            "longest_gaps_s": longest,
            "stalls_s": [report.stall_s for report in updates],
            "updates_s": [done - began for _, began, done in spans],
            "publications_s": [began - published for published, began, _ in spans],
            "copies_s": _time_copies(self._folder),
        }


def _time_copies(folder: Path, num_rounds: int = 7) -> list[float]:
    """Seconds of a plain copy of the same weights into place, tensor by tensor."""
    from safetensors.torch import load_file

    sources = list(load_file(folder / "model.safetensors").values())
    sources = [tensor.clone() for tensor in sources]
    targets = [tensor.clone() for tensor in sources]
    found = []
    for _ in range(num_rounds):
        began = time.perf_counter()
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        found.append(time.perf_counter() - began)
    return found


# ---- the program


def _import_engine() -> None:
    import forge.generator.native.engine
    import forge.generator.native.runner  # noqa: F401


def _import_vllm_engine() -> None:
    import torch  # noqa: F401

    import forge.generator.vllm.engine  # noqa: F401


def _import_service() -> None:
    import forge.generator.actor  # noqa: F401


SIDES: dict[str, tuple[Open, Callable[[], None]]] = {
    "native": (EngineSide, _import_engine),
    "forge-vllm": (
        lambda folder, plan, threads: EngineSide(folder, plan, threads, engine="vllm"),
        _import_vllm_engine,
    ),
    "service": (ServiceSide, _import_service),
}
UPDATES: dict[str, Engine] = {"update-native": "native", "update-vllm": "vllm"}


def main() -> None:
    name, folder, threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    logging.getLogger("forge").setLevel(logging.ERROR)
    if name in UPDATES:
        plan = Plan.read(folder / "plan.json")
        say("updated", **asyncio.run(UpdateSide(folder / "model", plan, threads, UPDATES[name]).measure()))
        return
    open_side, imports = SIDES[name]
    serve(open_side, folder, threads=threads, imports=imports)


if __name__ == "__main__":
    main()
