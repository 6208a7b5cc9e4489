"""A teacher's stored logprobs as the data of a run: found, checked, and put into samples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from forge.config import DistillConfig
from forge.data.files import Record
from forge.data.formats import Layout
from forge.data.samples import Counters, Encoder, Tokenizer
from forge.data.teacher_logprobs import LogprobStore, StoreFacts, read_facts, taught_sample
from forge.errors import ConfigError, DataError
from forge.loops.run_paths import run_dir
from forge.models.locate import resolve
from forge.models.tokenizer import ChatTokenizer
from forge.models.vocabulary import check_same_vocabulary, vocabulary_digest
from forge.types import Sample

if TYPE_CHECKING:
    from forge.losses import Loss


def store_folder(config: DistillConfig) -> Path:
    """Return where the teacher's logprobs are."""
    given = config.distillation.store
    return Path(given) if given is not None else run_dir(config) / "teacher_logprobs"


def make_distillation_loss(config: DistillConfig) -> Loss:
    """Return the divergence from the teacher that distillation minimizes."""
    from forge.losses import TeacherDivergence

    section = config.distillation
    return TeacherDivergence(
        kind=section.kind, beta=section.beta, tail=section.tail, label_coefficient=section.label_coefficient
    )


def describe_stored(config: DistillConfig) -> list[tuple[str, str]]:
    """Return what a dry run says about the loss and the stored logprobs."""
    folder, section = store_folder(config), config.distillation
    facts = read_facts(folder)
    stored = "" if facts is None else f"top {facts.k} of {facts.teacher}, {facts.num_tokens:,} tokens, in {folder}"
    return [("loss", f"{section.kind} over {section.top_k} tokens, tail: {section.tail}"), ("teacher", stored)]


class TaughtEncoder:
    """Makes samples of records, with the teacher's stored tokens and logprobs. Any thread may call it."""

    def __init__(self, encoder: Encoder, store: LogprobStore, *, top_k: int, num_rows: int) -> None:
        self._encoder, self._store, self._top_k, self._num_rows = encoder, store, top_k, num_rows
        self.max_seq_len = encoder.max_seq_len

    def encode_all(self, record: Record, *, layout: Layout, counters: Counters) -> tuple[Sample, ...]:
        """See `SampleEncoder.encode_all`. A sample without stored logprobs is a DataError, and so is one with
        tokens for which the student's output layer has no row."""
        from forge.losses.distillation import TEACHER_IDS, TEACHER_LOGPROBS

        samples = self._encoder.encode_all(record, layout=layout, counters=counters)
        names = (TEACHER_IDS, TEACHER_LOGPROBS)
        taught = tuple(taught_sample(each, self._store, top_k=self._top_k, names=names) for each in samples)
        for sample in taught:
            if (largest := int(sample.fields[TEACHER_IDS].max())) >= self._num_rows:
                raise DataError(
                    "the teacher holds a token likely that the student's output layer does not have",
                    path=sample.identity or "a sample",
                    value=largest,
                    rule=f"below {self._num_rows}, which is vocab_size in the student's config.json",
                    repair="lower distillation.top_k, or store logprobs of another teacher",
                )
        return taught


def make_taught_encoder(config: DistillConfig, tokenizer: Tokenizer) -> TaughtEncoder:
    """Return what makes samples with the logprobs that `forge distill` stored for this run."""
    assert isinstance(tokenizer, ChatTokenizer)
    folder, top_k = store_folder(config), config.distillation.top_k
    facts = _checked_facts(config, folder)
    check_tokenizer(config, facts, tokenizer)
    encoder = Encoder(tokenizer, data=config.data, max_seq_len=config.training.max_seq_len)
    num_rows = resolve(config.model).architecture.vocab_size or 0
    return TaughtEncoder(encoder, LogprobStore(folder, facts), top_k=top_k, num_rows=num_rows)


def _checked_facts(config: DistillConfig, folder: Path) -> StoreFacts:
    facts, top_k = read_facts(folder), config.distillation.top_k
    if facts is None or not facts.is_complete:
        raise ConfigError(
            f"{'none' if facts is None else 'not all'} of the teacher's logprobs are stored",
            path="distillation.store",
            value=str(folder),
            rule="a folder that `forge distill` has completed for this data",
            repair="run `forge distill FILE` with the same configuration first; it continues where it was stopped",
        )
    if facts.k < top_k:
        raise ConfigError(
            "fewer tokens of the teacher are stored than the run asks for",
            path="distillation.top_k",
            value=top_k,
            rule=f"at most {facts.k}, as stored in {folder}",
            repair=f"set distillation.top_k={facts.k}, or store again in another folder",
        )
    return facts


def check_tokenizer(config: DistillConfig, facts: StoreFacts, student: ChatTokenizer) -> None:
    """Refuse logprobs of a teacher with another tokenizer; name the first token that differs if the teacher is here."""
    if facts.tokenizer_digest == vocabulary_digest(student):
        return
    if config.teacher.path is not None and Path(config.teacher.path).is_dir():
        check_same_vocabulary(student, ChatTokenizer.load(config.teacher.path), path="teacher.path")
    raise DataError(
        "teacher and student have different tokenizers",
        path=str(store_folder(config)),
        value=facts.teacher,
        rule=f"stored with the tokens and numbers of {student.name}",
        repair="store logprobs of a teacher with this tokenizer",
    )
