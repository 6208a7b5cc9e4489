"""A self-play league whose controller is killed: the same members, results, opponents and weights after a resume."""

from __future__ import annotations

import signal
from pathlib import Path

from forge.loops.planning import plan_run
from forge.loops.run_paths import run_dir
from forge.observe.league_table import read_league
from forge.trainer.checkpoint_folder import list_checkpoints
from grpo_runs import config, episodes, ledger, run_app, train_here, weights_digest

GROUP = 7
"""Of the fourth step, when the league has changed since the checkpoint of step 2."""


def overrides(folder: Path, task_id: str) -> tuple[str, ...]:
    checkpoint = folder / "pair" / "checkpoints" / "step-00000002" / "checkpoint.json"
    args = f"{{marker: {folder / 'marker'}, task_id: '{task_id}', checkpoint: {checkpoint}}}"
    return (
        *("rewards.functions=[]", "episode.kind=own_games:killing_pair", f"episode.args={args}"),
        "episode.league={rule: prioritised, add_every: 1, max_members: 2, evict: oldest, self_play: 0.2}",
        *("rollout.no_signal=keep", "training.max_steps=5", "checkpointing.asynchronous=false"),
        *("checkpointing.save_interval=2", "checkpointing.export_hf=true"),
    )


def test_a_controller_that_is_killed_resumes_with_the_same_league(tmp_path: Path) -> None:
    """Version 1, which the checkpoint of step 2 has, is no longer a member when the run is killed in step 4."""
    whole = config(tmp_path / "whole" / "pair", *overrides(tmp_path / "whole", "none"))
    task_id = plan_run(whole).prompts.at(GROUP)[1].id
    train_here(whole)
    folder = tmp_path / "killed"
    chosen = config(folder / "pair", *overrides(folder, task_id))
    code, told = run_app(folder / "pair", *overrides(folder, task_id))
    assert code == -signal.SIGKILL, told
    kept = list_checkpoints(run_dir(chosen) / "checkpoints")[-1].extra["caller"]["league"]
    assert (list(kept["standings"]), read_league(run_dir(chosen))["step"]) == (["version 1", "version 2"], 3)
    code, told = run_app(folder / "pair", *overrides(folder, task_id), "checkpointing.resume=must")
    assert (code, "resuming after step 2" in told) == (0, True), told
    assert weights_digest(chosen) == weights_digest(whole)
    assert ledger(chosen) == ledger(whole)
    assert read_league(run_dir(chosen)) == read_league(run_dir(whole))
    ends = [list_checkpoints(run_dir(each) / "checkpoints")[-1].extra["caller"]["league"] for each in (chosen, whole)]
    for end in ends:
        end.pop("matches")  # of groups that were begun after the last step, or not yet
    assert ends[0] == ends[1]
    said = [
        [(each["group"], each["index"], each["agents"], [turn["text"] for turn in each["turns"]]) for each in found]
        for found in (episodes(chosen), episodes(whole))
    ]
    assert said[0] == said[1]
