"""The quick start's task is honest: held-out questions are new, no answer is favoured, demonstrations do not tell."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

APPS = Path(__file__).parents[2] / "apps"


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart_digits", APPS / "quickstart" / "digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_answers_are_right_and_equally_frequent(digits: ModuleType, tmp_path: Path) -> None:
    folder = digits.write_task(tmp_path, seed=3)
    for name, size in (("prompts", 900), ("heldout", 192)):
        found = records(folder / f"{name}.jsonl")
        assert len({record["prompt"] for record in found}) == len(found) == size
        counts: Counter[tuple[str, str]] = Counter()
        for record in found:
            word, listed = re.fullmatch(r"Which is the (\w+) of (\d \d \d \d)\?", record["prompt"]).groups()
            assert record["answer"] == {"largest": max, "smallest": min}[word](listed.split())
            assert len(set(listed.split())) == 4
            counts[word, record["answer"]] += 1
        assert len(counts) == 12
        assert set(counts.values()) == {size // 12}


def test_heldout_questions_are_shown_nowhere(digits: ModuleType, tmp_path: Path) -> None:
    folder = digits.write_task(tmp_path, seed=3)
    shown = {record["messages"][0]["content"] for record in records(folder / "demonstrations.jsonl")}
    asked = {record["prompt"] for record in records(folder / "prompts.jsonl")}
    heldout = {record["prompt"] for record in records(folder / "heldout.jsonl")}
    assert shown == asked
    assert not heldout & asked


def test_demonstrations_say_each_digit_once(digits: ModuleType, tmp_path: Path) -> None:
    folder = digits.write_task(tmp_path)
    said: dict[str, list[str]] = {}
    pattern = yaml.safe_load((APPS / "grpo" / "tiny.yaml").read_text())["rewards"]["functions"][0]["args"]["pattern"]
    for record in records(folder / "demonstrations.jsonl"):
        question, answer = (message["content"] for message in record["messages"])
        found = re.fullmatch(pattern, answer)
        assert found is not None, "the reward does not know the form that is demonstrated"
        said.setdefault(question, []).append(found[1])
    for question, answers in said.items():
        assert sorted(answers) == sorted(re.findall(r"\d", question))


def test_a_seed_makes_one_task(digits: ModuleType, tmp_path: Path) -> None:
    def read(folder: str, seed: int) -> list[bytes]:
        made = digits.write_task(tmp_path / folder, seed=seed)
        return [path.read_bytes() for path in sorted(made.iterdir())]

    assert read("a", 1) == read("b", 1)
    assert all(one != other for one, other in zip(read("a", 1), read("c", 2), strict=True))
