"""Where does the time of a decode step go on a GPU, and what do its fused kernels gain?

One decode step of 512 sequences on the shape of Qwen3-1.7B with random weights in bfloat16: 64 groups of 8 that share a
prompt of 512 tokens, with 64, 512 and 1,000 tokens of their own. The step is recorded in a CUDA graph and replayed:
called module by module, and with fused kernels, whose logits are compared. Beside them stand the parts alone (attention
and the products) and the bound: what must be read from memory at the rate of a large copy.

    python benchmarks/decode_gpu.py --json decode.json
    python benchmarks/decode_gpu.py --engine modules fused fused@fp8              # the engine, one after the other
    python benchmarks/decode_gpu.py --engine fused --trace trace.json.gz          # and a trace of a few of its steps
    python benchmarks/decode_gpu.py --engine modules --shape tiny --device cpu --requests 16 --new-tokens 8  # to try it
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import gzip
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from harness.report import table

GROUP, PROMPT = 8, 512
OWN = (64, 512, 1000)
VARIANTS = ("modules", "fused")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def choose_step(word: str) -> None:
    """Let the steps that are recorded from now on be computed as a variant."""
    os.environ["FORGE_DECODE_STEP"] = word


# ---- One step, replayed


class Load:
    """Sequences in the middle of their completions: pieces and a table of pages as the scheduler would have them."""

    def __init__(self, num: int, own: int) -> None:
        shared, each = PROMPT // 16, -(-own // 16)
        self.num, self.own = num, own
        width = shared + each
        groups = np.arange(num) // GROUP
        table = np.empty((num, width), dtype=np.int32)
        table[:, :shared] = groups[:, None] * shared + np.arange(shared)
        first = (num // GROUP) * shared
        table[:, shared:] = first + np.arange(num)[:, None] * each + np.arange(each)
        self.table, self.num_pages = table, int(table.max()) + 1
        ids = np.random.default_rng(0).integers(0, 256, PROMPT + own)
        position = PROMPT + own - 1
        self.pieces: Any = [
            SimpleNamespace(sequence=SimpleNamespace(slot=slot, ids=ids), start=position) for slot in range(num)
        ]

    def bytes_read(self, facts: Any, item: int) -> int:
        tokens = self.num * self.own + self.num // GROUP * PROMPT
        return int(tokens * 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * item)


def time_ms(work: Callable[[], object], *, repeats: int = 20) -> float:
    """Median by the device's clock, after three that do not count."""
    import torch

    for _ in range(3):
        work()
    found = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found)


def recorded(work: Callable[[], object], *, times: int = 1) -> Callable[[], None]:
    """The work as a graph, so many times in a row."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(times):
            work()
    return graph.replay


def runner_of(args: argparse.Namespace, num_pages: int, cache: str) -> Any:
    from forge.config import GeneratorConfig
    from forge.generator.native.runner import ModelRunner
    from forge.models.inference import page_bytes
    from forge.models.locate import ResolvedModel
    from harness.gpu_plan import facts_of

    facts = facts_of(args.shape)
    item = 1 if cache == "fp8" else 2
    config = GeneratorConfig(
        model=facts,
        max_seq_len=PROMPT + 1024,
        max_batch=args.requests,
        with_gpus=True,
        cuda_graphs=False,
        kv_cache_dtype=cache,
        kv_cache_gb=(num_pages + 64) * page_bytes(facts, item_bytes=item) / 2**30,
    )
    return ModelRunner(config, ResolvedModel(facts, None, args.shape), max_seq_len=PROMPT + 1024)


def fill_cache(runner: Any) -> None:
    """Fill it with the same random numbers each time: a step writes into it."""
    import torch

    torch.manual_seed(0)
    for caches in runner._caches:
        for each in caches:
            drawn = torch.randn(each.shape, dtype=torch.bfloat16, device=each.device)
            each.copy_(drawn.to(each.dtype))


def measure_variants(args: argparse.Namespace, cache: str, found: dict[str, Any], keep: Callable[[], None]) -> None:
    """Measure each variant, and tell what is known after each: an error of the device would end all that follow."""
    import torch

    from forge.generator.native.decode_graphs import DecodeGraphs

    loads = [Load(args.requests, own) for own in OWN]
    runner = runner_of(args, max(load.num_pages for load in loads), cache)
    found |= {"steps": {}, "cache": cache}
    reference: Any = None
    for word in args.variants:
        choose_step(word)
        try:
            began = time.perf_counter()
            graphs = DecodeGraphs(runner, max_batch=args.requests, sizes=[args.requests])
            recorded_s = time.perf_counter() - began
            fill_cache(runner)
            logits = graphs.run(loads[1].pieces, loads[1].table).float().clone()
            reference = logits if reference is None else reference
            apart = float((logits - reference).norm() / reference.norm())
            steps = {}
            for load in loads:
                graphs.run(load.pieces, load.table)
                steps[load.own] = time_ms(graphs._graphs[args.requests][0].replay)
        except Exception as error:  # noqa: BLE001 - the other variants are measured all the same
            found["steps"][word] = {"failed": repr(error)[:500]}
            say(f"{cache} {word}: {error!r}")
            keep()
            continue
        is_finite = bool(torch.isfinite(logits).all())
        found["steps"][word] = {"ms": steps, "apart": apart, "finite": is_finite, "recorded_s": recorded_s}
        say(f"{cache} {word}: {steps} ms, logits apart {apart:.2e}, finite {is_finite}, recorded in {recorded_s:.1f} s")
        keep()
        del graphs, logits
    if cache == "auto" and args.parts:
        with torch.inference_mode():
            found |= measure_parts(runner, loads)
        keep()
    runner.release_cache()


def measure_parts(runner: Any, loads: Sequence[Load]) -> dict[str, Any]:
    """Attention, products and everything but attention, alone."""
    import torch

    from forge.models import gpu_attention

    facts, device = runner.facts, runner.device
    num = loads[0].num
    found: dict[str, Any] = {"attention_ms": {}, "products_us": {}}
    caches = runner._caches
    for load in loads:
        for count in (num, num // 2):
            pages = torch.from_numpy(load.table[:count]).to(device)
            lengths = torch.full((count,), PROMPT + load.own, dtype=torch.int32, device=device)
            positions = np.full(count, PROMPT + load.own - 1, dtype=np.int64)
            shares = torch.from_numpy(runner.shares(positions, load.table[:count])).to(device)
            q = torch.randn(count, facts.num_heads, facts.head_dim, dtype=torch.bfloat16, device=device)

            def attend(q: Any = q, lengths: Any = lengths, pages: Any = pages, shares: Any = shares) -> None:
                for each in caches:
                    gpu_attention.decode_attend(
                        q, *each, context_lens_S=lengths, table_SP=pages, scale=0.09, shares=shares
                    )

            found["attention_ms"][f"{count} x {load.own}"] = time_ms(recorded(attend))
    layer = runner.model.layers["0"]
    attention, forward = layer.attention, layer.feed_forward
    qkv = attention.qkv_linear
    from forge.models.gpu_step import joined

    weights = {
        "wq": qkv.wq.weight,
        "wk": qkv.wk.weight,
        "qkv": joined([qkv.wq.weight, qkv.wk.weight, qkv.wv.weight]),
        "wo": attention.wo.weight,
        "w1": forward.w1.weight,
        "w1w3": joined([forward.w1.weight, forward.w3.weight]),
        "w2": forward.w2.weight,
        "head": runner.model.lm_head.weight,
    }
    for name, weight in weights.items():
        if weight is None:
            found["products_us"][name] = None
            continue
        for count in (num, num // 2):
            x = torch.randn(count, weight.shape[1], dtype=torch.bfloat16, device=device)
            times = 4 if name == "head" else 40
            work = recorded(lambda x=x, weight=weight: torch.nn.functional.linear(x, weight), times=times)
            taken = time_ms(work) / times
            rate = 2 * count * weight.numel() / taken / 1e9
            found["products_us"][f"{name} {count}"] = {"us": taken * 1e3, "tflops": rate}
    size = 1 << 30
    a, b = (torch.empty(size, dtype=torch.uint8, device=device).random_() for _ in range(2))
    found["copy_tb_s"] = 2 * size / time_ms(lambda: b.copy_(a)) / 1e9
    square = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    found["product_tflops"] = 2 * 8192**3 / time_ms(lambda: square @ square) / 1e9
    from forge.models.sizes import num_parameters

    weights_bytes = 2 * num_parameters(facts)
    rate = found["copy_tb_s"] * 1e9
    found["bound_ms"] = {load.own: (load.bytes_read(facts, 2) + weights_bytes) / rate for load in loads}
    return found


# ---- The engine


async def run_engines(args: argparse.Namespace, found: list[dict[str, Any]], keep: Callable[[], None]) -> None:
    """Run each engine that was asked for, one after the other. The trace is of the last one that is not `modules`."""
    import torch

    traced = next((word for word in reversed(args.engine) if word != "modules"), args.engine[-1])
    for word in args.engine:
        try:
            found.append(await run_engine(args, word, is_traced=args.trace is not None and word == traced))
        except Exception as error:  # noqa: BLE001 - the others are measured all the same
            found.append({"options": word, "failed": repr(error)[:500]})
        say(json.dumps({key: value for key, value in found[-1].items() if key != "timeline"}))
        keep()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


async def run_engine(args: argparse.Namespace, word: str, *, is_traced: bool) -> dict[str, Any]:
    """64 prompts of 512 tokens x 8 completions of 1,024 tokens through the engine, as in one step of GRPO."""
    from forge.config import GeneratorConfig, Sampling
    from forge.generator.engine import Request
    from forge.generator.native.engine import NativeEngine
    from forge.models.locate import ResolvedModel
    from harness.gpu_plan import facts_of

    options, _, cache = word.partition("@")
    choose_step(options)
    facts = facts_of(args.shape)
    config = GeneratorConfig(
        model=facts,
        max_seq_len=PROMPT + args.new_tokens,
        max_batch=args.requests,
        with_gpus=args.device == "cuda",
        kv_cache_dtype=cache or "auto",
        kv_cache_gb=args.cache_gb,
    )
    began = time.perf_counter()
    engine = NativeEngine(config, model=ResolvedModel(facts, None, args.shape))
    await engine.start()
    started_s = time.perf_counter() - began
    draw = np.random.default_rng(1)
    num_groups = args.requests // GROUP

    async def load(num_tokens: int) -> float:
        began = time.perf_counter()
        chosen = Sampling(max_tokens=num_tokens, ignore_eos=True, n=GROUP)
        lines = [tuple(draw.integers(0, facts.vocab_size or 2, PROMPT).tolist()) for _ in range(num_groups)]
        await asyncio.gather(*(engine.generate(Request(str(n), ids, chosen)) for n, ids in enumerate(lines)))
        return time.perf_counter() - began

    await load(8)
    found: dict[str, Any] = {"options": word, "start_s": started_s, "whole_s": await load(args.new_tokens)}
    found |= {"tokens_per_s": args.requests * args.new_tokens / found["whole_s"], "more": dict(engine.stats().more)}
    if is_traced and args.device == "cuda":
        found["timeline"] = await traced_steps(args, load)
    runner = engine.thread.serving().runner
    await engine.close()
    runner.release_cache()
    return found


async def traced_steps(args: argparse.Namespace, load: Callable[[int], Coroutine[Any, Any, float]]) -> dict[str, Any]:
    """Kernels of a few steps in the middle of the load, which is then given up."""
    import torch

    whole = asyncio.create_task(load(args.new_tokens))
    try:
        await asyncio.sleep(args.trace_after)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            await asyncio.sleep(0.25)
        profile.export_chrome_trace(str(args.trace))
        return timeline(args.trace)
    except Exception as error:  # noqa: BLE001 - a trace that fails costs no measurement
        return {"failed": repr(error)[:500]}
    finally:
        whole.cancel()
        await asyncio.wait([whole])


def timeline(path: Path) -> dict[str, Any]:
    """Kernels by time a step, and how long nothing ran. A step ends with the kernel that samples."""
    content = path.read_bytes()
    events = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]
    kernels = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    kernels.sort(key=lambda each: each["ts"])
    ends = [each["ts"] + each["dur"] for each in kernels if each["name"] == "sample"]
    if len(ends) < 3:
        return {"num_kernels": len(kernels), "steps": len(ends)}
    kernels = [each for each in kernels if ends[0] <= each["ts"] < ends[-1]]
    num_steps, whole = len(ends) - 1, ends[-1] - ends[0]
    by_name: Mapping[str, list[float]] = defaultdict(list)
    busy, until = 0.0, ends[0]
    gaps: list[tuple[float, str]] = []
    for each in kernels:
        by_name[each["name"]].append(each["dur"])
        start, end = each["ts"], each["ts"] + each["dur"]
        if start > until:
            gaps.append((start - until, each["name"][:60]))
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    rows = [
        {"kernel": name[:110], "ms": sum(durations) / 1e3 / num_steps, "calls": len(durations) / num_steps}
        for name, durations in by_name.items()
    ]
    gap_sums: dict[str, float] = defaultdict(float)
    for size, name in gaps:
        gap_sums["above 20 us, before " + name if size > 20 else "up to 20 us"] += size / 1e3 / num_steps
    return {
        "steps": num_steps,
        "step_ms": whole / 1e3 / num_steps,
        "busy_ms": busy / 1e3 / num_steps,
        "gaps_ms": dict(sorted(gap_sums.items(), key=lambda item: -item[1])[:12]),
        "kernels": sorted(rows, key=lambda row: -row["ms"])[:40],
    }


# ---- The command line


def show(found: Mapping[str, Any]) -> str:
    parts = []
    for each in found.get("variants", []):
        head = ("cache", "step", *(f"{own} own tokens, ms" for own in OWN), "logits apart", "")
        rows = []
        for word, row in each.get("steps", {}).items():
            times = [f"{row['ms'][own]:.2f}" for own in OWN] if "ms" in row else [""] * len(OWN)
            apart = f"{row['apart']:.1e}" if "apart" in row else ""
            rows.append((each["cache"], word, *times, apart, row.get("failed", "")[:80]))
        parts.append(table(head, rows))
        if "bound_ms" in each:
            lines = {name: each[name] for name in ("bound_ms", "copy_tb_s", "product_tflops", "attention_ms")}
            parts.append(json.dumps(lines))
            parts.append(json.dumps(each["products_us"]))
    for each in found.get("engines", []):
        engine = dict(each)
        spent = engine.pop("timeline", None)
        parts.append(json.dumps(engine))
        if spent and "kernels" in spent:
            rows = [(row["kernel"], f"{row['ms']:.3f}", f"{row['calls']:.1f}") for row in spent["kernels"]]
            rest = {name: value for name, value in spent.items() if name != "kernels"}
            parts += [json.dumps(rest), table(("kernel", "ms a step", "calls"), rows)]
    return "\n\n".join(parts)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split("\n\n")[0].split()))
    parser.add_argument("--shape", default="qwen3_1_7b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=1024, help="of a completion, with --engine")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="default: %(default)s")
    parser.add_argument("--caches", nargs="+", default=("auto", "fp8"), help="precisions; default: %(default)s")
    parser.add_argument("--no-parts", dest="parts", action="store_false", help="do not measure attention and products")
    parser.add_argument(
        "--engine", nargs="+", metavar="VARIANT[@CACHE]", help="run the engine with these instead, such as fused@fp8"
    )
    parser.add_argument("--cache-gb", type=float, help="the engine's")
    parser.add_argument("--trace", type=Path, help="a file for a trace of a few of the engine's steps")
    parser.add_argument("--trace-after", type=float, default=6.0, help="seconds; default: %(default)s")
    parser.add_argument("--json", type=Path, help="a file for the results")
    return parser.parse_args(words)


def main() -> None:
    args = parse_arguments()
    import torch

    needs_gpu = args.device == "cuda" or args.engine is None
    if needs_gpu and not torch.cuda.is_available():
        print("no NVIDIA GPU is visible here: nothing was measured")
        return
    found: dict[str, Any] = {"torch": torch.__version__}

    def keep() -> None:
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1) + "\n")

    if args.engine is not None:
        found["engines"] = []
        asyncio.run(run_engines(args, found["engines"], keep))
    else:
        found["variants"] = []
        for cache in args.caches:
            found["variants"].append({"cache": cache})
            try:
                measure_variants(args, cache, found["variants"][-1], keep)
            except Exception as error:  # noqa: BLE001 - what was measured before is kept
                found["variants"][-1]["failed"] = repr(error)[:500]
                say(f"{cache}: {error!r}")
            gc.collect()
            torch.cuda.empty_cache()
    keep()
    print(show(found), flush=True)
    os._exit(0)  # the engine may leave threads that would hold the process


if __name__ == "__main__":
    main()
