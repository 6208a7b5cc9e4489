"""An evaluation that is killed continues where it was: nothing is lost, and nothing is sampled twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from answering_endpoint import answering, digits_of
from leftovers import is_running, processes_of
from signals import hear_ctrl_c

LIMIT_S = 600
NUM_TASKS, NUM_SAMPLES, NUM_BEFORE = 4, 3, 5


def test_ctrl_c_leaves_figures_of_what_is_done(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"prompt": f"Question {number}?"}) + "\n" for number in range(4)))
    reached, released = threading.Event(), threading.Event()

    def answer(body: Mapping[str, Any]) -> str:
        if body["messages"][-1]["content"] == "Question 2?":
            reached.set()
            assert released.wait(LIMIT_S)
        return "Fine."

    with answering(answer) as server:
        words = ["--endpoint", server.url, "--tasks", str(tasks), "--episode", "own_episodes:dialogue", "num_turns=1"]
        command = [sys.executable, "-m", "forge.cli", "eval", *words, "prompts.shuffle=false", "--max-concurrent", "1"]
        support = str(Path(__file__).parents[1] / "support")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([support, os.environ.get("PYTHONPATH", "")])}
        with subprocess.Popen(
            command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=hear_ctrl_c
        ) as process:
            assert reached.wait(LIMIT_S)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=LIMIT_S)
        released.set()
    assert process.returncode == 130, errors
    assert "stopped; the same command continues runs/eval" in errors
    assert "Traceback" not in errors
    results = json.loads((tmp_path / "runs/eval/results.json").read_text())
    assert (results["figures"]["num_tasks"], results["figures"]["num_missing"]) == (2, 2)
    assert results["is_complete"] is False


def test_a_killed_evaluation_continues(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    records = [{"prompt": f"Question {number}?", "answer": str(number % 3)} for number in range(NUM_TASKS)]
    tasks.write_text("".join(json.dumps(record) + "\n" for record in records))
    reached, released = threading.Event(), threading.Event()
    num_asked = 0

    def answer(body: Mapping[str, Any]) -> str:
        nonlocal num_asked
        num_asked += 1  # one request at a time
        if num_asked == NUM_BEFORE + 1:
            reached.set()
            assert released.wait(LIMIT_S)
        return f"I say {(digits_of(body['messages'][-1]['content']) + body['seed']) % 3}"

    with answering(answer) as server:
        words = ["--endpoint", server.url, "--tasks", str(tasks), "--reward", "number", "--max-concurrent", "1"]
        command = [sys.executable, "-m", "forge.cli", "eval", *words, "-n", str(NUM_SAMPLES), "--json", "--output"]
        with subprocess.Popen([*command, "one"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
            assert reached.wait(LIMIT_S)
            children = processes_of(process.pid)
            process.kill()
        released.set()
        _, alive = psutil.wait_procs([child for child in children if is_running(child)], timeout=LIMIT_S)
        assert alive == []

        path = tmp_path / "one" / "samples.jsonl"
        before = path.read_bytes()
        assert before.count(b"\n") == NUM_BEFORE
        assert not (tmp_path / "one" / "results.json").exists()
        path.write_bytes(before + before[:50])  # as if it had been killed while it wrote

        done = subprocess.run([*command, "one"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        assert num_asked == NUM_TASKS * NUM_SAMPLES + 1  # only what was being answered was asked twice
        whole = subprocess.run([*command, "other"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
        assert whole.returncode == 0, whole.stderr

    assert path.read_bytes().startswith(before)
    lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    assert len({(line["group"], line["index"]) for line in lines}) == len(lines) == NUM_TASKS * NUM_SAMPLES
    assert json.loads(done.stdout)["figures"] == json.loads(whole.stdout)["figures"]
