"""What the pages show is what happens: their programs run, and print what the comments say."""

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

ROOT = Path(__file__).resolve().parents[2]
Drive = Callable[[Coroutine[Any, Any, Any]], Any]

PAGES = {
    "docs/concepts/store.md": (3, 0),
    "docs/concepts/rendezvous.md": (1, 0),
    "docs/guides/weights.md": (6, 2),
    "docs/guides/generators.md": (0, 1),
    "README.md": (0, 3),
}
"""How many fragments, and how many whole programs, each page has."""


def blocks(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        textwrap.dedent(block) for block in re.findall(r"^ *```python\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    ]


def is_program(block: str) -> bool:
    return "asyncio.run(main())" in block


def said(block: str) -> list[str]:
    """What the comments behind `print` say that it prints."""
    lines = [line for line in block.splitlines() if re.search(r"\bprint\(", line) and "  # " in line]
    return [line.rsplit("  # ", 1)[1] for line in lines]


PROGRAMS = [
    pytest.param(block, id=f"{Path(page).stem}-{number}")
    for page in PAGES
    for number, block in enumerate(blocks(page))
    if is_program(block)
]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run(page: str) -> None:
    found = blocks(page)
    programs = sum(map(is_program, found))
    assert (len(found) - programs, programs) == PAGES[page]


@pytest.mark.parametrize("page", [page for page, (fragments, _) in PAGES.items() if fragments])
def test_the_fragments_of_a_page_run_one_after_the_other(
    page: str, drive: Drive, leaves_nothing: None, capsys: pytest.CaptureFixture[str]
) -> None:
    fragments = [block for block in blocks(page) if not is_program(block)]

    async def scenario() -> None:
        names: dict[str, Any] = {"__name__": "page"}
        for fragment in fragments:
            code = compile(fragment, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
            running = eval(code, names)
            if inspect.iscoroutine(running):
                await running

    drive(scenario())
    expected = [line for fragment in fragments for line in said(fragment)]
    assert expected, "a page says what its fragments print"
    assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_programs_run(program: str, tmp_path: Path, leaves_nothing: None) -> None:
    file = tmp_path / "main.py"
    file.write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(file)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for line in said(program):
        assert line in done.stdout.splitlines()


def test_the_loop_runs_without_shared_memory(tmp_path: Path, leaves_nothing: None) -> None:
    """As the guide says under "Many hosts"."""
    loop = next(block for block in blocks("docs/guides/weights.md") if is_program(block))
    (tmp_path / "main.py").write_text(loop, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "main.py"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "FORGE_STORE_WAYS": "tcp"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert said(loop)[0] in done.stdout


def test_every_variable_of_the_library_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.c"), ROOT / "scripts" / "install.sh"]
    text = "\n".join(source.read_text(encoding="utf-8") for source in sources)
    used = set(re.findall(r"\bFORGE_[A-Z][A-Z_]*[A-Z]\b", text))
    documented = set(re.findall(r"^\| `(FORGE_[A-Z_]+)` \|", page, re.MULTILINE))
    assert documented == used
