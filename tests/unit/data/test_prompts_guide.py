"""The guide's program runs, its examples are valid and show every key, and its tables say what the tasks do."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import yaml

from forge.config import GRPOConfig, PromptsConfig, PromptSourceConfig
from forge.data.tasks import arithmetic, countdown, open_task

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "prompts.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


def test_the_program_prints_what_it_says() -> None:
    (program,) = blocks("python")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "prompts.md", "exec"), {"__name__": "guide"})
    assert printed.getvalue().splitlines() == re.findall(r"print\(.*\)  # (.*)", program)


def test_the_examples_are_valid_and_show_every_key() -> None:
    shown: set[str] = set()
    for block in blocks("yaml"):
        values = yaml.safe_load(block)
        GRPOConfig.model_validate(values)
        prompts = values.get("prompts", {})
        shown |= set(prompts) | {key for source in prompts.get("sources", []) for key in source}
    assert {*PromptsConfig.model_fields, *PromptSourceConfig.model_fields} <= shown


def cells(heading: str) -> list[list[str]]:
    section = GUIDE.partition(f"### {heading}\n")[2].partition("\n###")[0]
    rows = re.findall(r"^\| (\d.*) \|$", section, re.MULTILINE)
    return [row.split(" | ") for row in rows]


def spread(ends: tuple[int, int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def test_the_tables_are_those_of_the_levels() -> None:
    for row, (number, level) in zip(cells("arithmetic"), arithmetic.LEVELS.items(), strict=True):
        assert row[0].split()[0] == str(number)
        assert row[1:4] == [spread(level.num_terms), spread(level.operands), " ".join(level.operators)]
        count = open_task("arithmetic", args={"level": number}, seed=0, where="", size=1).num_problems
        assert row[4] == (f"{count:,}" if number < 5 else "8 · 10^16")
    for row, (number, goal) in zip(cells("countdown"), countdown.LEVELS.items(), strict=True):
        assert row[0].split()[0] == str(number)
        assert row[1:4] == [spread(goal.num_numbers), spread(goal.numbers), spread(goal.target)]
        assert row[4] == " ".join(goal.operators)
