"""Tasks of reasoning-gym: with the package where it is installed, and what is said where it is not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from forge.config import EvaluationConfig, PromptsConfig, PromptSourceConfig
from forge.data.prompts import PromptDataset, PromptSplit, open_prompts, save_prompts
from forge.errors import ConfigError


def opened(task: str, *, num_prompts: int | None = 12, fraction: float = 0.0, **args: Any) -> PromptSplit:
    source = PromptSourceConfig(task=f"reasoning_gym/{task}", num_prompts=num_prompts, task_args=args, seed=3)
    return open_prompts(PromptsConfig(sources=(source,)), evaluation=EvaluationConfig(fraction=fraction), seed=0)


def questions(dataset: PromptDataset | None) -> list[str]:
    assert dataset is not None
    return [dataset.read(index).messages[-1]["content"] for index in range(len(dataset))]


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match="cannot be imported") as caught:
        opened("chain_sum")
    assert (caught.value.path, caught.value.value) == ("prompts.sources[0].task", "reasoning_gym/chain_sum")
    assert caught.value.repair == "pip install 'torchforge[reasoning-gym]'"


@pytest.fixture
def gym() -> Any:
    return pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")


@pytest.mark.parametrize("task", ["chain_sum", "kakurasu", "calendar_arithmetic", "needle_haystack", "word_ladder"])
def test_a_prompt_carries_what_its_scoring_needs(gym: Any, task: str) -> None:
    prompt = opened(task, num_prompts=3).train.read(2)
    crossed = json.loads(json.dumps(prompt.metadata))
    assert crossed == prompt.metadata
    entry = {"question": crossed["reasoning_gym"]["question"], "answer": prompt.answer, "metadata": crossed}
    score = gym.get_score_answer_fn(crossed["source_dataset"])
    assert score(prompt.answer, entry) == 1
    assert score("certainly not", entry) < 1
    assert prompt.id == f"reasoning_gym/{task}:3:{prompt.id.rpartition(':')[2]}"


def test_arguments_reach_the_task_and_the_prompts_are_reproducible(gym: Any, tmp_path: Path) -> None:
    sets = opened("chain_sum", fraction=0.25, min_terms=2, max_terms=2, max_digits=1)
    again = opened("chain_sum", fraction=0.25, min_terms=2, max_terms=2, max_digits=1)
    assert (len(sets.train), len(questions(sets.heldout))) == (9, 3)
    assert sets.train.digest == again.train.digest
    assert not set(questions(sets.train)) & set(questions(sets.heldout))
    assert {sets.train.read(index).metadata["num_terms"] for index in range(9)} == {2}
    assert len({*questions(sets.train), *questions(sets.heldout)}) == 12
    save_prompts(sets.train, tmp_path / "frozen.jsonl")
    config = PromptsConfig(sources=(PromptSourceConfig(path=str(tmp_path / "frozen.jsonl")),))
    frozen = open_prompts(config, evaluation=EvaluationConfig(), seed=0).train
    assert [frozen.read(index) for index in range(9)] == [sets.train.read(index) for index in range(9)]
    assert frozen.digest == sets.train.digest


def test_more_prompts_than_there_are_problems_is_refused(gym: Any) -> None:
    digit = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    few = len(opened("chain_sum", num_prompts=None, **digit).train)
    assert 100 < few < 1000
    with pytest.raises(ConfigError, match="fewer different problems") as caught:
        opened("chain_sum", num_prompts=few + 50, **digit)
    assert caught.value.path == "prompts.sources[0].num_prompts"
    assert str(caught.value.rule).startswith("about ")


@pytest.mark.parametrize(
    ("task", "args", "path", "repair"),
    [
        ("chain_sums", {}, "task", "did you mean `reasoning_gym/chain_sum`?"),
        ("chain_sum", {"min_term": 2}, "task_args.min_term", "did you mean `min_terms`?"),
        ("chain_sum", {"seed": 2}, "task_args.seed", "write one of these, or remove it"),
        ("chain_sum", {"min_terms": 0}, "task_args", "correct them"),
        ("chain_sum", {"min_terms": "x"}, "task_args", "correct them"),
        ("arc_agi", {}, "task", "take another task"),
    ],
)
def test_what_the_package_cannot_do_is_refused(
    gym: Any, task: str, args: dict[str, Any], path: str, repair: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(task, num_prompts=3, **args)
    assert caught.value.path == f"prompts.sources[0].{path}"
    assert caught.value.repair == repair
    assert caught.value.rule
