"""The benchmark of episodes with tools gives both sides the same work, runs our side, and reports what it found."""

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

import pytest

from forge.envs.agent import Agent
from forge.runtime.forking import SCOPE
from forge.types import Task
from scripted_policy import ScriptedPolicy, state_of

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
OURS, TRL = "ours, 1 thread", "TRL, 1 thread"


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """The benchmark and its parts, as the program sees them."""
    import importlib

    paths = [str(BENCHMARKS), str(BENCHMARKS / "harness")]
    names = ("grpo_tools", "harness.tools_plan", "harness.tools_ours", "trl_tools")
    before, path = set(sys.modules), list(sys.path)
    environment = dict(os.environ)
    sys.path[:0] = paths
    try:
        yield {name.rpartition(".")[2]: importlib.import_module(name) for name in names}
    finally:
        sys.path[:] = path
        ours = ("grpo_plan", "grpo_tools", "harness", "trl_grpo", "trl_tools")
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ours:
                del sys.modules[name]
        os.environ.clear()
        os.environ.update(environment)


@pytest.fixture
def folder(modules: dict[str, ModuleType], tmp_path: Path) -> Path:
    """A tiny model with the chat template of the benchmark."""
    from forge.models.tiny import make_tiny

    make_tiny(tmp_path / "model", num_layers=1)
    (tmp_path / "model" / "chat_template.jinja").write_text(modules["tools_plan"].CHAT_TEMPLATE)
    return tmp_path


def test_a_quick_run_of_our_side(tmp_path: Path, leaves_nothing: None) -> None:
    written = tmp_path / "found.json"
    command = [sys.executable, str(BENCHMARKS / "grpo_tools.py"), "--quick", "--rounds", "1", "--sides", OURS]
    environment = {name: value for name, value in os.environ.items() if name == SCOPE or not name.startswith("FORGE_")}
    done = subprocess.run(
        [*command, "--json", str(written)], capture_output=True, text=True, timeout=600, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"| {OURS} | " in done.stdout
    assert "TRL: not measured: pass --with-trl" in done.stdout
    found = json.loads(written.read_text())
    plan, side = found["plan"], found["sides"][OURS]
    (window,) = side["windows"]
    assert window["samples"] == plan["window"] * plan["num_prompts"] * plan["group_size"]
    assert 0 < window["tokens"] <= window["samples"] * plan["max_tokens"] * 4
    assert side["last"]["episodes"]["num_turns"] >= 1


def test_both_sides_get_the_same_numbers(modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: Any) -> None:
    from forge.config import GRPOConfig, load

    plan = modules["grpo_tools"].FULL
    config = load(GRPOConfig, overrides=modules["tools_ours"].settings_of(plan, tmp_path))
    monkeypatch.setattr(sys, "argv", modules["grpo_tools"].trl_command(tmp_path, plan, tmp_path, "TRL, 2 threads")[1:])
    asked = modules["trl_tools"].parse_arguments()
    assert asked.threads == 2
    assert asked.prompts_per_step == config.rollout.batch_groups
    assert asked.group_size == config.rollout.group_size
    assert asked.max_tokens == config.generator.sampling.max_tokens
    assert not config.generator.sampling.ignore_eos
    assert asked.learning_rate == config.training.learning_rate
    assert config.algorithm.kl.coefficient == 0
    assert asked.temperature == config.generator.sampling.temperature == 0.5
    assert str(asked.prompts) == config.prompts.sources[0].path
    assert str(asked.model) == config.model.path


def test_an_episode_as_shown_has_the_tokens_of_the_whole_conversation(
    modules: dict[str, ModuleType], folder: Path
) -> None:
    from forge.models.tokenizer import ChatTokenizer

    plan, codec = modules["tools_plan"], ChatTokenizer.load(folder / "model")
    messages = plan.shown((3, 7, 1))["messages"]
    said = [message["content"] + "<|im_end|>" for message in messages if message["role"] == "assistant"]
    policy = ScriptedPolicy(codec, said)
    task = Task("task:0", messages=tuple(plan.question((3, 7, 1))), answer=str(plan.number_in(1)))
    state = state_of(policy, task=task)
    assert asyncio.run(modules["tools_ours"].look.function(task, Agent(state))) == 1.0
    assert state.counts.num_turns == plan.MAX_TURNS
    assert state.counts.num_tool_calls == plan.NUM_CALLS
    assert not state.counts.tool_errors
    assert not state.counts.prefix_breaks
    whole = codec.encode_rendered(codec.render_prompt(messages, add_generation_prompt=False).rstrip("\n"))
    last = state.turns[-1]
    assert list(policy.prompts[-1]) + list(last.token_ids) == whole
    full = modules["grpo_tools"].FULL
    assert max(len(turn.token_ids) for turn in state.turns) <= full.max_tokens
    assert len(whole) - len(policy.prompts[0]) <= full.max_completion_tokens
    assert len(whole) <= full.max_seq_len


def test_the_template_renders_calls_as_they_are_sampled(modules: dict[str, ModuleType], folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    call = {"type": "function", "function": {"name": "open_box", "arguments": {"box": 3}}}
    asked = {"role": "user", "content": "Open 3."}
    structured = [asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
    sampled = [asked, modules["tools_plan"].shown((3,))["messages"][1]]
    texts = [tokenizer.apply_chat_template(each, tokenize=False) for each in (structured, sampled)]
    assert texts[0] == texts[1]
    longer = tokenizer.apply_chat_template([*structured, {"role": "tool", "content": "32"}], tokenize=False)
    assert longer.startswith(texts[0])


def test_turns_of_trl_are_counted_from_its_masks(modules: dict[str, ModuleType]) -> None:
    import torch

    counted = modules["trl_tools"].Counted(window=1)
    inputs = {
        "completion_ids": torch.zeros(2, 6),
        "prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "completion_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]]),
        "tool_mask": torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1]]),
    }
    counted.count(inputs)
    assert counted.means() == {"num_turns": 1.5, "num_sampled": 3.0, "num_observed": 3.5}


def test_rewards_are_of_the_last_answer(modules: dict[str, ModuleType]) -> None:
    said = [{"role": "assistant", "content": "", "tool_calls": []}, {"role": "tool", "content": "32"}]
    right = {"role": "assistant", "content": "It is 32."}
    assert modules["trl_tools"].right(completions=[[*said, right], said], answer=["32", "32"]) == [1.0, 0.0]
    assert modules["tools_plan"].is_right("It is 32.", "33") == 0.0


def test_ratios_and_the_agreement_of_sides(modules: dict[str, ModuleType]) -> None:
    def windows(*rates: float) -> list[dict[str, Any]]:
        return [{"samples": 10 * rate, "seconds": 10.0, "cpu_seconds": 5.0, "tokens": 0} for rate in rates]

    taken = {OURS: windows(8, 4), "ours, 2 threads": windows(6, 3), TRL: windows(2, 1), "TRL, 2 threads": windows(1, 1)}
    rows = {row["what"]: row for row in modules["grpo_tools"].ratio_rows(taken)}
    assert (rows[f"{OURS} / {TRL}"]["ratio"], rows[f"{OURS} / {TRL}"]["met"]) == (4.0, True)
    assert rows["ours, 2 threads / TRL, 2 threads"]["goal"] is None
    assert rows[f"{OURS} / {TRL}, per CPU second"]["ratio"] == 4.0
    had = {"num_turns": 4.0, "num_sampled": 188.0, "num_observed": 72.0}
    sides = {OURS: {"last": {"episodes": had}}, TRL: {"last": {"episodes": {**had, "num_turns": 3.0}}}}
    met = [row["met"] for row in modules["grpo_tools"].agreement_rows(sides)]
    assert met == [True, True, False]
