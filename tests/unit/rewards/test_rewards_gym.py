"""The reward `reasoning_gym`, with the real package where it is installed."""

from __future__ import annotations

import pytest

from forge.errors import DataError
from forge.rewards.gym import reasoning_gym
from forge.types import Task
from scored_texts import asked, said


@pytest.fixture
def sum_prompt() -> Task:
    """A prompt as the task `reasoning_gym/chain_sum` makes it."""
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset("chain_sum", seed=3, size=1, min_terms=2, max_terms=2)[0]
    details = {"args": {"min_terms": 2, "max_terms": 2}, "question": entry["question"]}
    return Task(
        "a", text=entry["question"], answer=entry["answer"], metadata={**entry["metadata"], "reasoning_gym": details}
    )


def test_its_own_verdict(sum_prompt: Task) -> None:
    answer = sum_prompt.answer or ""
    assert reasoning_gym(sum_prompt, said(f" {answer}\n")) == 1
    assert reasoning_gym(sum_prompt, said(f"<think>hm</think><answer>{answer}</answer>"), within="answer") == 1
    assert reasoning_gym(sum_prompt, said(f"so\n{answer}"), take="last_line") == 1
    assert 0 <= reasoning_gym(sum_prompt, said(f"9{answer}")) < 1
    assert reasoning_gym(sum_prompt, said(f"9{answer}"), partial=False) == 0
    assert reasoning_gym(sum_prompt, said(answer), within="answer") == 0
    assert reasoning_gym(sum_prompt, said(" ")) == 0


def test_a_task_that_cannot_be_made_again_is_named(sum_prompt: Task) -> None:
    details = {"args": {"min_terms": -1}, "question": "?"}
    broken = Task("a", answer="1", metadata={"source_dataset": "chain_sum", "reasoning_gym": details})
    with pytest.raises(DataError) as caught:
        reasoning_gym(broken, said("1"))
    assert caught.value.path == "reasoning_gym/chain_sum"
    assert caught.value.repair


@pytest.mark.parametrize("metadata", [{}, {"source_dataset": "chain_sum"}, {"reasoning_gym": {}}])
def test_prompts_of_other_tasks_are_named(metadata: dict[str, object]) -> None:
    with pytest.raises(DataError) as caught:
        reasoning_gym(asked("1", **metadata), said("1"))
    assert caught.value.path == "task:7"
    assert caught.value.value == sorted(metadata)
    assert "metadata must have the key" in (caught.value.rule or "")
    assert "reasoning_gym" in (caught.value.repair or "")
