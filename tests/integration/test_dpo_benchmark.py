"""The benchmark of preference optimisation gives both sides the same tokens, and compares what they report."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forge.config import PreferenceConfig, load
from forge.loops.preflight import prepare_supervised

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    """The benchmark as a module."""
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("dpo_benchmark", FOLDER / "dpo.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("sft", None)


def test_both_sides_are_given_the_same_tokens_in_the_same_order(benchmark: Any, tmp_path: Path) -> None:
    plan = benchmark.QUICK
    found = benchmark.prepare(tmp_path, plan)
    records = [json.loads(line) for line in (tmp_path / "pairs.ids.jsonl").read_text().splitlines()]
    assert len(records) == found["pairs"] == plan.num_steps * plan.num_pairs
    given = iter(records)
    with prepare_supervised(load(PreferenceConfig, overrides=benchmark.settings_of(plan, tmp_path))) as prepared:
        for batch in prepared.loaders.train:
            samples = list(batch.samples())
            assert len(samples) == 2 * plan.num_pairs
            for chosen, rejected in zip(samples[::2], samples[1::2], strict=True):
                record = next(given)
                for sample, name in ((chosen, "chosen_ids"), (rejected, "rejected_ids")):
                    tokens = record["prompt_ids"] + record[name]
                    assert sample.token_ids.tolist()[: len(tokens)] == tokens
                    assert sample.loss_weights.tolist()[: len(tokens)] == [
                        *[0.0] * len(record["prompt_ids"]),
                        *[1.0] * len(record[name]),
                    ]
                    assert len(sample) - len(tokens) <= 1, "what the template puts behind an answer"
    assert next(given, None) is None


def test_ratios_and_losses_are_compared_step_by_step(benchmark: Any) -> None:
    def side(name: str, seconds: list[float], **kept: Any) -> Any:
        windows = [{"tokens": 100, "seconds": each, "cpu_seconds": each, **kept} for each in seconds]
        return benchmark.Side(name, None, Path("log"), windows=windows)

    ours, peer = side("ours", [1.0, 2.0], losses=[0.5, 0.4]), side("TRL", [3.0, 4.0])
    peer.logs = [{"loss": 0.5}, {"loss": 0.41}]
    row = benchmark.compare(ours, peer, {each.name: benchmark.losses_of(each)[:2] for each in (ours, peer)})
    assert row["ratio"] == pytest.approx(2.5)
    assert row["met"] is True
    assert row["largest_difference"] == pytest.approx(0.01)
    assert row["compared_steps"] == 2
