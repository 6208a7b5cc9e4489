"""Fine-tuning as a user starts it: from the command line to a folder that `transformers` loads."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest
import yaml

from forge.cli import main as forge_command
from forge.observe import read_jsonl
from user_cache import cache_with_kernels

ROOT = Path(__file__).parents[2]
LIMIT_S = 600
NUM_STEPS = 20
FEW_STEPS = 6
APP = ["apps/sft/main.py", "--config", "apps/sft/tiny.yaml"]
SHORT = [
    f"training.max_steps={NUM_STEPS}",
    *("training.schedule=constant", "training.warmup_ratio=0"),  # a shorter run has the first steps of a longer one
    "training.batch_size=4",
    "training.max_seq_len=256",
    f"validation.interval={FEW_STEPS}",
    "checkpointing.save_interval=10",
    "metrics.log_interval=4",
]
STEP_LINE = re.compile(
    r"Step \d+/\d+ \| epoch \d+/10 \| loss \d+\.\d{2,4} \| lr [\d.e-]+ \| \S+ tok/s( \| grad [\d.e-]+)?"
    r"( \| \S+ left)?"
)
VALIDATION_LINE = re.compile(r"Validation at step \d+/\d+ \| loss \d+\.\d{2,4}( \| best)?")

pytestmark = pytest.mark.usefixtures("leaves_nothing")


class Ended:
    """A run that has ended, and what it left."""

    def __init__(self, command: list[str], folder: Path, *settings: str) -> None:
        words = [*command, *SHORT, *settings, f"run.output_dir={folder}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **cache_with_kernels(folder.parent / "cache")}
        ended = subprocess.run(
            words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert ended.returncode == 0, ended.stderr
        self.output, self.errors = ended.stdout.splitlines(), ended.stderr
        self.folder = folder / "sft-tiny"
        self.lines = list(read_jsonl(self.folder / "metrics.jsonl"))

    def values(self, name: str) -> dict[int, float]:
        return {line.step: float(line.values[name]) for line in self.lines if name in line.values}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sft")


@pytest.fixture(scope="module")
def single(home: Path) -> Ended:
    """One controller, one rank."""
    return Ended([sys.executable, "-m", "forge.cli", "run", *APP], home / "single", "record.profile.steps=[2]")


def test_it_learns_and_says_so(single: Ended) -> None:
    steps = list(range(1, NUM_STEPS + 1))
    counts = Counter((line.step, name) for line in single.lines for name in line.values)
    assert set(counts.values()) == {1}
    assert sorted(single.values("train/loss")) == steps
    validation = single.values("validation/loss")
    assert sorted(validation) == [6, 12, 18, NUM_STEPS]
    assert validation[NUM_STEPS] < validation[6] < single.values("train/loss")[1] - 2
    assert validation[NUM_STEPS] < 2.2

    training = [line for line in single.output if line.startswith("Step ")]
    assert len(training) == NUM_STEPS // 4
    assert all(STEP_LINE.fullmatch(line) for line in training), training
    judged = [line for line in single.output if line.startswith("Validation")]
    assert len(judged) == 4
    assert all(VALIDATION_LINE.fullmatch(line) for line in judged), judged
    last = single.values("train/loss")[NUM_STEPS]
    said = f"Done after {NUM_STEPS} steps: loss {last:.4f}, validation loss {validation[NUM_STEPS]:.4f}"
    assert single.output[-1] == said
    assert len(single.output) == len(training) + len(judged) + 1
    assert "Warning" not in single.errors
    assert "Traceback" not in single.errors


def test_what_it_leaves_behind(single: Ended) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from forge.trainer.checkpoint_folder import best_checkpoint, list_checkpoints

    assert sorted(path.name for path in single.folder.iterdir()) == [
        ".writer",
        "checkpoints",
        "config.yaml",
        "logs",
        "metrics.jsonl",
        "profiles",
        "startup.json",
        "system.jsonl",
        "tensorboard",
        "trace.json",
    ]
    assert yaml.safe_load((single.folder / "config.yaml").read_text())["training"]["max_steps"] == NUM_STEPS
    (profile,) = (single.folder / "profiles").iterdir()
    assert profile.name == "step-00000002-trainer-0.json.gz"
    assert "aten::embedding" in {
        each["name"] for each in json.loads(gzip.decompress(profile.read_bytes()))["traceEvents"]
    }
    processes = {name for line in read_jsonl(single.folder / "system.jsonl") for name in line.values}
    assert {"memory_gib/controller", "memory_gib/trainer[0]"} <= processes
    spans = {each["name"] for each in json.loads((single.folder / "trace.json").read_text())}
    assert {"train", "train_step", "validate", "save"} <= spans
    events = EventAccumulator(str(single.folder / "tensorboard"))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("train/loss")}
    assert shown == pytest.approx(single.values("train/loss"))
    kept = list_checkpoints(single.folder / "checkpoints")
    assert [info.step for info in kept] == [18, NUM_STEPS]
    best = best_checkpoint(kept)
    assert best is not None
    assert (best.step, best.metric) == (NUM_STEPS, single.values("validation/loss")[NUM_STEPS])


def test_transformers_loads_the_export_and_finds_the_same_validation_loss(single: Ended) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from forge.config import SFTConfig, load
    from forge.data import open_loaders
    from forge.models.tokenizer import ChatTokenizer

    torch.set_num_threads(1)
    export = single.folder / "checkpoints" / "hf"
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    config = load(SFTConfig, files=[single.folder / "config.yaml"])
    sources = [source.model_copy(update={"path": str(ROOT / str(source.path))}) for source in config.data.sources]
    with open_loaders(
        config.data.model_copy(update={"sources": tuple(sources)}),
        training=config.training,
        tokenizer=ChatTokenizer.load(export),
        seed=config.run.seed,
        validation=config.validation,
    ) as loaders:
        assert loaders.validation is not None
        batches = list(loaders.validation)
    total = weight = 0.0
    with torch.no_grad():
        for batch in batches:
            parts = (batch.token_ids.split(batch.lengths), batch.loss_weights.split(batch.lengths))
            for tokens, weights in zip(*parts, strict=True):
                logprobs = model(tokens.unsqueeze(0)).logits[0, :-1].log_softmax(-1)
                said = logprobs.gather(1, tokens[1:, None])[:, 0]
                total, weight = total - float((said * weights[1:]).sum()), weight + float(weights.sum())
    assert weight > 500
    assert total / weight == pytest.approx(single.values("validation/loss")[NUM_STEPS], abs=1e-4)

    tokenizer = AutoTokenizer.from_pretrained(export)
    question = [{"role": "user", "content": "What is 1 + 2?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "=" in tokenizer.decode(answer)


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "-m", "forge.cli", "run", "--nproc_per_node", "2", *APP],
        [sys.executable, *APP, "distributed.tensor=2"],
    ],
    ids=["two ranks of the program", "a controller with two tensor parallel ranks"],
)
def test_two_ranks_learn_what_one_learns(single: Ended, home: Path, command: list[str]) -> None:
    both = Ended(command, home / f"both-{len(command)}", f"training.max_steps={FEW_STEPS}")

    def first(name: str) -> dict[int, float]:
        return {step: value for step, value in single.values(name).items() if step <= FEW_STEPS}

    assert [line.step for line in both.lines] == [line.step for line in single.lines if line.step <= FEW_STEPS]
    for name, steps in (("train/loss", FEW_STEPS), ("validation/loss", 1)):
        assert len(both.values(name)) == steps
        assert both.values(name) == pytest.approx(first(name), rel=2e-3)
    assert both.values("train/loss")[1] == pytest.approx(single.values("train/loss")[1], rel=1e-6)
    assert both.values("train/num_tokens") == first("train/num_tokens")
    assert len([line for line in both.output if line.startswith("Done")]) == 1


GUIDE = ["run", "--nproc_per_node", "2", "apps/sft/main.py", "--config", "apps/sft/llama3_8b.yaml"]
TINY = [
    *(
        "model.preset=tiny",
        "model.path=",
        "model.hf_repo=",
        "distributed.with_gpus=false",
        "distributed.precision=fp32",
    ),
    *("training.compile=false", "training.max_seq_len=256", "training.microbatch_tokens=256", "training.max_steps=2"),
]


def test_the_command_of_the_guide_runs_as_typed_with_a_smaller_model(tmp_path: Path) -> None:
    """The same file on two ranks of a CPU: only the model, and what a GPU is for, are replaced."""
    from forge.trainer.checkpoint_folder import list_checkpoints

    environment = {**os.environ, "OMP_NUM_THREADS": "1", **cache_with_kernels(tmp_path / "cache")}
    words = [sys.executable, "-m", "forge.cli", *GUIDE, *TINY, f"run.output_dir={tmp_path}"]
    ended = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    folder = tmp_path / "sft-llama-3.1-8b"
    losses = [line.values["train/loss"] for line in read_jsonl(folder / "metrics.jsonl") if "train/loss" in line.values]
    assert len(losses) == 2
    (saved,) = list_checkpoints(folder / "checkpoints")
    assert (saved.step, saved.world_size) == (2, 2)


# ---- Wrong input -----------------------------------------------------------------------------------------------------


def refused(words: list[str], folder: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """What the command says about input that it refuses: at once, without a traceback, and leaving nothing behind."""
    before = set(psutil.Process().children())  # such as Python's own tracker of shared memory, of another test
    code = forge_command(["run", *APP, f"run.output_dir={folder}", *words])
    said = capfd.readouterr().err
    assert code == 2, said
    assert "Traceback" not in said
    assert set(psutil.Process().children()) <= before
    return said


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["model.family=gpt2"], ["model.family", "'gpt2'", "qwen3, qwen3_moe, qwen2, llama"]),
        (["model.path=no/such/folder"], ["model.path", "no/such/folder", "forge download"]),
        (["data.sources=[{path: nothing.jsonl}]"], ["nothing.jsonl", "starts at the working directory"]),
        (["distributed.tensor=3"], ["distributed.tensor", "must divide model.num_heads, which is 4", "shard 3"]),
        (["distributed.pipeline=2"], ["distributed.pipeline", "model.tie_embeddings is true", "shard 2; tensor 2"]),
        (["training.max_seq_len=4096"], ["training.max_seq_len", "which is 2048", "lower it to 2048"]),
        (["training.max_seq_len=8"], ["data.sources", "'oversize': 1425", "raise training.max_seq_len"]),
        (["--resume"], ["no checkpoint to resume from", "checkpointing.resume=auto"]),
    ],
    ids=["family", "folder", "data", "heads", "tied", "too long", "nothing to learn", "no checkpoint"],
)
def test_wrong_input_is_refused(
    words: list[str],
    parts: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    said = refused(words, tmp_path / "runs", capfd)
    assert [part for part in parts if part not in said] == [], said
    assert not (tmp_path / "runs").exists()


def test_a_bad_record_is_named_by_file_and_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    records = (ROOT / "apps/sft/sums.jsonl").read_text().splitlines()[:3]
    data = tmp_path / "bad.jsonl"
    data.write_text("\n".join([*records, '{"messages": [{"role": "user"}]}']) + "\n")
    said = refused([f"data.sources=[{{path: {data}}}]", "validation.fraction=0"], tmp_path / "runs", capfd)
    assert f"{data}:4" in said
    assert "data.on_bad_record to skip" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        ('{"prompt": 3}', ["held.jsonl:2", "`prompt`", "data.on_bad_record to skip"]),
        (None, ["no sample to validate on", "validation", "'oversize': 1", "validation.sources"]),
    ],
    ids=["bad", "all too long"],
)
def test_what_is_held_out_is_looked_at_before_training(
    record: str | None,
    parts: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    held = tmp_path / "held.jsonl"
    long = '{"prompt": "' + "1 + " * 2000 + '1", "response": "2001"}\n'
    held.write_text(long if record is None else f'{{"prompt": "1 + 1", "response": "2"}}\n{record}\n')
    said = refused([f"validation.sources=[{{path: {held}}}]"], tmp_path / "runs", capfd)
    assert [part for part in parts if part not in said] == [], said
    assert not (tmp_path / "runs").exists()


def test_a_folder_with_checkpoints_is_not_mixed_with_another_run(
    single: Ended, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    before = {path: path.stat().st_mtime_ns for path in single.folder.rglob("*")}
    said = refused([], single.folder.parent, capfd)
    assert "already holds 2 checkpoint(s), the latest of step 20" in said
    assert "add --resume to continue that run, or run.name=" in said
    assert {path: path.stat().st_mtime_ns for path in single.folder.rglob("*")} == before


def test_a_refused_resume_leaves_the_folder_as_it_was(
    single: Ended, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    before = {path.name: path.read_text() for path in single.folder.glob("config*.yaml")}
    said = refused(["--resume", *SHORT, "run.seed=5"], single.folder.parent, capfd)
    assert "seed has changed" in said
    assert {path.name: path.read_text() for path in single.folder.glob("config*.yaml")} == before
