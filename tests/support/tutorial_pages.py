"""Tutorials as users follow them: the files of a page are saved, its commands run, and what they print is compared.

In a page, a block of Python or YAML whose first line is `# NAME` is that file, and a bash block is run as it stands. A
text block after it is what it prints: its lines appear in this order, with other numbers. Lines that the page leaves
out may be between them; where it says so, it has a line `...`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "tutorials"
LIMIT_S = 900
_BLOCK = re.compile(r"^```(python|yaml|bash|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PROGRESS = re.compile(r"(evaluation (?:at |after )?)?step (\d+)\b.*\breward\b", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


@dataclass(frozen=True, slots=True)
class Command:
    """A bash block of a page, and the lines that the page shows for it; none where it shows nothing."""

    script: str
    shown: tuple[str, ...]


def blocks(page: str) -> list[tuple[str, str]]:
    return _BLOCK.findall((FOLDER / f"{page}.md").read_text(encoding="utf-8"))


def files(page: str) -> dict[str, str]:
    """The files of a page, by name."""
    found = {}
    for language, body in blocks(page):
        name = re.match(r"# ([\w.]+)\n", body)
        if language in ("python", "yaml") and name:
            found[name[1]] = body
    return found


def commands(page: str) -> list[Command]:
    """The bash blocks of a page, in order."""
    found = []
    kinds = [*blocks(page), ("", "")]
    for (language, body), (following, text) in pairwise(kinds):
        if language == "bash":
            found.append(Command(body, tuple(text.splitlines()) if following == "text" else ()))
    return found


def follow(page: str, folder: Path, *, files_of: tuple[str, ...] = (), changes: Mapping[str, str] = {}) -> list[str]:
    """Save the files of the pages, run the commands of `page` in the folder, and return what each printed.

    `changes` are texts that are replaced everywhere, such as ports. Fails where a command fails, or prints something
    else than the page shows.
    """
    for name, body in {name: body for each in (*files_of, page) for name, body in files(each).items()}.items():
        (folder / name).write_text(changed(body, changes), encoding="utf-8")
    printed = []
    for command in commands(page):
        output = run(changed(command.script, changes), folder)
        missing = first_missing(changed("\n".join(command.shown), changes).splitlines(), output.splitlines())
        assert missing is None, f"{command.script}\ndoes not print\n{missing}\nbut\n{output}"
        printed.append(output)
    return printed


def changed(text: str, changes: Mapping[str, str]) -> str:
    for old, new in changes.items():
        text = text.replace(old, new)
    return text


def run(script: str, folder: Path) -> str:
    """Run a bash block. What it leaves in the background is ended with it."""
    path = os.pathsep.join([os.fspath(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{script}"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PATH": path, "PYTHONUNBUFFERED": "1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{script}\nexit code {done.returncode}\n{done.stdout}"
    return done.stdout


def first_missing(shown: list[str], printed: list[str]) -> str | None:
    """Return the first line of what a page shows that was not printed, in this order; None where all were."""
    rest = iter(map(_skeleton, printed))
    for line in shown:
        if line.strip() == "...":
            continue
        wanted = _skeleton(line)
        if not any(each == wanted for each in rest):
            return line
    return None


def _skeleton(line: str) -> str:
    """The line with every number alike, and every run of spaces. Of a run's progress the step counts and that there is
    a reward: the rest of these lines depends on the machine, and on where they are printed."""
    if progress := _PROGRESS.match(line):
        return f"{'evaluation at ' if progress[1] else ''}step {progress[2]}, with its reward"
    return re.sub(r"\s+", " ", _NUMBER.sub("#", line)).strip()


def links(page: str) -> Iterator[str]:
    """The files that a page links to."""
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    yield from (link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link)
