"""The files of apps/rlhf: the same for the same seed, held-out questions apart, and labels as its page says."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    write_files = runpy.run_path(str(ROOT / "apps" / "rlhf" / "preferences.py"))["write_files"]
    folder, again = (write_files(tmp_path_factory.mktemp("rlhf"), seed=3) for _ in range(2))
    for path in folder.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes()
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.iterdir()}


def test_held_out_questions_are_never_trained_on(files: dict[str, list[dict[str, Any]]]) -> None:
    heldout = {record["prompt"] for record in files["heldout"]}
    assert len(heldout) == len(files["heldout"]) == 112
    assert heldout == {record["prompt"] for record in files["heldout_preferences"]}
    for name in ("preferences", "prompts"):
        assert not heldout & {record["prompt"] for record in files[name]}
    assert not heldout & {record["messages"][0]["content"] for record in files["demonstrations"]}


def test_one_label_in_ten_is_wrong_and_four_demonstrations_in_ten_are_right(
    files: dict[str, list[dict[str, Any]]],
) -> None:
    answers = {record["prompt"]: record["answer"] for record in files["prompts"] + files["heldout"]}

    def value(prompt: str, answer: str) -> int:
        """2 for the right number, 1 for another, 0 for what is not such a sentence."""
        said = re.fullmatch(r"(\w+) has (\d) (\w+)\.", answer)
        asked = re.fullmatch(r"(\w+) has \d (\w+)\. How many (\w+) does \w+ have\?", prompt)
        assert asked is not None
        if said is None or (said[1], said[3]) != (asked[1], asked[2]):
            return 0
        return 1 + (said[2] == answers[prompt])

    pairs = [(value(each["prompt"], each["chosen"]), value(each["prompt"], each["rejected"])) for each in
             files["preferences"]]  # fmt: skip
    assert len(pairs) == 3200
    assert all(chosen != rejected for chosen, rejected in pairs)
    assert sum(chosen < rejected for chosen, rejected in pairs) / 3200 == pytest.approx(0.1, abs=0.02)
    assert sum(0 in pair for pair in pairs) / 3200 == pytest.approx(0.4, abs=0.03)
    shown = [[turn["content"] for turn in record["messages"]] for record in files["demonstrations"]]
    assert sum(value(*turns) == 2 for turns in shown) / len(shown) == pytest.approx(0.3 + 0.7 / 8, abs=0.03)
