"""A tiny model learns tic-tac-toe from itself: python apps/selfplay/tictactoe/main.py [--seed N] [key=value …]."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tictactoe import both_sides, likeliest, perfect_player, random_player, read_policy, write_files

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

from moves import MoveReader  # noqa: E402
from warm_start import main  # noqa: E402

OPPONENTS = {"random": random_player, "perfect": perfect_player}


def report(model: Path, run: Path) -> str:
    """Return how the model does against fixed opponents, before and after."""
    found, lines = {}, ["Wins, draws and losses over both sides, computed exactly:"]
    for when, folder in (("before", model), ("after", run / "checkpoints" / "hf")):
        with MoveReader(folder) as reader:
            policy = read_policy(reader.probabilities)
        for how, played in (("sampled", policy), ("likeliest", likeliest(policy))):
            for name, opponent in OPPONENTS.items():
                rates = found[f"{when}, {how}, {name}"] = both_sides(played, opponent)
                won, drawn, lost = (f"{rate:.1%}" for rate in rates)
                lines.append(f"  {when}, {how} moves, {name} opponent: {won} won, {drawn} drawn, {lost} lost")
    (run / "outcomes.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    return "\n".join(lines)


if __name__ == "__main__":
    main(HERE, write_files, report=report)
