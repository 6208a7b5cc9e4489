"""How many tokens a second does one GPU make, with the embedded engine and with vLLM?

512 requests of 128 random tokens each get 256 new ones, drawn at temperature 1 with their logprobs, on models of the
shapes of Qwen3-0.6B and 1.7B with random weights in bfloat16. Each engine runs in a process of its own, one after the
other, and goes through the load several times; the best round counts, for both. Beside them stands the bound of the
memory: what a step would take if it only read all weights once and the keys and values of every sequence once.

    python benchmarks/generation_cuda.py                 # both engines, both shapes
    python benchmarks/generation_cuda.py --contenders vllm-bare        # vLLM without the logprobs that training needs
    python benchmarks/generation_cuda.py --shapes tiny --device cpu --contenders native   # to try the program out
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from forge.config import GeneratorConfig, ModelConfig, Sampling
from forge.models.architecture import complete
from harness.report import table

GOAL = 0.6
BYTES_PER_S = 4.8e12
"""An H200's memory."""


def prompts(num: int, length: int, vocab: int) -> list[tuple[int, ...]]:
    draw = random.Random(0)
    return [tuple(draw.randrange(vocab) for _ in range(length)) for _ in range(num)]


def has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def facts_of(shape: str) -> ModelConfig:
    return complete(ModelConfig(preset=shape))


# ---- The contenders, each in a process of its own ---------------------------------------------------------------


async def native(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from forge.generator.engine import Request
    from forge.generator.native.engine import NativeEngine
    from forge.models.locate import ResolvedModel

    facts = facts_of(args.shape)
    config = GeneratorConfig(
        model=facts,
        max_seq_len=args.prompt_tokens + args.new_tokens,
        max_batch=args.requests,
        with_gpus=args.device == "cuda",
        prefix_sharing=False,
    )
    began = time.perf_counter()
    engine = NativeEngine(config, model=ResolvedModel(facts, None, args.shape))
    await engine.start()
    started_s = time.perf_counter() - began
    lines = prompts(args.requests, args.prompt_tokens, facts.vocab_size or 2)

    async def load(num_tokens: int) -> float:
        began = time.perf_counter()
        chosen = Sampling(max_tokens=num_tokens, ignore_eos=True)
        await asyncio.gather(*(engine.generate(Request(str(n), ids, chosen)) for n, ids in enumerate(lines)))
        return time.perf_counter() - began

    await load(8)
    rounds = [await load(args.new_tokens) for _ in range(args.rounds)]
    steps = engine.stats().more["num_steps"]
    if args.profile and args.device == "cuda":
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profile:
            await load(48)
        print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=30), flush=True)
    result = {"start_s": started_s, "rounds_s": rounds, "num_steps": steps}
    result["update"] = await native_updates(engine)
    await engine.close()
    return result


async def native_updates(engine: Any) -> dict[str, float]:
    """A version is published from this process, in host memory, and loaded."""
    from forge.store import Weights

    weights = Weights("policy", rank=0, world_size=1, on="host")
    state = {name: tensor.detach() for name, tensor in engine.thread.batching.runner.parameters.items()}
    found = []
    for version in range(4):
        began = time.perf_counter()
        await weights.publish(state, version=version)
        published_s = time.perf_counter() - began
        report = await engine.update_weights(version, "keep")
        found.append({"publish_s": published_s, "update_s": report.seconds, "stall_s": report.stall_s})
    return found[-1]


def vllm(args: argparse.Namespace) -> dict[str, Any]:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    from vllm import LLM, SamplingParams

    from forge.models.hf_config import SpecialIds, write_hf_config

    facts = facts_of(args.shape)
    with tempfile.TemporaryDirectory() as folder:
        write_hf_config(facts, Path(folder), dtype="bfloat16", special_ids=SpecialIds(bos=0, eos=1, pad=0))
        began = time.perf_counter()
        engine = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=args.prompt_tokens + args.new_tokens,
            max_num_seqs=args.requests,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.8,
            disable_log_stats=True,
        )
        started_s = time.perf_counter() - began
        made = prompts(args.requests, args.prompt_tokens, facts.vocab_size or 2)
        lines = [{"prompt_token_ids": list(ids)} for ids in made]
        logprobs = None if args.child == "vllm-bare" else 0

        def load(num_tokens: int) -> float:
            chosen = SamplingParams(
                max_tokens=num_tokens, temperature=1.0, logprobs=logprobs, ignore_eos=True, detokenize=False
            )
            began = time.perf_counter()
            engine.generate(lines, chosen, use_tqdm=False)
            return time.perf_counter() - began

        load(8)
        return {"start_s": started_s, "rounds_s": [load(args.new_tokens) for _ in range(args.rounds)]}


# ---- The comparison ---------------------------------------------------------------------------------------------


def bound_tokens_per_s(args: argparse.Namespace, shape: str) -> float:
    """If a decode step only read the weights and every sequence's keys and values, once."""
    from forge.models.sizes import num_parameters

    facts = facts_of(shape)
    width = facts.head_dim or 1
    per_token = 2 * (facts.num_layers or 1) * (facts.num_kv_heads or 1) * width * 2
    context = args.prompt_tokens + args.new_tokens / 2
    step_bytes = num_parameters(facts) * 2 + args.requests * context * per_token
    return args.requests / (step_bytes / BYTES_PER_S)


def run_child(args: argparse.Namespace, contender: str, shape: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", contender, "--shape", shape, "--device", args.device]
    for name in ("requests", "prompt_tokens", "new_tokens", "rounds"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    if args.profile:
        command.append("--profile")
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        subprocess.run([*command, "--answer", answer.name], check=True, start_new_session=True)
        found: dict[str, Any] = json.load(answer)
    return found


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for shape in args.shapes:
        total = args.requests * args.new_tokens
        found = {contender: run_child(args, contender, shape) for contender in args.contenders}
        speeds = {contender: total / min(each["rounds_s"]) for contender, each in found.items()}
        bound = bound_tokens_per_s(args, shape)
        for contender, each in found.items():
            row = {
                "shape": shape,
                "engine": contender,
                "tokens/s": round(speeds[contender]),
                "of the bound": round(speeds[contender] / bound, 3),
                "start, s": round(each["start_s"], 1),
                "rounds, s": [round(value, 2) for value in each["rounds_s"]],
                "update": each.get("update"),
            }
            if contender == "native" and "vllm" in speeds:
                row["of vLLM"] = round(speeds["native"] / speeds["vllm"], 2)
                row["goal"] = GOAL
            rows.append(row)
        print(json.dumps(rows[-len(found) :]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["qwen3_0_6b", "qwen3_1_7b"])
    parser.add_argument("--contenders", nargs="+", default=["vllm", "native"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tiny model and one round; figures mean little")
    parser.add_argument("--profile", action="store_true", help="print a profile of the embedded engine's steps")
    parser.add_argument("--json", help="a file for the rows")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        found = asyncio.run(native(args)) if args.child == "native" else vllm(args)
        Path(args.answer).write_text(json.dumps(found), encoding="utf-8")
        os._exit(0)  # engines may leave threads that would hold the process
    if args.quick:
        args.shapes, args.requests, args.new_tokens, args.rounds = ["tiny"], 16, 32, 1
    if args.device == "cuda" and not has_gpu():
        print("no NVIDIA GPU is visible here: nothing was measured (--device cpu tries the program out)")
        return
    rows = compare(args)
    head = ["shape", "engine", "tokens/s", "of the bound", "of vLLM", "goal", "start, s", "rounds, s", "update"]
    print(table(head, [[str(row.get(name, "")) for name in head] for row in rows]))
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
