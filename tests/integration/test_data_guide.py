"""The guide's program runs, and its examples are valid configuration."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml

from forge.config import DataConfig, SFTConfig, ValidationConfig

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "data.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL)


def test_the_program_runs_and_prints_what_it_says() -> None:
    (program,) = blocks("python")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "('prompt_response',) 90"


def test_the_examples_are_valid_and_show_every_key() -> None:
    shown: set[str] = set()
    for block in blocks("yaml"):
        values = yaml.safe_load(block)
        SFTConfig.model_validate(values)
        shown |= set(values.get("data", {})) | set(values.get("validation", {}))
        shown |= {key for source in values.get("data", {}).get("sources", []) for key in source}
    wanted = {
        *DataConfig.model_fields,
        *ValidationConfig.model_fields,
        "hf_config",
        "split",
        "format",
        "columns",
        "weight",
    }
    assert wanted <= shown
