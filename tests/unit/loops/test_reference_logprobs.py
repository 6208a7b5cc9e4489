"""The reference's logprobs beside a run: computed once, found by tokens, continued after a stop."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forge.config import PreferenceConfig, load
from forge.errors import CheckpointError, ConfigError, DataError
from forge.loops import reference_logprobs
from forge.loops.dry_run import dry_run
from forge.loops.logprob_table import LogprobTable, sample_key
from forge.loops.preflight import PreparedRun, prepare_supervised
from forge.loops.reference_logprobs import open_reference
from forge.models.tiny import make_tiny
from forge.types import Batch, Sample

ROOT = Path(__file__).resolve().parents[3]


def config(folder: Path, *overrides: str) -> PreferenceConfig:
    words = [f"run.output_dir={folder}", "run.name=run", "model.preset=tiny", "training.max_seq_len=128"]
    words += [f"data.sources=[{{path: {ROOT / 'apps/dpo/orders.jsonl'}}}]", "training.batch_size=4"]
    return load(PreferenceConfig, overrides=[*words, "training.max_steps=3", "validation.fraction=0.005", *overrides])


class Scorer:
    """Stands for a trainer: the logprob of a token is minus its number, and every scored sample is counted."""

    is_leader = True

    def __init__(self) -> None:
        self.num_scored = 0

    async def agree(self, *flags: bool) -> tuple[bool, ...]:
        return flags

    async def forward_logprobs(self, batch: Batch, *, temperature: float = 1.0) -> list[Tensor]:
        self.num_scored += len(batch)
        return [-sample.token_ids.float() for sample in batch.samples()]


def completed(
    chosen: PreferenceConfig,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    change: Callable[[PreparedRun], PreparedRun] = lambda prepared: prepared,
) -> tuple[int, list[Batch] | None]:
    """How many samples were scored, and the run's batches with the reference's logprobs; None if it was to stop."""

    async def body() -> tuple[int, list[Batch] | None]:
        scorer: Any = Scorer()
        with prepare_supervised(chosen) as prepared:
            async with open_reference(chosen, change(prepared), scorer, should_stop=should_stop) as complete:
                if complete is None:
                    return scorer.num_scored, None
                return scorer.num_scored, [await complete(batch) for batch in islice(prepared.loaders.train, 3)]

    return asyncio.run(body())


def test_a_pass_scores_every_answer_once_and_the_next_start_none(tmp_path: Path) -> None:
    scored, batches = completed(config(tmp_path))
    assert scored == 3 * 8 + 8, "two answers of each pair that is trained on, and of four held-out ones"
    assert batches is not None
    for batch in batches:
        expected = torch.where(batch.fields["completion"] != 0, -batch.token_ids.float(), 0.0)
        assert batch.fields["ref_logprobs"].equal(expected)
    again, same = completed(config(tmp_path))
    assert again == 0
    assert same is not None
    assert same[2].fields["ref_logprobs"].equal(batches[2].fields["ref_logprobs"])
    more, _ = completed(config(tmp_path, "training.max_steps=4"))
    assert more == 8, "only what is new"
    twice, _ = completed(config(tmp_path, "training.num_epochs=2", "training.max_steps=4"))
    assert twice == 0, "the samples of another epoch are the same"


def test_a_pass_covers_batches_beyond_an_estimate_of_their_number(tmp_path: Path) -> None:
    """Of much data the number of steps is estimated; the run takes every batch nevertheless."""

    def underestimated(prepared: PreparedRun) -> PreparedRun:
        return replace(prepared, trainer=prepared.trainer.model_copy(update={"total_steps": 1}))

    every = ("training.batch_size=200", "training.max_steps=null")
    scored, batches = completed(config(tmp_path, *every), change=underestimated)
    assert batches is not None
    assert [len(batch) for batch in batches] == [400, 400, 400]
    assert scored > 1200


def test_kto_keeps_the_logprobs_of_mismatched_answers_too(tmp_path: Path) -> None:
    scored, batches = completed(config(tmp_path, "preference.kind=kto"))
    assert scored == 2 * (3 * 8 + 8)
    assert batches is not None
    first = batches[0]
    samples = list(first.samples())
    # Both answers of a pair have one prompt, so that answers move on by two samples.
    prompt = int(samples[0].fields["completion"].argmax())
    other = samples[-2]
    total = -float(other.token_ids[other.fields["completion"] != 0].double().sum())
    assert float(samples[0].fields["mismatched_ref_logprob"][0]) == total
    assert prompt > 0


def test_a_pass_that_is_stopped_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_logprobs, "_UNWRITTEN", 1)
    asked = iter([False, False, True])
    scored, batches = completed(config(tmp_path), should_stop=lambda: next(asked))
    assert (scored, batches) == (16, None)
    assert completed(config(tmp_path))[0] == 16, "the other half"


def test_another_model_is_computed_again_or_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    completed(config(tmp_path))
    with caplog.at_level(logging.WARNING, "forge.preference"):
        scored, _ = completed(config(tmp_path, "distributed.precision=float64"))
    assert scored == 32
    assert "of another reference (distributed.precision): they are computed again" in caplog.text
    resumed: Any = object()
    with pytest.raises(CheckpointError) as caught:
        completed(config(tmp_path), change=lambda prepared: replace(prepared, checkpoint=resumed))
    assert caught.value.path == str(tmp_path / "run" / "reference")
    assert caught.value.value == "distributed.precision"
    assert caught.value.repair


def sample(tokens: list[int], mask: list[float]) -> Sample:
    completion = torch.tensor(mask)
    return Sample(torch.tensor(tokens), completion, {"completion": completion}, identity="x:1")


def test_answers_are_found_by_tokens_and_by_which_of_them_count(tmp_path: Path) -> None:
    one, other = sample([1, 2, 3], [0, 1, 1]), sample([1, 2, 3], [0, 0, 1])
    assert sample_key(one) != sample_key(other) != sample_key(sample([1, 2, 4], [0, 0, 1]))
    table = LogprobTable(tmp_path / "t", {"model": "a"})
    table.add(one, torch.tensor([-1.0, -2.0]))
    table.write()
    table.add(other, torch.tensor([-3.0]))
    table.write(coverage="all")
    read = LogprobTable(tmp_path / "t", {"model": "a"})
    read.load(is_resumed=True)
    assert len(read) == 2
    assert read.covers("all")
    found = [read.find(each) for each in (one, other, sample([9], [0]))]
    assert [None if each is None else each.tolist() for each in found] == [[-1.0, -2.0], [-3.0], None]
    follower = LogprobTable(tmp_path / "none", {"model": "a"}, is_writer=False)
    follower.add(one, torch.tensor([-1.0]))
    follower.write(coverage="all")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", ["table.json", "part-00000.safetensors"])
def test_files_that_cannot_be_read_are_refused_by_name(name: str, tmp_path: Path) -> None:
    completed(config(tmp_path))
    path = tmp_path / "run" / "reference" / name
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(DataError) as caught:
        completed(config(tmp_path))
    assert caught.value.path == str(path)
    assert f"delete {path.parent}" in str(caught.value.repair)


def test_a_table_that_is_replaced_is_never_half_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the process was killed after the first file was deleted."""
    table = LogprobTable(tmp_path / "t", {"model": "a"})
    table.add(sample([1, 2], [0, 1]), torch.tensor([-1.0]))
    table.write(coverage="all")
    table.forget()
    table.add(sample([1, 3], [0, 1]), torch.tensor([-2.0]))

    def killed(folder: Path, **options: Any) -> None:
        (folder / "part-00000.safetensors").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr("forge.loops.logprob_table.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        table.write()
    again = LogprobTable(tmp_path / "t", {"model": "a"})
    again.load(is_resumed=False)
    assert len(again) == 0


@pytest.mark.parametrize(
    ("override", "path"), [("reference.mode=online", "reference.mode"), ("reference.path={model}", "reference.path")]
)
def test_ranks_from_outside_have_no_reference_of_their_own(override: str, path: str, tmp_path: Path) -> None:
    with prepare_supervised(config(tmp_path)) as prepared:
        words = override.format(model=prepared.model.folder)
    with pytest.raises(ConfigError) as caught, prepare_supervised(config(tmp_path, words), num_ranks=2):
        pass
    assert caught.value.path == path
    assert "distributed.shard=2" in str(caught.value.repair)
    found = dry_run(config(tmp_path, words), num_ranks=2)
    assert [problem.path for problem in found.problems] == [path]
    own = config(tmp_path, "reference.mode=online", "adapter.rank=2")
    with prepare_supervised(own, num_ranks=1):
        pass  # the trainer is its own reference


def test_a_dry_run_says_what_is_compared_and_finds_a_wrong_folder(tmp_path: Path) -> None:
    facts = dict(dry_run(config(tmp_path)).facts)
    assert facts["loss"] == "dpo, beta 0.1"
    assert facts["reference"].startswith("the policy's initial weights; logprobs are computed in a pass over the data")
    facts = dict(dry_run(config(tmp_path, "preference.kind=simpo")).facts)
    assert (facts["loss"], facts["reference"]) == ("simpo, beta 2", "none: simpo needs none")
    found = dry_run(config(tmp_path, f"reference.path={tmp_path / 'nowhere'}"))
    assert [problem.path for problem in found.problems] == ["reference.path"]


def test_a_reference_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_tiny(other, num_layers=1)
    chosen = config(tmp_path, f"reference.path={other}")
    with prepare_supervised(chosen):
        pass  # another model with the same tokens
    for file in other.glob("tokenizer*.json"):
        file.write_text(file.read_text().replace("<|im_end|>", "<|im_over|>"))
    said = "reference model and policy have different tokenizers"
    with pytest.raises(ConfigError, match=said) as caught, prepare_supervised(chosen):
        pass
    assert (caught.value.path, caught.value.value) == ("reference.path", str(other))
    assert '"<|im_over|>" in the reference model' in str(caught.value.rule)
    assert [problem.path for problem in dry_run(chosen).problems] == ["reference.path"]
    for file in other.glob("tokenizer*.json"):
        file.unlink()
    with prepare_supervised(chosen):
        pass  # nothing to compare


def test_records_with_one_answer_need_kto(tmp_path: Path) -> None:
    (tmp_path / "labels.jsonl").write_text(json.dumps({"prompt": "q", "completion": "a", "label": True}) + "\n")
    source = f"data.sources=[{{path: {tmp_path / 'labels.jsonl'}}}]"
    found = dry_run(config(tmp_path, source, "validation.fraction=0"))
    assert [problem.path for problem in found.problems] == [f"{tmp_path / 'labels.jsonl'}:1"]
    assert not dry_run(config(tmp_path, source, "validation.fraction=0", "preference.kind=kto")).problems
