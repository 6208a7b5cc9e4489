"""Commands for live runs whose workers are in this process: what changes, from which step on, what is reproduced."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from forge.cli import main
from forge.config import GRPOConfig
from forge.loops.replay.bisecting import bisect_run
from forge.loops.replay.groups import resample_group
from forge.loops.replay.recorded import RecordedRun
from forge.loops.run_client import ChangedValue, RunClient, SettingsChange
from forge.loops.run_paths import run_dir
from forge.loops.runtime_changes import RuntimeChange, read_changes, record_change
from forge.observe.history import check_history
from grpo_runs import NUM_STEPS, config, ledger, metrics, train_here, train_watched, weights_digest
from live_commands import AtVersions
from local_services import services_here

RATE, TEMPERATURE = "training.learning_rate", "generator.sampling.temperature"
STALENESS, BATCH_GROUPS = "rollout.staleness", "rollout.batch_groups"
CHANGE = {RATE: 5e-4, TEMPERATURE: 0.7}


def train_commanded(chosen: GRPOConfig, on: dict[int, Any]) -> tuple[Any, dict[int, Any]]:
    """Run it with commands; the result, and the answers by version."""
    commands = AtVersions(run_dir(chosen), on)
    with services_here():
        result = train_watched(chosen, commands)
    return result, commands.answers()


def temperatures(chosen: GRPOConfig) -> dict[int, set[float | None]]:
    """The temperatures of the groups that each step learned from."""
    recorded = RecordedRun(run_dir(chosen))
    return {step: {group.temperature for group in recorded.read(step).groups} for step in recorded.steps}


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> GRPOConfig:
    """A run whose learning rate and temperature change after step 3."""
    chosen = config(tmp_path_factory.mktemp("control") / "changed", "checkpointing.keep=9", "training.schedule=linear")
    result, answers = train_commanded(chosen, {2: lambda run: run.set(CHANGE)})
    assert result.step == NUM_STEPS
    values = (ChangedValue(RATE, 1e-3, 5e-4), ChangedValue(TEMPERATURE, 1.0, 0.7))
    assert answers == {2: SettingsChange(4, values)}
    return chosen


def test_settings_hold_from_the_step_of_the_answer_on(changed: GRPOConfig) -> None:
    assert temperatures(changed) == {step: {1.0 if step < 4 else 0.7} for step in range(1, NUM_STEPS + 1)}
    rates, highest = metrics(changed, "train/learning_rate"), [1e-3] * 3 + [5e-4] * 3
    plan = [rate / most for rate, most in zip(rates, highest, strict=True)]
    assert plan == sorted(plan, reverse=True)  # the schedule goes on: only its highest rate is another
    assert plan[0] == 1.0
    assert plan[-1] > 0
    assert metrics(changed, "train/mismatch_max") == [0.0] * NUM_STEPS, "sampler and trainer agree, to the bit"
    assert list(read_changes(run_dir(changed))) == [
        RuntimeChange(3, RATE, 1e-3, 1e-3, 5e-4, "forge control"),
        RuntimeChange(3, TEMPERATURE, 1.0, 1.0, 0.7, "forge control"),
    ]


def test_every_step_before_and_after_a_change_is_replayed_bit_for_bit(changed: GRPOConfig) -> None:
    recorded = RecordedRun(run_dir(changed))
    assert {step: recorded.read(step).learning_rate for step in recorded.steps} == {
        step: None if step < 4 else 5e-4 for step in range(1, NUM_STEPS + 1)
    }
    with services_here():
        found = asyncio.run(bisect_run(recorded))
        assert (found.first, found.steps) == (None, tuple(range(1, NUM_STEPS + 1)))
        number = recorded.read(5).groups[0].number
        assert asyncio.run(resample_group(recorded, number)).is_same


@pytest.mark.parametrize("step", [2, 4])
def test_a_resume_from_before_or_after_a_change_ends_with_the_same_weights(
    changed: GRPOConfig, tmp_path: Path, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    """From before it, the change is made again after step 3."""
    folder = tmp_path / "changed"
    shutil.copytree(run_dir(changed), folder)
    caplog.set_level("INFO", "forge.loops")
    resume = f"checkpointing.resume={folder}/checkpoints/step-{step:08d}"
    resumed = config(folder, "checkpointing.keep=9", "training.schedule=linear", resume)
    train_here(resumed)
    assert weights_digest(resumed) == weights_digest(changed)
    assert temperatures(resumed)[NUM_STEPS] == {0.7}
    becomes = "is" if step == 4 else "will be"
    assert f"{RATE} {becomes} 0.0005" in caplog.text
    assert f"{RATE} is 0.0005, as changed after step 3 by forge control" in caplog.text
    (differs,) = [line for line in caplog.messages if line.startswith("keys that differ")]
    assert ("run.output_dir" in differs, RATE in differs) == (True, False), "a command has changed it, which is said"
    assert len(list(read_changes(folder))) == 2, "what is made again is not recorded again"
    said = (folder / "config.yaml").read_text()
    assert f"learning_rate: {'0.0005' if step == 4 else '0.001'}" in said
    assert check_history(folder).violations == []


def test_groups_of_two_temperatures_in_one_step_are_learned_from_at_their_own(tmp_path: Path) -> None:
    """Rollouts run ahead, and the weights hardly move: the trainer's logprobs are the sampler's, to the bit, unless it
    computes at another temperature. A larger batch takes in groups from before the change and from after it."""
    chosen = config(
        tmp_path / "mixed",
        *("rollout.staleness=1", "training.learning_rate=1e-30", "algorithm.kl.coefficient=0.1"),
        *("rollout.iterations=2", "algorithm.loss.proximal=trainer", "algorithm.loss.entropy_coefficient=0.01"),
    )
    train_commanded(chosen, {2: lambda run: run.set({TEMPERATURE: 0.5, BATCH_GROUPS: 3})})
    seen = temperatures(chosen)
    assert seen[1] == {1.0}
    assert seen[NUM_STEPS] == {0.5}
    assert {1.0, 0.5} in seen.values()
    assert metrics(chosen, "train/mismatch_max") == [0.0] * NUM_STEPS
    assert max(metrics(chosen, "train/kl")) < 1e-7, "the reference scores at the same temperature"
    recorded = RecordedRun(run_dir(chosen))
    with services_here():
        assert asyncio.run(bisect_run(recorded)).first is None


def test_the_bound_and_the_batch_of_a_live_run_shrink_and_grow(tmp_path: Path) -> None:
    """The checker of histories, which shares no code with the loop, knows the bound of each step."""
    chosen = config(tmp_path / "bounds", "rollout.staleness=2", "training.max_steps=9", "checkpointing.keep=9")
    answers = train_commanded(
        chosen,
        {
            2: lambda run: run.set({STALENESS: 0, BATCH_GROUPS: 1}),
            5: lambda run: run.set({STALENESS: 1, BATCH_GROUPS: 3}),
        },
    )[1]
    assert [answer.from_step for answer in answers.values()] == [4, 7]
    assert metrics(chosen, "rollout/num_groups") == [2.0] * 3 + [1.0] * 3 + [3.0] * 3
    assert max(metrics(chosen, "rollout/staleness_max")[3:6]) == 0
    found = check_history(run_dir(chosen))
    assert (found.violations, found.counts["changes of rollout.staleness"]) == ([], 2)
    trained = [line.group for line in ledger(chosen) if line.outcome == "trained"]
    assert len(trained) == len(set(trained)) == 6 + 3 + 9
    with services_here():
        assert asyncio.run(bisect_run(RecordedRun(run_dir(chosen)))).first is None
    # With another history of the bound, the same tokens are too old, or not.
    path = run_dir(chosen) / "runtime_changes.jsonl"
    assert max(metrics(chosen, "rollout/staleness_max")[:3]) > 0
    path.write_text(path.read_text().replace('"before": 2', '"before": 0'))
    assert {each.rule for each in check_history(run_dir(chosen)).violations} == {"staleness"}


def test_a_live_run_saves_evaluates_shows_and_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heldout = "evaluation={sources: [{task: arithmetic, num_prompts: 4}], num_samples: 2}"
    chosen = config(tmp_path / "asked", "checkpointing.save_interval=null", "training.max_steps=50", heldout)
    folder = run_dir(chosen)

    def at_once(run: RunClient) -> Any:
        shown = run.show()
        return shown, main(["control", str(folder)]), main(["control", str(folder), "--json"])

    result, answers = train_commanded(
        chosen,
        {
            1: lambda run: run.save(),
            3: lambda run: run.evaluate(),
            5: lambda run: main(["control", str(folder), "save"]),
            6: lambda run: main(["control", str(folder), "profile"]),
            7: at_once,
            8: lambda run: main(["control", str(folder), "evaluate"]),
            9: lambda run: run.stop(),
        },
    )
    assert answers[1].step == 1
    assert answers[1].path == folder / "checkpoints" / "step-00000001"
    assert answers[3].step == 3
    assert answers[3].values["num_prompts"] == 4
    status, *codes = answers[7]
    assert (status.kind, status.step, status.max_steps) == ("reinforcement learning", 7, 50)
    assert "generators load version 7" in status.waits_for
    assert status.settings[RATE].value == 1e-3
    assert status.workers == {"generators": 1, "rewards": 1}
    assert codes == [0, 0]
    assert (answers[5], answers[6], answers[8], answers[9]) == (0, 0, 0, 130)
    printed = capsys.readouterr().out
    (profile,) = (folder / "profiles").iterdir()  # the workers are in this process
    assert f"step 7: {profile}\n" in printed
    assert profile.name == "step-00000007-controller.json.gz"
    assert f"after step 5: {folder}/checkpoints/step-00000005\n" in printed
    assert "after step 7 of 50: generators load version 7" in printed
    assert "after step 8: num_prompts 4, reward " in printed
    assert (result.is_stopped, result.exit_code) == (True, 130)
    assert result.step in (9, 10)
    resumed = config(tmp_path / "asked", "training.max_steps=12", "checkpointing.resume=must", heldout)
    assert train_here(resumed).step == 12
    assert check_history(folder).violations == []


def test_a_command_that_the_end_of_the_run_overtakes_is_refused(tmp_path: Path) -> None:
    chosen = config(tmp_path / "over", "training.max_steps=2")
    answers = train_commanded(chosen, {2: lambda run: run.set(CHANGE)})[1]
    assert "the run ended before this command was carried out" in str(answers[2])
    assert list(read_changes(run_dir(chosen))) == []


def test_changes_that_the_configuration_replaces(tmp_path: Path) -> None:
    """What is written later wins, from the resume on; and the file says so."""
    folder = tmp_path / "won"
    train_commanded(config(folder, "training.max_steps=4"), {1: lambda run: run.set({**CHANGE, STALENESS: 1})})
    resumed = config(folder, f"{RATE}=2e-3", f"{STALENESS}=2", "checkpointing.resume=must")
    train_here(resumed)
    assert metrics(resumed, "train/learning_rate") == [1e-3, 1e-3, 5e-4, 5e-4, 2e-3, 2e-3]
    assert temperatures(resumed)[NUM_STEPS] == {0.7}
    assert [(each.step, each.key, each.before, each.after, each.by) for each in read_changes(folder)][3:] == [
        (4, RATE, 5e-4, 2e-3, "configuration"),
        (4, STALENESS, 1, 2, "configuration"),
    ]
    assert check_history(folder).violations == []
    again = config(folder, "training.max_steps=8", f"{RATE}=2e-3", f"{STALENESS}=2", "checkpointing.resume=must")
    train_here(again)
    assert metrics(again, "train/learning_rate")[-2:] == [2e-3, 2e-3]
    assert len((folder / "runtime_changes.jsonl").read_text().splitlines()) == 5
    line = json.loads((folder / "runtime_changes.jsonl").read_text().splitlines()[0])
    assert line["num_left"] == 2


def test_episodes_that_begin_after_a_change_are_sampled_and_learned_from_at_the_new_temperature(tmp_path: Path) -> None:
    chosen = config(tmp_path / "turns", "rewards.functions=[]", "episode.kind=own_episodes:dialogue")
    train_commanded(chosen, {1: lambda run: run.set({TEMPERATURE: 0.6})})
    assert temperatures(chosen) == {step: {1.0 if step < 3 else 0.6} for step in range(1, NUM_STEPS + 1)}
    assert metrics(chosen, "train/mismatch_max") == [0.0] * NUM_STEPS
    recorded = RecordedRun(run_dir(chosen))
    with services_here():
        assert asyncio.run(resample_group(recorded, recorded.read(4).groups[0].number)).is_same


def test_the_critic_has_a_learning_rate_of_its_own_or_follows_the_policys(tmp_path: Path) -> None:
    folder = tmp_path / "ppo"
    overrides = (
        "algorithm.preset=ppo",
        "rollout.batch_groups=4",
        "checkpointing.save_interval=1",
        "checkpointing.keep=9",
    )
    chosen = config(folder, *overrides)
    critic = "critic.training.learning_rate"
    train_commanded(
        chosen, {1: lambda run: run.set({critic: 2e-4}), 3: lambda run: run.set({critic: None, RATE: 5e-4})}
    )
    assert metrics(chosen, "critic/learning_rate") == [1e-3, 1e-3, 2e-4, 2e-4, 5e-4, 5e-4]
    assert metrics(chosen, "train/learning_rate") == [1e-3] * 4 + [5e-4] * 2
    digest = weights_digest(chosen)
    resumed = config(folder, *overrides, f"checkpointing.resume={folder}/checkpoints/step-00000001")
    train_here(resumed)
    assert weights_digest(resumed) == digest
    assert metrics(resumed, "critic/learning_rate") == [1e-3, 1e-3, 2e-4, 2e-4, 5e-4, 5e-4]


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_run_that_was_killed_before_its_first_checkpoint_makes_its_changes_again(tmp_path: Path, resume: str) -> None:
    """With `resume: auto`, as under a supervisor. A run that begins anew moves them aside."""
    folder = tmp_path / "early"
    folder.mkdir()
    record_change(folder, RuntimeChange(2, RATE, 1e-3, 1e-3, 5e-4, "forge control"))
    chosen = config(folder, f"checkpointing.resume={resume}")
    train_here(chosen)
    assert metrics(chosen, "train/learning_rate") == [1e-3] * 2 + [5e-4 if resume == "auto" else 1e-3] * 4
    assert (folder / "runtime_changes.1.jsonl").exists() == (resume == "never")
