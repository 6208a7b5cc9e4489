"""A tiny model learns Kuhn poker from itself: python apps/selfplay/kuhn/main.py [--seed N] [key=value …]."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kuhn import Policy, averaged, expected, exploitability, read_policy, write_files

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

from moves import MoveReader  # noqa: E402
from warm_start import main  # noqa: E402


def report(model: Path, run: Path) -> str:
    """Return the exploitability of the model before, of each version that was saved, and of their average."""
    with MoveReader(model, checkpoints=run / "checkpoints") as reader:
        policies = {0: read_policy(reader.probabilities)}
        for step, checkpoint in reader.versions():
            reader.load(checkpoint)
            policies[step] = read_policy(reader.probabilities)
    curve = {step: exploitability(policy) for step, policy in policies.items()}
    (*_, last) = policies
    means = {"all": averaged(list(policies.values())), "second half": averaged(_second_half(policies))}
    found = {"curve": curve, "averaged": {name: exploitability(mean) for name, mean in means.items()}}
    moves = {f"{card} {'-'.join(played)}".strip(): dict(row) for (card, played), row in policies[last].items()}
    (run / "exploitability.json").write_text(json.dumps({**found, "last": moves}, indent=1), encoding="utf-8")
    illegal = max(1 - sum(row.values()) for row in policies[last].values())
    return "\n".join(
        [
            f"Exploitability: {curve[0]:.4f} before, {curve[last]:.4f} after {last} steps (uniform: 0.4583, best: 0)",
            *(f"  of the average of {name} versions: {value:.4f}" for name, value in found["averaged"].items()),
            f"  first player against itself: {expected(policies[last], policies[last]):+.4f} (best play: -0.0556)",
            f"  illegal answers: at most {illegal:.2%} in any situation",
            f"Curve: {run / 'exploitability.json'}",
        ]
    )


def _second_half(policies: dict[int, Policy]) -> list[Policy]:
    (*_, last) = policies
    return [policy for step, policy in policies.items() if step > last / 2]


if __name__ == "__main__":
    main(HERE, write_files, report=report)
