"""Episodes with several agents whose controller is killed between moves: none is lost, trained twice or different."""

from __future__ import annotations

import signal
from pathlib import Path

from forge.loops.planning import plan_run
from forge.loops.run_paths import run_dir
from forge.trainer.checkpoint_folder import list_checkpoints
from grpo_runs import config, episodes, ledger, run_app, train_here, weights_digest

GROUP = 5
"""Of the third step, whose weights are those of the checkpoint of step 2."""


def overrides(folder: Path, task_id: str) -> tuple[str, ...]:
    checkpoint = folder / "pair" / "checkpoints" / "step-00000002" / "checkpoint.json"
    args = f"{{marker: {folder / 'marker'}, task_id: '{task_id}', checkpoint: {checkpoint}}}"
    return (
        *("rewards.functions=[]", "episode.kind=own_games:killing_pair", f"episode.args={args}"),
        "episode.agents={row: {advantage: baseline}, column: {advantage: zero_sum}}",
        *("rollout.no_signal=keep", "training.max_steps=4", "checkpointing.asynchronous=false"),
    )


def test_a_controller_that_is_killed_between_moves_is_taken_up(tmp_path: Path) -> None:
    whole = config(tmp_path / "whole" / "pair", *overrides(tmp_path / "whole", "none"))
    task_id = plan_run(whole).prompts.at(GROUP)[1].id
    train_here(whole)
    folder = tmp_path / "killed"
    chosen = config(folder / "pair", *overrides(folder, task_id))
    code, told = run_app(folder / "pair", *overrides(folder, task_id))
    assert code == -signal.SIGKILL, told
    code, told = run_app(folder / "pair", *overrides(folder, task_id), "checkpointing.resume=must")
    assert (code, "resuming after step 2" in told) == (0, True), told
    assert weights_digest(chosen) == weights_digest(whole)
    assert ledger(chosen) == ledger(whole)
    kept = [list_checkpoints(run_dir(each) / "checkpoints")[-1].extra["caller"]["agents"] for each in (chosen, whole)]
    assert kept[0] == kept[1]
    replayed = {episode["group"] for episode in episodes(chosen) if episode["stats"]["num_replayed"]}
    assert GROUP in replayed
