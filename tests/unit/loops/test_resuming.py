"""What a resume, or a second run in a folder, is refused for before any process is started."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge.config import GRPOConfig, SFTConfig, load
from forge.errors import CheckpointError, DataError, ForgeError, LaunchError
from forge.loops.grpo import run_grpo
from forge.loops.preflight import check_grpo, check_supervised, prepare_supervised
from forge.loops.resuming import report_changes
from forge.loops.run_paths import checkpoint_dir, run_dir
from forge.loops.sft import run_sft
from forge.trainer.checkpoint_folder import (
    CheckpointInfo,
    FileRecord,
    WriterLock,
    _sha256,
    check_checkpoint,
    checkpoint_name,
    list_checkpoints,
    write_record,
)
from grpo_runs import config, ledger
from grpo_workers import StandInTrainer, run_loop

RESUME = "checkpointing.resume=must"
ROOT = Path(__file__).parents[3]


def keep(folder: Path, extra: dict[str, Any], *, step: int, sequence: int = 0) -> CheckpointInfo:
    """A checkpoint as a trainer leaves it, with two files of a few bytes instead of weights."""
    path = folder / checkpoint_name(step)
    path.mkdir(parents=True)
    for name, content in ((".metadata", b"index"), ("__0_0.distcp", b"weights")):
        (path / name).write_bytes(content)
    files = {file.name: FileRecord(file.stat().st_size, _sha256(file)) for file in path.iterdir()}
    info = CheckpointInfo(path, step, sequence, "", None, 1, "2", {"step": step, "caller": extra}, files)
    write_record(info, folder=path)
    return info


def finished(folder: Path, *overrides: str) -> GRPOConfig:
    """A run of six steps, of which steps 2, 4 and 6 were saved."""
    trainer, chosen = StandInTrainer(), config(folder, *overrides)
    run_loop(chosen, trainer)
    for sequence, extra in enumerate(trainer.saved):
        keep(checkpoint_dir(chosen), extra, step=extra["step"], sequence=sequence)
    return chosen


def resumed(folder: Path) -> StandInTrainer:
    """A trainer that finds the newest checkpoint, for a run with `play`."""
    trainer = StandInTrainer()
    trainer.found = dict(list_checkpoints(folder)[-1].extra["caller"])
    trainer.step = trainer.found["step"]
    return trainer


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of a finished run, and a copy of it."""
    folder = run_dir(finished(tmp_path_factory.mktemp("finished") / "run"))
    copy = tmp_path_factory.mktemp("copy") / "run"
    shutil.copytree(folder, copy)
    return folder, copy


@pytest.fixture
def run(finished_once: tuple[Path, Path]) -> Path:
    """A finished run, as it was: always in the same folder, whose name is in its configuration."""
    folder, copy = finished_once
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ---- The ledger -----------------------------------------------------------------------------------------------------


def removed(lines: list[str]) -> list[str]:
    return lines[:3] + lines[4:]


def removed_at_the_end(lines: list[str]) -> list[str]:
    return lines[:-1]


def copied(lines: list[str]) -> list[str]:
    return [*lines[:5], lines[2], *lines[5:]]


def renumbered(lines: list[str]) -> list[str]:
    return [line.replace('"group": 4', '"group": 5') for line in lines]


def added(lines: list[str]) -> list[str]:
    return [*lines[:5], lines[4].replace('"group": 4', '"group": 400'), *lines[5:]]


@pytest.mark.parametrize(
    ("change", "place", "value"),
    [
        (removed, ":4", "twice: [], lost: [3]"),
        (removed_at_the_end, "", "twice: [], lost: [11]"),
        (copied, ":6", "twice: [2], lost: []"),
        (renumbered, ":6", "twice: [5], lost: [4]"),
        (added, ":6", "twice: [], lost: [], unknown: [400]"),
    ],
    ids=["removed", "removed at the end", "copied", "renumbered", "added"],
)
def test_a_changed_ledger_is_refused(
    change: Callable[[list[str]], list[str]], place: str, value: str, run: Path
) -> None:
    path = run / "ledger.jsonl"
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    before = contents(run)
    with pytest.raises(CheckpointError, match="the ledger does not add up") as caught:
        check_grpo(config(run, RESUME))
    error = caught.value
    assert (error.path, error.value) == (f"{path}{place}", value)
    assert "--resume PATH" in str(error.repair)
    assert contents(run) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"outcome"', '"result"'),
        ('"step": 1', '"step": "1"'),
        ('"step": 1', '"step": null'),
        ('"group": 0', '"group": [0]'),
        ('"group": 0', '"group": 0.0'),
    ],
)
def test_a_line_that_cannot_be_read_is_named(old: str, new: str, run: Path) -> None:
    path = run / "ledger.jsonl"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(DataError, match="cannot be read") as caught:
        check_grpo(config(run, RESUME))
    assert caught.value.path == f"{path}:1"


def test_a_ledger_that_is_not_a_file_is_refused(run: Path) -> None:
    path = run / "ledger.jsonl"
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match="the ledger cannot be read") as caught:
        check_grpo(config(run, RESUME))
    assert caught.value.path == str(path)


def test_lines_after_the_checkpoint_do_not_count(run: Path) -> None:
    """What a run wrote between its last checkpoint and a kill is moved aside, whatever it is."""
    path = run / "ledger.jsonl"
    with path.open("a") as file:
        file.write(json.dumps({"step": 7, "group": 3, "epoch": 0, "prompt": "p", "outcome": "trained"}) + "\n")
    assert check_grpo(config(run, RESUME)).resume_step == 6


def test_a_run_that_branches_off_is_resumed_with_a_ledger_of_its_own(run: Path, tmp_path: Path) -> None:
    origin = list_checkpoints(run / "checkpoints")[1]
    assert origin.step == 4
    branch = config(tmp_path / "branch", f"checkpointing.resume={origin.path}")
    trainer = StandInTrainer()
    trainer.found, trainer.step = dict(origin.extra["caller"]), 4
    assert run_loop(branch, trainer).step == 6
    assert {line.step for line in ledger(branch)} == {5, 6}
    keep(checkpoint_dir(branch), trainer.saved[-1], step=6)
    longer = config(tmp_path / "branch", RESUME, "training.max_steps=8")
    assert check_grpo(longer).resume_step == 6
    later = resumed(checkpoint_dir(branch))
    assert run_loop(longer, later).step == 8
    keep(checkpoint_dir(branch), later.saved[-1], step=8, sequence=1)
    path = run_dir(branch) / "ledger.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(CheckpointError, match="does not add up"):
        check_grpo(longer)


def test_a_ledger_that_is_gone_is_reported_and_begun_again(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    (run / "ledger.jsonl").unlink()
    longer = config(run, RESUME, "training.max_steps=8")
    check_grpo(longer)
    later = resumed(run / "checkpoints")
    run_loop(longer, later)
    assert "has no ledger.jsonl" in caplog.text
    keep(run / "checkpoints", later.saved[-1], step=8, sequence=3)
    assert check_grpo(longer).resume_step == 8


# ---- Other groups, prompts and checkpoints --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "path", "rule"),
    [
        ("rollout.group_size=4", "rollout.group_size", "3, as when the checkpoint was made"),
        ("rollout.iterations=2", "rollout.iterations", "1, as when the checkpoint was made"),
        ("prompts.sources.0.num_prompts=30", "prompts.sources", "the digest"),
        ("run.seed=5", "prompts.sources", "the digest"),
        ("training.max_steps=5", "training.max_steps", "at least 6"),
    ],
)
def test_a_resume_that_would_mix_two_runs_is_refused(override: str, path: str, rule: str, run: Path) -> None:
    before = contents(run)
    with pytest.raises(CheckpointError) as caught:
        check_grpo(config(run, RESUME, override))
    assert caught.value.path == path
    assert rule in str(caught.value.rule)
    assert caught.value.repair
    assert contents(run) == before


def test_other_changes_are_reported(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "forge.loops"):
        run_loop(config(run, RESUME, "training.max_steps=7", "rollout.staleness=1"), resumed(run / "checkpoints"))
    assert "keys that differ from the run that is resumed" in caplog.text
    assert "rollout.staleness: 0 -> 1, training.max_steps: 6 -> 7" in caplog.text


def test_a_key_that_was_unknown_then_is_not_reported_as_a_change(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A later version of the library has more keys, also in the elements of a list."""
    path = run / "config.yaml"
    text = path.read_text()
    path.write_text(text.replace("    timeout_s: 10.0\n", ""))
    assert path.read_text() != text
    with caplog.at_level(logging.WARNING, "forge.loops"):
        report_changes(config(run, "rewards.functions.0.weight=2"), run)
    assert "rewards.functions.0.weight: 1.0 -> 2.0" in caplog.text
    assert "timeout_s" not in caplog.text


def test_arguments_that_were_added_or_removed_are_reported(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = run / "config.yaml"
    document = yaml.safe_load(path.read_text())
    document["episode"]["args"] = {"size": 3, "gone": 1}
    path.write_text(yaml.safe_dump(document))
    now = config(run)
    now = now.model_copy(update={"episode": now.episode.model_copy(update={"args": {"size": 4, "goal": 5}})})
    with caplog.at_level(logging.WARNING, "forge.loops"):
        report_changes(now, run)
    for change in ("episode.args.size: 3 -> 4", "episode.args.goal: not set -> 5", "episode.args.gone: 1 -> not set"):
        assert change in caplog.text


@pytest.mark.parametrize(
    "content", [b"", b"a: [1\n b: }", b"- 1\n", b"\xa1\xff", b"checkpointing: {output_dir: 5}\n"], ids=repr
)
def test_a_configuration_that_cannot_be_read_does_not_keep_a_run_from_resuming(content: bytes, run: Path) -> None:
    (run / "config.yaml").write_bytes(content)
    longer = config(run, RESUME, "training.max_steps=7")
    assert check_grpo(longer).resume_step == 6
    assert run_loop(longer, resumed(run / "checkpoints")).step == 7
    assert (run / "config.1.yaml").read_bytes() == content


@pytest.mark.parametrize("words", [(), (RESUME,)])
def test_metrics_that_cannot_be_read_are_refused_at_once(words: tuple[str, ...], run: Path, tmp_path: Path) -> None:
    path = (run if words else tmp_path / "new") / "metrics.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"step": "a"}\n')
    before = contents(run)
    with pytest.raises(DataError, match="a line of a metrics file cannot be read") as caught:
        check_grpo(config(path.parent, *words))
    assert caught.value.path == f"{path}:1"
    assert contents(run) == before
    check_grpo(config(path.parent, *words, "metrics.jsonl=false"))


@pytest.mark.parametrize(
    ("harm", "fault"),
    [
        (lambda path: path.unlink(), "__0_0.distcp is missing"),
        (lambda path: path.write_bytes(b"half"), "__0_0.distcp has 4 bytes instead of 7"),
        (lambda path: path.write_bytes(b"WEIGHTS"), "__0_0.distcp has other content than was written"),
    ],
    ids=["missing", "cut off", "changed"],
)
def test_a_damaged_checkpoint_is_refused_and_an_older_one_named(
    harm: Callable[[Path], None], fault: str, run: Path
) -> None:
    newest, older = run / "checkpoints" / checkpoint_name(6), run / "checkpoints" / checkpoint_name(4)
    harm(newest / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="The checkpoint is damaged") as caught:
        check_grpo(config(run, RESUME))
    assert fault in caught.value.message
    assert caught.value.path == str(newest)
    assert caught.value.repair == f"restore its files, or resume from an older one: --resume {older}"
    assert check_grpo(config(run, f"checkpointing.resume={older}")).resume_step == 4


def test_of_a_large_checkpoint_the_index_alone_is_read(tmp_path: Path) -> None:
    info = keep(tmp_path, {}, step=1)
    (info.path / "__0_0.distcp").write_bytes(b"WEIGHTS")
    check_checkpoint(info, max_digest_bytes=8)
    (info.path / ".metadata").write_bytes(b"INDEX")
    with pytest.raises(CheckpointError, match="metadata has other content"):
        check_checkpoint(info, max_digest_bytes=8)


def changed_record(folder: Path, state: object) -> None:
    """Replace what the loop stored with the newest checkpoint."""
    path = list_checkpoints(folder)[-1].path / "checkpoint.json"
    record = json.loads(path.read_text())
    record["extra"]["caller"] = state
    path.write_text(json.dumps(record))


def test_a_checkpoint_of_fine_tuning_is_not_resumed_by_reinforcement_learning(run: Path, tmp_path: Path) -> None:
    foreign = keep(tmp_path / "sft" / "checkpoints", {"data": {}, "validation_loss": None}, step=2)
    with pytest.raises(CheckpointError, match="does not hold the state of such a run") as caught:
        check_grpo(config(tmp_path / "new", f"checkpointing.resume={foreign.path}"))
    error = caught.value
    assert (error.path, error.value) == (str(foreign.path), "a checkpoint of fine-tuning")
    assert error.rule == "a checkpoint of reinforcement learning"
    assert "model.path" in str(error.repair)
    for state in (None, {}, {"step": 6}, {"step": "6", "buffer": {}, "prompts": "", "evaluations": []}):
        changed_record(run / "checkpoints", state)
        with pytest.raises(CheckpointError, match="does not hold the state of such a run") as caught:
            check_grpo(config(run, RESUME))
        assert caught.value.value == "no state of a run"


# ---- Folders of other runs ------------------------------------------------------------------------------------------


@pytest.fixture
def locked() -> Iterator[Callable[[Path], int]]:
    """Lets another process lock a folder for writing."""
    program = "import sys, pathlib; from forge.trainer.checkpoint_folder import WriterLock\n"
    program += "lock = WriterLock(pathlib.Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    started: list[subprocess.Popen[str]] = []

    def lock(folder: Path) -> int:
        command = [sys.executable, "-c", program, str(folder)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        return process.pid

    yield lock
    for process in started:
        process.communicate()


@pytest.mark.parametrize("name", ["", "checkpoints"])
def test_a_folder_that_another_run_writes_to_is_refused(name: str, run: Path, locked: Callable[[Path], int]) -> None:
    pid = locked(run / name)
    for _ in range(2):  # looking takes no lock, and lets none go
        with pytest.raises(CheckpointError, match="Another run is writing") as caught:
            check_grpo(config(run, RESUME))
        assert caught.value.path == str(run / name)
        assert f"process {pid} on" in str(caught.value.value)


def test_looking_for_a_lock_makes_nothing(tmp_path: Path) -> None:
    WriterLock.check(tmp_path / "nothing")
    WriterLock.check(tmp_path)
    assert list(tmp_path.iterdir()) == []
    lock = WriterLock(tmp_path)
    with pytest.raises(CheckpointError, match="Another run is writing"):
        WriterLock.check(tmp_path)
    lock.release()
    WriterLock.check(tmp_path)


def test_a_finished_run_is_not_changed_by_another(run: Path, tmp_path: Path) -> None:
    other = finished(tmp_path / "other")
    (run / "report.html").write_text("the report")
    before = contents(run)
    foreign = checkpoint_dir(other) / checkpoint_name(4)
    for words in (
        (f"checkpointing.output_dir={tmp_path / 'elsewhere'}",),
        (f"checkpointing.resume={foreign}",),
        (f"checkpointing.output_dir={checkpoint_dir(other)}", RESUME),
    ):
        with pytest.raises(CheckpointError, match="This folder holds another run") as caught:
            check_grpo(config(run, *words))
        assert (caught.value.path, caught.value.value) == (str(run), str(run / "checkpoints" / checkpoint_name(6)))
        assert "run.name=NAME" in str(caught.value.repair)
        assert contents(run) == before
    with pytest.raises(CheckpointError, match="already holds 3 checkpoint") as caught:
        check_grpo(config(run))
    new = f"run.name={run.name}-2 for a new one in its own folder, or remove {run} to start over"
    assert f"add --resume to continue that run, or {new}" in str(caught.value.repair)
    assert contents(run) == before
    check_grpo(config(tmp_path / "third", f"checkpointing.resume={foreign}"))


def test_a_final_model_is_not_overwritten_either(run: Path) -> None:
    """Its checkpoints were deleted to save space."""
    for info in list_checkpoints(run / "checkpoints"):
        info.path.rename(run / info.path.name)
    check_grpo(config(run))
    (run / "checkpoints" / "hf").mkdir()
    with pytest.raises(CheckpointError, match="This folder holds another run") as caught:
        check_grpo(config(run, "checkpointing.resume=auto"))
    assert caught.value.value == str(run / "checkpoints" / "hf")


def test_a_run_that_saved_nothing_may_be_started_again(tmp_path: Path) -> None:
    chosen = config(tmp_path / "run")
    run_loop(chosen, StandInTrainer())
    assert run_loop(config(tmp_path / "run"), StandInTrainer()).step == 6
    assert len(ledger(chosen)) == 12


# ---- Before any process ---------------------------------------------------------------------------------------------

NOWHERE = "launcher.kind=slurm"
"""Starting anything fails where there is no `sbatch`. What is refused earlier is refused with another error."""


@pytest.fixture
def no_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")


@pytest.mark.usefixtures("no_commands")
def test_reinforcement_learning_refuses_before_it_starts_anything(run: Path, tmp_path: Path) -> None:
    with pytest.raises(LaunchError):
        asyncio.run(run_grpo(config(tmp_path / "new", NOWHERE)))
    for words in ((), (RESUME, "rollout.group_size=4"), (RESUME, "prompts.sources.0.num_prompts=30")):
        with pytest.raises(CheckpointError):
            asyncio.run(run_grpo(config(run, NOWHERE, *words)))
    (run / "ledger.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="does not add up"):
        asyncio.run(run_grpo(config(run, NOWHERE, RESUME)))
    (run / "checkpoints" / checkpoint_name(6) / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="damaged"):
        asyncio.run(run_grpo(config(run, NOWHERE, RESUME)))


def sft(folder: Path, *overrides: str) -> SFTConfig:
    words = ["model.preset=tiny", f"run.output_dir={folder.parent}", f"run.name={folder.name}"]
    words += [f"data.sources=[{{path: {ROOT / 'apps/sft/sums.jsonl'}}}]", "training.max_seq_len=128"]
    return load(SFTConfig, overrides=[*words, "training.max_steps=4", *overrides])


@pytest.mark.usefixtures("no_commands")
def test_fine_tuning_refuses_before_it_starts_anything(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with prepare_supervised(sft(folder)) as prepared:
        data = prepared.loaders.train.state_dict()
    assert not folder.exists()
    info = keep(folder / "checkpoints", {"data": data}, step=2)
    assert check_supervised(sft(folder, RESUME)).total_steps == 4
    with pytest.raises(LaunchError):
        asyncio.run(run_sft(sft(folder, NOWHERE, RESUME)))
    with pytest.raises(DataError, match="seed has changed"):
        asyncio.run(run_sft(sft(folder, NOWHERE, RESUME, "run.seed=5")))
    with pytest.raises(CheckpointError, match="holds full weights, and this run trains an adapter"):
        asyncio.run(run_sft(sft(folder, NOWHERE, RESUME, "adapter.rank=2")))
    with pytest.raises(CheckpointError, match="already holds 1 checkpoint"):
        asyncio.run(run_sft(sft(folder, NOWHERE)))
    with pytest.raises(ForgeError, match="warm-up is longer"):
        asyncio.run(run_sft(sft(tmp_path / "new", NOWHERE, "training.warmup_steps=5")))
    (info.path / "__0_0.distcp").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="damaged"):
        asyncio.run(run_sft(sft(folder, NOWHERE, RESUME)))


def test_a_checkpoint_of_reinforcement_learning_is_not_resumed_by_fine_tuning(run: Path, tmp_path: Path) -> None:
    foreign = run / "checkpoints" / checkpoint_name(6)
    with pytest.raises(CheckpointError, match="does not hold the state of such a run") as caught:
        check_supervised(sft(tmp_path / "new", f"checkpointing.resume={foreign}"))
    assert caught.value.value == "a checkpoint of reinforcement learning"
