"""Distillation from stored logprobs: what is stored, that a run learns from it and resumes exactly, what is refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.cli import main
from forge.config import DistillConfig, InvalidConfig, load
from forge.data.teacher_logprobs import LogprobStore, LogprobWriter, StoreFacts, read_facts, sample_key
from forge.errors import ActorFailure, CheckpointError, ConfigError, DataError
from forge.loops import storing
from forge.loops.dry_run import dry_run
from forge.loops.preflight import prepare_supervised
from forge.loops.run_paths import load_tokenizer, run_dir
from forge.loops.storing import read_samples, store_logprobs
from forge.loops.supervised import SupervisedResult, run_supervised
from forge.losses.distillation import TEACHER_IDS, TEACHER_LOGPROBS
from forge.memory import Card, plan_memory, resolve_run
from forge.models.locate import resolve
from forge.models.tiny import make_tiny
from forge.models.tokenizer import ChatTokenizer
from forge.observe import read_jsonl
from forge.trainer.checkpoint_folder import WriterLock
from forge.types import Batch, Sample
from local_services import services_here

K = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher, some data, and the logprobs that the native engine stored of it."""
    found = tmp_path_factory.mktemp("distill")
    make_tiny(found / "teacher", seed=5, num_layers=1)
    lines = [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"it is {n % 4}."}]}
        for n in range(12)
    ]
    (found / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    stored_here(a_config(found))
    return found


def a_config(folder: Path, *overrides: str, name: str = "run") -> DistillConfig:
    given = {
        "run": {"name": name, "output_dir": str(folder / "runs")},
        "model": {"preset": "tiny"},
        "teacher": {"path": str(folder / "teacher"), "generator": {"engine": "native"}},
        "distillation": {"store": str(folder / "store"), "top_k": K},
        "data": {"sources": [{"path": str(folder / "data.jsonl")}], "packing": False},
        "training": {"batch_size": 3, "num_epochs": 2, "max_seq_len": 64, "learning_rate": 3e-3},
        "checkpointing": {"save_interval": 2},
        "metrics": {"tensorboard": False, "log_interval": 100},
    }
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(given))
    return load(DistillConfig, files=[file], overrides=list(overrides))


def stored_here(config: DistillConfig) -> StoreFacts:
    """Store with the teacher's engine in this process."""
    with services_here():
        return asyncio.run(asyncio.wait_for(store_logprobs(config), 600))


def train_supervised_here(config: DistillConfig) -> SupervisedResult:
    """Train with the trainer in this process."""
    with services_here():
        return asyncio.run(asyncio.wait_for(run_supervised(config), 600))


def weights_digest(config: DistillConfig) -> str:
    file = run_dir(config) / "checkpoints" / "hf" / "model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def samples_of(config: DistillConfig) -> list[Sample]:
    model = resolve(config.model)
    return list(read_samples(config, load_tokenizer(model, chat_template=None, purpose="a test")))


def test_what_is_stored_is_what_the_teacher_says(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = a_config(folder)
    facts = read_facts(folder / "store")
    assert facts is not None
    samples = samples_of(config)
    assert (facts.k, facts.is_complete, facts.num_samples, len(samples)) == (K, True, 12, 12)
    store = LogprobStore(folder / "store", facts)
    store.verify()
    model = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
    for sample in samples[:3]:
        logprobs, ids = store.find(sample, top_k=4)
        expected = torch.log_softmax(model(sample.token_ids[None]).logits[0].detach(), -1)[:-1].topk(4)
        for place in torch.nonzero(sample.loss_weights)[:, 0].tolist():
            assert torch.equal(ids[place], expected.indices[place - 1])
            assert torch.allclose(logprobs[place], expected.values[place - 1], atol=1e-4)
        assert not logprobs[sample.loss_weights == 0].any()


def test_a_run_learns_the_teacher_s_distribution_and_resumes_exactly(folder: Path) -> None:
    whole = a_config(folder, "validation.sources=[{path: " + str(folder / "data.jsonl") + "}]", name="whole")
    result = train_supervised_here(whole)
    assert result.step == 8
    assert result.validation_loss is not None
    found = [line.values for line in read_jsonl(run_dir(whole) / "metrics.jsonl")]
    losses = [float(values["train/divergence"]) for values in found if "train/divergence" in values]
    assert losses[-1] < 0.7 * losses[0]
    assert "validation/nll" in found[-1]

    parts = a_config(folder, "training.max_steps=5", "training.schedule=constant", name="parts")
    once = a_config(folder, "training.schedule=constant", name="once")
    train_supervised_here(parts)
    train_supervised_here(a_config(folder, "training.schedule=constant", "checkpointing.resume=must", name="parts"))
    train_supervised_here(once)
    assert weights_digest(parts) == weights_digest(once)


def test_batches_have_the_teacher_s_tokens_where_tokens_count(folder: Path) -> None:
    config = a_config(folder, "distillation.top_k=2")
    with prepare_supervised(config) as prepared:
        batch = next(prepared.loaders.train)
    assert batch.fields[TEACHER_IDS].shape == batch.fields[TEACHER_LOGPROBS].shape == (batch.num_tokens, 2)
    assert bool((batch.fields[TEACHER_LOGPROBS][batch.loss_weights != 0] < 0).all())


def test_storing_continues_and_asks_about_nothing_twice(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder / "store", tmp_path / "store")
    config = a_config(folder, f"distillation.store={tmp_path / 'store'}")
    more = tmp_path / "more.jsonl"
    more.write_text((folder / "data.jsonl").read_text().replace("say 3", "say 33").splitlines()[3] + "\n")
    asked: list[int] = []
    original = storing._ask_about

    async def ask(samples: Any, *args: Any, **options: Any) -> None:
        asked.append(len(samples))
        await original(samples, *args, **options)

    monkeypatch.setattr(storing, "_ask_about", ask)
    assert stored_here(config).num_samples == 12
    assert asked == []
    both = f"data.sources=[{{path: {folder / 'data.jsonl'}}}, {{path: {more}}}]"
    facts = stored_here(a_config(folder, f"distillation.store={tmp_path / 'store'}", both))
    assert (asked, facts.num_samples, len(facts.shards)) == ([1], 13, 2)


def test_answers_that_are_here_when_the_teacher_fails_are_kept(folder: Path, tmp_path: Path) -> None:
    writer, samples = LogprobWriter(tmp_path, some_facts()), [a_sample(1, 2, 3), a_sample(4, 5)]

    async def top(batch: Batch, k: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if int(batch.token_ids[0]) == 4:
            raise ActorFailure("gone", path="teacher", rule="alive", repair="start it")
        return [(-torch.ones(2, k), torch.ones(2, k, dtype=torch.int64))]

    config = a_config(folder, "training.max_seq_len=3", "distillation.top_k=2")
    with pytest.raises(ActorFailure):
        asyncio.run(storing._ask_about(samples, top, writer, config=config, report=lambda: None))
    facts = read_facts(tmp_path)
    assert facts is not None
    assert (facts.num_samples, facts.is_complete) == (1, False)
    assert [LogprobWriter(tmp_path, some_facts()).has(sample_key(each)) for each in samples] == [True, False]


def test_one_process_at_a_time_stores_into_a_folder(folder: Path) -> None:
    lock = WriterLock(folder / "store")
    with pytest.raises(CheckpointError) as caught:
        stored_here(a_config(folder))
    assert caught.value.path == str(folder / "store")
    lock.release()
    assert stored_here(a_config(folder)).is_complete


def test_a_token_that_the_student_has_no_row_for_is_refused(folder: Path, tmp_path: Path) -> None:
    """A teacher's output layer may have more rows than the student's, with the same tokenizer."""
    facts = read_facts(folder / "store")
    assert facts is not None
    config = a_config(folder, f"distillation.store={tmp_path}")
    writer = LogprobWriter(tmp_path, replace(facts, shards=(), is_complete=False))
    for sample in samples_of(config):
        num_counted = int((sample.loss_weights != 0).sum())
        writer.add(sample_key(sample), -torch.ones(num_counted, K), torch.full((num_counted, K), 512))
    writer.finish()
    with pytest.raises(DataError, match="does not have") as caught, prepare_supervised(config):
        pass
    assert caught.value.value == 512
    assert "512" in str(caught.value.rule)


def some_facts(**changes: Any) -> StoreFacts:
    return replace(StoreFacts(2, "float16", "teacher", "digest"), **changes)


def a_sample(*tokens: int) -> Sample:
    weights = torch.ones(len(tokens))
    weights[0] = 0
    return Sample(torch.tensor(tokens), weights, identity="here:1")


def test_a_store_keeps_shards_whole_and_says_what_does_not_fit(tmp_path: Path) -> None:
    samples = [a_sample(1, 2, 3), a_sample(4, 5), a_sample(6, 7, 8, 9)]
    writer = LogprobWriter(tmp_path, some_facts(), shard_tokens=3)
    for number, sample in enumerate(samples):
        rows = len(sample) - 1
        writer.add(sample_key(sample), torch.full((rows, 2), -float(number + 1)), torch.full((rows, 2), number))
    assert writer.has(sample_key(samples[2]))
    facts = writer.finish()
    assert [shard.num_tokens for shard in facts.shards] == [3, 3]
    store = LogprobStore(tmp_path, facts)
    logprobs, ids = store.find(samples[2], top_k=1)
    assert (logprobs[1:].tolist(), ids[1:].tolist()) == ([[-3.0]] * 3, [[2]] * 3)
    with pytest.raises(DataError, match="here:1 has no stored logprobs"):
        store.find(replace(samples[0], loss_weights=torch.tensor([0.0, 0.0, 1.0])), top_k=1)
    for changes in ({"k": 3}, {"dtype": "float32"}, {"teacher": "another"}, {"tokenizer_digest": "another"}):
        with pytest.raises(DataError, match="another") as caught:
            LogprobWriter(tmp_path, some_facts(**changes))
        assert caught.value.path == str(tmp_path)
    with pytest.raises(DataError, match="did not give k tokens"):
        LogprobWriter(tmp_path / "new", some_facts()).add(b"", torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(DataError, match="not finite") as caught:
        LogprobWriter(tmp_path / "new", some_facts()).add(b"", torch.tensor([[-1.0, -math.inf]]), torch.zeros(1, 2))
    assert (caught.value.path, caught.value.value) == ("teacher", -math.inf)
    (tmp_path / "logprobs-00001.safetensors").write_bytes(b"damaged")
    with pytest.raises(DataError, match="cannot be used"):
        LogprobStore(tmp_path, facts)
    (tmp_path / "teacher.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be read"):
        read_facts(tmp_path)


def test_runs_that_do_not_fit_their_store_are_refused(folder: Path, tmp_path: Path) -> None:
    cases = {
        "distillation.store": [f"distillation.store={tmp_path / 'nothing'}"],
        "distillation.top_k": ["distillation.top_k=7"],
    }
    for path, overrides in cases.items():
        config = a_config(folder, *overrides)
        with pytest.raises(ConfigError) as caught, prepare_supervised(config):
            pass
        assert caught.value.path == path
        assert [problem.path for problem in dry_run(config).problems] == [path]
    with (
        pytest.raises(DataError, match="has no stored logprobs"),
        prepare_supervised(a_config(folder, "data.loss_on=all")),
    ):
        pass
    settings = json.loads((folder / "teacher" / "config.json").read_text())
    shutil.copytree(folder / "teacher", tmp_path / "short")
    (tmp_path / "short" / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 32}))
    too_short = ("teacher.generator.max_seq_len=32", f"teacher.path={tmp_path / 'short'}")
    for override in too_short:
        with pytest.raises(ConfigError, match="cannot score the longest sequences") as caught:
            asyncio.run(store_logprobs(a_config(folder, override, f"distillation.store={tmp_path / 'nothing'}")))
        assert caught.value.path == override.partition("=")[0]
        assert "at least 64" in str(caught.value.rule)
    no_teacher = a_config(folder, "~teacher", f"distillation.store={tmp_path / 'nothing'}")
    with pytest.raises(ConfigError, match="no teacher to ask"):
        asyncio.run(store_logprobs(no_teacher))


def test_a_student_with_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path / "other", num_layers=1)
    for file in (tmp_path / "other").glob("tokenizer*.json"):
        file.write_text(file.read_text().replace("<|im_end|>", "<|im_over|>"))
    student = (f"model.path={tmp_path / 'other'}", "model.preset=null")
    assert ChatTokenizer.load(tmp_path / "other").vocabulary != ChatTokenizer.load(folder / "teacher").vocabulary
    with pytest.raises(ConfigError, match="different tokenizers") as caught:
        asyncio.run(store_logprobs(a_config(folder, *student)))
    assert caught.value.path == "teacher.path"
    for more, error in (((), ConfigError), (("~teacher",), DataError)):
        with pytest.raises(error, match="different tokenizers"), prepare_supervised(a_config(folder, *student, *more)):
            pass


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("distillation.beta=0.2", "distillation.beta"),
        ("distributed.pipeline=2", "distributed.pipeline"),
    ],
)
def test_settings_without_an_effect_are_refused(folder: Path, override: str, path: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        a_config(folder, override)
    assert [problem.path for problem in caught.value.problems] == [path]
    with pytest.raises(InvalidConfig, match="at least 2"):
        a_config(folder, "distillation.top_k=1", "distillation.tail=renormalize")


def test_the_plan_and_the_commands_know_the_kind(folder: Path, tmp_path: Path) -> None:
    config = a_config(folder)
    assert dict(dry_run(config).facts)["steps"].startswith("8,")
    card = Card(2**34, 1)
    (gpu,) = plan_memory(resolve_run(config, card=card), card=card).gpus
    assert gpu.name == "trainer"
    assert main(["plan", str(folder / "run.yaml"), "--gpu-memory", "16GB"]) == 0
    assert main(["distill", str(folder / "run.yaml"), "~teacher", f"distillation.store={tmp_path}"]) == 2
