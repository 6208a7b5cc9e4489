"""The errors that the FAQ quotes exist, and those with a configuration are raised for it."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from forge.config import GRPOConfig, load
from forge.errors import ForgeError
from forge.loops.planning import plan_run

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
QUOTES: list[tuple[str, str]] = re.findall(
    r"^(?:<!-- load: (.*?) -->\n)?```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
)

BASE = """
model: {preset: tiny}
prompts: {sources: [{task: arithmetic}]}
rewards: {functions: [{kind: number}]}
training: {max_seq_len: 256}
generator: {sampling: {max_tokens: 32}}
"""


@pytest.mark.parametrize(("overrides", "text"), [quote for quote in QUOTES if quote[0]])
def test_a_configuration_raises_the_error(
    overrides: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE, encoding="utf-8")
    with pytest.raises(ForgeError) as raised:
        plan_run(load(GRPOConfig, files=["base.yaml"], overrides=shlex.split(overrides)))
    assert set(text.splitlines()) <= set(str(raised.value).splitlines())


def test_every_quoted_message_is_in_the_code() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "src").rglob("*.py")]
    constants = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    code = "\n".join(value for value in constants if isinstance(value, str))
    quoted = [piece for overrides, text in QUOTES if not overrides for piece in re.split("…|\n", text)]
    assert [piece for piece in quoted if len(piece.strip(" .:;,()")) > 2 and piece not in code] == []
