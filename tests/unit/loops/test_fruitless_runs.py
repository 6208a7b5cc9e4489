"""What a run leaves behind when it learns nothing, or ends before its time: evidence that can be read."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from forge.config import GRPOConfig, Sampling
from forge.errors import CheckpointError, NonFiniteError, RolloutError
from forge.loops.run_paths import run_dir
from forge.loops.stopping import Stop
from forge.rollout.ledger import check_ledger
from forge.types import Batch, Completion, Score, StepResult, Task
from grpo_runs import config, ledger, metrics
from grpo_workers import StandInPolicy, StandInRewards, StandInTrainer, make_loop, number_of, run_loop

NO_STEP = ("rollout.max_no_signal_groups=20", "record.report=true")


class Raising(StandInRewards):
    """Fails on every completion, as a function that raises does: the message differs from call to call."""

    async def score(self, prompt: Task, completions: Sequence[Completion]) -> list[Score]:
        why = f"ValueError: no answer in {prompt.id} (my_rewards.py:3)"
        return [Score(0.0, {"mine": 0.0}, {"mine": why}, unshaped=0.0) for _ in completions]


def zero() -> StandInRewards:
    return StandInRewards(lambda completion: 0.0)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rollouts(chosen: GRPOConfig) -> list[str]:
    return sorted(path.name for path in (run_dir(chosen) / "rollouts").iterdir())


def report_data(chosen: GRPOConfig) -> dict[str, Any]:
    page = (run_dir(chosen) / "report.html").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    return data


@pytest.mark.parametrize("rule", ["drop", "replace"])
def test_rewards_that_are_always_0_leave_evidence(rule: str, tmp_path: Path) -> None:
    chosen = config(tmp_path / "run", *NO_STEP, f"rollout.no_signal={rule}", "evaluation.fraction=0.1")
    trainer = StandInTrainer()
    with pytest.raises(RolloutError, match="20 groups in a row brought nothing to learn from") as caught:
        run_loop(chosen, trainer, rewards=zero())
    assert caught.value.value == "20 groups: all rewards are 0 (20 groups)"

    # The advice is true: the file is there, and shows what the policy said.
    path = run_dir(chosen) / "rollouts" / "fruitless_000001.jsonl"
    assert str(caught.value.repair).startswith(f"look at {path}; the task is too hard")
    found = lines(path)
    assert {(line["step"], line["outcome"], line["reason"]) for line in found} == {
        (1, "no_signal", "all rewards are 0")
    }
    written = sorted({line["group"] for line in found})
    assert len(written) == 9, "the first eight and the sixteenth: a run that learns nothing does not fill the disk"
    assert len(found) == 9 * 3
    assert rollouts(chosen) == ["evaluation_000000.jsonl", "fruitless_000001.jsonl"]
    answers = lines(run_dir(chosen) / "rollouts" / "evaluation_000000.jsonl")
    assert {line["outcome"] for line in answers} == {"evaluation"}
    assert len({line["group"] for line in answers}) == 4

    # The ledger has every group, and the checkpoint has them pending: a resumed run rolls them out again.
    assert Counter((line.step, line.outcome) for line in ledger(chosen)) == {(1, "no_signal"): 20}
    state = trainer.saved[-1]["buffer"]
    assert {line.group for line in ledger(chosen)} <= set(state["pending"])

    data = report_data(chosen)
    assert data["ledger"] == {"no_signal": 20}
    assert {item["reason"] for item in data["samples"]["items"]} == {"", "all rewards are 0"}


def test_a_run_that_learned_nothing_resumes_and_every_group_is_settled_once(tmp_path: Path) -> None:
    """With a reward that was corrected: what was dropped before comes again."""
    chosen = config(tmp_path / "run", *NO_STEP)
    trainer, later = StandInTrainer(), StandInTrainer()
    with pytest.raises(RolloutError):
        run_loop(chosen, trainer, rewards=zero())
    later.found = trainer.saved[-1]
    assert run_loop(chosen, later).step == 6
    state = later.saved[-1]["buffer"]
    check_ledger(ledger(chosen), pending=state["pending"], next_number=state["next_number"])
    assert {line.outcome for line in ledger(chosen)} == {"trained"}
    discarded = (run_dir(chosen) / "ledger.discarded.jsonl").read_text().splitlines()
    assert len(discarded) == 20
    assert "fruitless_000001.jsonl" not in rollouts(chosen)
    assert (run_dir(chosen) / "rollouts" / "discarded" / "fruitless_000001.jsonl").is_file()


@pytest.mark.parametrize(("on_error", "outcome"), [("zero", "no_signal"), ("skip", "failed")])
def test_a_reward_that_always_raises_is_named(on_error: str, outcome: str, tmp_path: Path) -> None:
    chosen = config(tmp_path / "run", *NO_STEP, f"rewards.on_error={on_error}")
    with pytest.raises(RolloutError) as caught:
        run_loop(chosen, StandInTrainer(), rewards=Raising())
    assert str(caught.value.value).startswith(
        "20 groups: a reward failed (20 groups); rewards failed on 60 of 60 completions, "
        "most often (60 times) 'mine': ValueError: no answer in "
    )
    assert "; correct the reward" in str(caught.value.repair)
    assert "too hard" not in str(caught.value)
    (path,) = (run_dir(chosen) / "rollouts").iterdir()
    assert {(line["outcome"], line["reason"]) for line in lines(path)} == {(outcome, "a reward failed")}
    assert all("ValueError" in line["failures"]["mine"] for line in lines(path))
    assert {line.outcome for line in ledger(chosen)} == {outcome}


def test_without_records_the_advice_names_no_file(tmp_path: Path) -> None:
    chosen = config(tmp_path / "run", *NO_STEP, "record.rollouts=none")
    with pytest.raises(RolloutError) as caught:
        run_loop(chosen, StandInTrainer(), rewards=zero())
    assert str(caught.value.repair).startswith("the task is too hard")
    assert not (run_dir(chosen) / "rollouts").exists()


def test_the_end_of_the_prompts_without_signal_leaves_the_same(tmp_path: Path) -> None:
    chosen = config(tmp_path / "run", "~training.max_steps", "record.report=true")
    with pytest.raises(RolloutError, match="prompts are exhausted") as caught:
        run_loop(chosen, StandInTrainer(), rewards=zero())
    assert caught.value.value == "40 groups: all rewards are 0 (40 groups)"
    assert len(ledger(chosen)) == 40
    assert report_data(chosen)["ledger"] == {"no_signal": 40}


def test_rewards_that_are_whitened_over_the_batch_end_the_run_and_are_saved(tmp_path: Path) -> None:
    chosen = config(tmp_path / "run", *NO_STEP, "algorithm.preset=reinforce_pp")
    trainer = StandInTrainer()
    with pytest.raises(RolloutError, match="20 groups in a row"):
        run_loop(chosen, trainer, rewards=zero())
    assert trainer.saved[-1]["buffer"]["pending"][:20] == list(range(20))
    assert len(ledger(chosen)) == 20


@pytest.mark.parametrize("preset", ["reinforce", "reinforce_pp"])
def test_groups_of_one_are_learned_from_where_no_group_is_the_baseline(preset: str, tmp_path: Path) -> None:
    chosen = config(
        tmp_path / "run", f"algorithm.preset={preset}", "rollout.group_size=1", "rollout.max_no_signal_groups=4"
    )
    assert run_loop(chosen, StandInTrainer()).step == 6
    assert {line.outcome for line in ledger(chosen)} == {"trained"}


def test_groups_without_signal_that_are_kept_are_counted(tmp_path: Path) -> None:
    chosen = config(tmp_path / "run", "rollout.no_signal=keep")
    run_loop(chosen, StandInTrainer(), rewards=zero())
    assert metrics(chosen, "rollout/num_no_signal") == [2.0] * 6
    assert {line.outcome for line in ledger(chosen)} == {"trained"}


def test_throughput_counts_what_was_sampled_and_not_only_what_was_learned_from(tmp_path: Path) -> None:
    """Half of all groups have no signal: the tokens were sampled all the same."""

    class Half(StandInRewards):
        async def score(self, prompt: Task, completions: Sequence[Completion]) -> list[Score]:
            scores = await super().score(prompt, completions)
            is_flat = number_of(prompt.id) % 2
            return [Score(0.5, {"all": 0.5}) if is_flat else score for score in scores]

    class Slow(StandInTrainer):
        async def train_step(self, batch: Batch, *, keep_logprobs: bool = False) -> StepResult:
            now[0] += 10
            return await super().train_step(batch, keep_logprobs=keep_logprobs)

    class SlowAnswers(StandInPolicy):
        async def generate(self, prompt: Task, *, sampling: Sampling) -> list[Completion]:
            now[0] += 15 * (sampling.n == 1)  # four prompts are held out, and asked once
            return await super().generate(prompt, sampling=sampling)

    now = [0.0]
    chosen = config(tmp_path / "run", "rollout.no_signal=replace", "evaluation.fraction=0.1", "evaluation.interval=3")
    trainer = Slow()
    run_loop(chosen, trainer, policy=SlowAnswers(trainer), rewards=Half(), clock=lambda: now[0])
    by_step = Counter(line.step for line in ledger(chosen))
    assert sum(by_step.values()) > 12, "some were dropped"
    seconds = [10, 10, 10, 70, 10, 10]  # rollouts continue while the policy is evaluated after step 3
    for name, per_group in (("rollout/samples_per_s", 3), ("rollout/tokens_per_s", 3 * 4)):
        counted = [rate * time for rate, time in zip(metrics(chosen, name), seconds, strict=True)]
        assert counted == pytest.approx([per_group * by_step[step] for step in range(1, 7)])


# ---- However it ends ------------------------------------------------------------------------------------------------


class Bursting(StandInTrainer):
    """Its third step is not finite."""

    async def train_step(self, batch: Batch, *, keep_logprobs: bool = False) -> StepResult:
        if self.step == 2:
            raise NonFiniteError("step 3: the loss is nan")
        return await super().train_step(batch, keep_logprobs=keep_logprobs)


def test_a_step_that_fails_leaves_a_report(tmp_path: Path) -> None:
    chosen = config(tmp_path / "run", "record.report=true")
    with pytest.raises(NonFiniteError):
        run_loop(chosen, Bursting())
    assert report_data(chosen)["run"]["lastStep"] == 2


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_run_that_is_stopped_before_its_first_step_leaves_a_report(is_cancelled: bool, tmp_path: Path) -> None:
    """By Ctrl-C, once or twice, while nothing brings signal."""
    chosen = config(tmp_path / "run", "record.report=true", "rollout.no_signal=replace")

    async def body() -> bool:
        stop, trainer, task = Stop(), StandInTrainer(), asyncio.current_task()
        assert task is not None

        class Stopping(StandInRewards):
            async def score(self, prompt: Task, completions: Sequence[Completion]) -> list[Score]:
                seen.append(prompt.id)
                if len(seen) == 12:
                    task.cancel() if is_cancelled else stop.ask()
                return [Score(0.0, {"all": 0.0}) for _ in completions]

        loop = make_loop(chosen, trainer, StandInPolicy(trainer), Stopping(), stop=stop)
        try:
            return (await loop.run()).is_stopped
        finally:
            loop.close()

    seen: list[str] = []
    if is_cancelled:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(body())
    else:
        assert asyncio.run(body())
    data = report_data(chosen)
    assert data["run"]["lastTime"] is None
    assert data["samples"]["items"]
    assert data["ledger"] == {"no_signal": len(ledger(chosen))}
    assert "The run has not finished a step, so there are no curves." in data["notes"]


def test_a_resume_that_is_refused_leaves_the_report_as_it_was(tmp_path: Path) -> None:
    trainer, later = StandInTrainer(), StandInTrainer()
    chosen = config(tmp_path / "run", "record.report=true")
    run_loop(chosen, trainer)
    page = run_dir(chosen) / "report.html"
    page.write_text("as it was")
    later.found = trainer.saved[-1]
    with pytest.raises(CheckpointError):
        run_loop(config(tmp_path / "run", "record.report=true", "prompts.sources.0.num_prompts=30"), later)
    assert page.read_text() == "as it was"


def test_a_report_that_cannot_be_written_does_not_make_the_run_a_failed_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = config(tmp_path / "run", "record.report=true")
    (run_dir(chosen) / "report.html").mkdir(parents=True)
    result = run_loop(chosen, StandInTrainer())
    assert (result.step, result.report) == (6, None)
    assert "the report could not be made" in caplog.text
