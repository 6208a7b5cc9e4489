"""How far is the memory that `forge plan` predicts from what a GPU shows?

Trainers take steps and an engine generates on models of the shapes of Qwen3 with random weights, one setting after the
other in one process for each shape. Beside each prediction stands what was measured: the bytes of tensors that stay
(weights, states), the most that tensors took (torch's allocated), the most that torch held (reserved), and what the
process took of the GPU, as the driver tells. The last is right only while nobody else uses the GPU.

    python benchmarks/memory_plan.py                          # all settings, on the GPU; about 3 minutes
    python benchmarks/memory_plan.py --shapes qwen3_0_6b --minutes 3 --json memory_plan.json
    python benchmarks/memory_plan.py --quick                  # without a GPU: what can be counted on a CPU

Without a GPU it says so and ends; with `--quick` it counts on the CPU what tensors a tiny model's trainer holds and
what its layers keep for the backward pass.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from forge.config import GRPOConfig, load
from forge.memory import Card, ResolvedRun, find_card, resolve_run
from forge.memory.constants import CUDA_CONTEXT, GIB
from forge.memory.devices import generator_job, trainer_jobs
from forge.memory.generator import awake_parts
from forge.memory.records import Part
from forge.memory.trainer import lasting_parts, training_moments
from harness.report import table

PARTS = ("trainer", "generator")
GOAL = 0.1
"""How far a predicted peak may be from the measured one."""
SETTING_S = 120.0
"""How long a child may be silent before it is ended."""
LEFT_BYTES = 256 << 20
"""What a setting may leave behind; a child that holds more makes room for another, so that measurements stay apart."""
COMMON = ("model.", "distributed.shard", "record.", "training.max_seq_len", "generator.sampling")
"""What all settings have alike, and lines need not repeat."""


@dataclass(frozen=True)
class Setting:
    """What one child measures: the overrides of a run of reinforcement learning, and which part of it runs."""

    part: str
    words: tuple[str, ...]

    @property
    def label(self) -> str:
        shown = [word.rpartition(".")[2] for word in self.words if not word.startswith(COMMON)]
        return f"{self.part}: {', '.join(shown)}"


@dataclass(frozen=True)
class Line:
    """One quantity of one setting, in bytes."""

    shape: str
    setting: str
    what: str
    predicted: int
    measured: int

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured if self.measured else float("inf")


def settings_for(shape: str, *, quick: bool) -> list[Setting]:
    base = (f"model.preset={shape}", "distributed.shard=1", "record.trainer_logprobs=false")
    if quick:
        small = (*base, "training.max_seq_len=256", "training.microbatch_tokens=512", "rollout.share_prompts=false")
        return [Setting("trainer", (*small, f"distributed.precision={each}")) for each in ("float32", "bfloat16")]
    rows = (*base, "training.max_seq_len=1536", "generator.sampling.max_tokens=1024")
    mixed, pure = "distributed.precision=bfloat16", "distributed.precision=bfloat16_pure"
    variants = [
        (mixed, "training.microbatch_tokens=8192"),
        (mixed, "training.microbatch_tokens=8192", "training.activation_checkpointing=selective"),
        (mixed, "training.microbatch_tokens=8192", "training.activation_checkpointing=full"),
        (mixed, "training.microbatch_tokens=16384", "training.activation_checkpointing=full"),
        (mixed, "training.microbatch_tokens=8192", "rollout.share_prompts=false"),
        (mixed, "training.microbatch_tokens=1536", "training.optimizer_dtype=bfloat16"),
        (pure, "training.microbatch_tokens=8192"),
        (pure, "training.microbatch_tokens=8192", "training.activation_checkpointing=selective"),
        (pure, "training.microbatch_tokens=1536", "training.optimizer_dtype=bfloat16"),
        (mixed, "training.microbatch_tokens=8192", "training.activation_offload=true"),
    ]
    compiled = [(mixed, f"training.microbatch_tokens={tokens}", "training.compile=true") for tokens in (8192, 17408)]
    generators = [("generator.kv_cache_gb=8",), ("generator.kv_cache_gb=8", "generator.max_batch=256")]
    parts = [*(("trainer", each) for each in variants), *(("generator", each) for each in generators)]
    parts += [("trainer", each) for each in compiled]  # last: they take longest
    return [Setting(part, (*rows, *variant)) for part, variant in parts]


# ---- What is predicted ---------------------------------------------------------------------------------------------


def planned(setting: Setting, card: Card | None) -> ResolvedRun:
    config = load(GRPOConfig, overrides=[*setting.words, f"distributed.with_gpus={'true' if card else 'false'}"])
    return replace(resolve_run(config, card=card), num_versions=0)  # nothing is published here


def without(parts: tuple[Part, ...], *names: str) -> int:
    return sum(part.num_bytes for part in parts if part.name not in names)


def predictions(setting: Setting, card: Card | None) -> dict[str, int]:
    run = planned(setting, card)
    if setting.part == "generator":
        job = generator_job(replace(run, placement="apart"), card)
        assert job is not None
        parts = awake_parts(job)
        total = without(parts)
        return {"weights": without(tuple(part for part in parts if part.name == "weights")), "process": total}
    ((_, trainer),) = trainer_jobs(run)
    lasting = lasting_parts(trainer)
    found = {"lasting": without(lasting, "CUDA context")}
    if card is None:
        found["gradients"] = trainer.master * trainer.holding.held
        waiting = next(part for part in training_moments(trainer)[0].parts if part.name == "activations")
        return found | {"activations": waiting.num_bytes}
    peak = max(training_moments(trainer), key=lambda moment: moment.num_bytes)
    found["peak allocated"] = without(peak.parts, "CUDA context", "allocator slack")
    found["peak reserved"] = without(peak.parts, "CUDA context")
    found["process"] = without(peak.parts)
    return found


# ---- What is measured, in a child ----------------------------------------------------------------------------------


def made_batch(run: ResolvedRun, fields: tuple[str, ...], *, num_rows: int) -> Any:
    """Rows of full length, of groups of the longest samples."""
    import torch

    from forge.types import Batch, Sample

    assert run.training is not None
    length, completion = run.training.max_seq_len, run.completion_tokens
    tokens = run.training.microbatch_tokens or length
    prompt = length - completion if run.share_prompts else 0
    together = max(1, min(run.group_size, (tokens - prompt) // max(1, completion))) if run.share_prompts else 1
    each = prompt + together * completion if run.share_prompts else length
    num_groups = num_rows * max(1, tokens // each)
    made = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(num_groups):
        shared = torch.randint(run.sizes.vocab, (prompt,), generator=made)
        for _ in range(together):
            own = torch.randint(run.sizes.vocab, (length - prompt,), generator=made)
            weights = torch.ones(length)
            weights[: max(1, prompt)] = 0
            values = {name: torch.zeros(length) for name in fields}
            samples.append(Sample(torch.cat([shared, own]), weights, fields=values))
    return Batch.of(samples)


def open_engine(setting: Setting, card: Card | None) -> tuple[Any, Any]:
    from forge.config import TrainerConfig
    from forge.losses import make_loss
    from forge.trainer.engine import Engine

    words = [*setting.words, f"distributed.with_gpus={'true' if card else 'false'}", "training.schedule=constant"]
    config = load(GRPOConfig, overrides=words)
    run = planned(setting, card)
    assert run.training is not None
    loss = make_loss(
        config.algorithm, max_tokens=run.completion_tokens, temperature=1.0, iterations=1, exact_entropy=False
    )
    training = run.training.model_copy(update={"schedule": "constant", "warmup_steps": 0})
    trainer = TrainerConfig(model=run.facts, training=training, distributed=config.distributed)
    return Engine(trainer, loss=loss), made_batch(run, tuple(loss.fields), num_rows=2 if card else 1)


def measure_trainer(setting: Setting, card: Card) -> dict[str, int]:
    import torch

    before = torch.cuda.memory_allocated()
    engine, batch = open_engine(setting, card)
    try:
        torch.cuda.synchronize()
        lasting = torch.cuda.memory_allocated() - before
        engine.train_step(batch)
        torch.cuda.reset_peak_memory_stats()
        engine.train_step(batch)
        torch.cuda.synchronize()
        return {
            "lasting": lasting,
            "peak allocated": torch.cuda.max_memory_allocated(),
            "peak reserved": torch.cuda.max_memory_reserved(),
            "process": used_now(),
        }
    finally:
        engine.close()


async def measure_generator(setting: Setting, card: Card) -> dict[str, int]:
    from forge.config import GeneratorConfig, Sampling
    from forge.generator.engine import Request
    from forge.generator.native.engine import NativeEngine
    from forge.models.locate import ResolvedModel

    run = planned(setting, card)
    assert run.generator is not None
    section = run.generator.model_copy(update={"max_seq_len": run.generator_seq_len, "with_gpus": True})
    engine = NativeEngine(GeneratorConfig.of(run.facts, section), model=ResolvedModel(run.facts, None, run.name))
    await engine.start()
    try:
        weights = sum(parameter.nbytes for parameter in engine.thread.batching.runner.parameters.values())
        prompt = tuple(range(1, 1 + run.generator_seq_len - run.completion_tokens))
        chosen = Sampling(max_tokens=32, ignore_eos=True)
        asked = [Request(str(number), (number + 1, *prompt[1:]), chosen) for number in range(section.max_batch)]
        await asyncio.gather(*(engine.generate(request) for request in asked))
        return {"weights": weights, "process": used_now()}
    finally:
        await engine.close()


def count_on_cpu(setting: Setting) -> dict[str, int]:
    """What tensors hold, and what layers keep, of a trainer on a CPU."""
    import torch

    torch.set_num_threads(1)
    engine, batch = open_engine(setting, None)
    states = engine.optimizer.state_dict()
    tensors = [*engine.own_parameters().values(), *states["exp_avg"].values(), *states["exp_avg_sq"].values()]
    tables = [buffer for part in engine.parts for buffer in part.buffers()]
    lasting = sum(_local(tensor).nbytes for tensor in (*tensors, *tables))
    known = {_local(tensor).untyped_storage().data_ptr() for tensor in tables}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = _local(tensor).untyped_storage()
        gathered = (
            _local(weight).untyped_storage().data_ptr() for part in engine.parts for weight in part.parameters()
        )
        if storage.data_ptr() not in known.union(gathered):
            kept[storage.data_ptr()] = storage  # held, so that its address is not given to another
        return tensor

    gradients: list[int] = []
    step = engine.optimizer.step

    def noted(**rate: float) -> None:
        gradients.append(sum(_local(each.grad).nbytes for each in engine._parameters.values()))
        step(**rate)

    engine.optimizer.step = noted
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.train_step(batch)
    engine.close()
    activations = sum(storage.nbytes() for storage in kept.values())
    return {"lasting": lasting, "gradients": gradients[0], "activations": activations}


def _local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


def measure(setting: Setting, card: Card | None) -> dict[str, int]:
    if card is None:
        return count_on_cpu(setting)
    if setting.part == "trainer":
        return measure_trainer(setting, card)
    return asyncio.run(measure_generator(setting, card))


def clear(card: Card | None) -> int:
    """Forget the last setting, and give back what it held; what is left all the same, in bytes."""
    import torch

    torch._dynamo.reset()
    gc.collect()
    if card is None:
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def measure_all(settings: list[Setting], card: Card | None) -> Iterator[dict[str, Any]]:
    """What each setting took, or that there was not memory enough. Ends early where a setting left too much behind."""
    import torch

    for setting in settings:
        began, why, found = time.monotonic(), "", None
        try:
            found = measure(setting, card)
        except torch.OutOfMemoryError:
            why = "out of memory"
        yield {"found": found, "why": why, "seconds": round(time.monotonic() - began, 1)}
        if clear(card) > LEFT_BYTES:
            return


def used_now() -> int:
    """What is in use on the first GPU, by all processes, as the driver tells."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout) * 2**20


# ---- The comparison ------------------------------------------------------------------------------------------------


async def run_child(settings: list[Setting], *, on_gpu: bool, end: float) -> AsyncIterator[dict[str, Any]]:
    """The answers of one child, in order; it may end before it has answered for all."""
    command = [sys.executable, __file__, "--child", json.dumps([asdict(setting) for setting in settings])]
    if not on_gpu:
        command.append("--quick")
    with tempfile.TemporaryFile() as errors:
        child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=errors)
        assert child.stdout is not None
        try:
            for _ in settings:
                limit_s = min(SETTING_S, max(1.0, end - time.monotonic()))
                answer = await asyncio.wait_for(_next_answer(child.stdout), limit_s)
                if answer is None:  # its output has ended, and it will in a moment: it says how
                    await asyncio.wait_for(child.wait(), limit_s)
                    break
                yield answer
            else:
                return
        except TimeoutError:
            yield {"found": None, "why": f"was silent for {limit_s:.0f} s", "seconds": limit_s}
            return
        finally:
            if child.returncode is None:
                child.kill()
            await child.wait()
        if child.returncode:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
            why = f"its process ended with {child.returncode}: {' / '.join(line.strip() for line in said[-4:])}"
            yield {"found": None, "why": why, "seconds": 0.0}


async def _next_answer(stdout: asyncio.StreamReader) -> dict[str, Any] | None:
    while line := await stdout.readline():
        if line.startswith(b"MEASURED "):
            answer: dict[str, Any] = json.loads(line.removeprefix(b"MEASURED "))
            return answer
    return None


async def compare(shape: str, settings: list[Setting], card: Card | None, *, end: float) -> list[Line]:
    """The lines of one shape, from as many children as it takes."""
    lines: list[Line] = []
    while settings and time.monotonic() < end:
        before = used_now() if card is not None else 0
        num_answers = 0
        async for answer in run_child(settings, on_gpu=card is not None, end=end):
            setting = settings[num_answers]
            num_answers += 1
            lines += _told(shape, setting, answer, card, before=before)
        settings = settings[max(1, num_answers) :]
    for setting in settings:
        print(f"left out, because the time is over: {shape}, {setting.label}")
    return lines


def _told(shape: str, setting: Setting, answer: Mapping[str, Any], card: Card | None, *, before: int) -> list[Line]:
    """An answer as lines, and said."""
    measured: dict[str, int] | None = answer["found"]
    if measured is None:
        print(f"FAILED: {shape}, {setting.label}: {answer['why']}", flush=True)
        return []
    if "process" in measured:
        measured["process"] -= before
    predicted = predictions(setting, card)
    found = [
        Line(shape, setting.label, what, predicted[what], measured[what]) for what in predicted if what in measured
    ]
    said = ", ".join(f"{line.what} {line.ratio:.3f}" for line in found)
    print(f"{shape}, {setting.label}: predicted / measured: {said} ({answer['seconds']} s)", flush=True)
    return found


def show(lines: list[Line]) -> str:
    rows = [
        (
            line.shape,
            line.setting,
            line.what,
            f"{line.predicted / GIB:.3f}",
            f"{line.measured / GIB:.3f}",
            f"{line.ratio:.3f}",
        )
        for line in lines
    ]
    return table(("shape", "setting", "what", "predicted GiB", "measured GiB", "ratio"), rows)


def judge(lines: list[Line]) -> tuple[float, bool]:
    """The largest distance of a predicted peak from the measured one, and whether that is near enough."""
    peaks = [abs(line.ratio - 1) for line in lines if line.what in ("peak reserved", "process")]
    worst = max(peaks, default=0.0)
    return worst, worst <= GOAL


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--shapes", nargs="+", default=["qwen3_0_6b", "qwen3_1_7b"], help="presets of models")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=9.0, help="settings that no longer fit are left out")
    parser.add_argument("--quick", action="store_true", help="on a CPU, with a tiny model: what can be counted there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the lines as JSON")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    card = None if args.quick else find_card()
    if args.child:
        settings = [Setting(given["part"], tuple(given["words"])) for given in json.loads(args.child)]
        for answer in measure_all(settings, card):
            print("MEASURED", json.dumps(answer), flush=True)
        return 0
    if card is None and not args.quick:
        print("There is no GPU here: nothing was measured. --quick counts what can be counted on a CPU.")
        return 0
    end, lines = time.monotonic() + 60 * args.minutes, list[Line]()
    for shape in ["tiny"] if args.quick else args.shapes:
        settings = [each for each in settings_for(shape, quick=args.quick) if each.part in args.parts]
        lines += asyncio.run(compare(shape, settings, card, end=end))
    print(f"\n{show(lines)}\n")
    worst, near = judge(lines)
    if card is not None:
        print(f"farthest peak: {worst:.1%} (goal: within {GOAL:.0%}: {'met' if near else 'missed'}); {card.name}")
        print(f"a CUDA context is taken for {CUDA_CONTEXT / GIB:.2f} GiB")
    if args.json is not None:
        args.json.write_text(json.dumps({"lines": [asdict(line) for line in lines], "worst": worst}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
