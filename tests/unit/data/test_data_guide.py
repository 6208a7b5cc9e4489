"""The examples of the data guide are valid configuration, and show every key."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from forge.config import DataConfig, SFTConfig, ValidationConfig

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "data.md"


def test_the_examples_are_valid_and_show_every_key() -> None:
    shown: set[str] = set()
    for block in re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL):
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
