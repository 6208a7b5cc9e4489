"""What a report takes from a run's folder: whole runs, runs that go on, and runs that were killed."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from forge.errors import DataError, OptionError
from forge.observe import JsonlSink
from forge.observe.report import read_run
from forge.observe.report.charts import choose_charts
from forge.observe.report.headline import facts, headline
from forge.observe.report.page import describe
from forge.observe.report.samples import read_samples
from run_folders import make_grpo_run, make_sft_run, write_metrics, write_other_rollouts, write_rollouts


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_grpo_run(tmp_path_factory.mktemp("runs") / "arithmetic-grpo", num_steps=30)


def titles(folder: Path) -> dict[str, list[str]]:
    sections: dict[str, list[str]] = {}
    for chart in choose_charts(read_run(folder, max_samples=0).metrics):
        sections.setdefault(chart["section"], []).append(chart["title"])
    return sections


def test_a_whole_run_is_read(whole: Path) -> None:
    run = read_run(whole, max_samples=1000)
    assert run.metrics.steps == tuple(range(1, 31))
    assert run.metrics.last_step == run.metrics.num_steps == 30
    evaluated = [step for step, v in zip(run.metrics.steps, run.metrics.columns["evaluation/reward"], strict=True) if v]
    assert evaluated == [1, 10, 20, 30]
    assert run.setting("rollout.group_size") == 8
    assert run.setting("rollout.group_size.no.such") is None
    assert run.ledger == {"trained": 240, "no_signal": 3}
    assert len(run.samples.items) == run.samples.num_samples == 30 * 2 * 4
    assert run.notes == ()


def test_the_charts_of_a_policy_and_what_no_chart_shows(whole: Path) -> None:
    assert titles(whole) == {
        "Learning": ["Reward", "Held-out evaluation", "Rewards by part"],
        "Policy": ["KL divergence", "Entropy", "Importance ratio"],
        "Optimizer": ["Policy loss", "Gradient norm", "Learning rate"],
        "Rollouts": ["Completion length", "Staleness", "Groups that taught nothing", "Truncated"],
        "Speed": [
            "Tokens per second",
            "Samples per second",
            "Where the time goes",
            "Weight synchronisation",
            "Weights from other hosts",
            "Step time",
        ],
        "More": ["evaluation/num_prompts", "runtime/queue_depth"],
    }
    charts = {chart["title"]: chart for chart in choose_charts(read_run(whole, max_samples=0).metrics)}
    assert charts["Reward"]["series"] == [
        {"key": "rollout/reward_mean", "label": "mean", "band": "rollout/reward_std"},
    ]
    assert [one["label"] for one in charts["Held-out evaluation"]["series"]] == ["reward", "pass@1", "pass@4"]
    assert [one["label"] for one in charts["Rewards by part"]["series"]] == ["exact", "format"]
    assert charts["Where the time goes"]["stack"]
    assert charts["KL divergence"]["log"]


def test_a_run_without_evaluation_and_rollouts(tmp_path: Path) -> None:
    write_metrics(tmp_path, 5, evaluate=False)
    assert titles(tmp_path)["Learning"] == ["Reward", "Rewards by part"]
    run = read_run(tmp_path, max_samples=10)
    assert (run.samples.items, run.samples.num_samples, run.ledger, run.config_text, run.notes) == ((), 0, {}, "", ())


def test_a_fine_tuning_run_shows_its_losses(tmp_path: Path) -> None:
    folder = make_sft_run(tmp_path)
    assert titles(folder) == {
        "Learning": ["Loss"],
        "Optimizer": ["Gradient norm", "Learning rate"],
        "Speed": ["Tokens per second"],
        "More": ["validation/best"],
    }
    run = read_run(folder, max_samples=10)
    assert run.metrics.nonfinite == {"train/loss": (40,)}
    assert run.metrics.columns["train/loss"][39] is None
    assert [tile["label"] for tile in headline(run.metrics)] == ["Validation loss", "Training loss", "Training"]


def test_the_head_says_where_the_run_began_and_where_it_is(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step in range(1, 5):
        sink.write(step, {"rollout/reward_mean": step / 10, "evaluation/reward": 0.25 * step, "train/loss": 1.0})
    sink.close()
    shown = [
        (tile["label"], tile["value"], tile["detail"]) for tile in headline(read_run(tmp_path, max_samples=0).metrics)
    ]
    assert shown == [("Held-out reward", "1", "from 0.25"), ("Reward", "0.4", "from 0.1")]


def test_the_head_says_what_was_run(whole: Path, tmp_path: Path) -> None:
    run = read_run(whole, max_samples=0)
    assert ("algorithm", "dapo") in facts(run)
    assert ("staleness bound", "2") in facts(run)
    assert not any(label == "batch size" for label, _ in facts(run))


def test_evaluations_and_groups_that_taught_nothing_are_among_the_samples(tmp_path: Path) -> None:
    write_metrics(tmp_path, 2)
    write_rollouts(tmp_path, [1, 2])
    write_other_rollouts(tmp_path, [1, 2])
    samples = read_run(tmp_path, max_samples=100).samples
    assert (samples.num_samples, samples.num_steps) == (2 * (8 + 4 + 4), 2)
    seen = [(item["step"], item["outcome"]) for item in samples.items]
    assert seen == [
        (step, outcome)
        for step in (1, 2)
        for outcome, count in (("no_signal", 4), ("trained", 8), ("evaluation", 4))
        for _ in range(count)
    ]
    assert {item["reason"] for item in samples.items} == {"", "all rewards are 0"}
    few = read_run(tmp_path, max_samples=16)
    assert Counter(item["outcome"] for item in few.samples.items) == {"trained": 8, "no_signal": 4, "evaluation": 4}
    assert "16 of 32 samples are shown, from 2 of 2 steps; more with --max-samples." in few.notes


def test_a_run_without_a_step_is_shown_by_what_it_sampled(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(DataError, match="no metrics yet"):
        read_run(tmp_path, max_samples=10)
    write_other_rollouts(tmp_path, [1])
    run = read_run(tmp_path, max_samples=10)
    assert (run.metrics.steps, run.metrics.last_step, run.metrics.last_time) == ((), 0, None)
    assert (len(run.samples.items), choose_charts(run.metrics), headline(run.metrics)) == (8, [], [])
    assert run.notes == ("The run has not finished a step, so there are no curves.",)


def test_half_a_last_line_of_a_killed_run_is_left_out(tmp_path: Path) -> None:
    write_metrics(tmp_path, 4)
    write_rollouts(tmp_path, [1, 2])
    for path in (tmp_path / "metrics.jsonl", tmp_path / "rollouts" / "step_000002.jsonl"):
        path.write_bytes(path.read_bytes()[:-40])
    (tmp_path / "rollouts" / ".step_000003.jsonl.part").write_text('{"step": 3')
    (tmp_path / "ledger.jsonl").write_text('{"outcome": "trained"}\n{"outco')
    run = read_run(tmp_path, max_samples=100)
    assert run.metrics.last_step == 3
    assert [item["step"] for item in run.samples.items] == [1] * 8 + [2] * 7
    assert run.ledger == {"trained": 1}
    assert run.notes == ()


def test_lines_that_cannot_be_read_are_counted_and_said(tmp_path: Path) -> None:
    write_metrics(tmp_path, 2)
    write_rollouts(tmp_path, [1])
    (tmp_path / "config.yaml").write_text("run: [")
    (tmp_path / "ledger.jsonl").write_text('{"outcome": "trained"}\nnonsense\n{"step": 1}\n')
    with open(tmp_path / "rollouts" / "step_000001.jsonl", "ab") as file:
        file.write(b'not json\n[1]\n{"step": 1, "group": 1, "index": "x"}\n')
    run = read_run(tmp_path, max_samples=100)
    assert len(run.samples.items) == 8
    assert run.config_text == "run: ["
    assert run.notes == (
        "config.yaml could not be read in full, so the run is described without it.",
        "2 lines of ledger.jsonl could not be read and are not counted.",
        "3 lines of rollouts could not be read and are left out.",
    )


def test_changes_while_the_run_ran_are_said(tmp_path: Path) -> None:
    write_metrics(tmp_path, 2)
    change = {
        "time": "t",
        "step": 3,
        "key": "training.learning_rate",
        "before": 1e-3,
        "after": 5e-4,
        "by": "forge control",
    }
    hosts = change | {"step": 4, "key": "launcher.hosts", "before": ["a"], "after": ["a", "b"], "by": "forge hosts"}
    (tmp_path / "runtime_changes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (change, hosts)))
    with open(tmp_path / "runtime_changes.jsonl", "a") as file:
        file.write('{"step": 5}\n{"step')
    run = read_run(tmp_path, max_samples=0)
    assert run.changes == (
        "after step 3: training.learning_rate 0.001 → 0.0005 (forge control)",
        'after step 4: launcher.hosts ["a"] → ["a", "b"] (forge hosts)',
    )
    assert run.notes == ("1 lines of runtime_changes.jsonl could not be read.",)
    assert describe(run, made_at=0.0)["changes"] == run.changes


def test_a_long_run_has_points_that_are_means(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", clock=lambda: 1.0)
    for step in range(1, 4001):
        sink.write(step, {"train/loss": math.inf if step == 5 else float(step)})
    sink.close()
    figures = read_run(tmp_path, max_samples=0).metrics
    assert (figures.stride, figures.num_steps, figures.last_step) == (3, 4000, 4000)
    assert figures.steps[:3] == (3, 6, 9)
    assert figures.steps[-1] == 4000
    assert figures.columns["train/loss"][:2] == (2.0, 5.0)
    assert figures.nonfinite == {"train/loss": (6,)}
    assert read_run(tmp_path, max_samples=0).notes == ("Each point of a curve is the mean of 3 steps.",)


# ---- Which samples are chosen ---------------------------------------------------------------------------------------


def places(folder: Path, max_samples: int) -> tuple[list[tuple[int, int, int]], tuple[str, ...]]:
    samples = read_run(folder, max_samples=max_samples).samples
    return [(item["step"], item["group"], item["index"]) for item in samples.items], samples.notes


def test_samples_are_whole_groups_spread_over_the_steps(whole: Path) -> None:
    chosen, notes = places(whole, 43)
    assert len(chosen) == 40
    assert set(Counter(group for _, group, _ in chosen).values()) == {4}
    steps = sorted({step for step, _, _ in chosen})
    assert (len(steps), steps[0], steps[-1]) == (10, 1, 30)
    assert max(later - earlier for earlier, later in pairwise(steps)) <= 4
    assert {index for _, _, index in chosen} == {0, 1, 2, 3}
    assert notes == ("40 of 240 samples are shown, from 10 of 30 steps; more with --max-samples.",)


def test_where_no_group_fits_the_rewards_are_spread(whole: Path) -> None:
    samples = read_run(whole, max_samples=2).samples
    assert len(samples.items) == 2
    assert {item["step"] for item in samples.items} == {30}
    whole_group = [json.loads(line) for line in (whole / "rollouts" / "step_000030.jsonl").read_text().splitlines()]
    rewards = [fields["reward"] for fields in whole_group if fields["group"] == samples.items[0]["group"]]
    assert {item["reward"] for item in samples.items} == {min(rewards), max(rewards)}


def test_no_samples_are_read_where_none_are_wanted(whole: Path) -> None:
    assert places(whole, 0) == ([], ("0 of 240 samples are shown, from 0 of 30 steps; more with --max-samples.",))


def test_prompts_are_kept_once(whole: Path) -> None:
    samples = read_run(whole, max_samples=1000).samples
    assert len(samples.prompts) == 60
    assert samples.prompts[samples.items[0]["prompt"]][1]["role"] == "user"


def line_of(**changes: Any) -> str:
    fields = {"step": 1, "group": 0, "index": 0, "text": "ab", "token_ids": [1, 2], "pieces": ["a", "b"]}
    return json.dumps(fields | {"logprobs": [-0.123456, -1], "reward": 1, "prompt": "p"} | changes) + "\n"


def test_long_completions_are_cut_and_it_is_said(tmp_path: Path) -> None:
    def long(size: int) -> dict[str, Any]:
        return {"token_ids": [7] * size, "pieces": ["x"] * size, "logprobs": [-1.0] * size, "text": "x" * size}

    lines = [line_of(), line_of(index=1, **long(900)), line_of(index=2, **long(5000))]
    (tmp_path / "step_000001.jsonl").write_text("".join(lines))
    samples = read_samples(tmp_path, max_samples=10, max_tokens=1002)
    kept = [(len(item["pieces"]), len(item["ids"]), len(item["sampler"]), item["numTokens"]) for item in samples.items]
    assert kept == [(2, 2, 2, 2), (500, 500, 500, 900), (500, 500, 500, 5000)]
    assert samples.notes == ("Of long completions only the first 500 tokens are shown.",)
    assert read_samples(tmp_path, max_samples=10, max_tokens=5902).notes == ()


def test_what_does_not_fit_its_tokens_is_not_shown_with_them(tmp_path: Path) -> None:
    write_metrics(tmp_path, 1)
    (tmp_path / "rollouts").mkdir()
    odd = line_of(pieces=["a"], logprobs=[-1], versions=[[0, 0, 2], "x"], reward=True, parts=[], failures={"r": 3})
    text = line_of() + odd.replace('"index": 0', '"index": 1') + line_of(index=2, prompt={"a": 1}, answer=4)
    (tmp_path / "rollouts" / "step_000001.jsonl").write_text(text)
    plain, odd_one, other = read_run(tmp_path, max_samples=10).samples.items
    assert (plain["sampler"], plain["trainer"], plain["text"]) == ([-0.1235, -1.0], None, None)
    assert (odd_one["pieces"], odd_one["text"], odd_one["sampler"], odd_one["reward"]) == ([], "ab", None, None)
    assert (odd_one["versions"], odd_one["parts"], odd_one["failures"]) == ([[0, 0, 2]], {}, {"r": "3"})
    assert other["answer"] == "4"


# ---- What is refused ------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_run(tmp_path / "missing", max_samples=1)
    assert caught.value.path == str(tmp_path / "missing")
    assert caught.value.rule == "the folder of a run, <run.output_dir>/<run.name>"
    assert caught.value.repair == "check the path"


def test_a_folder_without_figures_names_the_runs_inside_it(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_run(tmp_path, max_samples=1)
    assert caught.value.path == str(tmp_path / "metrics.jsonl")
    assert caught.value.rule == "a run's folder has a metrics.jsonl"
    assert caught.value.repair == "run with metrics.jsonl set to true"
    (tmp_path / "mine").mkdir()
    write_metrics(tmp_path / "mine", 1)
    with pytest.raises(DataError, match="give one of the runs in it: mine"):
        read_run(tmp_path, max_samples=1)


def test_a_run_before_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "ti')
    with pytest.raises(DataError) as caught:
        read_run(tmp_path, max_samples=1)
    assert caught.value.path == str(tmp_path / "metrics.jsonl")
    assert caught.value.rule == "at least one whole line"
    assert caught.value.repair == "wait for the end of its first step"


def test_a_negative_number_of_samples(tmp_path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        read_run(tmp_path, max_samples=-1)
    assert (caught.value.path, caught.value.value, caught.value.rule) == ("--max-samples", -1, "0 or more")
    assert caught.value.repair == "leave it out, or give 0 for a report without samples"
