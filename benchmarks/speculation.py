"""How many steps and how much time does speculative decoding save, at temperature 1 too?

All sides are the native engine with the same weights in this process: without drafts, with prompt lookup, and with
`--draft` with a draft model. They take turns with every batch of requests, and must sample the same tokens with the
same logprobs, bit for bit, or the benchmark fails. The loads are requests to repeat a text with one change, where much
can be guessed, and to write a story, where little can. `--model` is a Hugging Face folder with a chat template, such as
`scripts/fetch_smollm2.py` makes.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from forge.config import GeneratorConfig, ModelConfig, Sampling
from forge.generator.engine import Request
from forge.generator.native.engine import NativeEngine
from forge.models.locate import resolve
from forge.models.tiny import make_tiny
from forge.models.tokenizer import ChatTokenizer
from forge.types import Completion
from harness.report import machine, table

NAMES = ("Ada", "Bruno", "Chiara", "Dmitri", "Esra", "Farid", "Greta", "Hana")
PLACES = ("harbour", "library", "market", "station", "museum", "bakery", "garden", "theatre")
TEXT = (
    "{name} left the {place} at nine in the morning and walked along the river. At ten {name} met a friend from the "
    "{place}, and they talked about the weather, the price of bread and the new bridge. At noon {name} went back to "
    "the {place} to look for a red umbrella, which nobody had seen. In the evening {name} wrote a letter about the day."
)
EDIT = "Repeat the following text word for word, but write {other} instead of {name}.\n\n{text}"
STORY = "Write a short story about {name}, who works at the {place}."


@dataclass(frozen=True)
class Plan:
    """How much is asked for."""

    num_requests: int = 8
    batches: tuple[int, ...] = (1, 8)
    max_tokens: int = 96
    temperatures: tuple[float, ...] = (1.0, 0.0)

    def prompts(self, load: str) -> list[str]:
        """Return the requests of a load."""
        found = []
        for number in range(self.num_requests):
            name, place = NAMES[number % 8], PLACES[(number + number // 8) % 8]
            text = TEXT.format(name=name, place=place)
            asked = EDIT.format(name=name, other=NAMES[(number + 3) % 8], text=text)
            found.append(asked if load == "edit" else STORY.format(name=name, place=place))
        return found


@dataclass
class Measured:
    """What one side did on one load."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


async def run_load(
    engines: Mapping[str, NativeEngine], prompts: Sequence[Sequence[int]], *, batch: int, sampling: Mapping[str, Any]
) -> dict[str, Measured]:
    """Ask all engines for the same, a batch of requests at a time."""
    found = {name: Measured() for name in engines}
    for start in range(0, len(prompts), batch):
        answers: dict[str, list[Completion]] = {}
        order = list(engines) if (start // batch) % 2 else list(reversed(engines))
        for name in order:
            requests = [
                Request(str(number), tuple(prompts[number]), Sampling(**{**sampling, "seed": number}))
                for number in range(start, min(start + batch, len(prompts)))
            ]
            before, began, cpu = engines[name].stats(), time.perf_counter(), time.process_time()
            answers[name] = [each for (each,) in await asyncio.gather(*map(engines[name].generate, requests))]
            measured, after = found[name], engines[name].stats()
            measured.seconds.append(time.perf_counter() - began)
            measured.cpu_s.append(time.process_time() - cpu)
            measured.num_tokens += after.num_tokens - before.num_tokens
            for key in ("num_steps", "num_drafted", "num_accepted"):
                added = after.more.get(key, 0) - before.more.get(key, 0)
                setattr(measured, key, getattr(measured, key) + added)
        _check_equal(answers)
    return found


def _check_equal(answers: Mapping[str, Sequence[Completion]]) -> None:
    plain = [(each.token_ids, each.logprobs) for each in answers["without"]]
    for name, found in answers.items():
        if [(each.token_ids, each.logprobs) for each in found] != plain:
            raise AssertionError(f"with {name} other tokens or logprobs were sampled than without")


def make_engine(folder: Path, plan: Plan, speculation: Mapping[str, Any] | None) -> NativeEngine:
    config = GeneratorConfig(
        model=ModelConfig(path=str(folder)),
        max_seq_len=512,
        max_batch=max(plan.batches),
        with_gpus=False,
        speculation=speculation,
    )
    return NativeEngine(config, model=resolve(config.model), tokenizer=ChatTokenizer.load(folder))


async def measure(plan: Plan, folder: Path, draft: Path | None, num_rounds: int) -> list[dict[str, Any]]:
    """Return what every side did on every load, in every round."""
    settings: dict[str, Mapping[str, Any] | None] = {"without": None, "prompt lookup": {}}
    if draft is not None:
        settings["draft model"] = {"model": str(draft)}
    engines = {name: make_engine(folder, plan, section) for name, section in settings.items()}
    tokenizer = ChatTokenizer.load(folder)
    rows: list[dict[str, Any]] = []
    try:
        for engine in engines.values():
            await engine.start()
        for number in range(num_rounds):
            for load in ("edit", "story"):
                messages = [[{"role": "user", "content": text}] for text in plan.prompts(load)]
                prompts = [tokenizer.encode_prompt(each) for each in messages]
                for batch in plan.batches:
                    for temperature in plan.temperatures:
                        sampling = {"temperature": temperature, "max_tokens": plan.max_tokens}
                        print(
                            f"round {number + 1}: {load}, {batch} at once, {temperature:g}", file=sys.stderr, flush=True
                        )
                        found = await run_load(engines, prompts, batch=batch, sampling=sampling)
                        key = {"load": load, "batch": batch, "temperature": temperature}
                        rows += [{**key, "side": name, **asdict(each)} for name, each in found.items()]
    finally:
        for engine in engines.values():
            await engine.close()
    return rows


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table: each side against the one without drafts."""
    head = ["load", "at once", "temperature", "", "tokens a step", "guesses that were right", "s", "CPU s", "faster by"]
    keys = list(dict.fromkeys((row["load"], row["batch"], row["temperature"], row["side"]) for row in rows))
    lines = []
    for key in keys:
        own = [row for row in rows if (row["load"], row["batch"], row["temperature"], row["side"]) == key]
        plain = [
            row for row in rows if (row["load"], row["batch"], row["temperature"], row["side"]) == (*key[:3], "without")
        ]
        seconds = statistics.median(sum(row["seconds"]) for row in own)
        ratio = statistics.median(sum(p["seconds"]) / sum(o["seconds"]) for o, p in zip(own, plain, strict=True))
        drafted = own[0]["num_drafted"]
        lines.append(
            [
                key[0],
                str(key[1]),
                f"{key[2]:g}",
                key[3],
                f"{own[0]['num_tokens'] / own[0]['num_steps']:.2f}",
                f"{own[0]['num_accepted'] / drafted:.0%} of {drafted:,}" if drafted else "",
                f"{seconds:.2f}",
                f"{statistics.median(sum(row['cpu_s']) for row in own):.2f}",
                "" if key[3] == "without" else f"{ratio:.2f}",
            ]
        )
    return table(head, lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model and few requests; figures mean little")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder with a chat template")
    parser.add_argument("--draft", type=Path, help="the folder of a smaller model with the same tokenizer")
    parser.add_argument("--requests", type=int, default=8, help="requests of a load")
    parser.add_argument("--tokens", type=int, default=96, help="longest completion")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    chosen = parser.parse_args()
    if chosen.model is None and not chosen.quick:
        parser.error("--model is needed, or --quick")
    plan = Plan(chosen.requests, max_tokens=chosen.tokens)
    torch.set_num_threads(chosen.threads)
    with tempfile.TemporaryDirectory() as made:
        model, draft, num_rounds = chosen.model, chosen.draft, chosen.rounds
        if chosen.quick:
            plan, num_rounds = Plan(2, (1, 2), 8), 1
            model, draft = Path(made) / "model", Path(made) / "draft"
            make_tiny(model, num_layers=2)
            make_tiny(draft, num_layers=1)
        rows = asyncio.run(measure(plan, model, draft, num_rounds))
    found = {"machine": machine(), "plan": asdict(plan), "rows": rows}
    print(", ".join(f"{name} {value}" for name, value in found["machine"].items()))
    print(f"\n{report(rows)}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
