"""What does the chunked output layer cost in memory and time, against whole logits?

One forward and backward pass through the output layer alone, from hidden states to the gradients of hidden states and
weight, at a vocabulary of 151,936. The ways take turns; on a CPU each has a process of its own. Its peak memory is what
the pass needed beyond the inputs: on a CPU by the kernel's count of the process's resident memory, on a GPU by torch's
count of allocated memory. The first pass of each gives the memory and is not timed. Times on a CPU are
those that the process computed, which other programs disturb less than the clock on the wall.

`--peer liger` adds Liger's fused linear cross-entropy, on a GPU, where that package is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.losses import chunked_logprobs, chunked_nll
from harness.report import machine, table

ANSWER_S = 600.0
NAIVE = "cross_entropy of whole logits"
AGREE = 0.02
"""How far the loss of a way may be from that of the first; bfloat16 logits are rounded."""


@dataclass(frozen=True)
class Shape:
    """What all ways compute."""

    tokens: int
    hidden: int
    vocab: int
    device: str
    dtype: str
    chunk_tokens: int | None
    num_threads: int

    @property
    def gradient_bytes(self) -> int:
        return (self.tokens + self.vocab) * self.hidden * getattr(torch, self.dtype).itemsize


# ---- the ways: from hidden states, weight and targets to the summed loss


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, shape: Shape) -> Tensor:
    return F.cross_entropy((hidden @ weight.t()).float(), targets, reduction="sum")


def naive_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, shape: Shape) -> Tensor:
    logprobs = torch.log_softmax((hidden @ weight.t()).float(), dim=-1)
    return -logprobs.gather(1, targets[:, None]).sum()


def our_nll(hidden: Tensor, weight: Tensor, targets: Tensor, shape: Shape) -> Tensor:
    ones = torch.ones(len(targets), device=hidden.device)
    return chunked_nll(hidden, weight, targets, ones, chunk_tokens=shape.chunk_tokens)[0]


def our_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, shape: Shape) -> Tensor:
    return -chunked_logprobs(hidden, weight, targets, chunk_tokens=shape.chunk_tokens)[0].sum()


def our_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, shape: Shape) -> Tensor:
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, chunk_tokens=shape.chunk_tokens, entropy=True)
    assert entropy is not None
    return -logprobs.sum() - 0.0 * entropy.sum()


def liger(hidden: Tensor, weight: Tensor, targets: Tensor, shape: Shape) -> Tensor:
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    total: Tensor = LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, targets)
    return total


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor, Shape], Tensor]] = {
    NAIVE: naive,
    "log_softmax of whole logits": naive_logprobs,
    "chunked_nll": our_nll,
    "chunked_logprobs": our_logprobs,
    "chunked_logprobs with entropy": our_entropy,
    "Liger's fused linear cross-entropy": liger,
}
CPU_WAYS = (NAIVE, "log_softmax of whole logits", "chunked_nll", "chunked_logprobs")


# ---- one pass of one way


class Here:
    """A way on the GPU, in this process: torch counts its memory exactly, and ways can share the device's."""

    def __init__(self, name: str, shape: Shape, inputs: tuple[Tensor, ...]) -> None:
        self.name, self._shape, self._inputs = name, shape, inputs

    def go(self) -> dict[str, float]:
        return one_pass(self.name, self._shape, self._inputs)

    def stop(self) -> None:
        torch.cuda.empty_cache()


class Apart:
    """A process that holds the inputs and passes through the output layer when it is told to."""

    def __init__(self, name: str, shape: Shape) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_obey, args=(theirs, name, shape), daemon=True)
        self._process.start()
        theirs.close()

    def go(self) -> dict[str, float]:
        """One pass: its seconds, its peak in bytes, and the loss."""
        self._pipe.send("go")
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError(f"{self.name} did not answer within {ANSWER_S:.0f} s")
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"{self.name} failed:\n{answer}")
        found: dict[str, float] = answer
        return found

    def stop(self) -> None:
        self._pipe.close()  # which it sees
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _obey(pipe: Connection, name: str, shape: Shape) -> None:
    torch.set_num_threads(shape.num_threads)
    inputs: tuple[Tensor, ...] = ()
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        try:
            inputs = inputs or make_inputs(shape)
            pipe.send(one_pass(name, shape, inputs))
        except Exception:  # noqa: BLE001 - the benchmark's to hear
            pipe.send(traceback.format_exc())


def make_inputs(shape: Shape) -> tuple[Tensor, ...]:
    """Logits of about unit size, as a model at the beginning of training gives."""
    torch.manual_seed(0)
    made: dict[str, Any] = {"dtype": getattr(torch, shape.dtype), "device": shape.device}
    hidden = torch.randn(shape.tokens, shape.hidden, **made).requires_grad_()
    weight = torch.randn(shape.vocab, shape.hidden, **made).mul_(shape.hidden**-0.5).requires_grad_()
    return hidden, weight, torch.randint(0, shape.vocab, (shape.tokens,), device=shape.device)


def one_pass(name: str, shape: Shape, inputs: tuple[Tensor, ...]) -> dict[str, float]:
    hidden, weight, targets = inputs
    before = begin_peak(shape.device)
    clock = time.process_time if shape.device == "cpu" else time.perf_counter
    began = clock()
    total = WAYS[name](hidden, weight, targets, shape)
    total.backward()
    if shape.device != "cpu":
        torch.cuda.synchronize()
    seconds = clock() - began
    found = {"seconds": seconds, "peak": peak(shape.device) - before, "loss": float(total.detach()) / shape.tokens}
    hidden.grad = weight.grad = None
    return found


def begin_peak(device: str) -> int:
    """Forget the peak so far; what is held now."""
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def peak(device: str) -> int:
    return int(torch.cuda.max_memory_allocated()) if device != "cpu" else _resident("VmHWM")


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


# ---- the report


def measure(shape: Shape, names: list[str], num_rounds: int) -> dict[str, Any]:
    print(f"measuring: hidden {shape.hidden}", file=sys.stderr, flush=True)
    ways: list[Apart] | list[Here]
    if shape.device == "cpu":
        ways = [Apart(name, shape) for name in names]
    else:
        inputs = make_inputs(shape)
        ways = [Here(name, shape, inputs) for name in names]
    try:
        first = {way.name: way.go() for way in ways}
        seconds: dict[str, list[float]] = {way.name: [] for way in ways}
        for number in range(num_rounds):
            for way in ways if number % 2 else reversed(ways):
                seconds[way.name].append(way.go()["seconds"])
    finally:
        for way in ways:
            way.stop()
    for name, found in first.items():
        if abs(found["loss"] / first[NAIVE]["loss"] - 1) > AGREE:
            raise AssertionError(f"{name} gives a loss of {found['loss']}, {NAIVE} one of {first[NAIVE]['loss']}")
    rows = [
        {"what": name, "peak": first[name]["peak"], "loss": first[name]["loss"], "seconds": seconds[name]}
        for name in names
    ]
    return {"shape": asdict(shape), "gradient_bytes": shape.gradient_bytes, "rows": rows}


def report(part: dict[str, Any]) -> str:
    shape, rows = part["shape"], part["rows"]
    base = next(row for row in rows if row["what"] == NAIVE)
    head = ("way", "peak GB", "of that, not gradients", "peak, naive / this", "ms (best)", "time, this / naive", "loss")
    cells = [
        (
            row["what"],
            f"{row['peak'] / 1e9:.2f}",
            f"{(row['peak'] - part['gradient_bytes']) / 1e9:.2f}",
            f"{base['peak'] / row['peak']:.1f}",
            f"{1e3 * statistics.median(row['seconds']):,.0f} ({1e3 * min(row['seconds']):,.0f})",
            f"{statistics.median(mine / its for mine, its in zip(row['seconds'], base['seconds'], strict=True)):.2f}",
            f"{row['loss']:.4f}",
        )
        for row in rows
    ]
    title = f"## {shape['tokens']:,} tokens, width {shape['hidden']:,}, vocabulary {shape['vocab']:,}, {shape['dtype']}"
    return f"{title}, {shape['device']}\n\n{table(head, cells)}"


def facts(device: str) -> dict[str, Any]:
    if device == "cpu":
        return machine() | {"torch": torch.__version__}
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "device": torch.cuda.get_device_name()}


def chosen_ways(device: str, peer: str | None) -> list[str]:
    names = list(CPU_WAYS) if device == "cpu" else [name for name in WAYS if WAYS[name] is not liger]
    if peer == "liger":
        if device != "cpu" and importlib.util.find_spec("liger_kernel") is not None:
            names += [name for name in WAYS if WAYS[name] is liger]
        else:
            print("Liger is left out: it needs a GPU and the package liger_kernel", file=sys.stderr)
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small vocabulary and few tokens; figures mean little")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, help="tokens of one pass (default: 1024 on a CPU, 32768 on a GPU)")
    parser.add_argument("--hidden", type=int, action="append", help="the model's width (repeatable; 1024 and 2048)")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float64"), default="bfloat16")
    parser.add_argument("--chunk-tokens", type=int, help="tokens of one chunk (default: the function's own)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each process")
    parser.add_argument("--rounds", type=int, help="timed passes of each way (default: 1 on a CPU, 10 on a GPU)")
    parser.add_argument("--peer", choices=("liger",), help="measure this peer as well")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    chosen = parser.parse_args()
    is_cpu = chosen.device == "cpu"
    tokens = chosen.tokens or (1024 if is_cpu else 32_768)
    shape = Shape(tokens, 0, chosen.vocab, chosen.device, chosen.dtype, chosen.chunk_tokens, chosen.threads)
    widths, num_rounds = chosen.hidden or [1024, 2048], chosen.rounds or (1 if is_cpu else 10)
    if chosen.quick:
        shape, widths, num_rounds = replace(shape, tokens=128, vocab=4096, chunk_tokens=32), [64], 1
    names = chosen_ways(chosen.device, chosen.peer)
    found: dict[str, Any] = {"machine": facts(chosen.device)}
    found["parts"] = [measure(replace(shape, hidden=width), names, num_rounds) for width in widths]
    where = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    print("\n\n".join([where, *(report(part) for part in found["parts"])]))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
