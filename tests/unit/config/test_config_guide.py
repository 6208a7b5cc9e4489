"""What the guide shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from forge.config import ForgeConfig, InvalidConfig, load

GUIDE = (Path(__file__).resolve().parents[3] / "docs" / "guides" / "configuration.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(blocks("yaml")[0])
    Path("app.yaml").write_text("")


def test_the_programs_run_and_give_what_is_said() -> None:
    layers, own = blocks("python")
    names: dict[str, Any] = {}
    exec(compile(layers, "guide", "exec", dont_inherit=True), names)
    for expression, value in re.findall(r"^(settings\S*\S)\s+# (\d+)", layers, flags=re.MULTILINE):
        assert eval(expression, names) == int(value), expression
    names = {"__name__": "guide"}
    exec(compile(own, "guide", "exec", dont_inherit=True), names)
    assert names["settings"].optimizer.lr == 1e-4

    Path("base.yaml").write_text('run:\n  name: a\n  seed: "3"\n')
    with pytest.raises(InvalidConfig) as caught:
        load(names["AppConfig"], files=["base.yaml"], overrides=["lr=1e-4"])
    paths = re.compile(r"^  (\S+)$", flags=re.MULTILINE)
    assert paths.findall(str(caught.value)) == paths.findall(blocks("text")[0])


def test_every_override_of_the_table_works() -> None:
    words = re.findall(r"^\| `([^`]+)` \|", GUIDE, flags=re.MULTILINE)
    assert len(words) == 8
    for word in words:
        load(ForgeConfig, files=["base.yaml"], overrides=["launcher.kind=local", word])
