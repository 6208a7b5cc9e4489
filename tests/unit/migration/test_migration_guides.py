"""The guides for those who come from another project: their examples are what the command prints, and their rewards
agree."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge.cli import main
from forge.config import GRPOConfig, PreferenceConfig, load
from forge.config.fields import field_at
from forge.types import Completion, Task

GUIDES = Path(__file__).resolve().parents[3] / "docs" / "guides"


@dataclass(frozen=True)
class Example:
    """What a page converts: the file, the words of its command, and what fills in the rest on a CPU."""

    file: str
    options: tuple[str, ...]
    filled: tuple[str, ...]


HERE = (
    "model.path=tiny",
    "generator.engine=native",
    "generator.precision=null",
    "distributed.shard=1",
    "training.compile=false",
)
PROMPTS = "prompts.sources=[{path: data.jsonl}]"
EXAMPLES = {
    "trl": Example(
        "grpo.yaml", ("--num-processes", "1"), (*HERE, "prompts.sources=[{path: data.jsonl}]", "metrics.wandb=false")
    ),
    "verl": Example(
        "run_gsm8k.sh",
        (),
        (*HERE, PROMPTS, "evaluation.sources=[]", "generator.tensor_parallel=1", "metrics.wandb=false"),
    ),
    "titanrl": Example("config_registry.py", (), (*HERE, PROMPTS, "~model.preset", "metrics.wandb=false")),
}


def page(project: str) -> str:
    return (GUIDES / f"from_{project}.md").read_text(encoding="utf-8")


def blocks(project: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page(project), re.MULTILINE | re.DOTALL)


def named(project: str, start: str) -> str:
    """Return the block whose first line is a comment that starts like this, without that line."""
    (found,) = re.findall(rf"^```\w+\n# {re.escape(start)}\n(.*?)^```$", page(project), re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.fixture(params=EXAMPLES)
def project(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each page, in a working directory that holds the file that it converts."""
    name = str(request.param)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / EXAMPLES[name].file).write_text(named(name, EXAMPLES[name].file), encoding="utf-8")
    return name


def converted(project: str) -> None:
    example = EXAMPLES[project]
    assert main(["import", project, example.file, "--output", "mine.yaml", *example.options]) == 0


def test_the_page_shows_what_the_command_prints(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    converted(project)
    printed = capsys.readouterr().out.partition("\nmine.yaml is written.")[0]
    assert blocks(project, "text")[0].splitlines() == printed.splitlines()
    shown = next(block for block in blocks(project, "yaml") if block.startswith("# From "))
    assert shown == Path("mine.yaml").read_text(encoding="utf-8")


def test_the_example_is_a_run_once_it_is_filled_in(
    project: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from forge.models.tiny import make_tiny

    make_tiny(tmp_path / "tiny", max_seq_len=8192)
    (tmp_path / "my_rewards.py").write_text(named(project, "my_rewards.py"), encoding="utf-8")
    record = {"prompt": "What is 1 + 1?", "answer": "2", "solution": "2"}
    (tmp_path / "data.jsonl").write_text((json.dumps(record) + "\n") * 2, encoding="utf-8")
    sys.modules.pop("my_rewards", None)
    converted(project)
    assert main(["config", "check", "mine.yaml", *EXAMPLES[project].filled]) == 0, capsys.readouterr().err
    sys.modules.pop("my_rewards", None)


def test_every_key_of_ours_that_a_page_names_exists(project: str) -> None:
    rows = re.findall(r"^\| .* \| (.*) \|$", page(project), re.MULTILINE)
    words = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?::[^`]*)?`", "\n".join(rows))
    schemas = (GRPOConfig, PreferenceConfig)
    assert words
    known = ("my_rewards.py", "completion.finish_reason", "prompt.answer", "prompt.metadata")
    wrong = [
        word for word in words if word not in known and not any(field_at(each, word.split(".")) for each in schemas)
    ]
    assert wrong == []


def test_the_configuration_of_a_page_is_valid_as_it_stands(project: str) -> None:
    shown = next(block for block in blocks(project, "yaml") if block.startswith("# From "))
    Path("shown.yaml").write_text(shown, encoding="utf-8")
    assert load(GRPOConfig, files=["shown.yaml"]).algorithm.kl.place == "loss"


# ---- Rewards, side by side -------------------------------------------------------------------------------------------

TEXTS = ["", "so it is #### 42", "#### 1,234.\n#### 42", r"thus \boxed{42}", "word " * 120, "#### nothing"]


def definitions(source: str, **names: Any) -> dict[str, Any]:
    found: dict[str, Any] = dict(names)
    exec(compile(source, "page", "exec", dont_inherit=True), found)
    return found


def ours(function: Any, text: str) -> float:
    task = Task("1", text="?", answer="42", metadata={"reward_model": {"ground_truth": "42"}})
    completion = Completion.__new__(Completion)
    object.__setattr__(completion, "text", text)
    return float(function(task, completion))


@pytest.mark.parametrize("text", TEXTS)
def test_the_reward_of_trl_and_ours_agree(text: str) -> None:
    theirs = definitions(named("trl", "my_rewards.py, TRL"))["brief"]
    (score,) = theirs(completions=[[{"role": "assistant", "content": text}]])
    assert ours(definitions(named("trl", "my_rewards.py"))["brief"], text) == score


@pytest.mark.parametrize("text", TEXTS)
def test_the_reward_of_verl_and_ours_agree(text: str) -> None:
    theirs = definitions(named("verl", "rewards/gsm8k.py, verl"))["compute_score"]
    score = theirs("openai/gsm8k", text, "42")
    assert ours(definitions(named("verl", "my_rewards.py"))["compute_score"], text) == score


@pytest.mark.parametrize("text", TEXTS)
def test_the_reward_of_titanrl_and_ours_agree(text: str) -> None:
    source = named("titanrl", "my_math/rollouter.py, TitanRL")
    base = type("RewardFn", (), {"Config": type("Config", (), {})})
    theirs = definitions(source, RewardFn=base, dataclass=lambda **_: lambda made: made, re=re)["RewardBoxed"]()
    rollout = SimpleNamespace(turns=[SimpleNamespace(completion_message={"content": text})])
    score = asyncio.run(theirs(rollout, SimpleNamespace(answer="42")))
    assert ours(definitions(named("titanrl", "my_rewards.py"))["reward_boxed"], text) == score
