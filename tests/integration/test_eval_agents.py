"""`forge eval` of a program with several agents: the evaluated model, and an endpoint for one of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from answering_endpoint import answering
from forge.cli import main
from local_services import services_here

SUPPORT = Path(__file__).parents[1] / "support"
WORDS = ["--tasks", "arithmetic", "--num-tasks", "2", "--episode", "own_games:review", "--max-tokens", "8"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with services_here():
        yield


def test_an_endpoint_answers_for_one_agent(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(lambda body: "odd") as server:
        agents = f"episode.agents={{critic: {{endpoint: {{url: '{server.url}', model: m}}}}}}"
        assert main(["eval", "model.preset=tiny", *WORDS, agents, "--output", "out", "--json"]) == 0
    capsys.readouterr()
    lines = [json.loads(line) for line in Path("out", "samples.jsonl").read_text().split("\n")[:-1]]
    assert len(server.requests) == len(lines) == 2
    for line in lines:
        assert [(turn["agent"], turn["is_trained"]) for turn in line["turns"]] == [
            ("solver", True),
            ("solver", True),
            ("critic", False),
        ]
        assert line["turns"][2]["text"] == "odd"
        assert line["reward"] == line["agents"]["solver"]["reward"]


@pytest.mark.parametrize(
    ("agents", "message"),
    [
        ("{critic: {model: x}}", "starts no generators for single agents"),
        ("{critic: {version: 0}}", "has no versions of a run"),
        ("{judge: {}}", "no such agent"),
    ],
)
def test_agents_that_are_refused(agents: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "model.preset=tiny", *WORDS, f"episode.agents={agents}"]) == 2
    assert message in capsys.readouterr().err
