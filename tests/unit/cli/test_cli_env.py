"""`forge env check`: tasks, oracles, text, JSON, exit codes and bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from forge.cli import main


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    records = [{"prompt": f"{n} + {n}?", "answer": str(2 * n), "prompt_id": f"sum {n}"} for n in range(12)]
    Path("tasks.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def checked(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert main(["env", "check", *words, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def status(report: dict[str, Any], name: str) -> str:
    (found,) = [each["status"] for each in report["checks"] if each["name"] == name]
    return str(found)


def test_an_environment_with_its_own_oracle_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", "tried_episodes:Guess", "--tasks", "tasks.jsonl", "--num-tasks", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tried_episodes:Guess, 3 tasks, each twice"
    assert [line.split()[0] for line in lines[2:6]] == ["agent", "nothing", "random", "oracle"]
    assert "PASS  determinism  the same seed gives the same messages, rewards and outcome" in lines
    assert "PASS  oracle       the oracle gets the highest reward on every task (1)" in lines
    assert lines[-1] == "All checks passed."


def test_tasks_come_from_a_file_json_or_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    found = checked(
        capsys, "tried_episodes:calculate", "--tasks", "tasks.jsonl", "--oracle", "tried_episodes:solutions"
    )
    assert (found["program"], found["num_tasks"], found["is_ok"], found["notes"]) == (
        "tried_episodes:calculate",
        8,
        True,
        [],
    )
    assert found["agents"]["oracle"]["reward_min"] == 1
    tasks = '[{"prompt": "1 + 1?", "answer": 2}, {"prompt": "2 + 2?", "answer": 4}]'
    found = checked(capsys, "tried_episodes:calculate", "--tasks", tasks)
    assert (found["num_tasks"], status(found, "oracle")) == (2, "skip")
    assert checked(capsys, "tried_episodes:calculate", "--tasks", '{"prompt": "1"}')["num_tasks"] == 1
    found = checked(capsys, "tried_episodes:calculate", "--num-tasks", "2")
    assert found["num_tasks"] == 2
    assert found["notes"][0].startswith("the tasks are made up")


def test_a_configuration_gives_program_arguments_limits_and_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    section = {"kind": "tried_episodes:Guess", "args": {"max_guesses": 4}, "limits": {"max_turns": 3}}
    prompts = {"sources": [{"path": "tasks.jsonl"}]}
    Path("run.yaml").write_text(json.dumps({"prompts": prompts, "episode": section}))
    found = checked(capsys, "--config", "run.yaml", "--num-tasks", "2")
    assert found["agents"]["nothing"]["outcomes"] == {"turn_limit": 2}
    found = checked(capsys, "--config", "run.yaml", "--num-tasks", "2", "--max-turns", "9")
    assert (found["agents"]["nothing"]["outcomes"], found["agents"]["nothing"]["turns_mean"]) == ({"truncated": 2}, 4)
    found = checked(capsys, "--config", "run.yaml", "--num-tasks", "2", "max_guesses=2")
    assert found["agents"]["nothing"]["turns_mean"] == 2


def test_failures_are_printed_with_traceback_and_exit_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", "tried_episodes:broken", "--num-tasks", "2"]) == 1
    text = capsys.readouterr().out
    assert "FAIL  runs         4 of 4 episodes raised or ended in a fault\n" in text
    assert "      KeyError: 'mine'\n" in text
    assert text.endswith("1 failed, 0 warned.\n")
    assert checked(capsys, "tried_episodes:unrewarded", code=1)["is_ok"] is False
    words = ["tried_episodes:Guess", "--tasks", "tasks.jsonl", "--max-reward", "2"]
    assert status(checked(capsys, *words, code=1), "oracle") == "fail"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["forge env check needs one program", "path:   MODULE:ATTRIBUTE"]),
        (["nowhere_at_all:solve"], ["episode.kind", "cannot be imported"]),
        (["tried_episodes:calculate", "--tasks", "nowhere.jsonl"], ["nowhere.jsonl", "repair:"]),
        (["tried_episodes:calculate", "--tasks", "[3]"], ["path:   --tasks", "value:  '[3]'", "repair: write them"]),
        (["tried_episodes:calculate", "--tasks", "["], ["path:   --tasks", "rule:   a JSON object or a list of them:"]),
        (["tried_episodes:calculate", "--tasks", '{"a": 1}'], ["path:   --tasks", "no prompt"]),
        (["tried_episodes:calculate", "--num-tasks", "0"], ["path:   --num-tasks", "value:  0", "rule:   a whole"]),
        (["tried_episodes:calculate", "--timeout", "0"], ["path:   --timeout", "rule:   a number of seconds above 0"]),
        (["tried_episodes:calculate", "--max-turns", "no"], ["episode.limits.max_turns", "'no'"]),
        (["tried_episodes:calculate", "--seed", "-1"], ["run.seed", "value:  -1"]),
        (["tried_episodes:calculate", "--oracle", "solutions"], ["path:   --oracle", "repair: write it like"]),
        (["tried_episodes:calculate", "--oracle", "tried_episodes:solution"], ["path:   --oracle", "solutions"]),
        (["tried_episodes:calculate", "--oracle", "sys:path"], ["the oracle cannot be used"]),
        (["tried_episodes:calculate", "--oracle", "os:getpid"], ["the oracle cannot be called", "rule:   a function"]),
        (["tried_episodes:calculate", "bonas=1"], ["episode.args", "bonas"]),
    ],
)
def test_bad_input_is_named(words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", *words]) == 2
    captured = capsys.readouterr()
    assert all(part in captured.err for part in parts), captured.err
    assert "Traceback" not in captured.err
