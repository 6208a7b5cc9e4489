"""The errors that the FAQ quotes are those that the code raises."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from forge.config import GRPOConfig, load
from forge.errors import ForgeError
from forge.loops.planning import plan_run

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
QUOTES: list[tuple[str, str, str]] = re.findall(
    r"^<!-- (load|from): (.*?) -->\n```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
)
RAISED = [pytest.param(how, text, id=how) for kind, how, text in QUOTES if kind == "load"]
WRITTEN = [pytest.param(how, text, id=f"{Path(how).stem}: {text[:30]}") for kind, how, text in QUOTES if kind == "from"]

BASE = """
model: {preset: tiny}
prompts: {sources: [{task: arithmetic}]}
rewards: {functions: [{kind: number}]}
training: {max_seq_len: 256}
generator: {sampling: {max_tokens: 32}}
"""


def test_every_quote_is_checked() -> None:
    assert len(QUOTES) == PAGE.count("```text")
    assert len(RAISED) >= 10
    assert len(WRITTEN) >= 10


@pytest.mark.parametrize(("overrides", "text"), RAISED)
def test_an_error_reads_as_quoted(overrides: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE, encoding="utf-8")
    with pytest.raises(ForgeError) as raised:
        plan_run(load(GRPOConfig, files=["base.yaml"], overrides=shlex.split(overrides)))
    assert str(raised.value) == text.rstrip("\n")


@pytest.mark.parametrize(("source", "text"), WRITTEN)
def test_a_message_stands_in_the_code_as_quoted(source: str, text: str) -> None:
    code = (ROOT / source).read_text(encoding="utf-8")
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # literals that are laid side by side
    for line in text.splitlines():
        pieces = [piece for piece in re.split("…", line) if len(piece.strip(" .:;,()")) > 2]
        assert pieces
        assert [piece for piece in pieces if piece not in code] == [], source
