"""The page about rollouts shows what happens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest

from forge.rollout.buffer import DropReason
from forge.rollout.ledger import LedgerLine

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "concepts" / "rollouts.md").read_text(encoding="utf-8")


def test_its_program_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(program, "rollouts.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*\)  # (.*)$", program, re.MULTILINE)


def test_its_ledger_line_is_one() -> None:
    (line,) = re.findall(r"^```json\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert LedgerLine(**json.loads(line)).outcome == "trained"


def test_it_lists_every_outcome() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \| ", PAGE[PAGE.index("## The ledger") :], re.MULTILINE))
    assert listed == {"trained", *get_args(DropReason)}
