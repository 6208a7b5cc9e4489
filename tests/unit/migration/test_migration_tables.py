"""The tables of `forge import`: every key of every project is in exactly one rule, and every key of ours exists."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from forge.config import ForgeConfig, GRPOConfig, PreferenceConfig, RewardTrainingConfig, SFTConfig
from forge.config.fields import field_at
from forge.migration import titanrl, trl, verl
from forge.migration.records import Rule

ROOT = Path(__file__).resolve().parents[3]
OURS: dict[str, type[ForgeConfig]] = {
    "grpo": GRPOConfig,
    "rloo": GRPOConfig,
    "sft": SFTConfig,
    "dpo": PreferenceConfig,
    "kto": PreferenceConfig,
    "reward": RewardTrainingConfig,
}
TABLES: dict[str, tuple[Sequence[Rule], dict[str, Any], type[ForgeConfig]]] = {
    **{f"trl {kind}": (trl.rules_of(kind), trl.defaults_of(kind), OURS[kind]) for kind in trl.KINDS},
    "verl": (verl.RULES, verl.defaults(), GRPOConfig),
    "titanrl": (titanrl.RULES, titanrl.defaults(), GRPOConfig),
}


@pytest.fixture(params=TABLES)
def table(request: pytest.FixtureRequest) -> tuple[Sequence[Rule], dict[str, Any], type[ForgeConfig]]:
    return TABLES[request.param]


def test_every_key_is_in_exactly_one_rule(table: Any) -> None:
    rules, known, _ = table
    named = Counter(key for rule in rules for key in rule.theirs)
    sections = [key[:-1] for key in named if key.endswith(".*")]
    assert [key for key, count in named.items() if count > 1] == []
    assert [key for key in known if key not in named and not key.startswith(tuple(sections))] == []


def test_every_key_that_a_rule_names_is_one_of_the_project(table: Any) -> None:
    rules, known, _ = table
    own = {"peft_config.*", "trainer.*"} if "num_processes" in known else set()  # arguments that have no key
    own |= {"rollouter.train_dataset.repo_id", "rollouter.train_dataset.split"}  # of a dataset that a user chooses
    for key in (key for rule in rules for key in rule.theirs if key not in own):
        found = key in known if not key.endswith(".*") else any(each.startswith(key[:-1]) for each in known)
        assert found, key


def test_every_key_of_ours_exists_and_is_set_by_one_rule_only(table: Any) -> None:
    rules, _, schema = table
    for rule in rules:
        for path in rule.ours:
            assert field_at(schema, path.split(".")) is not None or path == "generator.sampling", path
    shared = {"data.sources", "training.max_seq_len", "algorithm.advantage.scale"}
    count = Counter(path for rule in rules for path in rule.ours)
    assert {path for path, number in count.items() if number > 1} <= shared


def test_a_rule_without_a_counterpart_says_what_to_do(table: Any) -> None:
    rules, _, _ = table
    assert [
        rule.theirs for rule in rules if rule.verdict == "none" and rule.convert is None and len(rule.note) < 15
    ] == []
    assert [rule.theirs for rule in rules if not rule.theirs and not rule.note] == []


# ---- The lists of keys -----------------------------------------------------------------------------------------------


def lister() -> ModuleType:
    """The program that lists the keys of a wheel or of an installed package."""
    spec = importlib.util.spec_from_file_location("list_peer_keys", ROOT / "scripts" / "list_peer_keys.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def site_packages(package: str) -> Path:
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parents[1]


def stored(project: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (ROOT / "src/forge/migration/keys" / f"{project}.json").read_text(encoding="utf-8")
    )
    return found


def test_the_keys_of_titanrl_are_those_of_the_installed_version() -> None:
    version = importlib.metadata.version("torchtitan")
    found = lister().listed("titanrl", [site_packages("torchtitan")], version=version)
    assert json.loads(json.dumps(found)) == stored("titanrl")


def test_the_keys_of_transformers_are_those_of_the_installed_version() -> None:
    program = lister()
    read = program.reader([site_packages("transformers")])
    found = program.trl_fields(read, "transformers/training_args.py", "TrainingArguments")
    group = stored("trl")["groups"]["TrainingArguments"]
    assert set(found) == set(group)
    changed_by_trl = {"logging_steps", "gradient_checkpointing", "bf16", "lr_scheduler_kwargs"}
    assert {key for key in found if found[key] != group[key]} <= changed_by_trl


def test_a_wheel_is_read_without_being_installed(tmp_path: Path) -> None:
    source = """
class GRPOConfig(_BaseConfig):
    beta: float = field(default=0.0, metadata={"help": "…"})
    names: list[str] = field(default_factory=lambda: ["a"])
    chosen: str = default_optim
    needed: int
"""
    with zipfile.ZipFile(tmp_path / "trl-9.9.9-py3-none-any.whl", "w") as wheel:
        wheel.writestr("trl/trainer/grpo_config.py", source)
    program = lister()
    read = program.reader([tmp_path / "trl-9.9.9-py3-none-any.whl"])
    assert program.trl_fields(read, "trl/trainer/grpo_config.py", "GRPOConfig") == {
        "beta": 0.0,
        "names": ["a"],
        "chosen": {"text": "default_optim"},
        "needed": {"text": "required"},
    }
    assert program.version_of(tmp_path / "trl-9.9.9-py3-none-any.whl") == "9.9.9"


def test_the_versions_are_those_that_the_guides_name() -> None:
    for project, title in {"trl": "TRL", "verl": "verl", "titanrl": "TorchTitan"}.items():
        page = (ROOT / "docs" / "guides" / f"from_{project}.md").read_text(encoding="utf-8")
        assert f"{title} {stored(project)['version']}" in page
