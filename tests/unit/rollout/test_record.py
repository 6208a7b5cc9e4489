"""What is written down of rollouts, and the pieces of text that tokens stand for."""

from __future__ import annotations

import json
import math
import os
import random
from collections import UserDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from agent_folders import make_agent_groups
from episodes import with_turn
from forge.config import RecordConfig
from forge.errors import DataError
from forge.rollout.record import PieceSplitter, RolloutRecorder, spread
from forge.rollout.signal import NoSignalGroup
from forge.types import Group
from run_folders import HOSTILE, decode, encode, make_groups, trainer_logprobs

Decode = Callable[[Sequence[int]], str]


def recorder(folder: Path, *, resume_step: int | None = None, **keys: Any) -> RolloutRecorder:
    return RolloutRecorder(folder, decode=decode, config=RecordConfig(**keys), resume_step=resume_step)


def strict(path: Path) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def two_groups(step: int = 4) -> list[Group]:
    return make_groups(step, num_groups=2, group_size=3)


def test_a_line_has_everything_about_an_episode(tmp_path: Path) -> None:
    groups = two_groups()
    logprobs = trainer_logprobs(groups)
    path = recorder(tmp_path / "rollouts").write(4, groups, logprobs)
    assert path == tmp_path / "rollouts" / "step_000004.jsonl"
    lines = strict(path)
    assert [(line["group"], line["index"]) for line in lines] == [(6, 0), (6, 1), (6, 2), (7, 0), (7, 1), (7, 2)]
    line, episode = lines[1], groups[0].episodes[1]
    (completion,) = episode.turns
    assert line["step"] == 4
    assert line["epoch"] == 0
    assert line["prompt_id"] == episode.task.id
    assert line["prompt"] == [dict(message) for message in episode.task.messages]
    assert line["answer"] == episode.task.answer
    assert line["text"] == completion.text
    assert line["token_ids"] == list(completion.token_ids)
    assert "".join(line["pieces"]) == decode(completion.token_ids)
    assert len(line["pieces"]) == len(completion)
    assert line["logprobs"] == list(completion.logprobs)
    assert line["trainer_logprobs"] == logprobs[6, 1]
    assert line["ref_logprobs"] == list(episode.ref_logprobs or ())
    assert line["versions"] == [[span.version, span.start, span.end] for span in completion.versions]
    assert (line["outcome"], line["reason"]) == ("trained", None)
    assert line["reward"] == line["unshaped_reward"] == episode.score.reward
    assert line["parts"] == dict(episode.score.parts)
    assert line["failures"] == dict(episode.score.failures)
    assert line["advantage"] == episode.advantage
    assert line["finish_reason"] == completion.finish_reason
    assert line["num_prompt_tokens"] == len(completion.context_ids)


def test_of_groups_that_taught_nothing_ever_fewer_are_written(tmp_path: Path) -> None:
    group = two_groups()[0]
    writer = recorder(tmp_path)
    for number in range(1, 41):
        path = writer.write_no_signal(3, NoSignalGroup(number, "no_signal", "all_zero", replace(group, number=number)))
        assert (path is not None) == (number <= 8 or number in (16, 32))
    assert writer.write_no_signal(3, NoSignalGroup(41, "refused", "refused")) is None, "nothing was sampled"
    found = strict(tmp_path / "fruitless_000003.jsonl")
    assert len(found) == 10 * 3
    assert {(line["step"], line["outcome"], line["reason"]) for line in found} == {
        (3, "no_signal", "all rewards are 0"),
    }
    failed = NoSignalGroup(42, "failed", "failed", group)
    assert writer.write_no_signal(4, failed) == tmp_path / "fruitless_000004.jsonl", "each step begins anew"
    few = recorder(tmp_path / "few", rollouts="some", num_groups=1)
    written = [few.write_no_signal(1, NoSignalGroup(number, "failed", "failed", group)) for number in range(5)]
    assert [path is not None for path in written] == [True, True, False, True, False]
    none = recorder(tmp_path / "none", rollouts="none")
    assert (none.write_no_signal(1, failed), none.write_evaluation(1, [group])) == (None, None)


def test_a_resume_moves_all_kinds_of_files_of_later_steps_aside(tmp_path: Path) -> None:
    group = two_groups()[0]
    writer = recorder(tmp_path)
    for step in (1, 2, 3):
        writer.write(step, [group])
        writer.write_no_signal(step, NoSignalGroup(9, "no_signal", "all_zero", group))
        writer.write_evaluation(step, [group])
    recorder(tmp_path, resume_step=2)
    kinds = ("evaluation", "fruitless", "step")
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == [
        f"{kind}_00000{step}.jsonl" for kind in kinds for step in (1, 2)
    ]
    assert sorted(path.name for path in (tmp_path / "discarded").iterdir()) == [
        f"{kind}_000003.jsonl" for kind in kinds
    ]


def test_what_nobody_computed_is_null(tmp_path: Path) -> None:
    group = two_groups()[0]
    bare = replace(group.episodes[0], ref_logprobs=None, task=replace(group.task, text="Go on", answer=None))
    path = recorder(tmp_path).write(4, [replace(group, episodes=(bare,))])
    assert path is not None
    (line,) = strict(path)
    assert [line[name] for name in ("trainer_logprobs", "ref_logprobs", "answer", "prompt")] == [
        None, None, None, "Go on",
    ]  # fmt: skip


def test_advantages_of_tokens_are_written_where_those_of_a_turn_differ(tmp_path: Path) -> None:
    (group,) = make_groups(1, num_groups=1, group_size=3)
    plain, equal, own = group.episodes
    differing = tuple(0.5 - 0.1 * place for place in range(own.num_tokens))
    episodes = (
        plain,
        replace(equal, token_advantages=(0.25,) * equal.num_tokens),
        replace(own, token_advantages=differing),
    )
    path = recorder(tmp_path).write(1, [replace(group, episodes=episodes)])
    assert path is not None
    lines = strict(path)
    assert ["token_advantages" in line for line in lines] == [False, False, True]
    assert lines[2]["token_advantages"] == list(differing)
    turns = make_agent_groups(2)  # every turn has its own, and each token of a turn the same
    path = recorder(tmp_path / "turns").write(2, turns)
    assert path is not None
    assert ["token_advantages" in line for line in strict(path)] == [False, False]


def test_trainer_logprobs_are_left_out_where_the_configuration_says_so(tmp_path: Path) -> None:
    groups = two_groups()
    path = recorder(tmp_path, trainer_logprobs=False).write(4, groups, trainer_logprobs(groups))
    assert path is not None
    assert {str(line["trainer_logprobs"]) for line in strict(path)} == {"None"}


def test_numbers_that_json_lacks_are_null_and_odd_texts_come_through(tmp_path: Path) -> None:
    group = two_groups()[0]
    first = group.episodes[0]
    odd = replace(
        with_turn(first, logprobs=(-math.inf, *first.logprobs[1:])),
        task=replace(first.task, messages=(UserDict(role="user", content=HOSTILE, time=Path("x")),)),
        score=replace(first.score, reward=math.nan, parts={"exact": math.inf}),
    )
    path = recorder(tmp_path).write(1, [replace(group, episodes=(odd,))])
    assert path is not None
    raw = path.read_bytes()
    assert raw.count(b"\n") == 1
    line = json.loads(raw)
    assert (line["reward"], line["parts"], line["logprobs"][0]) == (None, {"exact": None}, None)
    assert line["prompt"][0]["content"] == HOSTILE
    assert line["prompt"][0]["time"] == "x"


@pytest.mark.parametrize("name", ["trainer_logprobs", "ref_logprobs"])
def test_logprobs_of_other_tokens_are_refused_and_leave_no_file(tmp_path: Path, name: str) -> None:
    groups = two_groups()
    known = trainer_logprobs(groups)
    if name == "trainer_logprobs":
        known[7, 2] = known[7, 2][:-1]
    else:
        last = replace(groups[1].episodes[2], ref_logprobs=(-1.0,))
        groups[1] = replace(groups[1], episodes=(*groups[1].episodes[:2], last))
    with pytest.raises(ValueError, match=f"{name} of group 7, 2 has"):
        recorder(tmp_path).write(4, groups, known)
    assert list(tmp_path.iterdir()) == []


def test_some_means_whole_groups_spread_over_the_batch(tmp_path: Path) -> None:
    groups = make_groups(1, num_groups=9, group_size=2)
    path = recorder(tmp_path, rollouts="some", num_groups=3).write(1, groups)
    assert path is not None
    assert [line["group"] for line in strict(path)] == [0, 0, 4, 4, 8, 8]


def test_none_means_no_file_and_no_folder(tmp_path: Path) -> None:
    assert recorder(tmp_path / "rollouts", rollouts="none").write(1, two_groups()) is None
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_is_written_again_replaces_its_file(tmp_path: Path) -> None:
    target = recorder(tmp_path)
    target.write(4, two_groups())
    path = target.write(4, two_groups()[:1])
    assert path is not None
    assert [item.name for item in tmp_path.iterdir()] == ["step_000004.jsonl"]
    assert len(strict(path)) == 3


def test_resuming_sets_later_steps_aside_and_keeps_what_was_set_aside_before(tmp_path: Path) -> None:
    def names(folder: Path) -> list[str]:
        return sorted(item.name for item in folder.iterdir() if item.is_file())

    first = recorder(tmp_path)
    for step in range(1, 5):
        first.write(step, two_groups(step))
    (tmp_path / "step_notes.jsonl").write_text("somebody's own\n")
    (tmp_path / ".step_000005.jsonl.part").write_text("half of what was being written when")
    second = recorder(tmp_path, resume_step=2)
    assert names(tmp_path) == ["step_000001.jsonl", "step_000002.jsonl", "step_notes.jsonl"]
    assert names(tmp_path / "discarded") == ["step_000003.jsonl", "step_000004.jsonl"]
    second.write(3, two_groups(3)[:1])
    recorder(tmp_path, resume_step=2)
    assert names(tmp_path / "discarded") == ["step_000003.1.jsonl", "step_000003.jsonl", "step_000004.jsonl"]
    assert len(strict(tmp_path / "discarded" / "step_000003.1.jsonl")) == 3
    recorder(tmp_path, rollouts="none")  # a new run in an old folder
    assert names(tmp_path) == ["step_notes.jsonl"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError) as caught:
        recorder(tmp_path / "file" / "rollouts")
    assert caught.value.path == str(tmp_path / "file" / "rollouts")
    assert caught.value.rule == f"a folder that can be written: {os.strerror(20)}"
    assert "record.rollouts" in str(caught.value.repair)


@pytest.mark.parametrize(("count", "expected"), [(1, [0]), (2, [0, 9]), (4, [0, 3, 6, 9]), (10, list(range(10)))])
def test_spreading_takes_both_ends(count: int, expected: list[int]) -> None:
    assert spread(range(10), count) == expected


# ---- Pieces ---------------------------------------------------------------------------------------------------------


def byte_level() -> Tokenizer:
    """A tokenizer of bytes with a few merges, as GPT-2, Qwen and Llama 3 have, untrained."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("he", "y"), ("Ġ", "h")]
    vocabulary = {word: number for number, word in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def sentence_piece() -> Tokenizer:
    """One whose words begin with a mark for the space, which the first word of a text loses, and that has bytes."""
    words = ["▁", "▁hey", "▁you", "hey", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.Unigram([(word, -1.0) for word in words], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def decoder(tokenizer: Tokenizer) -> Decode:
    return lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=False))


@pytest.mark.parametrize("text", ["hey hey", " hey", "Größe π ≈ 算 🙂🙂 hey", "hey<|end|>hey\n\n", "🙂", ""])
def test_pieces_of_a_byte_level_tokenizer_join_to_the_text(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text).ids
    splitter = PieceSplitter(decoder(tokenizer))
    for _ in range(2):  # the second time from what is remembered
        pieces = splitter.split(ids)
        assert len(pieces) == len(ids)
        assert "".join(pieces) == text


def test_the_last_token_of_a_character_has_it() -> None:
    tokenizer = byte_level()
    assert PieceSplitter(decoder(tokenizer)).split(tokenizer.encode("é🙂x").ids) == ["", "é", "", "", "", "🙂", "x"]


def test_bytes_that_make_no_character_are_shown_and_do_not_eat_the_next_one() -> None:
    byte = {text: ids for text in "\x80é🙂x" if (ids := encode(text))}
    lead, smile = byte["🙂"][0], byte["🙂"]
    splitter = PieceSplitter(decode)
    for ids in (
        [lead, *smile, *byte["x"]],
        [lead] * 12 + [*smile],
        [*smile, lead],
        [lead, lead],
        [*byte["é"][1:]] * 30,
    ):
        pieces = splitter.split(ids)
        assert len(pieces) == len(ids)
        assert "".join(pieces) == decode(ids)


@pytest.mark.parametrize("seed", range(4))
def test_pieces_of_tokens_drawn_at_random_join_to_the_text(seed: int) -> None:
    tokenizer, chance = byte_level(), random.Random(seed)
    splitter = PieceSplitter(decoder(tokenizer))
    for _ in range(200):
        ids = chance.choices(range(tokenizer.get_vocab_size()), k=chance.randint(1, 60))
        assert "".join(splitter.split(ids)) == decoder(tokenizer)(ids)


def test_pieces_of_a_sentencepiece_tokenizer_keep_their_spaces() -> None:
    tokenizer = sentence_piece()
    smile = [4 + byte for byte in "🙂".encode()]
    ids = [1, 2, 1, *smile, *smile, 2, 3]
    pieces = PieceSplitter(decoder(tokenizer)).split(ids)
    assert pieces == ["hey", " you", " hey", "", "", "", "🙂", "", "", "", "🙂", " you", "hey"]
    assert "".join(pieces) == tokenizer.decode(ids)


def test_a_long_completion_is_decoded_in_small_pieces_and_pairs_only_once() -> None:
    sizes: list[int] = []

    def counted(token_ids: Sequence[int]) -> str:
        sizes.append(len(token_ids))
        return decode(token_ids)

    splitter = PieceSplitter(counted)
    ids = encode("Let me add the tens first: 算 12" * 50)
    first = splitter.split(ids)
    assert max(sizes) <= 10
    assert len(sizes) < len(ids)
    sizes.clear()
    assert splitter.split(encode("Let me add the tens first:" * 50)) == encode_pieces("Let me add the tens first:" * 50)
    assert len(sizes) <= 2
    assert "".join(first) == decode(ids)


def encode_pieces(text: str) -> list[str]:
    return [decode([token]) for token in encode(text)]
