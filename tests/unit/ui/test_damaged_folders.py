"""Files of a run that are damaged, or written by somebody else: the page shows less, and nothing fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge.ui.config_view import view_config
from forge.ui.decimation import Span, encode_table
from forge.ui.live_run import LiveRun
from forge.ui.run_summary import SummaryReader
from forge.ui.strict_json import to_json
from fuzzing import inputs
from run_folders import make_grpo_run

NUM_INPUTS = 150
EVENT = json.dumps({"time": "2026-01-01T00:00:00+00:00", "event": "crash", "status": -9, "action": "stop", "step": 3})
LEAGUE = {"member": "a", "rating": 1.0, "games": 1, "wins": 1, "draws": 0, "losses": 0, "win_rate": 1.0}
VALID = {
    "supervisor.jsonl": f"{EVENT}\n".encode(),
    "results.json": json.dumps({"time": 1.0, "figures": {"reward": {"value": 0.5}}}).encode(),
    "league.json": json.dumps({"step": 1, "rating": 1.0, "members": [LEAGUE]}).encode(),
    "runtime_changes.jsonl": b'{"time": "2026-01-01T00:00:00", "step": 1, "key": "a.b", "before": 1, "after": 2}\n',
}


def strict(text: str) -> object:
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "ledger.jsonl", *VALID])
def test_damaged_files_are_read_as_far_as_they_go(tmp_path: Path, name: str) -> None:
    folder = make_grpo_run(tmp_path / "run", num_steps=2)
    path = folder / name
    valid = path.read_bytes() if path.exists() else VALID[name]
    for data in inputs(41, [valid], NUM_INPUTS):
        path.write_bytes(data)
        summary = SummaryReader(folder, "run").read()
        strict(to_json(summary.plain()))
        run = LiveRun(folder)
        while run.advance():
            pass
        strict(to_json(run.describe(summary)))
        strict(encode_table(run.rows(), Span(points=2)))
        if name == "config.yaml":
            strict(to_json(view_config(folder, None)))
