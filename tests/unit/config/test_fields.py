"""Old keys load with a warning that names the new one; both together are refused."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import ValidationError

from forge.config import (
    ConfigModel,
    ForgeConfig,
    GRPOConfig,
    InvalidConfig,
    PolicyConfig,
    dump,
    load,
    load_with_origins,
)
from forge.config.command_line import detect_kind
from forge.config.fields import move_old_keys


class Inner(ConfigModel):
    old_keys: ClassVar[Mapping[str, str | None]] = {"before": "after"}

    after: int = 0


class Base(ForgeConfig):
    old_keys: ClassVar[Mapping[str, str | None]] = {"gone": None}

    one: Inner = Inner()
    many: tuple[Inner, ...] = ()
    named: Mapping[str, Inner] = {}


class Derived(Base):
    old_keys: ClassVar[Mapping[str, str | None]] = {"old.deep.key": "one.after"}


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return file


def warned(record: list[warnings.WarningMessage]) -> list[str]:
    return [f"{Path(each.filename).name}:{each.lineno}: {each.message}" for each in record]


def test_old_keys_of_a_file_are_read_at_every_depth_and_each_warning_has_its_line(tmp_path: Path) -> None:
    text = "one:\n  before: 1\nmany:\n- {before: 2}\n- {after: 3}\nnamed:\n  a:\n    before: 4\n"
    with pytest.warns(FutureWarning) as record:
        loaded = load_with_origins(Derived, files=[write(tmp_path, text)])
    config = loaded.config
    assert (config.one.after, [each.after for each in config.many], config.named["a"].after) == (1, [2, 3], 4)
    rest = "The old key stops working in the next release."
    assert warned(record.list) == [
        f"run.yaml:2: one.before is now one.after. {rest}",
        f"run.yaml:4: many.0.before is now many.0.after. {rest}",
        f"run.yaml:8: named.a.before is now named.a.after. {rest}",
    ]
    assert str(loaded.origins["one.after"]).endswith("run.yaml:2")


def test_a_key_moves_out_of_a_section_that_is_no_more(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match=r"old\.deep\.key is now one\.after"):
        assert load(Derived, files=[write(tmp_path, "old: {deep: {key: 5}}")]).one.after == 5
    with pytest.raises(InvalidConfig) as caught, pytest.warns(FutureWarning):
        load(Derived, files=[write(tmp_path, "old: {deep: {key: 5, other: 6}}")])
    assert caught.value.path == "old"


def test_overrides_and_defaults_are_renamed_and_later_layers_still_win(tmp_path: Path) -> None:
    file = write(tmp_path, "one: {before: 1}")
    with pytest.warns(FutureWarning) as record:
        assert load(Derived, overrides=["one.before=2"]).one.after == 2
    assert record[0].filename == "<override one.before=2>"
    for override, expected in {"one.after=3": 3, "one={before: 4}": 4, "~one.before": 0}.items():
        with pytest.warns(FutureWarning):
            assert load(Derived, files=[file], overrides=[override]).one.after == expected
    with pytest.warns(FutureWarning):
        assert load(Derived, defaults={"one": {"before": 6}}).one.after == 6
    file = write(tmp_path, "many: [{}]")
    with pytest.warns(FutureWarning):
        assert load(Derived, files=[file], overrides=["many.0.before=7"]).many[0].after == 7


@pytest.mark.parametrize(
    ("text", "overrides", "value"),
    [
        ("one: {before: 1, after: 2}", [], 1),
        ("", ["one.after=2", "one.before=1"], 1),
        ("", ["one={before: 1, after: 2}"], 1),
    ],
)
def test_old_and_new_together_are_refused(tmp_path: Path, text: str, overrides: list[str], value: int) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(Derived, files=[write(tmp_path, text)], overrides=overrides)
    problem = caught.value.problems[0]
    assert (problem.path, problem.value, problem.repair) == ("one.before", value, "remove the old key")
    assert "one.after" in problem.rule
    assert problem.origin is not None


def test_python_takes_old_keys_too_and_refuses_both() -> None:
    with pytest.warns(FutureWarning, match="before is now after") as record:
        assert Inner(before=3).after == 3  # type: ignore[call-arg]
    assert record[0].filename == __file__
    with pytest.warns(FutureWarning):
        assert Derived(old={"deep": {"key": 4}}, one=Inner()).one.after == 4  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="old name of after"):
        Inner(before=3, after=4)  # type: ignore[call-arg]


def test_a_removed_key_warns_only_if_it_has_a_value(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(Derived, files=[write(tmp_path, "gone: {}")])
    with pytest.warns(FutureWarning, match="gone is no longer a configuration key"):
        load(Derived, files=[write(tmp_path, "gone: {a: 1}")])


GRPO_OF_BEFORE = """
generator: {engine: vllm, max_batch: 32}
generators: {num_replicas: 4, tensor_parallel: 2, num_threads: 3}
rollout: {max_fruitless: 7}
rewards:
  functions: [{kind: judge}]
  judge: {path: models/judge, num_replicas: 2, num_threads: 5}
"""


def test_a_configuration_of_the_last_release_means_the_same(tmp_path: Path) -> None:
    file = write(tmp_path, GRPO_OF_BEFORE)
    with pytest.warns(FutureWarning) as record:
        config = load(GRPOConfig, files=[file])
    assert len(record) == 6
    section = config.generator
    assert (section.engine, section.max_batch, section.num_replicas, section.tensor_parallel) == ("vllm", 32, 4, 2)
    assert (section.num_threads, config.rollout.max_no_signal_groups) == (3, 7)
    assert config.rewards.judge is not None
    assert (config.rewards.judge.generator.num_replicas, config.rewards.judge.generator.num_threads) == (2, 5)
    assert detect_kind([str(file)], []).kind == detect_kind([], ["generators.num_replicas=2"]).kind == "grpo"
    assert "generators" not in dump(config)


def test_a_policy_of_the_last_release_means_the_same() -> None:
    with pytest.warns(FutureWarning):
        config = load(PolicyConfig, overrides=["num_replicas=3", "tensor_parallel=2"])
    assert (config.generator.num_replicas, config.generator.tensor_parallel) == (3, 2)


def test_plain_data_of_a_run_folder_can_be_compared_by_new_names() -> None:
    data = {"generators": {"num_replicas": 2}, "rollout": {"max_fruitless": 9}}
    assert [moved.new for moved in move_old_keys(GRPOConfig, data)] == [
        ("generator", "num_replicas"),
        ("rollout", "max_no_signal_groups"),
    ]
    assert data == {"generator": {"num_replicas": 2}, "rollout": {"max_no_signal_groups": 9}}
