"""The environments of the applications pass `forge env check`, with their own oracles."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from forge.cli import main
from forge.runtime.sandbox import survey

APPS = Path(__file__).resolve().parents[2] / "apps"

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.mark.parametrize(("app", "module"), [("tools", "boxes"), ("games", "treasure"), ("coding", "functions")])
def test_an_applications_environment_passes(
    app: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if app == "coding" and not any(finding.works for finding in survey()[:2]):
        pytest.skip("there is no security boundary for sandboxes here")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(APPS / app)])
    monkeypatch.delitem(sys.modules, module, raising=False)
    import_module(module).write_files(Path("runs") / f"{app}-0" / "task")
    code = main(["env", "check", "--config", str(APPS / app / "grpo.yaml"), "--num-tasks", "3", "--json"])
    report = json.loads(capsys.readouterr().out)
    found = {check["name"]: (check["status"], check["detail"]) for check in report["checks"]}
    assert code == 0, report["checks"]
    assert {name: status for name, (status, _) in found.items()} == dict.fromkeys(found, "pass"), report["checks"]
