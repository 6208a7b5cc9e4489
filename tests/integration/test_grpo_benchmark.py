"""The benchmark of reinforcement learning runs our side, gives all sides the same work, and says what it found."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
AHEAD, ONE = "ours, asynchronous, staleness 1", "ours, synchronous, one process"


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """The benchmark and its parts, as the program sees them."""
    import importlib

    paths = [str(BENCHMARKS), str(BENCHMARKS / "harness")]
    names = ("grpo", "harness.grpo_plan", "harness.grpo_ours", "harness.grpo_report", "harness.plot", "trl_grpo")
    before = set(sys.modules)
    environment = dict(os.environ)
    sys.path[:0] = paths
    try:
        yield {name.rpartition(".")[2]: importlib.import_module(name) for name in names}
    finally:
        for path in paths:
            sys.path.remove(path)
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ("grpo", "grpo_plan", "harness", "trl_grpo"):
                del sys.modules[name]
        os.environ.clear()
        os.environ.update(environment)


# ---- A run of our own side


def test_a_quick_run_of_an_asynchronous_side(tmp_path: Path, leaves_nothing: None) -> None:
    written = tmp_path / "found.json"
    command = [sys.executable, str(BENCHMARKS / "grpo.py"), "--quick", "--rounds", "2", "--only", "speed"]
    command += [
        "--json",
        str(written),
        "--plots",
        str(tmp_path / "plots"),
        "--sides",
        AHEAD,
        "--set",
        "training.microbatch_tokens=512",
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FORGE_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"| {AHEAD} | " in done.stdout
    assert "TRL: not measured: pass --with-trl" in done.stdout

    drawn = ElementTree.parse(tmp_path / "plots" / "grpo_samples.svg")
    found = json.loads(written.read_text())
    rate = found["sides"][AHEAD]["samples_per_s"]
    assert f"{rate:.3g} /s" in [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    plan, side = found["plan"], found["sides"][AHEAD]
    assert "training.microbatch_tokens=512" in found["settings"]
    assert len(side["windows"]) == plan["num_rounds"] == 2
    for window in side["windows"]:
        assert window["samples"] == plan["window"] * plan["num_prompts"] * plan["group_size"]
        assert window["tokens"] == window["samples"] * plan["max_tokens"]
        assert window["seconds"] > 0
        assert window["cpu_seconds"] > 0
    assert side["windows"][-1]["step"] == plan["window"] * (plan["num_rounds"] + plan["num_warm"])
    assert 0 < side["last"]["times"]["training"] < side["last"]["times"]["step"]


def test_nothing_is_generated_between_windows(modules: dict[str, ModuleType]) -> None:
    class Policy:
        def __init__(self) -> None:
            self.begun: list[str] = []
            self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()

        async def generate(self, prompt: str) -> str:
            self.begun.append(prompt)
            self.has_begun.set()
            await self.may_end.wait()
            return prompt

        async def update_weights(self, version: int) -> int:
            return version

    async def sleep() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def body() -> None:
        policy = Policy()
        gate = modules["grpo_ours"].Gate(policy)
        gate.open()
        first = asyncio.create_task(gate.generate("a"))
        await policy.has_begun.wait()
        assert await gate.update_weights(2) == 2
        closing = asyncio.create_task(gate.shut(2))
        later = asyncio.create_task(gate.generate("b"))
        await sleep()
        assert policy.begun == ["a"]
        assert not closing.done()  # "a" is under way
        policy.may_end.set()
        await first
        await closing
        closing = asyncio.create_task(gate.shut(3))
        await sleep()
        assert not closing.done()  # version 3 is not served
        await gate.update_weights(3)
        await closing
        assert policy.begun == ["a"]
        gate.open()
        assert await later == "b"

    asyncio.run(asyncio.wait_for(body(), 600))


def test_steps_that_hold_a_wait_are_left_out_of_the_split(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    plan = modules["grpo_plan"].Plan({}, window=3, num_warm=1)
    steps = {1: 9.0, 2: 9.0, 3: 9.0, 4: 9.0, 5: 1.0, 6: 2.0, 7: 9.0, 8: 3.0}
    lines = [
        {"step": step, "time": 0.0, "values": {"time/step": seconds, "time/training": seconds / 2}}
        for step, seconds in steps.items()
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert modules["grpo_ours"].time_split(path, plan) == {"step": 2.0, "training": 1.0}


# ---- All sides are asked for the same


def test_both_sides_get_the_same_numbers(modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: Any) -> None:
    from forge.config import GRPOConfig, load

    plan = modules["grpo"].FULL
    config = load(GRPOConfig, overrides=modules["grpo_ours"].settings_of(plan, tmp_path))
    command = modules["grpo"].trl_command(tmp_path, plan, tmp_path, "TRL, 2 threads")
    monkeypatch.setattr(sys, "argv", command[1:])
    asked = modules["trl_grpo"].parse_arguments()
    assert asked.threads == 2
    assert asked.fixed_length
    assert config.generator.sampling.ignore_eos
    assert not asked.evaluate
    assert asked.prompts_per_step == config.rollout.batch_groups == 8
    assert asked.group_size == config.rollout.group_size == 8
    assert asked.max_tokens == config.generator.sampling.max_tokens == 32
    assert asked.learning_rate == config.training.learning_rate
    assert config.algorithm.kl.coefficient == 0
    assert config.algorithm.loss.average == "token_mean"
    assert config.generator.sampling.temperature == 1.0
    assert str(asked.prompts) == config.prompts.sources[0].path
    assert str(asked.model) == config.model.path


def test_both_sides_read_the_same_tokens(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from forge.models.tokenizer import ChatTokenizer

    plan = modules["grpo"].QUICK
    found = modules["grpo_plan"].prepare(tmp_path, plan)
    assert (found["num_train"], found["num_heldout"]) == (900, 192)
    question = modules["grpo_plan"].read_questions(tmp_path / "task" / "heldout.jsonl")[0]["prompt"]
    messages = modules["trl_grpo"].as_messages(question)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ours = list(ChatTokenizer.load(tmp_path / "model").encode_prompt(messages))
    assert theirs(text)["input_ids"] == ours
    assert len(ours) + 32 <= plan.max_seq_len


@pytest.mark.parametrize(
    ("text", "answer", "earned"),
    [
        ("The answer is 7.", "7", 1.0),
        ("The answer is 7. The answer is 3.", "3", 0.0),
        ("The answer is 17.", "7", 0.0),
        ("7", "7", 0.0),
        ("", "7", 0.0),
    ],
)
def test_both_sides_earn_the_same(modules: dict[str, ModuleType], text: str, answer: str, earned: float) -> None:
    from types import SimpleNamespace

    assert modules["grpo_plan"].reward(SimpleNamespace(answer=answer), SimpleNamespace(text=text)) == earned
    said = [[{"role": "assistant", "content": text}]]
    right = modules["trl_grpo"].make_reward(modules["trl_grpo"].ANSWERS["sentence"])
    assert right(completions=said, answer=[answer], prompts=[]) == [earned]


# ---- What is made of it


def windows(*rates: float) -> list[dict[str, Any]]:
    return [{"samples": 10.0 * rate, "seconds": 10.0, "cpu_seconds": 5.0, "tokens": 320.0 * rate} for rate in rates]


def test_ratios_are_of_neighbours_and_against_the_better_peer(modules: dict[str, ModuleType]) -> None:
    apart = "ours, synchronous, apart"
    taken = {
        ONE: windows(60, 30, 90),
        apart: windows(40, 20, 60),
        AHEAD: windows(80, 40, 60),
        "TRL, 1 thread": windows(20, 10, 30),
        "TRL, 2 threads": windows(10, 5, 16),
    }
    rows = modules["grpo_report"].speed_rows(taken, ours=[ONE, apart, AHEAD], peers=["TRL, 1 thread", "TRL, 2 threads"])
    found = {row["what"]: row for row in rows}
    assert found[f"{ONE} / TRL, 1 thread"]["ratio"] == 3.0
    assert found[f"{ONE} / TRL, 1 thread"]["met"] is True
    assert found[f"{apart} / TRL, 1 thread"]["goal"] is None  # only the better of ours is held to it
    assert found[f"{AHEAD} / {apart}"]["ratio"] == 2.0
    assert found[f"{AHEAD} / {apart}"]["ratio_quartiles"] == [1.5, 2.0]
    assert not any("2 threads" in what for what in found)
    sync = modules["grpo_report"].sync_row(ONE, {"syncing": 0.06, "step": 1.0})
    assert (sync["met"], sync["ratio"]) == (False, 0.06)


def test_time_to_an_accuracy_counts_windows_only(modules: dict[str, ModuleType]) -> None:
    report = modules["grpo_report"]

    def side(seconds: float, *accuracies: float) -> list[tuple[float, int, float]]:
        return report.curve([{"seconds": seconds, "samples": 64, "accuracy": each} for each in accuracies])

    ours, peer = side(2.0, 0.25, 0.5, 0.9), side(5.0, 0.25, 0.3, 0.6, 0.86, 0.9)
    assert ours[0] == (0.0, 0, 0.25)  # what comes before the first step is not counted
    assert report.reached(ours, 0.85) == (4.0, 128)

    def row(mine: Any, its: Any) -> dict[str, Any]:
        return report.time_row({ONE: mine, "TRL": its}, ours=ONE, peer="TRL", goal=0.85)

    good, late = row([ours], [peer]), row([peer], [ours])
    assert good["ratio"] == pytest.approx(4.0 / 15.0)
    assert good["met"] is True
    assert late["met"] is False
    failed = side(2.0, 0.25, 0.3)
    never = row([failed], [peer])
    assert (never["ratio"], never["met"]) == (None, False)
    assert row([ours, failed, ours], [peer] * 3)["ratio"] == pytest.approx(4.0 / 15.0)
    assert row([ours, failed], [peer] * 2)["ratio"] is None
    assert row([ours], [failed])["ratio"] == 2.0  # with all the time that the peer had
    assert [each["goal"] for each in report.only_the_best([late, good, never])] == [None, 0.4, None]
    table = report._curves_table({ONE: [ours, failed]}, 0.85)
    assert "| ours, synchronous, one process | 25.0% | 4.0 s, 128 samples; not reached |" in table


def test_curves_are_drawn_to_scale_with_their_goal(modules: dict[str, ModuleType]) -> None:
    plot = modules["plot"]
    lines = {"ours": [[(0.0, 0.1), (50.0, 0.9)]], "a peer <1>": [[(0.0, 0.1), (100.0, 0.4)]]}
    drawn = ElementTree.fromstring(plot.curves("Held-out", lines, across="seconds", goal=0.7))
    paths = [
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        for line in drawn.iter("{http://www.w3.org/2000/svg}polyline")
    ]
    (start, half), (_, end) = paths
    assert half[0] - start[0] == pytest.approx((end[0] - start[0]) / 2)
    assert start[1] - half[1] == pytest.approx((0.9 - 0.1) / (0.4 - 0.1) * (start[1] - end[1]), rel=1e-2)
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Held-out", "ours", "a peer <1>", "100", "100%"} <= set(texts)
