"""What a plan notes beyond memory: on one GPU, generating while training gains nothing."""

from __future__ import annotations

from typing import Any

import pytest

from forge.config import GRPOConfig
from forge.memory import Card, parse_size
from forge.memory.resolved import resolve_run

CARD = Card(parse_size("80GB"), 2)
ADVICE = "on one GPU, generating while training has gained nothing"


def notes_of(*, on_gpu: bool = True, **changed: Any) -> tuple[str, ...]:
    gpus = {"with_gpus": on_gpu}
    sections: dict[str, Any] = {
        "model": {"preset": "tiny"},
        "distributed": {**gpus, "shard": 1},
        "generator": {**gpus, "max_seq_len": 64, "sampling": {"max_tokens": 16}},
        "training": {"max_seq_len": 64},
        "rollout": {"staleness": 1},
        "placement": "beside",
    }
    for name, value in changed.items():
        sections[name] = {**sections[name], **value} if isinstance(value, dict) else value
    return resolve_run(GRPOConfig.model_validate(sections), card=CARD).notes


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, "placement=shared rollout.staleness=0"),
        ({"rollout": {"staleness": 0}}, "placement=shared"),
        ({"placement": "shared"}, "rollout.staleness=0"),
    ],
)
def test_one_gpu_is_advised_to_take_turns(changed: dict[str, Any], words: str) -> None:
    (note,) = (note for note in notes_of(**changed) if ADVICE in note)
    assert note.endswith(f"try {words}")


@pytest.mark.parametrize(
    "changed",
    [
        {"placement": "shared", "rollout": {"staleness": 0}},
        {"placement": "apart"},
        {"on_gpu": False},
        {"distributed": {"shard": 2}},
        {"generator": {"num_replicas": 2}},
    ],
    ids=str,
)
def test_other_runs_are_not(changed: dict[str, Any]) -> None:
    assert not any(ADVICE in note for note in notes_of(**changed))
