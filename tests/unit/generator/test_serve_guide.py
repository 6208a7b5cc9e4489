"""What docs/guides/serve.md says about operation is what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge.cli.serve_weights import find_weights
from forge.config import PolicyConfig
from forge.errors import ConfigError
from forge.generator.openai.access_log import AccessLog
from forge.generator.openai.prometheus import Metric
from forge.generator.openai.requests_open import RequestRecord
from forge.generator.openai.server_metrics import ServerMetrics
from forge.trainer.checkpoint_folder import CheckpointInfo, checkpoint_name, write_record

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "serve.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


def section(title: str) -> str:
    return GUIDE.read_text(encoding="utf-8").split(f"### {title}\n")[1].split("\n### ")[0].split("\n## ")[0]


def test_every_metric_is_listed() -> None:
    exported = {metric.name for metric in vars(ServerMetrics()).values() if isinstance(metric, Metric)}
    assert set(re.findall(r"`(forge_\w+)`", section("Metrics"))) == exported


def test_the_line_of_the_access_log(capsys: pytest.CaptureFixture[str]) -> None:
    AccessLog("stdout").write(RequestRecord("id", "/v1/models"))
    (shown,) = blocks("json")
    assert list(json.loads(shown)) == list(json.loads(capsys.readouterr().out))


def test_the_keys_exist() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    keys = set(re.findall(r"`(serve\.\w+|generator\.\w+|workers\.generator\.\w+)`", text))
    keys |= set(re.findall(r" (serve\.\w+)=", text))
    assert {"serve.drain_s", "serve.update_mode", "serve.max_requests"} <= keys
    for key in keys:
        found: Any = PolicyConfig
        for part in key.split("."):
            assert part in found.model_fields, key
            found = found.model_fields[part].annotation


def test_the_probes_of_the_examples() -> None:
    (pod,) = [yaml.safe_load(block) for block in blocks("yaml") if "Kubernetes" in block]
    (container,) = pod["containers"]
    paths = {name: container[name]["httpGet"]["path"] for name in container if name.endswith("Probe")}
    assert paths == {"livenessProbe": "/health", "readinessProbe": "/ready", "startupProbe": "/ready"}
    drain_s = int(re.findall(r"serve\.drain_s=(\d+)", " ".join(container["command"]))[0])
    assert pod["terminationGracePeriodSeconds"] > drain_s
    (unit,) = blocks("ini")
    assert "ExecReload=/bin/kill -HUP $MAINPID" in unit
    assert int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0]) > int(re.findall(r"drain_s=(\d+)", unit)[0])


# ---- Where new weights are -------------------------------------------------------------------------------------------


def save(folder: Path, *, step: int, sequence: int) -> Path:
    place = folder / checkpoint_name(step)
    place.mkdir(parents=True)
    write_record(CheckpointInfo(place, step, sequence, "2026-11-16T00:00:00Z", None, 1, "2.0"), folder=place)
    return place


def model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    return folder


def touch_later(path: Path, than: Path) -> None:
    import os

    later = than.stat().st_mtime_ns + 1_000_000_000
    os.utime(path, ns=(later, later))


def test_the_newest_weights_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "sums"
    with pytest.raises(ConfigError) as caught:
        find_weights(str(run))
    assert caught.value.path == "serve.update_from"
    first = save(run / "checkpoints", step=10, sequence=1)
    assert find_weights(str(run)).path == first
    assert find_weights(str(first)).step == 10
    second = save(run / "checkpoints", step=5, sequence=2)  # after going back
    touch_later(second / "checkpoint.json", first / "checkpoint.json")
    found = find_weights(str(run))
    assert (found.path, found.step) == (second, 5)
    final = model(run / "checkpoints" / "hf")
    touch_later(final / "model.safetensors", second / "checkpoint.json")
    found = find_weights(str(run))
    assert (found.path, found.step) == (final, None), "the run has ended"
    assert found.stamp == find_weights(str(final)).stamp
    touch_later(final / "model.safetensors", final / "model.safetensors")
    assert found.stamp != find_weights(str(final)).stamp, "it was written again"
