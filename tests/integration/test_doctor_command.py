"""`forge doctor` on this machine, and on one where a part is missing, broken or of the wrong version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("leaves_nothing")

LIVE = {"process", "service"}


def doctor(*words: str, first_on_path: Path | None = None) -> subprocess.CompletedProcess[str]:
    path = [str(first_on_path)] if first_on_path else []
    inherited = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, *([inherited] if inherited else [])])}
    return subprocess.run(
        [sys.executable, "-m", "forge.cli", "doctor", *words],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        check=False,
    )


def checks_of(ended: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    facts: dict[str, Any] = json.loads(ended.stdout)
    assert facts["ok"] is (ended.returncode == 0)
    return {check["name"]: check for check in facts["checks"]}


def write_metadata(folder: Path, name: str, version: str, *requires: str) -> None:
    """What an installed distribution leaves on the path: enough for its version to be found."""
    home = folder / f"{name}-{version}.dist-info"
    home.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (home / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {one}" for one in requires)]) + "\n")


def test_everything_passes_here() -> None:
    ended = doctor("--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    checks = checks_of(ended)
    assert {"python", "torch", "torchmonarch", "pidfd", "shared memory", "open files"} | LIVE <= set(checks)
    assert {name for name, check in checks.items() if check["status"] == "FAIL"} == set()
    assert {checks[name]["status"] for name in ("python", "torch", "torchmonarch", "pidfd", *LIVE)} == {"PASS"}
    assert all(check["detail"] for check in checks.values())
    facts = json.loads(ended.stdout)
    assert facts["versions"]["torch"]
    assert facts["cpus"] >= 1
    assert facts["memory"]["total"] >= facts["memory"]["available"] > 0
    assert facts["gpus"]["present"] >= len(facts["gpus"]["names"])


def test_a_person_reads_the_same(tmp_path: Path) -> None:
    write_metadata(tmp_path, "torch", "1.13.0")
    ended = doctor(first_on_path=tmp_path)
    assert ended.returncode == 1
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert ["Components"] in lines
    assert ["Machine"] in lines
    assert [line for line in lines if line[:2] == ["FAIL", "torch"]]
    assert [line for line in lines if line[:2] == ["PASS", "service"]]
    assert "repair: pip install torch==" in ended.stdout


def test_a_part_of_the_wrong_version_and_a_missing_one_fail(tmp_path: Path) -> None:
    write_metadata(tmp_path, "torch", "1.13.0")
    write_metadata(tmp_path, "torchforge", "0.0.1", "torch==2.13.0", "forge-absent-part==4.5", "other>=1")
    ended = doctor("--json", first_on_path=tmp_path)
    checks = checks_of(ended)
    assert ended.returncode == 1
    assert {name for name, check in checks.items() if check["status"] == "FAIL"} == {"torch", "forge-absent-part"}
    assert checks["torch"]["detail"] == "1.13.0 (needs 2.13.0)"
    assert checks["torch"]["repair"] == "pip install torch==2.13.0"
    assert checks["forge-absent-part"]["detail"] == "None (needs 4.5)"


def test_a_part_that_cannot_be_loaded_is_a_finding_and_not_a_crash(tmp_path: Path) -> None:
    for name in ("monarch", "torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('libcudart.so.13 is not there')")
    ended = doctor("--json", first_on_path=tmp_path)
    assert ended.returncode == 1, ended.stderr
    checks = checks_of(ended)
    for name in LIVE:
        assert checks[name]["status"] == "FAIL"
        assert "libcudart.so.13 is not there" in checks[name]["detail"]
    assert json.loads(ended.stdout)["gpus"]["torch_can_use"] is False
    assert "Traceback" not in ended.stderr


def test_what_a_configuration_needs_is_checked_without_starting_anything(tmp_path: Path) -> None:
    write_metadata(tmp_path, "bitsandbytes", "0.1.0")
    words = ["--no-start", "--json", "--config", "sft/qwen3_1_7b_lora", "adapter.base_dtype=nf4"]
    ended = doctor(*words, "distributed.with_gpus=false", first_on_path=tmp_path)
    assert ended.returncode == 1, ended.stderr
    checks = checks_of(ended)
    assert not LIVE & set(checks)
    assert checks["adapter.base_dtype"]["status"] == "FAIL"
    assert checks["adapter.base_dtype"]["repair"] == "pip install 'torchforge[quantized]'"
    assert checks["model.path"]["status"] == "FAIL"
    assert "forge download Qwen/Qwen3-1.7B" in checks["model.path"]["repair"]
    assert checks["disk"]["status"] == "PASS"
