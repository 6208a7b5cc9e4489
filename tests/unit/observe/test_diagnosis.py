"""Why runs do not learn: findings in recorded runs, in runs made up for a rule, and none in healthy ones."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forge.cli import main
from forge.errors import DataError
from forge.observe.diagnosis import diagnose, diagnosis_lines, read_evidence
from forge.observe.diagnosis.evidence import noise
from forge.observe.diagnosis.policy import with_jump
from forge.observe.diagnosis.report import RULES

ROOT = Path(__file__).resolve().parents[3]
RECORDED = ROOT / "apps" / "diagnosis" / "recorded"

FOUND = {
    "healthy": [],
    "reward_hacking": ["reward hacking"],
    "memorised": ["memorised prompts"],
    "entropy_collapse": ["entropy collapse"],
    "learning_rate": ["learning rate too high"],
    "stale_data": ["stale data"],
    "cut_off": ["cut off before the answer"],
}


def names(folder: Path) -> list[str]:
    return [finding.name for finding in diagnose(folder).findings]


# ---- Recorded runs -------------------------------------------------------------------------------------------------


def test_all_recorded_runs_are_looked_at() -> None:
    assert {path.name for path in RECORDED.iterdir()} == set(FOUND)


@pytest.mark.parametrize("name", FOUND)
def test_the_cause_of_a_recorded_run_is_found_and_nothing_else(name: str) -> None:
    assert names(RECORDED / name) == FOUND[name]


@pytest.mark.parametrize("name", FOUND)
def test_a_recorded_run_is_small(name: str) -> None:
    files = [path for path in (RECORDED / name).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 300_000
    assert not any("/tmp/" in path.read_text(encoding="utf-8") for path in files)


def test_findings_name_their_evidence() -> None:
    (hacked,) = diagnose(RECORDED / "reward_hacking").findings
    text = "\n".join(hacked.evidence)
    assert "rollout/reward_mean 0.3" in text
    assert "% of 192 prompts" in text
    assert "which decides what is solved" in text
    assert hacked.step == 5
    (where,) = [line for line in hacked.evidence if line.startswith("rollouts/step_000040.jsonl:")]
    path, _, rest = where.partition(":")
    line = (
        (RECORDED / "reward_hacking" / path).read_text(encoding="utf-8").splitlines()[int(rest.partition(":")[0]) - 1]
    )
    assert json.loads(line)["parts"]["right"] == 0.0
    (collapsed,) = diagnose(RECORDED / "entropy_collapse").findings
    assert any("8 times 'The answer is " in line for line in collapsed.evidence)
    (cut,) = diagnose(RECORDED / "cut_off").findings
    assert "ledger.jsonl: 200 groups were dropped since step 0" in cut.evidence
    assert "max_tokens` is 5" in cut.cause


@pytest.mark.parametrize("name", ["reward_hacking", "stale_data", "entropy_collapse", "learning_rate", "memorised"])
def test_the_beginning_of_a_run_is_not_judged(name: str, tmp_path: Path) -> None:
    lines = (RECORDED / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= 2))
    assert names(tmp_path) == []


# ---- Runs made up for one rule ---------------------------------------------------------------------------------------


def write_run(
    folder: Path,
    columns: Mapping[str, Sequence[float]],
    *,
    evaluations: Mapping[int, Mapping[str, float]] | None = None,
    config: str = "",
) -> Path:
    """A run whose metrics are columns, one value for each step, and otherwise those of a dull one."""
    num = len(next(iter(columns.values())))
    plain: dict[str, Sequence[float]] = {
        "rollout/reward_mean": [0.5] * num,
        "rollout/reward_std": [0.5] * num,
        "rollout/num_groups": [32] * num,
        "train/loss": [0.1] * num,
    }
    rows = {step: {} for step in range(num + 1)} | {step: dict(each) for step, each in (evaluations or {}).items()}
    for name, values in (plain | dict(columns)).items():
        for step, value in enumerate(values, start=1):
            rows[step][name] = value
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(line(step, values) for step, values in rows.items() if values))
    (folder / "config.yaml").write_text(config)
    return folder


def line(step: int, values: Mapping[str, float]) -> str:
    odd = {name: repr(value) for name, value in values.items() if not math.isfinite(value)}
    plain = {name: None if name in odd else value for name, value in values.items()}
    return json.dumps({"step": step, "time": 0.0, "values": plain} | ({"nonfinite": odd} if odd else {})) + "\n"


def test_rewards_that_fail_are_found_with_their_message(tmp_path: Path) -> None:
    folder = write_run(tmp_path, {"rollout/num_failed": [20] * 10}, config="rollout: {group_size: 8}\n")
    (folder / "rollouts").mkdir()
    episode = {"step": 3, "group": 1, "text": "?", "failures": {"right": "ValueError: no digit"}}
    (folder / "rollouts" / "step_000003.jsonl").write_text(json.dumps(episode) + "\n")
    (found,) = diagnose(folder).findings
    assert found.name == "failing rewards"
    assert found.evidence == (
        "rollout/num_failed: 200 of 2,560 completions (7.8%)",
        "rollouts/step_000003.jsonl:1: reward 'right': ValueError: no digit",
    )
    assert (
        names(write_run(tmp_path / "few", {"rollout/num_failed": [1] * 10}, config="rollout: {group_size: 8}\n")) == []
    )


def test_numbers_that_are_not_finite_are_found(tmp_path: Path) -> None:
    values = [0.1, 0.1, math.nan, 0.1]
    (found,) = diagnose(write_run(tmp_path, {"train/grad_norm": values, "train/skipped": [0, 0, 1, 0]})).findings
    assert found.name == "non-finite numbers"
    assert found.step == 3
    assert found.evidence == (
        "train/grad_norm is not finite at step 3",
        "train/skipped: 1 of 4 steps were skipped",
    )


def test_a_sampler_that_differs_from_the_trainer_is_found_on_policy_only(tmp_path: Path) -> None:
    columns = {"rollout/staleness_max": [0] * 10, "train/mismatch_outside": [0.05] * 10, "train/mismatch": [0.03] * 10}
    (found,) = diagnose(write_run(tmp_path, columns)).findings
    assert found.name == "sampler mismatch"
    assert found.evidence[1] == "train/mismatch 0.03 (median)"
    assert names(write_run(tmp_path / "late", columns | {"rollout/staleness_max": [1] * 10})) == []
    again = "rollout: {iterations: 4}\n"
    assert names(write_run(tmp_path / "again", columns, config=again)) == []
    assert names(write_run(tmp_path / "bf16", columns | {"train/mismatch_outside": [0.002] * 10})) == []


def test_completions_that_only_get_longer_are_found(tmp_path: Path) -> None:
    truncated = [step / 40 for step in range(40)]
    columns = {"rollout/truncated": truncated, "rollout/length_mean": [100 + 900 * part for part in truncated]}
    (found,) = diagnose(write_run(tmp_path, columns)).findings
    assert found.name == "completions cut off"
    assert "rollout/length_mean 122 -> 899 tokens" in found.evidence
    rising = {"rollout/reward_mean": [0.2 + 0.01 * step for step in range(40)]}
    assert names(write_run(tmp_path / "rising", columns | rising)) == []


def test_a_task_that_is_too_hard_is_not_one_that_is_cut_off(tmp_path: Path) -> None:
    columns = {
        "rollout/reward_mean": [0.001] * 10,
        "rollout/num_groups": [1] * 10,
        "rollout/num_no_signal": [31] * 10,
        "rollout/no_signal/all_zero": [31] * 10,
    }
    folder = write_run(tmp_path, columns)
    (folder / "rollouts").mkdir()
    episode = {"step": 11, "group": 1, "text": "I do not know", "answer": "7", "reward": 0.0, "finish_reason": "stop"}
    (folder / "rollouts" / "fruitless_000011.jsonl").write_text(json.dumps(episode) + "\n")
    (found,) = diagnose(folder).findings
    assert found.name == "nothing to learn from"
    assert "rollouts/fruitless_000011.jsonl:1: answer '7': 'I do not know'" in found.evidence
    solved = {"rollout/reward_mean": [0.99] * 10, "rollout/no_signal/all_zero": [0] * 10}
    assert names(write_run(tmp_path / "solved", columns | solved)) == []


def test_a_reward_that_rises_with_what_is_solved_is_not_hacked(tmp_path: Path) -> None:
    rising = {"rollout/reward_mean": [0.2 + 0.015 * step for step in range(40)]}
    for last, expected in ((0.8, []), (0.3, []), (0.0, ["reward hacking"])):
        evaluations = {
            step: {"evaluation/reward": 0.2 + 0.015 * step, "evaluation/avg@1": value, "evaluation/num_prompts": 200}
            for step, value in ((0, 0.3), (20, 0.35), (40, last))
        }
        assert names(write_run(tmp_path / str(last), rising, evaluations=evaluations)) == expected


# ---- Healthy runs ----------------------------------------------------------------------------------------------------


def healthy_run(seed: int) -> tuple[dict[str, list[float]], dict[int, dict[str, float]]]:
    """The metrics of a run that learns: binomial rewards of few or many groups, of one or of varied difficulty, entropy
    and gradient norms that stray and spike, synchronous or not."""
    rng = random.Random(seed)
    num, groups, size = rng.choice((10, 25, 60, 200)), rng.choice((8, 16, 64)), 8
    start, end, rate = rng.uniform(0.02, 0.6), rng.uniform(0.6, 1.0), rng.uniform(0.5, 4.0)
    staleness, entropy = rng.choice((0, 0, 1, 2)), rng.uniform(0.1, 1.5)
    columns: dict[str, list[float]] = {}
    evaluations: dict[int, dict[str, float]] = {}
    for step in range(num + 1):
        solved = end - (end - start) * math.exp(-rate * step / num * 3)
        if step % max(1, num // 8) == 0:
            share = sum(rng.random() < solved for _ in range(200)) / 200
            evaluations[step] = {"evaluation/reward": share, "evaluation/avg@1": share, "evaluation/num_prompts": 200}
        if step == 0:
            continue
        found = [sum(rng.random() < p for _ in range(size)) / size for p in difficulties(rng, solved, groups)]
        mean = sum(found) / groups
        zero, full = sum(each == 0 for each in found), sum(each == 1 for each in found)
        values = {
            "rollout/reward_mean": mean,
            "rollout/reward_std": math.sqrt(mean * (1 - mean)),
            "rollout/num_groups": groups - zero - full,
            "rollout/num_no_signal": zero + full,
            "rollout/no_signal/all_zero": zero,
            "rollout/no_signal/all_equal": full,
            "rollout/epoch": step // 20,
            "rollout/truncated": rng.uniform(0, 0.1),
            "rollout/staleness_mean": staleness,
            "rollout/staleness_max": staleness,
            "train/entropy": entropy * (1.1 - solved) * rng.lognormvariate(0, 0.3) + 0.01,
            "train/grad_norm": rng.lognormvariate(0, 0.5) * (20 if rng.random() < 0.03 else 1),
            "train/approx_kl": rng.lognormvariate(-4.5, 1.0) if staleness else 0.0,
            "train/mismatch_outside": rng.uniform(0, 0.1) if staleness else 0.001,
            "train/loss": rng.gauss(0, 0.01),
        }
        for name, value in values.items():
            columns.setdefault(name, []).append(value)
    return columns, evaluations


def difficulties(rng: random.Random, solved: float, groups: int) -> list[float]:
    spread = rng.choice((100.0, 2.0))
    return [rng.betavariate(spread * solved + 1e-3, spread * (1 - solved) + 1e-3) for _ in range(groups)]


@pytest.mark.parametrize("seed", range(150))
def test_a_healthy_run_has_no_findings(seed: int, tmp_path: Path) -> None:
    columns, evaluations = healthy_run(seed)
    assert names(write_run(tmp_path, columns, evaluations=evaluations)) == []


# ---- The command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(RECORDED / "stale_data")
    assert main(["diagnose", folder]) == 0
    text = capsys.readouterr().out
    assert "STALE DATA (from step 4 on)" in text
    assert max(map(len, text.splitlines()[1:])) <= 100
    assert main(["diagnose", folder, "--json"]) == 0
    plain: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert plain["num_steps"] == 25
    assert [each["name"] for each in plain["findings"]] == ["stale data"]
    assert set(plain["findings"][0]) == {"name", "symptom", "evidence", "cause", "repair", "step"}


def test_a_healthy_run_is_not_called_proven(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(RECORDED / "healthy")]) == 0
    assert "No known problem was found. That is no proof that there is none." in capsys.readouterr().out


def test_every_rule_hides_only_rules_that_follow() -> None:
    order = list(RULES)
    for rule, hidden in RULES.items():
        assert all(order.index(rule) < order.index(each) for each in hidden)


def test_a_folder_that_cannot_be_diagnosed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        diagnose(tmp_path)
    assert caught.value.path == str(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_text(line(1, {"train/loss": 1.0}))
    with pytest.raises(DataError, match="it has no rewards") as caught:
        diagnose(tmp_path)
    assert caught.value.rule == "a run of reinforcement learning"
    assert caught.value.repair == "use `forge report`, which shows runs of every kind"
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="it has no step and no evaluation yet") as caught:
        diagnose(tmp_path)
    assert caught.value.repair == "wait for its first step"


def test_the_error_names_the_runs_of_a_folder(tmp_path: Path) -> None:
    for name in ("a", "group/b"):
        write_run(tmp_path / name, {"rollout/reward_mean": [0.5]})
    with pytest.raises(DataError) as caught:
        diagnose(tmp_path)
    assert caught.value.repair == f"give one of the runs in it: {tmp_path / 'a'}, {tmp_path / 'group' / 'b'}"
    with pytest.raises(DataError) as caught:
        diagnose(tmp_path / "a" / "metrics.jsonl")
    assert caught.value.path == str(tmp_path / "a" / "metrics.jsonl")
    assert caught.value.repair == f"give the folder: {tmp_path / 'a'}"


def test_files_that_are_damaged_are_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path, {"rollout/reward_mean": [0.5] * 3}, config="run: {name: a")
    with pytest.raises(DataError, match="configuration of this run cannot be read") as caught:
        diagnose(folder)
    assert str(caught.value.path).startswith(str(folder / "config.yaml"))
    assert "move it away" in str(caught.value.repair)
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"step": 2', '"step: 2'))
    with pytest.raises(DataError) as caught:
        diagnose(folder)
    assert caught.value.path == f"{metrics}:2"


def test_a_run_that_has_only_evaluated_is_not_judged(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(line(0, {"evaluation/reward": 0.2, "evaluation/avg@1": 0.2}))
    assert next(iter(diagnosis_lines(diagnose(tmp_path)))) == f"{tmp_path}: 0 steps"
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", FOUND)
def test_no_metric_is_taken_for_granted(name: str) -> None:
    whole = read_evidence(RECORDED / name)
    for missing in set(whole.columns) - {"rollout/reward_mean"}:  # without that one it is not a step
        columns = {each: column for each, column in whole.columns.items() if each != missing}
        found = [rule(replace(whole, columns=columns)) for rule in RULES]
        assert name != "healthy" or not any(found), missing
    rewards = {each: column for each, column in whole.columns.items() if each == "rollout/reward_mean"}
    assert len([rule(replace(whole, columns=rewards)) for rule in RULES]) == len(RULES)


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan, 1e300])
def test_metrics_with_extreme_values_are_read(odd: float, tmp_path: Path) -> None:
    text = (RECORDED / "healthy" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    lines = []
    for each in map(json.loads, text):
        values = {name: odd if each["step"] in (20, 40) else value for name, value in each["values"].items()}
        lines.append(line(each["step"], values))
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert ("non-finite numbers" in names(tmp_path)) == (not math.isfinite(odd))


def test_a_policy_of_which_nothing_is_finite_has_not_collapsed(tmp_path: Path) -> None:
    broken = [0.3] * 10 + [math.nan] * 30
    columns = {"train/entropy": broken, "train/grad_norm": broken, "rollout/no_signal/all_zero": [20] * 40}
    assert names(write_run(tmp_path, columns)) == ["non-finite numbers"]


def test_the_warm_up_of_a_critic_is_not_a_policy_without_entropy(tmp_path: Path) -> None:
    folder = write_run(tmp_path, {"train/loss": [0.1] * 40})
    lines = [json.loads(each) for each in (folder / "metrics.jsonl").read_text().splitlines()]
    for each in lines[5:]:
        each["values"] |= {"train/entropy": 0.3, "train/grad_norm": 0.5}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert names(folder) == []
    assert read_evidence(folder).column("train/entropy") == (0.3,) * 40


def test_the_noise_of_a_growing_run_is_that_of_all_its_steps() -> None:
    values = [random.Random(seed).gauss(0, 1) for seed in range(50)]
    found = noise(values[:3])
    for place in range(4, 51):
        found = with_jump(found, values[place - 2 : place], num_jumps=place - 1)
        assert found == pytest.approx(noise(values[:place]))


def test_the_end_of_a_long_ledger_is_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path, {"rollout/reward_mean": [0.5] * 3})
    learned = json.dumps({"step": 3, "group": 0, "outcome": "trained", "prompt": "p" * 900}) + "\n"
    dropped = json.dumps({"step": 4, "group": 1, "outcome": "no_signal"}) + "\n"
    (folder / "ledger.jsonl").write_text(dropped + learned * 6000 + dropped * 7)
    assert read_evidence(folder).num_dropped_at_end == 7  # and not the first line, which lies before what is read


def test_evaluations_with_another_number_of_samples_are_shown(tmp_path: Path) -> None:
    metrics = [{"evaluation/reward": 0.2, "evaluation/avg@1": 0.2}, {"evaluation/reward": 0.6, "evaluation/avg@4": 0.6}]
    folder = write_run(tmp_path, {"rollout/reward_mean": [0.5] * 9}, evaluations={0: metrics[0], 9: metrics[1]})
    assert next(iter(diagnosis_lines(diagnose(folder)))).endswith("evaluation/avg@4 20.0% -> 60.0%")


def test_a_run_without_configuration_and_rollouts_is_diagnosed_from_its_metrics(tmp_path: Path) -> None:
    for name in ("stale_data", "learning_rate", "entropy_collapse", "memorised"):
        metrics = (RECORDED / name / "metrics.jsonl").read_text(encoding="utf-8")
        (tmp_path / "metrics.jsonl").write_text(metrics[: len(metrics) - 40])  # the last line was cut off by a kill
        assert names(tmp_path) == FOUND[name]
    assert list(diagnosis_lines(diagnose(tmp_path)))


def test_the_command_starts_without_torch() -> None:
    folder = str(RECORDED / "healthy")
    code = f"import sys; from forge.cli import main; main(['diagnose', {folder!r}]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
