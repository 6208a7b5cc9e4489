"""The section `episode.agents`: what it holds, what it refuses, and the example of the guide."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from forge.config import GRPOConfig, InvalidConfig, load
from forge.loops.planning import plan_run

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "multi_agent.md"


def agents(text: str) -> Any:
    return load(GRPOConfig, overrides=[f"episode.agents={text}"]).episode.agents


def test_an_agent_is_the_live_policy_and_learns() -> None:
    found = agents(
        "{solver: {}, critic: {learns: false}, judge: {endpoint: {url: 'http://x/v1'}}, old: {model: m}, "
        "first: {version: 0}}"
    )
    assert {name: (each.is_live, each.is_trained, each.has_own_generators) for name, each in found.items()} == {
        "solver": (True, True, False),
        "critic": (True, False, False),
        "judge": (False, False, False),
        "old": (False, False, True),
        "first": (False, False, False),
    }


@pytest.mark.parametrize(
    ("text", "path", "rule"),
    [
        (
            "{a: {model: m, endpoint: {url: 'http://x/v1'}}}",
            "episode.agents.a.endpoint",
            "one of version, adapter, checkpoint",
        ),
        ("{a: {model: m, learns: true}}", "episode.agents.a.learns", "only the live policy is trained"),
        ("{a: {learns: false, advantage: zero_sum}}", "episode.agents.a.advantage", "does not learn"),
        ("{a: {baseline: {decay: 0.5}}}", "episode.agents.a.baseline", "without advantage: baseline"),
        ("{a: {num_replicas: 2}}", "episode.agents.a.num_replicas", "generators of its own"),
        ("{a: {endpoint: {url: 'http://x'}, limits: {max_tokens: 2}}}", "episode.agents.a.limits.max_tokens", "null"),
        ("{a: {endpoint: {url: x}}}", "episode.agents.a.endpoint.url", "http://"),
        ("{a: {advantage: baseline, baseline: {decay: 1.0}}}", "episode.agents.a.baseline.decay", "less than 1"),
        ("{a: {advantage: gae}}", "episode.agents.a.advantage", "group"),
        ("{a: {version: -1}}", "episode.agents.a.version", "greater than or equal to 0"),
        ("{a: {version: 0, model: m}}", "episode.agents.a.model", "one of version, adapter, checkpoint"),
        ("{a: {version: 0, learns: true}}", "episode.agents.a.learns", "only the live policy is trained"),
        ("{a: {version: 0, num_replicas: 2}}", "episode.agents.a.num_replicas", "generators of its own"),
    ],
)
def test_what_is_refused(text: str, path: str, rule: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        agents(text)
    assert path in str(caught.value)
    assert rule in str(caught.value)


def test_the_configuration_of_the_guide_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    yaml, section = re.findall(r"^```yaml\n(.*?)^```$", guide, re.M | re.S)
    program = re.findall(r"^```python\n(.*?)^```$", guide, re.M | re.S)[0]
    (tmp_path / "review.yaml").write_text(yaml)
    (tmp_path / "my_agents.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    plan = plan_run(load(GRPOConfig, files=[tmp_path / "review.yaml"]))
    (tmp_path / "version.yaml").write_text(section)
    bound = load(GRPOConfig, files=[tmp_path / "review.yaml", tmp_path / "version.yaml"])
    assert plan_run(bound).run.num_pinned == 1
    sys.modules.pop("my_agents")
    assert plan.program is not None
    assert plan.program.agents == ("solver", "critic")
    assert plan.config.episode.agents["critic"].limits.max_turns == 2
