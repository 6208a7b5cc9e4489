"""The programs of the pages run, and print what their comments say."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from forge.runtime.sandbox import survey

ROOT = Path(__file__).resolve().parents[2]
Drive = Callable[[Coroutine[Any, Any, Any]], Any]

FRAGMENTS = (
    "docs/concepts/episodes.md",
    "docs/concepts/losses.md",
    "docs/concepts/rendezvous.md",
    "docs/concepts/store.md",
    "docs/guides/agents.md",
    "docs/guides/black_box_agents.md",
    "docs/guides/chaos.md",
    "docs/guides/curricula.md",
    "docs/guides/data.md",
    "docs/guides/distillation.md",
    "docs/guides/elasticity.md",
    "docs/guides/lora.md",
    "docs/guides/multi_agent.md",
    "docs/guides/ppo.md",
    "docs/guides/preferences.md",
    "docs/guides/reward_models.md",
    "docs/guides/sandbox.md",
    "docs/guides/self_play.md",
    "docs/guides/weights.md",
)
"""Pages whose blocks run one after the other, except whole programs."""

PROGRAMS = ("README.md", "docs/guides/elasticity.md", "docs/guides/generators.md", "docs/guides/weights.md")
"""Pages with whole programs."""


def blocks(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        textwrap.dedent(block) for block in re.findall(r"^ *```python\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    ]


def is_program(block: str) -> bool:
    return "asyncio.run(main())" in block


def printed(block: str) -> list[str]:
    """Return the output of a block, according to the comments behind `print`."""
    lines = [line for line in block.splitlines() if re.search(r"\bprint\(", line) and "  # " in line]
    return [line.rsplit("  # ", 1)[1] for line in lines]


@pytest.mark.parametrize("page", FRAGMENTS)
def test_the_fragments_of_a_page_run_one_after_the_other(
    page: str, drive: Drive, leaves_nothing: None, capsys: pytest.CaptureFixture[str]
) -> None:
    fragments = [block for block in blocks(page) if not is_program(block)]
    if page.endswith(("sandbox.md", "black_box_agents.md")) and not any(finding.works for finding in survey()[:2]):
        pytest.skip("there is no boundary here")

    async def scenario() -> None:
        names: dict[str, Any] = {"__name__": "page"}
        for fragment in fragments:
            code = compile(fragment, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
            running = eval(code, names)
            if inspect.iscoroutine(running):
                await running

    drive(scenario())
    expected = [line for fragment in fragments for line in printed(fragment)]
    assert expected, "the fragments of a page print something"
    assert capsys.readouterr().out.splitlines() == expected


def run(program: str, folder: Path, **variables: str) -> None:
    (folder / "main.py").write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "main.py"],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert set(printed(program)) <= set(done.stdout.splitlines())


@pytest.mark.parametrize("page", PROGRAMS)
def test_the_programs_of_a_page_run(page: str, tmp_path: Path, leaves_nothing: None) -> None:
    programs = list(filter(is_program, blocks(page)))
    assert programs
    for program in programs:
        run(program, tmp_path)


def test_the_loop_runs_without_shared_memory(tmp_path: Path, leaves_nothing: None) -> None:
    run(next(filter(is_program, blocks("docs/guides/weights.md"))), tmp_path, FORGE_STORE_WAYS="tcp")


def test_every_variable_of_the_library_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.c"), ROOT / "scripts" / "install.sh"]
    text = "\n".join(source.read_text(encoding="utf-8") for source in sources)
    used = set(re.findall(r"\bFORGE_[A-Z][A-Z_]*[A-Z]\b", text))
    documented = set(re.findall(r"^\| `(FORGE_[A-Z_]+)` \|", page, re.MULTILINE))
    assert documented == used
