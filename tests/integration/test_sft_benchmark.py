"""The benchmark of supervised fine-tuning runs our side, and says what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "sft.py"


def run(*args: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FORGE_")}
    command = [sys.executable, str(BENCHMARK), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def benchmark() -> Any:
    """The benchmark as a module."""
    import importlib.util

    sys.path.insert(0, str(BENCHMARK.parent))
    try:
        spec = importlib.util.spec_from_file_location("sft_benchmark", BENCHMARK)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCHMARK.parent))
        sys.modules.pop("sft_benchmark", None)


def test_a_quick_run_of_our_side(tmp_path: Path, leaves_nothing: None) -> None:
    written = tmp_path / "found.json"
    printed = run("--quick", "--rounds", "2", "--json", str(written), "training.microbatch_tokens=512")
    assert "| ours | " in printed
    assert "TRL: not measured: pass --with-trl" in printed
    assert printed.endswith("every goal measured was met\n")

    found = json.loads(written.read_text())
    assert found["rows"] == []
    assert "training.microbatch_tokens=512" in found["settings"]
    ours = found["sides"]["ours"]
    plan = found["plan"]
    assert len(ours["windows"]) == plan["num_rounds"] == 2
    assert ours["last"]["steps"] == 3  # the windows, and one to warm up
    full = plan["num_rows"] * plan["longest"]
    for window in ours["windows"]:
        assert 0.8 * full < window["tokens"] <= full
        assert window["seconds"] > 0
        assert window["cpu_seconds"] > 0
    tokens, losses = zip(*ours["curve"], strict=True)
    assert tokens[0] == 0
    counted = sum(window["tokens"] for window in ours["windows"])
    assert counted + 0.8 * full < tokens[-1] <= counted + full  # the step before them too
    assert losses[-1] < losses[0] - 0.5
    assert [(mark["tokens"], mark["losses"]["ours"]) for mark in found["curves"]] == list(map(tuple, ours["curve"]))


def test_both_sides_are_given_the_same_tokens(benchmark: Any, tmp_path: Path) -> None:
    from forge.models.tokenizer import ChatTokenizer

    found = benchmark.prepare(tmp_path, benchmark.QUICK)
    tokenizer = ChatTokenizer.load(tmp_path / "model")
    chats = (tmp_path / "train.chat.jsonl").read_text().splitlines()
    records = (tmp_path / "train.ids.jsonl").read_text().splitlines()
    assert len(chats) == len(records) == found["train"]["records"]
    for chat, line in zip(chats, records, strict=True):
        record = json.loads(line)
        ids, is_answer = tokenizer.encode_chat(json.loads(chat)["messages"])
        assert record["input_ids"] == ids
        assert [label != -100 for label in record["labels"]] == is_answer
        assert benchmark.QUICK.shortest <= len(ids) <= benchmark.QUICK.longest
    assert found["train"]["tokens"] >= benchmark.QUICK.num_steps * benchmark.QUICK.tokens_per_step


def test_losses_are_compared_at_equal_tokens(benchmark: Any) -> None:
    def side(name: str, curve: list[tuple[int, float]]) -> Any:
        return benchmark.Side(name, None, Path(), curve=curve)

    ours = side("ours", [(0, 6.0), (100, 5.0), (210, 4.0)])
    peer = side("TRL, packed", [(0, 6.0), (50, 5.5), (150, 4.5), (200, 4.0)])
    found = benchmark.curves([ours, peer])
    assert [mark["tokens"] for mark in found] == [0, 100, 200]
    assert [mark["losses"]["TRL, packed"] for mark in found] == [6.0, 5.0, 4.0]
    assert found[-1]["losses"]["ours"] == pytest.approx(4.0 + 10 / 110)


def test_a_side_that_ends_early_shows_its_own_words(benchmark: Any, tmp_path: Path, leaves_nothing: None) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    side = benchmark.Side.start("a peer", command, tmp_path / "log", threads=1)
    with pytest.raises(RuntimeError, match=r"a peer: ended before its window\n(.|\n)*no such model"):
        side.read_until("window")
    side.stop()
