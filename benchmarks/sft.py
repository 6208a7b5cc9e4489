"""How many tokens a second does supervised fine-tuning learn from, against TRL's `SFTTrainer`?

Both train the same model (Qwen3's shape, about 30 million weights, made here) from the same files on conversations of
30 to 512 tokens, lengths log-uniform, on a CPU in float32, with as many threads and the same AdamW. Loss is on answers
only, and a step has about as many tokens on all sides. Ours is what `apps/sft/main.py` runs: `run_sft`, with its
loader that reads, tokenises and packs while it trains, a rank in a process of its own, and its metrics. TRL is given
tokens, so that it pays for no tokenising. It runs in an environment of its own, packed, padded in a random order (its
default) and padded with samples of similar length together.

Each side is a process that trains for one window and waits for its next turn; the order of turns is reversed every
round. Tokens of padding do not count, nor do warming up and validation. The mean loss of the same held-out answers is
taken on all sides when so many tokens have been trained on, and given at equal numbers of tokens.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import contextlib
import json
import logging
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Self

from harness.report import machine, table, verdict
from harness.sft_ours import serve, settings_of
from harness.sft_plan import Plan, prepare
from harness.throughput import quartiles

ROOT = Path(__file__).resolve().parent.parent
TRL_PACKAGES = ("torch==2.13.0", "trl==1.16.0", "transformers==5.22.2", "accelerate==1.15.0", "datasets==5.2.0")
TRL_MODES = {
    "TRL, packed": ("packed", "random"),
    "TRL, padded, similar lengths together": ("padded", "group_by_length"),
    "TRL, padded": ("padded", "random"),
}
OURS, PADDED = "ours", "TRL, padded"
GOAL_BEST, GOAL_PADDED = 1.3, 2.5
PADDED_ROWS = 8
"""TRL's default of rows in a micro-batch, of which two make a step."""


SHAPE_30M = {
    "vocab_size": 32768,
    "hidden_size": 384,
    "num_layers": 10,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1152,
    "max_seq_len": 2048,
}
FULL = Plan(SHAPE_30M)
QUICK = Plan({"num_layers": 2}, longest=256, num_rounds=3, num_warm=1, num_marks=2, num_held_out=6)

# ---- TRL's side


def make_environment(folder: Path) -> None:
    """An environment with TRL, made once; releases are pinned, and torch is the one that we use."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    wanted = [package.partition("==")[::2] for package in TRL_PACKAGES]
    probe = (
        "from importlib.metadata import version as v; import sys; print(*(v(n).split('+')[0] for n in sys.argv[1:]))"
    )
    names, versions = zip(*wanted, strict=True)
    found = subprocess.run([str(python), "-c", probe, *names], capture_output=True, text=True)
    if found.stdout.split() != list(versions):
        print(f"installing {' '.join(TRL_PACKAGES)} into {folder.name}", file=sys.stderr, flush=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *TRL_PACKAGES], check=True)


def trl_command(environment: Path, plan: Plan, folder: Path, name: str) -> list[str]:
    mode, order = TRL_MODES[name]
    rows, accumulation = (1, plan.num_rows) if mode == "packed" else (PADDED_ROWS, 2)
    asked = {
        "model": folder / "model",
        "train": folder / "train.ids.jsonl",
        "validation": folder / "held_out.ids.jsonl",
        "mode": mode,
        "order": order,
        "max-length": plan.longest,
        "rows": rows,
        "accumulation": accumulation,
        "steps": plan.num_steps,
        "warmup-steps": 0,
        "window": plan.window,
        "validate-every-tokens": plan.validate_every_tokens,
        "threads": plan.threads,
    }
    words = [word for key, value in asked.items() for word in (f"--{key}", str(value))]
    return [str(environment / "bin" / "python"), str(ROOT / "benchmarks/harness/trl_sft.py"), "--take-turns", *words]


# ---- measuring


@dataclass
class Side:
    """A process that trains for one window whenever it is told to."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    windows: list[dict[str, Any]] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, name: str, command: Sequence[str], log: Path, *, threads: int) -> Self:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        pipe = subprocess.PIPE
        with log.open("w") as errors:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=environment)
        return cls(name, process, log)

    def take_turn(self) -> dict[str, Any]:
        self._tell()
        return self.read_until("window")

    def finish(self) -> None:
        """Let it validate for the last time and end."""
        self._tell()
        self.last = self.read_until("done")
        self._pipe(self.process.stdin).close()
        self.process.wait(timeout=120)

    def stop(self) -> None:
        """See that the process is gone: it ends in order when nobody is left to tell it to go on."""
        with contextlib.suppress(OSError):
            self._pipe(self.process.stdin).close()
        for end in (self.process.terminate, self.process.kill):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=60)
            end()
        self.process.wait()

    def read_until(self, event: str) -> dict[str, Any]:
        for line in self._pipe(self.process.stdout):
            if not line.startswith('{"event"'):
                continue  # a line for people
            found: dict[str, Any] = json.loads(line)
            if found["event"] == "validation":
                self.curve.append((found["tokens"], found["loss"]))
            if found["event"] == event:
                return found
        self.process.wait()
        raise RuntimeError(f"{self.name}: ended before its {event}\n{self.log.read_text()[-4000:]}")

    def _tell(self) -> None:
        stream = self._pipe(self.process.stdin)
        stream.write("\n")
        stream.flush()

    @staticmethod
    def _pipe(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream

    def summary(self) -> dict[str, Any]:
        tokens = sum(window["tokens"] for window in self.windows)
        rates = self.rates
        return {
            "tokens_per_s": statistics.median(rates),
            "tokens_per_s_best": max(rates),
            "tokens_per_cpu_s": tokens / sum(window["cpu_seconds"] for window in self.windows),
            "windows": self.windows,
            "curve": self.curve,
            "last": self.last,
        }

    @property
    def rates(self) -> list[float]:
        return [window["tokens"] / window["seconds"] for window in self.windows]


@contextlib.contextmanager
def started(plan: Plan, folder: Path, environment: Path | None) -> Iterator[list[Side]]:
    """All sides after their first window, started one after the other; they are gone afterwards, whatever happens."""
    (folder / "plan.json").write_text(json.dumps(asdict(plan)))
    commands = {OURS: [sys.executable, str(Path(__file__).resolve()), "--serve", str(folder)]}
    if environment is not None:
        commands |= {name: trl_command(environment, plan, folder, name) for name in TRL_MODES}
    sides: list[Side] = []
    try:
        for number, (name, command) in enumerate(commands.items()):
            sides.append(Side.start(name, command, folder / f"side{number}.log", threads=plan.threads))
            sides[-1].read_until("window")
        yield sides
    finally:
        for side in sides:
            side.stop()


def measure(plan: Plan, environment: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="forge-sft-") as name:
        folder = Path(name)
        data = prepare(folder, plan)
        with started(plan, folder, environment) as sides:
            for number in range(1, plan.num_warm + plan.num_rounds):
                rates = []
                for side in sides if number % 2 else sides[::-1]:
                    window = side.take_turn()
                    rates.append(f"{side.name} {window['tokens'] / window['seconds']:,.0f}")
                    if number >= plan.num_warm:
                        side.windows.append(window)
                progress = f"window {number + 1} of {plan.num_warm + plan.num_rounds}, tokens/s: {'; '.join(rates)}"
                print(progress, file=sys.stderr, flush=True)
            for side in sides:
                side.finish()
    return {
        "plan": asdict(plan),
        "settings": [word for word in settings_of(plan, Path()) if "=." not in word and "path" not in word],
        "data": data,
        "sides": {side.name: side.summary() for side in sides},
        "rows": [compare(sides[0], side) for side in sides[1:]],
        "curves": curves(sides),
    }


def compare(ours: Side, peer: Side) -> dict[str, Any]:
    low, median, high = quartiles(sorted(a / b for a, b in zip(ours.rates, peer.rates, strict=True)))
    goal = GOAL_PADDED if peer.name == PADDED else GOAL_BEST
    return {"what": peer.name, "ratio": median, "ratio_quartiles": [low, high], "goal": goal, "met": median >= goal}


def curves(sides: Sequence[Side]) -> list[dict[str, Any]]:
    """Everyone's loss where all are known: at the tokens where we validated, read off the others' straight lines."""
    end = min(side.curve[-1][0] for side in sides)
    marks = sorted({min(tokens, end) for tokens, _ in sides[0].curve})
    return [{"tokens": mark, "losses": {side.name: _read_off(side.curve, mark) for side in sides}} for mark in marks]


def _read_off(curve: Sequence[tuple[int, float]], mark: int) -> float:
    for (left, before), (right, after) in pairwise(curve):
        if left <= mark <= right:
            return before + (after - before) * (mark - left) / max(1, right - left)
    raise ValueError(f"{mark} tokens lie outside the curve")


# ---- what is printed


def report(found: dict[str, Any]) -> str:
    sides, rows = found["sides"], {row["what"]: row for row in found["rows"]}
    head = ("", "tokens/s (best)", "tokens per CPU second", "ours is faster by (quartiles)", "goal")
    lines = []
    for name, side in sides.items():
        row = rows.get(name)
        low, high = row["ratio_quartiles"] if row else (0, 0)
        lines.append(
            (
                name,
                f"{side['tokens_per_s']:,.0f} ({side['tokens_per_s_best']:,.0f})",
                f"{side['tokens_per_cpu_s']:,.0f}",
                f"{row['ratio']:.2f} ({low:.2f}–{high:.2f})" if row else "",
                verdict(row, "≥") if row else "",
            )
        )
    losses = table(
        ("tokens trained on", *sides),
        ((f"{mark['tokens']:,}", *(f"{mark['losses'][name]:.4f}" for name in sides)) for mark in found["curves"]),
    )
    return f"{_described(found)}\n\n{table(head, lines)}\n\nLoss per held-out answer token:\n\n{losses}"


def _described(found: dict[str, Any]) -> str:
    plan, data = found["plan"], found["data"]
    train = data["train"]
    return (
        f"{data['parameters'] / 1e6:.1f} M weights, float32, {plan['threads']} thread(s), windows of {plan['window']} "
        f"step(s) of about {plan['num_rows'] * plan['longest']:,} tokens, {plan['num_rounds']} of each side; "
        f"conversations of {train['mean_length']:.0f} tokens on average, of which {train['answers']:.0%} count"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run of a tiny model; figures mean little")
    parser.add_argument("--with-trl", action="store_true", help="compare with TRL, installed into .venv-trl if need be")
    parser.add_argument("--trl-venv", type=Path, help="compare with TRL in this environment")
    parser.add_argument("--threads", type=int, default=1, help="of each side; default: %(default)s")
    parser.add_argument("--rounds", type=int, help="windows of each side")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal was missed")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("settings", nargs="*", help="of our side, such as training.compile=true")
    chosen = parser.parse_args()
    if chosen.trl_venv is not None and not (chosen.trl_venv / "bin" / "python").exists():
        parser.error(f"--trl-venv {chosen.trl_venv}: no environment there; --with-trl makes one")
    return chosen


def main() -> int:
    chosen = parse_arguments()
    logging.getLogger("forge").setLevel(logging.ERROR)
    if chosen.serve is not None:
        serve(chosen.serve, Plan(**json.loads((chosen.serve / "plan.json").read_text())))
        return 0
    environment: Path | None = chosen.trl_venv
    if environment is None and chosen.with_trl:
        environment = ROOT / ".venv-trl"
        make_environment(environment)
    plan = replace(QUICK if chosen.quick else FULL, threads=chosen.threads, settings=tuple(chosen.settings))
    if chosen.rounds:
        plan = replace(plan, num_rounds=chosen.rounds)
    found = {"machine": machine(), **measure(plan, environment)}
    found["machine"]["load_after"] = os.getloadavg()[0]
    print(", ".join(f"{name} {value}" for name, value in found["machine"].items()) + f"\n\n{report(found)}")
    if environment is None:
        print("\nTRL: not measured: pass --with-trl")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    missed = [row["what"] for row in found["rows"] if not row["met"]]
    print("\n" + ("goals missed: " + "; ".join(missed) if missed else "every goal measured was met"))
    return 1 if chosen.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
