"""Type checkers know the signatures of endpoints through the handles of services and actors."""

from __future__ import annotations

import re
from pathlib import Path

from mypy import api

SOURCES = Path(__file__).parents[2] / "src"
SAMPLE = Path(__file__).parents[1] / "support" / "typed_calls.py"
CONFIG = f"""
[mypy]
strict = true
mypy_path = {SOURCES}
follow_imports = skip
disable_error_code = import-untyped, import-not-found
[mypy-forge,forge.errors,forge.runtime,forge.runtime.*,forge.service,forge.service.*]
follow_imports = silent
"""
"""Reads only what endpoints and handles are made of, which keeps the test short."""


def test_mypy_accepts_right_calls_and_reports_wrong_ones(tmp_path: Path) -> None:
    (tmp_path / "mypy.ini").write_text(CONFIG)
    expected = {
        (number, found[1])
        for number, line in enumerate(SAMPLE.read_text().splitlines(), 1)
        if (found := re.search(r"# error: ([\w-]+)$", line))
    }
    arguments = ["--config-file", str(tmp_path / "mypy.ini"), "--cache-dir", str(tmp_path / "cache")]
    report, failure, _ = api.run([*arguments, "--show-error-codes", "--no-error-summary", str(SAMPLE)])
    errors = re.findall(r"^.*typed_calls\.py:(\d+): error: .*\[([\w-]+)\]$", report, re.MULTILINE)
    assert {(int(number), code) for number, code in errors} == expected, report + failure
    assert report.count(": error:") == len(errors) == len(expected), report
