"""Fine-tuning that is killed with `kill -9`, anywhere, and goes on as if nothing had happened.

Runs are ranks as `forge run --nproc_per_node` starts them, forked from one process that has imported everything. They
kill themselves, all at once, at a moment that the test names: when a step is printed, or in the middle of a save.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import yaml
from torch.distributed import TCPStore

from checkpoint_ranks import Ranks, ranks_of
from forge.observe import read_jsonl
from forge.trainer.checkpoint_folder import best_checkpoint, list_checkpoints
from killing_sinks import HOLDING, holding
from leftovers import processes_of
from signals import hear_ctrl_c

if Path(sys.argv[0]).name == "checkpoint_ranks.py":  # the process that ranks are forked from
    import tensorboard.summary.writer.event_file_writer  # noqa: F401
    from transformers import PreTrainedTokenizerFast  # noqa: F401

    import forge.data
    import forge.losses.build
    import forge.models.tiny
    import forge.models.tokenizer
    import forge.trainer.checkpointer
    import forge.trainer.engine  # noqa: F401


ROOT = Path(__file__).parents[2]
APP = ROOT / "apps" / "sft" / "main.py"
NUM_STEPS = 16
SAVE_INTERVAL = 4
BAD_LINE = 40
KILLED = -signal.SIGKILL
INTERRUPTED = 130


# ---- On the ranks ----------------------------------------------------------------------------------------------------


class _Output:
    """Standard output of a rank, which ends the run when a text comes by."""

    def __init__(self, file: Any, *, folder: Path, kill_at: str | None, stop_at: list[str] | None) -> None:
        self._file, self._folder, self._kill_at, self._stop_at = file, folder, kill_at, stop_at

    def write(self, text: str) -> int:
        self._file.write(text)
        self._file.flush()
        if self._kill_at is not None and self._kill_at in text:
            _kill_all(self._folder)
        if self._stop_at is not None and self._stop_at[0] in text:
            os.kill(os.getpid(), signal.Signals[self._stop_at[1]])
        return len(text)

    def flush(self) -> None:
        self._file.flush()

    def isatty(self) -> bool:
        return False


def _kill_all(folder: Path) -> NoReturn:
    own = os.getpid()
    for path in folder.glob("*.pid"):
        if int(path.stem) != own:
            os.kill(int(path.stem), signal.SIGKILL)
    os.kill(own, signal.SIGKILL)
    raise AssertionError("a process that was killed goes on")


def fine_tune(
    *,
    rank: int,
    folder: str,
    words: list[str],
    num_ranks: int,
    port: int,
    kill_at: str | None = None,
    stop_at: list[str] | None = None,
    kill_in_save: list[str] | None = None,
    stop_on_open: str | None = None,
) -> None:
    """One rank of `forge run --nproc_per_node N apps/sft/main.py`; output goes to rank0.txt and so on."""
    import torch.distributed as dist

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(
        {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    )
    home = Path(folder)
    output = (home / f"rank{rank}.txt").open("w")
    os.dup2(output.fileno(), 2)
    meeting = dist.FileStore(f"{home}/meeting-{port}", num_ranks)
    (home / f"{os.getpid()}.pid").touch()
    meeting.set(f"rank{rank}", "can be killed")
    meeting.wait([f"rank{each}" for each in range(num_ranks)])
    sys.stdout = _Output(output, folder=home, kill_at=kill_at, stop_at=stop_at)  # type: ignore[assignment]
    if kill_in_save is not None and rank == 0:
        event, part = kill_in_save
        sys.addaudithook(lambda name, what: _kill_all(home) if name == event and _names(what, part) else None)
    if stop_on_open is not None:
        sys.addaudithook(lambda name, what: _stop() if name == "open" and _names(what, stop_on_open) else None)
    sys.argv = [str(APP), *words]
    try:
        runpy.run_path(str(APP), run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, int) and ended.code > 128:  # stopped by a signal
            output.flush()
            os._exit(ended.code)
        raise


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _names(what: tuple[Any, ...], part: str) -> bool:
    first = str(what[0]) if what else ""
    return all(piece in first for piece in part.split("*"))


# ---- The runs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield from ranks_of(__name__)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources of different formats, mixed by weight, shuffled and packed; validation and saves in between."""
    folder = tmp_path_factory.mktemp("data")
    records = [json.loads(line) for line in (ROOT / "apps/sft/sums.jsonl").read_text().splitlines()[:160]]
    (folder / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records[:100]))
    plain = [[message["content"] for message in record["messages"]] for record in records[100:]]
    (folder / "plain.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt, "response": response}) + "\n" for prompt, response in plain)
    )
    config = {
        "model": {"preset": "tiny"},
        "training": {
            "batch_size": 4,
            "num_epochs": 40,
            "max_steps": NUM_STEPS,
            "max_seq_len": 96,
            "learning_rate": 3e-3,
            "weight_decay": 0.01,
        },
        "data": {
            "sources": [{"path": str(folder / "chat.jsonl")}, {"path": str(folder / "plain.jsonl"), "weight": 0.5}],
            "pack_lookahead": 8,
        },
        "validation": {"fraction": 0.1, "interval": 3},
        "checkpointing": {"save_interval": SAVE_INTERVAL},
        "metrics": {"log_interval": 1},
    }
    path = folder / "sft.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


class Run:
    """One run in its own folder, which may be started several times."""

    def __init__(self, ranks: Ranks, folder: Path, settings: Path) -> None:
        self._ranks, self.folder, self._settings = ranks, folder, settings
        folder.mkdir()

    def words(self, *words: str) -> list[str]:
        return ["--config", str(self._settings), f"run.output_dir={self.folder}", "run.name=run", *words]

    def start(self, *words: str, num_ranks: int = 1, **kill: Any) -> list[int]:
        for old in self.folder.glob("*.pid"):
            old.unlink()
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun holds it, on a free port
        return self._ranks.run(
            fine_tune,
            num_ranks,
            scratch=self.folder,
            has_group=False,  # the engine makes its own
            folder=self.folder,
            words=self.words(*words),
            num_ranks=num_ranks,
            port=store.port,
            **kill,
        )

    def finish(self, *words: str, num_ranks: int = 1) -> None:
        codes = self.start(*words, num_ranks=num_ranks)
        assert codes == [0] * num_ranks, self.output()

    def output(self) -> str:
        return (self.folder / "rank0.txt").read_text()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "run" / "checkpoints"

    def names(self) -> list[str]:
        return sorted(path.name for path in self.checkpoints.glob("step-*"))

    def figures(self) -> list[tuple[int, str, float]]:
        """Everything that must repeat itself, in the order of the file."""
        names = ("train/loss", "train/grad_norm", "train/learning_rate", "train/num_tokens", "train/epoch")
        kept = (*names, "validation/loss", "validation/best")
        lines = read_jsonl(self.folder / "run" / "metrics.jsonl")
        return [(line.step, name, float(line.values[name])) for line in lines for name in kept if name in line.values]

    def losses(self) -> list[float]:
        return [value for _, name, value in self.figures() if name == "train/loss"]

    def weights(self) -> dict[str, bytes]:
        """The files of the exported weights. A pipeline writes one for each stage."""
        return {path.name: path.read_bytes() for path in (self.checkpoints / "hf").glob("*.safetensors")}

    def tensors(self) -> dict[str, Any]:
        from safetensors.torch import load

        return {name: tensor for content in self.weights().values() for name, tensor in load(content).items()}


@pytest.fixture(scope="module")
def whole(ranks: Ranks, settings: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that nobody interrupts."""
    run = Run(ranks, tmp_path_factory.mktemp("whole") / "runs", settings)
    run.finish()
    assert [step for step, name, _ in run.figures() if name == "train/loss"] == list(range(1, NUM_STEPS + 1))
    assert [step for step, name, _ in run.figures() if name == "validation/loss"] == [3, 6, 9, 12, 15, 16]
    return run


def test_a_run_repeats_itself(ranks: Ranks, settings: Path, whole: Run, tmp_path: Path) -> None:
    again = Run(ranks, tmp_path / "runs", settings)
    again.finish()
    assert again.figures() == whole.figures()
    assert again.weights() == whole.weights()


def test_a_run_killed_again_and_again_ends_like_one_that_was_not(
    ranks: Ranks, settings: Path, whole: Run, tmp_path: Path
) -> None:
    run = Run(ranks, tmp_path / "runs", settings)
    chance = random.Random(4)
    for first in (1, 5, 9, 13):
        step = chance.randint(first, first + 3)
        assert run.start("checkpointing.resume=auto", kill_at=f"Step {step}/") == [KILLED]
        assert f"Step {step}/" in run.output()
    run.finish("--resume")
    assert run.figures() == whole.figures()
    assert run.weights() == whole.weights()


@pytest.mark.parametrize(
    "moment",
    [
        ("open", "step-00000008.partial-*.distcp"),  # nothing is written
        ("os.rename", "step-00000008.partial-"),  # everything is written, and not yet visible
    ],
    ids=["while it is written", "before it is visible"],
)
def test_a_kill_during_a_save_costs_that_save_alone(
    ranks: Ranks, settings: Path, whole: Run, tmp_path: Path, moment: tuple[str, str]
) -> None:
    run = Run(ranks, tmp_path / "runs", settings)
    assert run.start("validation.interval=null", kill_in_save=list(moment)) == [KILLED]
    assert "step-00000004" in run.names()
    assert "step-00000008" not in run.names()
    assert any(name.startswith("step-00000008.partial-") for name in run.names())
    run.finish("--resume")
    assert "resuming after step 4" in run.output()
    assert not any("partial" in name for name in run.names())
    plain = [figure for figure in run.figures() if figure[1].startswith("train/")]
    assert plain == [figure for figure in whole.figures() if figure[1].startswith("train/")]
    assert run.weights() == whole.weights()


@pytest.mark.parametrize(("number", "num_ranks"), [("SIGTERM", 1), ("SIGHUP", 1), ("SIGTERM", 2)])
def test_a_signal_saves_the_step_and_loses_nothing(
    ranks: Ranks, settings: Path, whole: Run, tmp_path: Path, number: str, num_ranks: int
) -> None:
    """Also where one rank of several gets it: they agree on the step."""
    run = Run(ranks, tmp_path / "runs", settings)
    never = ("checkpointing.save_interval=null", "validation.interval=null")
    codes = run.start(*never, num_ranks=num_ranks, stop_at=["Step 6/", number])
    assert codes[0] == 128 + signal.Signals[number], run.output()
    assert run.names() == ["step-00000006"]
    assert "stopped after step 6; --resume continues after step 6" in run.output()
    assert "Traceback" not in run.output()
    assert not (run.checkpoints / "hf").exists()
    if num_ranks > 1:
        return  # it ends like any other: see the test below
    run.finish("--resume", "validation.interval=null")
    plain = [figure for figure in run.figures() if figure[1].startswith("train/")]
    assert plain == [figure for figure in whole.figures() if figure[1].startswith("train/")]
    assert run.weights() == whole.weights()


def test_a_signal_before_the_first_step_saves_nothing(ranks: Ranks, settings: Path, tmp_path: Path) -> None:
    run = Run(ranks, tmp_path / "runs", settings)
    assert run.start(stop_on_open="metrics.jsonl") == [143], run.output()
    assert "stopped after step 0; there is no checkpoint yet" in run.output()
    assert run.names() == []


def test_seconds_make_a_checkpoint_due_on_every_rank(ranks: Ranks, settings: Path, tmp_path: Path) -> None:
    run = Run(ranks, tmp_path / "runs", settings)
    always = ("checkpointing.save_interval=null", "checkpointing.save_interval_s=1e-9", "checkpointing.keep=9")
    run.finish(*always, "validation.interval=null", "training.max_steps=4", num_ranks=2)
    assert run.names() == [f"step-0000000{step}" for step in (1, 2, 3, 4)]


def test_two_ranks_killed_together_go_on_bit_for_bit(ranks: Ranks, settings: Path, whole: Run, tmp_path: Path) -> None:
    sharded = Run(ranks, tmp_path / "sharded", settings)
    sharded.finish(num_ranks=2)
    run = Run(ranks, tmp_path / "runs", settings)
    assert run.start(num_ranks=2, kill_at="Step 7/") == [KILLED, KILLED]
    run.finish("--resume", num_ranks=2)
    assert run.figures() == sharded.figures()
    assert run.weights() == sharded.weights()
    assert run.losses() == pytest.approx(whole.losses(), rel=1e-4)


@pytest.mark.parametrize(
    ("words", "layout"),
    [([], "distributed.tensor=2"), (["model.tie_embeddings=false"], "distributed.pipeline=2")],
    ids=["tensor", "pipeline"],
)
def test_another_layout_goes_on_to_the_same_result(
    ranks: Ranks, settings: Path, whole: Run, tmp_path: Path, words: list[str], layout: str
) -> None:
    import torch

    expected = whole
    if words:
        expected = Run(ranks, tmp_path / "expected", settings)
        expected.finish(*words)
    run = Run(ranks, tmp_path / "runs", settings)
    assert run.start(*words, kill_at="Step 10/") == [KILLED]
    run.finish(*words, layout, "--resume", num_ranks=2)
    assert run.losses()[:8] == expected.losses()[:8]
    assert run.losses() == pytest.approx(expected.losses(), rel=1e-4)
    torch.testing.assert_close(run.tensors(), expected.tensors(), rtol=0, atol=2e-4)


def held_command(run: Run, folder: Path, *, at_step: int) -> tuple[list[str], Path]:
    """A program that waits when a step is written, and the pipe that lets it go on: steps are short."""
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    words = run.words(holding(pipe, at_step=at_step))
    return [sys.executable, "-m", "forge.cli", "run", str(APP), *words], pipe


def with_support() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


def test_a_controller_that_is_killed_takes_its_ranks_along_and_goes_on(
    ranks: Ranks, settings: Path, whole: Run, tmp_path: Path
) -> None:
    run = Run(ranks, tmp_path / "runs", settings)
    command, _ = held_command(run, tmp_path, at_step=6)
    environment = {**with_support(), "OMP_NUM_THREADS": "1"}
    errors = (tmp_path / "errors.txt").open("w")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as controller:
        assert controller.stdout is not None
        for line in controller.stdout:
            if line.startswith(HOLDING):
                break
        started = processes_of(controller.pid)
        controller.kill()
    errors.close()
    assert controller.returncode == KILLED, (tmp_path / "errors.txt").read_text()
    assert started
    _, alive = psutil.wait_procs(started, timeout=600)
    assert alive == []
    run.finish("--resume")
    assert run.figures() == whole.figures()
    assert run.weights() == whole.weights()


def test_ctrl_c_says_where_the_run_stopped_and_how_it_goes_on(ranks: Ranks, settings: Path, tmp_path: Path) -> None:
    run = Run(ranks, tmp_path / "runs", settings)
    command, pipe = held_command(run, tmp_path, at_step=6)
    with (tmp_path / "errors.txt").open("w") as errors:
        controller = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=with_support(),
            preexec_fn=hear_ctrl_c,
            start_new_session=True,
        )
        with controller:
            assert controller.stdout is not None
            for line in controller.stdout:
                if line.startswith(HOLDING):
                    os.killpg(controller.pid, signal.SIGINT)
                    pipe.write_text("")
                    break
            controller.stdout.read()
    said = (tmp_path / "errors.txt").read_text()
    assert controller.returncode == INTERRUPTED, said
    assert "Traceback" not in said
    found = re.search(r"stopped after step (\d+); --resume continues after step (\d+)", said)
    assert found is not None, said
    assert found[1] == found[2] == str(list_checkpoints(run.checkpoints)[-1].step)


# ---- What resume means -----------------------------------------------------------------------------------------------


def test_the_words_of_resume(ranks: Ranks, settings: Path, tmp_path: Path) -> None:
    run = Run(ranks, tmp_path / "runs", settings)
    few = "training.max_steps=5"
    assert run.start(few, "--resume") == [1]
    assert "There is no checkpoint to resume from" in run.output()
    assert "checkpointing.resume=auto to start anew" in run.output()
    assert not (run.folder / "run" / "metrics.jsonl").exists()

    run.finish(few)
    before = (run.folder / "run" / "metrics.jsonl").read_bytes()
    assert run.start(few) == [1]
    assert "checkpointing.resume=never the folder must hold no checkpoint" in run.output()
    assert "add --resume to continue that run, or run.name=" in run.output()
    assert (run.folder / "run" / "metrics.jsonl").read_bytes() == before

    branch = Run(ranks, tmp_path / "branch", settings)
    branch.finish("--resume", str(run.checkpoints / "step-00000004"), few)
    assert "resuming after step 4" in branch.output()
    assert [step for step, name, _ in branch.figures() if name == "train/loss"] == [5]
    assert branch.losses() == run.losses()[4:]
    assert branch.weights() == run.weights()


def test_a_run_that_has_ended_stays_as_it_is(ranks: Ranks, settings: Path, tmp_path: Path) -> None:
    run = Run(ranks, tmp_path / "runs", settings)
    run.finish("training.max_steps=4")
    before, weights, names = run.figures(), run.weights(), run.names()
    run.finish("training.max_steps=4", "--resume")
    assert run.figures() == before
    assert run.weights() == weights
    assert run.names() == names
    assert "nan" not in run.output()


# ---- What is kept ----------------------------------------------------------------------------------------------------


def test_the_best_checkpoint_is_kept_beside_the_newest(ranks: Ranks, settings: Path, tmp_path: Path) -> None:
    run = Run(ranks, tmp_path / "runs", settings)
    run.finish("training.max_steps=4")  # its last step is saved by the interval and validated at the end
    losses = {step: value for step, name, value in run.figures() if name == "validation/loss"}
    assert losses[4] < losses[3]
    best = best_checkpoint(list_checkpoints(run.checkpoints))
    assert best is not None
    assert (best.step, best.metric) == (4, losses[4])
    run.finish("training.max_steps=12", "training.learning_rate=1.0", "checkpointing.keep=1", "--resume")
    losses = {step: value for step, name, value in run.figures() if name == "validation/loss"}
    assert min(losses, key=lambda step: losses[step]) == 4
    assert run.names() == ["step-00000004", "step-00000012"]


@pytest.fixture
def poisoned(tmp_path: Path) -> tuple[Path, Path]:
    """A model with a NaN in the embedding of `~`, and data of which one line has that token."""
    import torch
    from safetensors.torch import load_file, save_file

    from forge.models.tiny import make_tiny

    folder = tmp_path / "model"
    make_tiny(folder, tie_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][ord("~")] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    records = (ROOT / "apps/sft/sums.jsonl").read_text().splitlines()[:80]
    records[BAD_LINE - 1] = records[BAD_LINE - 1].replace("?", " ~?", 1)
    data = tmp_path / "poisoned.jsonl"
    data.write_text("\n".join(records) + "\n")
    return folder, data


def test_a_step_that_is_not_finite_stops_the_run_or_is_left_out(
    ranks: Ranks, settings: Path, tmp_path: Path, poisoned: tuple[Path, Path]
) -> None:
    model, data = poisoned
    words = [
        "~model.preset",
        f"model.path={model}",
        f"data.sources=[{{path: {data}}}]",
        "data.shuffle=false",
        "training.max_steps=8",
        f"validation={{interval: 1, max_samples: 20, sources: [{{path: {settings.parent / 'chat.jsonl'}}}]}}",
    ]
    run = Run(ranks, tmp_path / "runs", settings)
    assert run.start(*words) == [1]
    said = run.output()
    assert f"{data}:{BAD_LINE}" in said
    assert "training.on_nonfinite=skip" in said
    done = len(run.losses())
    assert 1 < done < 8
    kept = list_checkpoints(run.checkpoints)
    assert kept[-1].step == done
    assert best_checkpoint(kept) == kept[-1]  # it was the best before the run stopped, and still is

    run.finish(*words, "training.on_nonfinite=skip", "--resume")
    assert f"step {done + 1} was skipped" in run.output()
    losses = run.losses()
    assert [step for step, loss in enumerate(losses, 1) if math.isnan(loss)] == [done + 1]
    skipping = Run(ranks, tmp_path / "skipping", settings)
    skipping.finish(*words, "training.on_nonfinite=skip")
    assert repr(skipping.figures()) == repr(run.figures())
    assert skipping.weights() == run.weights()
