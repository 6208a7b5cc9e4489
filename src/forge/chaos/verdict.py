"""What faults cost a run, and whether a guarantee was broken."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from forge.chaos.experiment import Trial
from forge.observe.history import History, check_history

_TORN_LOGPROB: Final = 0.1
"""By so much the logprobs of sampler and trainer differ where a generator computed with other weights than it said."""


@dataclass(slots=True)
class Verdict:
    """What became of a disturbed run.

    Attributes:
        num_faults: how many were injected, by kind and role.
        num_skipped: how many were not, or were not over when the run ended.
        problems: what must not happen: broken guarantees, leaks, a run that did not end well.
        torn: tokens whose recorded weights are not those that sampled them.
        equal: whether the final weights are those of the undisturbed run; None where that cannot be expected.
        goodput: useful samples per second, as a fraction of the undisturbed run's; None without one.
        samples_per_s: of the two runs.
        history: what `forge history` says.
    """

    num_faults: Counter[str] = field(default_factory=Counter)
    num_skipped: int = 0
    problems: list[str] = field(default_factory=list)
    torn: int = 0
    equal: bool | None = None
    goodput: float | None = None
    samples_per_s: dict[str, float] = field(default_factory=dict)
    history: History | None = None

    @property
    def is_good(self) -> bool:
        """Whether the run kept every guarantee."""
        return not self.problems

    def plain(self) -> dict[str, Any]:
        """Return it as what JSON can hold."""
        return {
            "is_good": self.is_good,
            "num_faults": dict(self.num_faults),
            "num_skipped": self.num_skipped,
            "problems": self.problems,
            "torn_tokens": self.torn,
            "equal_weights": self.equal,
            "goodput": self.goodput,
            "samples_per_s": self.samples_per_s,
            "history": None if self.history is None else self.history.plain(),
        }


def judge(disturbed: Trial, undisturbed: Trial | None, *, is_deterministic: bool) -> Verdict:
    """Compare a disturbed run with its guarantees, and with an undisturbed run where there is one.

    `is_deterministic` says whether both must end with the same weights.
    """
    found = Verdict()
    for injection in disturbed.injections:
        fault = injection.fault
        if injection.done is None:
            found.num_skipped += 1
        else:
            found.num_faults[fault.kind if fault.kind == "clock" else f"{fault.kind} {fault.role}"] += 1
    if disturbed.status != 0:
        how = "did not end in time" if disturbed.status is None else f"ended with exit status {disturbed.status}"
        found.problems.append(f"the run {how}")
    leaks = {
        "processes": disturbed.leaked_processes,
        "segments of shared memory": disturbed.leaked_segments,
        "temporary files": disturbed.leaked_files,
    }
    found.problems += [
        f"left behind: {len(each)} {what}: {', '.join(each[:5])}" for what, each in leaks.items() if each
    ]
    found.history = check_history(disturbed.folder)
    found.problems += [f"{each.rule}: {each.where}: {each.what}" for each in found.history.violations]
    found.torn = sum(_torn_tokens(disturbed.folder))
    if found.torn:
        found.problems.append(f"{found.torn} tokens were sampled by other weights than recorded")
    found.samples_per_s["disturbed"] = samples_per_s(disturbed.folder)
    if undisturbed is not None:
        found.samples_per_s["undisturbed"] = samples_per_s(undisturbed.folder)
        found.goodput = found.samples_per_s["disturbed"] / found.samples_per_s["undisturbed"]
        if is_deterministic:
            found.equal = weights_digest(disturbed.folder) == weights_digest(undisturbed.folder)
            if not found.equal:
                found.problems.append("the final weights are not those of the undisturbed run")
    return found


def samples_per_s(folder: Path) -> float:
    """Return the trained samples per second between the first and the last step, repeated steps counted once.

    The times are those of the files of rollouts: the run's own clocks may have been moved.
    """
    files = dict(_step_files(folder))
    if len(files) < 2:
        return math.nan
    first, last = min(files), max(files)
    samples = sum(sum(1 for _ in path.open("rb")) for step, path in files.items() if step > first)
    return samples / (files[last].stat().st_mtime - files[first].stat().st_mtime)


def weights_digest(folder: Path) -> str | None:
    """Return the digest of a run's final weights; None if it has none."""
    files = sorted((folder / "checkpoints" / "hf").glob("*.safetensors"))
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def verdict_lines(found: Verdict) -> Iterator[str]:
    """Yield a verdict as text."""
    kinds = ", ".join(f"{count} x {name}" for name, count in sorted(found.num_faults.items())) or "none"
    skipped = f"; {found.num_skipped} not injected" if found.num_skipped else ""
    yield f"faults: {found.num_faults.total()} ({kinds}){skipped}"
    counts = Counter() if found.history is None else found.history.counts
    broken = Counter() if found.history is None else Counter(each.rule for each in found.history.violations)
    yield f"groups: {counts['groups']:,} committed, {broken['none_lost']} lost, {broken['once']} twice"
    yield f"torn reads: {found.torn} of {counts['tokens']:,} tokens"
    if found.equal is not None:
        yield f"final weights: {'equal to' if found.equal else 'NOT those of'} the undisturbed run, bit for bit"
    for name, rate in found.samples_per_s.items():
        yield f"samples/s, {name}: {rate:.2f}"
    if found.goodput is not None:
        yield f"goodput: {found.goodput:.1%}"
    yield from (f"PROBLEM: {each}" for each in found.problems)
    yield "verdict: every guarantee was kept" if found.is_good else f"verdict: {len(found.problems)} problem(s)"


def _torn_tokens(folder: Path) -> Iterator[int]:
    """Yield, for each episode, the tokens that the weights of their recorded version cannot have sampled: the trainer
    had these weights when it learned from them, and computes other logprobs."""
    for step, path in _step_files(folder):
        with path.open("rb") as file:
            for raw in file:
                line = json.loads(raw)
                sampled, trained = line["logprobs"], line["trainer_logprobs"]
                for version, start, end in line["versions"] if trained else ():
                    if version == step - 1:
                        pairs = zip(sampled[start:end], trained[start:end], strict=True)
                        yield sum(abs((a or 0.0) - (b or 0.0)) > _TORN_LOGPROB for a, b in pairs)


def _step_files(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in sorted((folder / "rollouts").glob("step_*.jsonl")):
        yield int(path.stem.removeprefix("step_")), path
