"""Training of a reward model, from pairs in a file to what a run reports, and how it resumes.

Runs are in this process, as one rank.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from forge.config import RewardLossConfig, RewardTrainingConfig, SFTConfig, load
from forge.errors import CheckpointError, ConfigError, DataError
from forge.loops.dry_run import dry_run
from forge.loops.reward_model import RewardModelResult, run_reward_model
from forge.loops.sft import run_sft
from forge.observe import read_jsonl
from reward_model_runs import (
    LAST,
    ROOT,
    as_rank,
    config,
    conversation,
    hf_rewards,
    one_torch_thread,
    pairs,
    train,
    write,
    write_pairs,
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("reward_model"))


@pytest.fixture(scope="module")
def trained(home: Path) -> Iterator[RewardModelResult]:
    with one_torch_thread():
        yield train(config(home / "runs"))


def test_it_learns_and_reports_accuracy_and_calibration_as_transformers_finds_them(
    home: Path, trained: RewardModelResult
) -> None:
    assert trained.export is not None
    records = [json.loads(line) for line in (home / "held.jsonl").read_text().splitlines()]
    chosen, rejected = (
        hf_rewards(trained.export, [conversation(record, side) for record in records])
        for side in ("chosen", "rejected")
    )
    margins = [one - other for one, other in zip(chosen, rejected, strict=True)]
    found = trained.validation_metrics
    assert found["accuracy"] == sum(margin > 0 for margin in margins) / 42
    assert found["accuracy"] > 0.9
    assert found["reward_margin"] == pytest.approx(sum(margins) / 42, abs=1e-4)
    probabilities = [1 / (1 + math.exp(-margin)) for margin in margins]
    assert found["brier"] == pytest.approx(sum((1 - each) ** 2 for each in probabilities) / 42, abs=1e-4)
    assert found["reward_mean"] == pytest.approx(sum(chosen + rejected) / 84, abs=1e-4)
    error = 0.0
    for number in range(10):
        inside = [m for m in margins if int((1 / (1 + math.exp(-abs(m))) - 0.5) * 20) == number]
        confidence = sum(1 / (1 + math.exp(-abs(margin))) for margin in inside)
        error += abs(sum(margin > 0 for margin in inside) - confidence) / 42
    assert found["ece"] == pytest.approx(error, abs=1e-4)

    lines = list(read_jsonl(home / "runs" / "rm" / "metrics.jsonl"))
    judged = {line.step: line.values for line in lines if "validation/loss" in line.values}
    assert sorted(judged) == [10, 20, 30]
    assert judged[30]["validation/ece"] == found["ece"]
    assert judged[10]["validation/loss"] > judged[30]["validation/loss"]
    steps = [line.values for line in lines if "train/loss" in line.values]
    assert "train/accuracy" in steps[0]
    assert not any("calibration" in name for name in steps[0])


def test_the_report_shows_the_calibration(home: Path, trained: RewardModelResult) -> None:
    from forge.observe.report import write_report

    page = write_report(home / "runs" / "rm", output=home / "report.html", max_samples=0).path.read_text()
    for shown in ("Accuracy on pairs", "Calibration", "Reliability", "validation/ece", "validation/calibration/"):
        assert shown in page, shown


def test_a_run_that_was_stopped_resumes_bit_for_bit(home: Path, trained: RewardModelResult) -> None:
    chosen = config(home / "resumed", "training.max_steps=10", "training.schedule=constant", "training.warmup_ratio=0")
    whole = config(home / "whole", "training.max_steps=20", "training.schedule=constant", "training.warmup_ratio=0")
    train(chosen)
    resume = ["training.max_steps=20", "training.schedule=constant", "training.warmup_ratio=0"]
    again = train(config(home / "resumed", *resume, "checkpointing.resume=must"))
    expected = train(whole)
    assert again.export is not None
    assert expected.export is not None
    ours, theirs = (load_file(each.export / "model.safetensors") for each in (again, expected) if each.export)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert again.validation_metrics == expected.validation_metrics
    write(home / "sft.jsonl", [{"messages": conversation(next(pairs(1)), "chosen")}] * 4)
    model = ["model.preset=tiny", "model.num_layers=1", f"run.output_dir={home / 'resumed'}", "run.name=rm"]
    data = [f"data.sources=[{{path: {home}/sft.jsonl}}]", "checkpointing.resume=must"]
    with as_rank(), pytest.raises(CheckpointError, match="does not hold the state"):
        asyncio.run(run_sft(load(SFTConfig, overrides=[*model, *data])))


def test_margins_and_centring_change_what_is_learned(home: Path, trained: RewardModelResult) -> None:
    few = ("training.max_steps=6", "validation.interval=null", "checkpointing.export_hf=false")
    losses = {
        name: train(config(home / name, *few, *changes)).validation_loss
        for name, changes in {
            "plain": ("reward_model.margins=false", "reward_model.centering_coefficient=0"),
            "margins": ("reward_model.margins=true", "reward_model.centering_coefficient=0"),
            "centred": ("reward_model.margins=false", "reward_model.centering_coefficient=1"),
        }.items()
    }
    assert len(set(losses.values())) == 3
    assert losses["plain"] == min(value for value in losses.values() if value is not None)


# ---- Bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        (("model.head=language",), "model.head"),
        (("data.oversize=truncate",), "data.oversize"),
        (("data.loss_on=all",), "data.loss_on"),
        (("data.sources.0.format=unpaired",), "data.sources.0.format"),
        (("reward_model.centering_coefficient=-1",), "reward_model.centering_coefficient"),
        (("reward_model.calibration_bins=0",), "reward_model.calibration_bins"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(home: Path, changes: tuple[str, ...], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(home / "refused", *changes)
    assert path in str(caught.value)


def test_records_that_are_not_pairs_are_refused(home: Path) -> None:
    write(home / "labels.jsonl", [{"prompt": "a", "completion": "b", "label": True}])
    chosen = config(home / "refused", f"data.sources=[{{path: {home}/labels.jsonl}}]")
    with as_rank(), pytest.raises(DataError) as caught:
        asyncio.run(run_reward_model(chosen))
    assert "one answer and a label" in str(caught.value)
    assert caught.value.rule is not None
    found = dry_run(chosen)
    assert [problem for problem in found.problems if "one answer and a label" in problem.rule]


def test_a_dry_run_and_a_memory_plan(home: Path) -> None:
    from forge.memory import plan_memory, resolve_run

    facts = dict(dry_run(config(home / "dry")).facts)
    assert "120 samples" in facts["data"]
    assert facts["steps"].startswith(str(LAST))
    plan = plan_memory(resolve_run(config(home / "dry")))
    assert plan.num_parameters == sum(
        tensor.numel()
        for tensor in load_file(home / "runs" / "rm" / "checkpoints" / "hf" / "model.safetensors").values()
    )


def test_the_kind_of_a_file_is_found_by_its_sections() -> None:
    from forge.cli.plan import _KINDS
    from forge.config.command_line import SCHEMAS, detect_kind, program_of

    for file in ("apps/reward_model/tiny.yaml", "apps/rlhf/qwen3_1_7b_reward_model.yaml"):
        found = detect_kind([str(ROOT / file)], [])
        assert (found.kind, found.schema, found.others) == ("reward_model", RewardTrainingConfig, ())
        assert (ROOT / "apps" / program_of(found.kind) / "main.py").is_file()
    assert detect_kind([str(ROOT / "apps/sft/tiny.yaml")], []).kind == "sft"
    assert set(_KINDS) == set(SCHEMAS)


def test_the_guide_shows_what_there_is(trained: RewardModelResult) -> None:
    from forge.config import GRPOConfig
    from forge.rewards import check

    page = (ROOT / "docs" / "guides" / "reward_models.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\$ head -n 1 (\S+)\n(.*)$", page, re.MULTILINE)
    assert [(ROOT / name).read_text().splitlines()[0] for name, _ in shown] == [line for _, line in shown]
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    config = GRPOConfig.model_validate(yaml.safe_load(text))
    check(config.rewards)
    keys = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert set(RewardLossConfig.model_fields) <= set(keys)
    assert {"native", "vllm", "transformers"} <= set(keys)
    metrics = {*trained.validation_metrics}
    for name in re.findall(r"`(?:validation/)?(\w+)`", page.partition("## Accuracy")[2].partition("The Bradley")[0]):
        assert name in metrics or any(each.startswith(name) for each in metrics), name


def test_how_a_program_ends(trained: RewardModelResult) -> None:
    from dataclasses import replace

    from forge.loops.programs import summary

    found = trained.validation_metrics
    judged = f"accuracy {found['accuracy']:.1%}, calibration error {found['ece']:.3f}"
    assert summary(trained) == (
        f"Done after {LAST} steps: loss {trained.loss:.4f}, validation loss {trained.validation_loss:.4f}, {judged}"
    )
    stopped = replace(trained, is_stopped=True, loss=math.nan, validation_loss=None, validation_metrics={})
    assert summary(stopped) == f"Stopped after {LAST} steps: nothing was left to do"
