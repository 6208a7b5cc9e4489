"""Preference records: their formats, which tokens count, and what becomes of pairs that cannot be used."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from byte_tokenizer import END, EOS, ByteTokenizer, write_lines
from forge.config import PreferenceDataConfig, TrainingConfig, ValidationConfig
from forge.data import PREFERENCES, Counters, Layout, PreferenceEncoder, Record, detect, open_loaders
from forge.data.preferences import common_prefix
from forge.data.reward_pairs import RewardPairEncoder
from forge.errors import DataError
from forge.types import Batch, Sample

ASKED = [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}]


def turns(*contents: str) -> list[dict[str, str]]:
    """A user's and an assistant's messages by turns."""
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def encode(
    value: Any,
    kind: str = "preference",
    *,
    max_seq_len: int = 99,
    paired: bool = True,
    margin: bool = False,
    columns: dict[str, str] | None = None,
    **data: Any,
) -> tuple[tuple[Sample, ...], Counters]:
    counters = Counters()
    encoder = PreferenceEncoder(
        ByteTokenizer(), data=PreferenceDataConfig(**data), max_seq_len=max_seq_len, paired=paired, margin=margin
    )
    record = Record("x.jsonl:3", json.dumps(value).encode())
    return encoder.encode_all(record, layout=Layout(kind, columns or {}), counters=counters), counters


def shown(token_ids: list[int]) -> str:
    return "".join({END: "$", EOS: "."}.get(token, chr(token) if token < 256 else "|") for token in token_ids)


def learnt(sample: Sample, field: str | None = None) -> str:
    values = sample.loss_weights if field is None else sample.fields[field]
    return shown([token for token, value in zip(sample.token_ids.tolist(), values.tolist(), strict=True) if value])


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "q", "chosen": "yes", "rejected": "no"},
        {"prompt": turns("q"), "chosen": turns("q", "yes")[1:], "rejected": turns("q", "no")[1:]},
        {"chosen": turns("q", "yes"), "rejected": turns("q", "no")},
        {"prompt": "q", "chosen": turns("q", "yes"), "rejected": turns("q", "no")},
        {"prompt": turns("q"), "chosen": turns("q", "yes"), "rejected": turns("q", "no")},
    ],
    ids=["texts", "explicit", "implicit", "text_and_whole", "messages_and_whole"],
)
def test_every_way_to_write_a_pair_gives_the_same_two_samples(value: dict[str, Any]) -> None:
    (chosen, rejected), counters = encode(value)
    assert shown(chosen.token_ids.tolist()) == "|user|q$|assistant|yes$"
    assert shown(rejected.token_ids.tolist()) == "|user|q$|assistant|no$"
    assert (learnt(chosen), learnt(rejected)) == ("yes$", "no$")
    assert (learnt(chosen, "completion"), learnt(rejected, "completion")) == ("yes$", "no$")
    assert set(chosen.fields["chosen"].tolist()) == {1.0}
    assert set(rejected.fields["chosen"].tolist()) == {0.0}
    assert chosen.sequence == rejected.sequence == 0
    assert chosen.identity == rejected.identity == "x.jsonl:3"
    assert counters == Counters()
    assert detect([Record("x:1", value)], columns={}, lenient=False, formats=PREFERENCES) == "preference"


def test_answers_of_earlier_turns_belong_to_the_prompt() -> None:
    value = {"chosen": turns("a", "b", "c", "yes", "d", "more"), "rejected": turns("a", "b", "c", "no")}
    (chosen, rejected), _ = encode(value)
    assert learnt(chosen) == "yes$more$"  # the user's words between two answers do not count
    assert learnt(rejected) == "no$"


def test_a_message_with_train_false_does_not_count() -> None:
    longer = turns("q", "yes", "d", "more")
    longer[1]["train"] = False  # type: ignore[assignment]
    (chosen, _), _ = encode(
        {"prompt": "q", "chosen": longer[1:], "rejected": "no"} | {"rejected": turns("q", "no")[1:]}
    )
    assert learnt(chosen) == "more$"


def test_plain_text_begins_where_the_tokens_differ() -> None:
    (chosen, rejected), _ = encode({"chosen": "Q: x A: yes", "rejected": "Q: x A: yellow"}, "preference_text")
    assert (learnt(chosen), learnt(rejected)) == ("s.", "llow.")
    value = {"prompt": "Q: x A:", "chosen": " yes", "rejected": " yellow"}
    (chosen, rejected), _ = encode(value, "preference_text")
    assert (learnt(chosen), learnt(rejected)) == (" yes.", " yellow.")
    assert shown(chosen.token_ids.tolist()) == "Q: x A: yes."
    only_end = {"prompt": "a", "chosen": "b", "rejected": "bc"}
    assert [learnt(each) for each in encode(only_end, "preference_text")[0]] == ["b.", "bc."]


def test_one_answer_with_a_label() -> None:
    for label, expected in ((True, 1.0), (False, 0.0), (1, 1.0), (0, 0.0)):
        (sample,), _ = encode({"prompt": "q", "completion": "yes", "label": label}, "unpaired", paired=False)
        assert learnt(sample) == "yes$"
        assert set(sample.fields["chosen"].tolist()) == {expected}
        assert sample.sequence is None
    value = {"prompt": "q: ", "completion": "yes", "label": True}
    (sample,), _ = encode(value, "unpaired_text", paired=False)
    assert learnt(sample) == "yes."
    assert detect([Record("x:1", value)], columns={}, lenient=False, formats=PREFERENCES) == "unpaired"


def test_pairs_become_single_answers_where_that_is_asked_for() -> None:
    samples, _ = encode({"prompt": "q", "chosen": "yes", "rejected": "no"}, paired=False)
    assert [(learnt(each), float(each.fields["chosen"][0]), each.sequence) for each in samples] == [
        ("yes$", 1.0, None),
        ("no$", 0.0, None),
    ]


def test_all_counts_the_prompt_of_the_chosen_answer() -> None:
    (chosen, rejected), _ = encode({"prompt": "q", "chosen": "yes", "rejected": "no"}, loss_on="all")
    assert learnt(chosen) == "user|q$|assistant|yes$"
    assert learnt(chosen, "completion") == "yes$"
    assert learnt(rejected) == "no$"


def test_system_prompt_columns_and_margin() -> None:
    value = {"ask": "q", "good": "yes", "bad": "no", "by": 1.5}
    columns = {"prompt": "ask", "chosen": "good", "rejected": "bad", "margin": "by"}
    (chosen, rejected), _ = encode(value, columns=columns, margin=True, system_prompt="S")
    assert shown(chosen.token_ids.tolist()) == "|system|S$|user|q$|assistant|yes$"
    assert set(chosen.fields["margin"].tolist()) == set(rejected.fields["margin"].tolist()) == {1.5}
    del value["by"]
    assert set(encode(value, columns=columns, margin=True)[0][0].fields["margin"].tolist()) == {0.0}
    own = {"prompt": ASKED, "chosen": turns("", "yes")[1:], "rejected": turns("", "no")[1:]}
    assert shown(encode(own, system_prompt="T")[0][0].token_ids.tolist()).startswith("|system|S$|user|")


@pytest.mark.parametrize(
    ("value", "kind", "says"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "preference", "are identical"),
        ({"chosen": turns("q", "a"), "rejected": turns("q", "a")}, "preference", "are identical"),
        ({"prompt": "q", "chosen": "a", "rejected": " "}, "preference", "under `rejected` that is not text"),
        ({"prompt": "q", "chosen": "a", "rejected": []}, "preference", "no messages under `rejected`"),
        ({"prompt": "q", "chosen": "a", "rejected": turns("q", "b")}, "preference", "is text, the other is messages"),
        ({"chosen": "a", "rejected": "b"}, "preference", "there is no prompt"),
        ({"chosen": turns("q", "a"), "rejected": turns("p", "b")}, "preference", "no common prompt"),
        ({"chosen": turns("q", "a"), "rejected": turns("q", "a", "b", "c")}, "preference", "is the beginning of the"),
        ({"chosen": turns("q", "a", "b"), "rejected": turns("q", "a", "c")}, "preference", "is not the assistant's"),
        ({"prompt": "p", "chosen": turns("q", "a"), "rejected": turns("q", "b")}, "preference", "is not the prompt of"),
        (
            {"prompt": turns("q", "a"), "chosen": turns("", "b")[1:], "rejected": turns("", "c")[1:]},
            "preference",
            "the prompt ends with a message of the assistant",
        ),
        ({"prompt": "q", "chosen": [{"role": "x", "content": "a"}], "rejected": [1]}, "preference", "no valid role"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "tools": [1]}, "preference", "has tools"),
        ({"prompt": "q", "completion": "a", "label": "yes"}, "unpaired", "no label under `label`"),
        ({"prompt": "q", "completion": "a", "label": 2}, "unpaired", "no label under `label`"),
        ({"prompt": "q", "completion": "a"}, "unpaired_text", "no label under `label`"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": "much"}, "preference", "not a number"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": float("nan")}, "preference", "not a number"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": 10**400}, "preference", "not a number"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": 1e300}, "preference", "not a number"),
    ],
)
def test_a_record_that_cannot_be_used_is_refused_by_place_rule_and_repair(
    value: Any, kind: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DataError, match=says) as caught:
        encode(value, kind, paired=kind == "preference", margin=True)
    assert caught.value.path == "x.jsonl:3"
    assert caught.value.rule
    assert "on_bad_record" in str(caught.value.repair)
    samples, counters = encode(value, kind, paired=kind == "preference", margin=True, on_bad_record="skip")
    assert samples == ()
    assert counters.bad == 1
    assert "x.jsonl:3" in caplog.text


def test_a_loss_on_pairs_refuses_single_answers_and_unknown_keys() -> None:
    with pytest.raises(DataError, match="one answer and a label"):
        encode({"prompt": "q", "completion": "yes", "label": True}, "unpaired")
    with pytest.raises(DataError, match="format of this record is not known") as caught:
        detect([Record("x:1", {"prompt": "q", "chosen": "a"})], columns={}, lenient=False, formats=PREFERENCES)
    assert "columns" in str(caught.value.repair)


def test_pairs_that_are_too_long_are_dropped_cut_or_refused_as_a_whole() -> None:
    value = {"prompt": "q", "chosen": "yes, of course", "rejected": "no"}
    length = len("|user|q$|assistant|no$")
    samples, counters = encode(value, max_seq_len=length)
    assert samples == ()
    assert counters == Counters(oversize=1)
    (chosen, rejected), counters = encode(value, max_seq_len=length, oversize="truncate")
    assert (learnt(chosen), learnt(rejected)) == ("yes", "no$")
    assert counters == Counters(truncated=1)
    with pytest.raises(DataError, match="tokens"):
        encode(value, max_seq_len=length, oversize="error")
    # The prompt alone fills the row; and what is left of both answers is the same.
    assert encode(value, max_seq_len=length - 3, oversize="truncate") == ((), Counters(without_loss=1))
    alike = {"prompt": "q", "chosen": "abcd", "rejected": "abce"}
    assert encode(alike, max_seq_len=length, oversize="truncate") == ((), Counters(without_loss=1))


def test_single_answers_that_are_dropped_do_not_count_as_cut() -> None:
    value = {"prompt": "q", "chosen": "yes, of course", "rejected": "no"}
    length = len("|user|q$|assistant|no$")
    samples, counters = encode(value, max_seq_len=length, paired=False)
    assert [learnt(sample) for sample in samples] == ["no$"]
    assert counters == Counters(oversize=1)
    prompt_only = encode(value, max_seq_len=length - 3, paired=False, oversize="truncate")
    assert prompt_only == ((), Counters(without_loss=2))


def test_a_reward_model_reads_a_text_that_is_the_beginning_of_the_other() -> None:
    class Whole(ByteTokenizer):
        def encode_whole(self, text: str) -> list[int]:
            return [*text.encode()]

    encoder = RewardPairEncoder(Whole(), data=PreferenceDataConfig(), max_seq_len=99, margin=False)
    record = Record("x.jsonl:3", json.dumps({"chosen": "Q: a, and b", "rejected": "Q: a"}).encode())
    chosen, rejected = encoder.encode_all(record, layout=Layout("preference_text", {}), counters=Counters())
    assert (shown(chosen.token_ids.tolist()), shown(rejected.token_ids.tolist())) == ("Q: a, and b", "Q: a")
    assert [learnt(each) for each in (chosen, rejected)] == ["b", "a"]


def test_common_prefix() -> None:
    assert [common_prefix(*each) for each in (([1, 2], [1, 3]), ([1], [1, 2]), ([], [1]), ([2], [1]))] == [1, 1, 0, 0]


# Through files, batches and positions, as samples of fine-tuning go.


def open_pairs(path: Path, *, paired: bool = True, training: dict[str, Any] | None = None, **data: Any) -> Any:
    config = PreferenceDataConfig.model_validate({"sources": [{"path": str(path)}], **data})
    section = TrainingConfig.model_validate({"max_seq_len": 64, "batch_size": 3, **(training or {})})
    encoder = PreferenceEncoder(ByteTokenizer(), data=config, max_seq_len=64, paired=paired)
    validation = None if config.streaming else ValidationConfig(fraction=0.2)
    return open_loaders(
        config,
        training=section,
        tokenizer=ByteTokenizer(),
        seed=1,
        validation=validation,
        read_ahead=0,
        encoder=encoder,
        formats=PREFERENCES,
    )


RECORDS = [{"prompt": f"q{n}", "chosen": "y" * (1 + n % 3), "rejected": "n" * (1 + n % 5)} for n in range(11)]


def identities(batches: list[Batch]) -> list[str]:
    return [identity.rpartition(":")[2] for batch in batches for identity in batch.identities]


def test_batches_hold_whole_pairs_and_resume_to_the_pair(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", RECORDS)
    with open_pairs(path) as loaders:
        batches = list(loaders.train)
        held = list(loaders.validation)
        assert loaders.train.count_batches().total == len(batches) == 3
        assert [batch.num_sequences for batch in batches] == [3, 3, 3]
        assert len(held[0]) == 4
        for batch in batches:
            assert batch.sequences == (0, 0, 1, 1, 2, 2)
            assert [float(sample.fields["chosen"][0]) for sample in batch.samples()] == [1.0, 0.0] * 3
        assert sorted(identities([*batches, *held])) == sorted(2 * [str(n + 1) for n in range(11)])
        again = list(loaders.train.from_start())
        assert all(torch.equal(one.token_ids, other.token_ids) for one, other in zip(batches, again, strict=True))
    with open_pairs(path) as loaders, open_pairs(path) as others:
        next(loaders.train)
        others.train.load_state_dict(json.loads(json.dumps(loaders.train.state_dict())))
        assert identities(list(others.train)) == identities(batches[1:])


@pytest.mark.parametrize("streaming", [False, True])
def test_packed_rows_streams_and_single_answers(tmp_path: Path, streaming: bool) -> None:
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(record) + "\n" for record in RECORDS).encode()))
    with open_pairs(path, packing=True, streaming=streaming, training={"batch_size": 1}) as loaders:
        batches = list(loaders.train)
    assert len(batches) < len(identities(batches)) / 2, "some row holds two pairs"
    for batch in batches:
        assert all(batch.sequences[2 * n] == batch.sequences[2 * n + 1] == n for n in range(len(batch) // 2))
    with open_pairs(path, paired=False, streaming=streaming) as loaders:
        first = next(loaders.train)
    assert first.sequences == ()
    assert len(first) == 6
