"""A run with a curriculum that resumes as after a kill: the same tasks, tokens and weights."""

from __future__ import annotations

from pathlib import Path

from forge.loops.run_paths import run_dir
from forge.trainer.checkpoint_folder import list_checkpoints
from grpo_runs import config, episodes, ledger, metrics, train_here, weights_digest


def test_a_run_resumes_with_the_same_choices_and_weights(tmp_path: Path) -> None:
    """From a checkpoint whose later steps were taken and are discarded, as those after the last checkpoint are when a
    run is killed. `tests/unit/loops/test_curriculum_run.py` resumes from every step."""
    overrides = ("curriculum.kind=prioritised", "curriculum.explore=0.25", "curriculum.solved_at=0.5")
    overrides += ("rollout.no_signal=replace", "training.max_steps=4", "checkpointing.export_hf=true")
    chosen = config(tmp_path / "run", *overrides)

    def found() -> tuple[object, ...]:
        texts = [(each["group"], each["prompt_id"], each["text"]) for each in episodes(chosen)]
        return weights_digest(chosen), ledger(chosen), metrics(chosen, "curriculum/pass_rate"), texts

    train_here(chosen)
    whole = found()
    first, last = list_checkpoints(run_dir(chosen) / "checkpoints")
    assert (first.path.name, len(first.extra["caller"]["curriculum"]["history"]["task"])) == ("step-00000002", 4)
    train_here(config(tmp_path / "run", *overrides, f"checkpointing.resume={first.path}"))
    assert found() == whole
    again = list_checkpoints(run_dir(chosen) / "checkpoints")[-1]
    histories = [each.extra["caller"]["curriculum"]["history"] for each in (last, again)]
    assert histories[0] == histories[1]
