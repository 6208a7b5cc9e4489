"""The reference page is what the schema says."""

from __future__ import annotations

import runpy
from pathlib import Path

from forge.config import ForgeConfig, PreferenceConfig, RewardTrainingConfig, SFTConfig
from forge.config.fields import walk_fields

ROOT = Path(__file__).resolve().parents[3]


def test_the_committed_page_is_the_generated_one() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "config_reference.py"))["make_page"]()
    committed = (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    assert committed == page, "run scripts/config_reference.py"


def test_every_field_is_described() -> None:
    schemas = (ForgeConfig, SFTConfig, PreferenceConfig, RewardTrainingConfig)
    fields = [field for schema in schemas for field in walk_fields(schema)]
    assert len(fields) > 150
    assert [".".join(path) for path, field in fields if not field.description] == []
