"""The text of a completion as its tokens come, against the plain definition: decode everything, cut at the stop."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from forge.config import Sampling
from forge.generator.text import TextTracker
from forge.models.tiny import make_tiny
from forge.models.tokenizer import ChatTokenizer

STOPS = ["ab", "b", "aab", "\n\n", "é", " x", "</s>", "aXa", "€"]


def wrapped(tokenizer: Tokenizer, *, eos: str | None = "</s>") -> ChatTokenizer:
    from transformers import PreTrainedTokenizerFast

    return ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos), name="made here")


def sentencepiece_like(*, byte_fallback: bool, eos: str | None = "</s>") -> ChatTokenizer:
    words = ["<unk>", "▁", "▁a", "a", "b", "ab", "▁x", "▁▁", "X", "\n", "é", "\ufffd", "▁hello", "wo", "rld", "aXa!"]
    words += [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=byte_fallback))
    if byte_fallback:  # as Llama 2 and Gemma have it
        chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(chain)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<s>", special=True)])
    return wrapped(tokenizer, eos=eos)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    make_tiny(folder)
    return {
        "bytes": ChatTokenizer.load(folder),
        "metaspace": sentencepiece_like(byte_fallback=False),
        "fallback": sentencepiece_like(byte_fallback=True),
    }


def cut(text: str, sampling: Sampling, *, after: int = 0) -> tuple[str, str | None]:
    """The plain definition: the stop string that is complete first, the longest of several; ends up to `after` do not
    count."""
    ends = [
        (start + len(stop), -len(stop), stop)
        for stop in sampling.stop
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > after
    ]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if sampling.include_stop else end - len(stop)], stop


def followed(tracker: TextTracker, token_ids: Sequence[int]) -> list[str]:
    """The parts as they come, token by token, until a stop string or the end."""
    parts = []
    for token in token_ids:
        parts.append(tracker.add([token]))
        if tracker.stopped is not None:
            break
    return [*parts, tracker.finish()]


def check(tokenizer: ChatTokenizer, token_ids: Sequence[int], sampling: Sampling) -> None:
    tracker = TextTracker(tokenizer, sampling)
    parts = followed(tracker, token_ids)
    wanted, stop = cut(tokenizer.decode(token_ids, skip_special=True), sampling)
    assert ("".join(parts), tracker.stopped) == (wanted, stop)
    assert tracker.text == wanted
    at_once = TextTracker(tokenizer, sampling)
    assert at_once.add(token_ids) + at_once.finish() == wanted


@pytest.mark.parametrize("name", ["bytes", "metaspace", "fallback"])
@settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 2**32),
    length=st.integers(0, 60),
    stops=st.lists(st.sampled_from(STOPS), max_size=3),
    include_stop=st.booleans(),
)
@example(seed=0, length=0, stops=[], include_stop=False)
def test_parts_add_up_to_the_text_of_all_tokens_cut_at_the_first_stop_string(
    tokenizers: dict[str, ChatTokenizer], name: str, seed: int, length: int, stops: list[str], include_stop: bool
) -> None:
    tokenizer, source = tokenizers[name], random.Random(seed)
    rich = [token for text in ("ab é€ aab\n\n x</s>", "😀aXa") for token in tokenizer.encode_text(text)]
    spread = source.random()
    token_ids = [
        source.choice(rich) if source.random() < spread else source.randrange(tokenizer.vocab_size + 5)
        for _ in range(length)
    ]
    check(tokenizer, token_ids, Sampling(stop=tuple(stops), include_stop=include_stop))


def bytes_of(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """The tokens of a text of which the tiny tokenizer has no token longer than a byte."""
    ids = tokenizer.encode_text(text)[:-1]
    assert len(ids) == len(text.encode())
    return ids


def test_a_character_is_held_back_until_its_last_byte(tokenizers: dict[str, ChatTokenizer]) -> None:
    tokenizer = tokenizers["bytes"]
    tracker = TextTracker(tokenizer, Sampling())
    assert [tracker.add([token]) for token in bytes_of(tokenizer, "😀é")] == ["", "", "", "😀", "", "é"]
    assert tracker.finish() == ""


def test_what_is_incomplete_at_the_end_comes_with_finish(tokenizers: dict[str, ChatTokenizer]) -> None:
    tokenizer = tokenizers["bytes"]
    tracker = TextTracker(tokenizer, Sampling())
    assert tracker.add(bytes_of(tokenizer, "x😀")[:-1]) == "x"
    assert tracker.finish() == "\ufffd"
    assert tracker.text == "x\ufffd"


def test_what_may_begin_a_stop_string_is_held_back_and_no_more(tokenizers: dict[str, ChatTokenizer]) -> None:
    tokenizer = tokenizers["fallback"]
    a, b = 3, 4
    assert tokenizer.decode([a, b]) == "ab"
    tracker = TextTracker(tokenizer, Sampling(stop=("aabX",)))
    assert [tracker.add([token]) for token in (a, a, a, b, b)] == ["", "", "a", "", "aabb"]
    assert [tracker.add([token]) for token in (a, a, b)] == ["", "", ""]
    assert tracker.finish() == "aab"
    assert tracker.stopped is None


@pytest.mark.parametrize(("include_stop", "text"), [(False, "a"), (True, "aX")])
def test_a_stop_string_inside_a_token_leaves_out_what_follows_it(
    tokenizers: dict[str, ChatTokenizer], include_stop: bool, text: str
) -> None:
    tokenizer = tokenizers["metaspace"]
    token = next(token for token in range(tokenizer.vocab_size) if tokenizer.decode([token]) == "aXa!")
    tracker = TextTracker(tokenizer, Sampling(stop=("X",), include_stop=include_stop))
    assert tracker.add([token, token]) == text
    assert tracker.stopped == "X"
    assert tracker.add([token]) == ""
    assert tracker.finish() == ""
    assert tracker.text == text


def test_the_stop_string_that_is_complete_first_counts_and_of_two_the_longer(
    tokenizers: dict[str, ChatTokenizer],
) -> None:
    tokenizer = tokenizers["bytes"]
    ids = bytes_of(tokenizer, "1234")
    for stops, stopped, text in [(("1234", "23"), "23", "1"), (("3", "23"), "23", "1"), (("34", "5"), "34", "12")]:
        tracker = TextTracker(tokenizer, Sampling(stop=stops))
        assert "".join(followed(tracker, ids)) == text
        assert tracker.stopped == stopped


def test_spaces_between_words_stay_and_special_tokens_do_not_swallow_them(
    tokenizers: dict[str, ChatTokenizer],
) -> None:
    for name in ("metaspace", "fallback"):
        tokenizer = tokenizers[name]
        pieces = {tokenizer.decode([0, token])[len(tokenizer.decode([0])) :]: token for token in range(16)}
        special = tokenizer.eos_token_id
        ids = [pieces[" hello"], special, pieces[" "], pieces[" hello"], special, pieces[" hello"], pieces["wo"]]
        tracker = TextTracker(tokenizer, Sampling())
        assert followed(tracker, ids) == ["hello", "", " ", " hello", "", " hello", "wo", ""]


def test_bytes_that_spoil_those_before_them_are_not_shown_too_early(tokenizers: dict[str, ChatTokenizer]) -> None:
    tokenizer = tokenizers["fallback"]
    euro = tokenizer.encode_text("€")[-4:-1]
    assert tokenizer.decode(euro) == "€"
    assert tokenizer.decode([*euro, euro[-1]]) == "\ufffd" * 4
    check(tokenizer, [*euro, euro[-1], 3], Sampling())
    tracker = TextTracker(tokenizer, Sampling())
    assert [tracker.add([token]) for token in (*euro, 3)] == ["", "", "", "€a"]


@pytest.mark.parametrize(("text", "stops"), [("x1x12x12", ("1", "12")), ("11111", ("11",))])
def test_text_of_the_first_min_tokens_does_not_stop_a_completion(
    tokenizers: dict[str, ChatTokenizer], text: str, stops: tuple[str, ...]
) -> None:
    tokenizer = tokenizers["bytes"]
    ids = bytes_of(tokenizer, text)
    for min_tokens in range(len(ids) + 1):
        sampling = Sampling(stop=stops, min_tokens=min_tokens)
        tracker = TextTracker(tokenizer, sampling)
        assert ("".join(followed(tracker, ids)), tracker.stopped) == cut(text, sampling, after=min_tokens)


def test_a_stop_string_is_found_after_a_false_start_of_it(tokenizers: dict[str, ChatTokenizer]) -> None:
    for text, stop in [("11211121113", "1121113"), ("12121213", "121213"), ("1112", "112")]:
        ids = bytes_of(tokenizers["bytes"], text)
        tracker = TextTracker(tokenizers["bytes"], Sampling(stop=(stop,)))
        assert "".join(followed(tracker, ids)) == text.removesuffix(stop)
        assert tracker.stopped == stop


class Counted:
    """A tokenizer that adds up how many tokens it was asked to decode."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer, self.num_decoded = tokenizer, 0
        self.vocab_size, self.encode_beginning = tokenizer.vocab_size, tokenizer.encode_beginning

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        self.num_decoded += len(ids)
        return self._tokenizer.decode(ids, skip_special=skip_special)


def long_texts(tokenizer: ChatTokenizer) -> Iterator[list[int]]:
    yield tokenizer.encode_text("some words and digits 12 " * 40)
    yield bytes_of(tokenizer, "😀é€" * 100)
    yield bytes_of(tokenizer, "é")[1:] * 1000  # bytes that never make a character
    yield bytes_of(tokenizer, "😀")[:3] * 300


def test_the_work_is_in_proportion_to_the_length(tokenizers: dict[str, ChatTokenizer]) -> None:
    for ids in long_texts(tokenizers["bytes"]):
        counted = Counted(tokenizers["bytes"])
        tracker = TextTracker(counted, Sampling(stop=("never",)))  # type: ignore[arg-type]
        assert "".join(followed(tracker, ids)) == tokenizers["bytes"].decode(ids, skip_special=True)
        assert counted.num_decoded < 40 * len(ids)


def test_broken_bytes_are_shown_one_behind(tokenizers: dict[str, ChatTokenizer]) -> None:
    tokenizer = tokenizers["bytes"]
    tail = bytes_of(tokenizer, "é")[1]
    tracker = TextTracker(tokenizer, Sampling())
    assert [tracker.add([tail]) for _ in range(200)] == ["", *["\ufffd"] * 199]
    assert tracker.finish() == "\ufffd"


def test_a_tokenizer_without_an_end_token_has_text_too() -> None:
    tokenizer = sentencepiece_like(byte_fallback=True, eos=None)
    check(tokenizer, [3, 12, 16 + 0xC3, 16 + 0xA9, 16 + 0xA9, 5, 3], Sampling(stop=("b",)))


def test_a_character_after_any_number_of_broken_bytes_is_whole(tokenizers: dict[str, ChatTokenizer]) -> None:
    tokenizer = tokenizers["bytes"]
    smile, tail = bytes_of(tokenizer, "😀"), bytes_of(tokenizer, "é")[1]
    for count in range(20):
        check(tokenizer, [*[tail] * count, *smile, *smile[:2], *smile], Sampling())
