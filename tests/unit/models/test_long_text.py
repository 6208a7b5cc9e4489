"""Long texts: bounds that no text escapes, tokens as those of short ones, and an interpreter that goes on."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from forge.models.long_text import _LETTERS, LONG_TEXT, TextTooLong, characters_per_token, encode_long
from forge.models.tiny import make_tiny
from forge.models.tokenizer import ChatTokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder, num_layers=1, hidden_size=32, intermediate_size=32)
    return ChatTokenizer.load(folder)


def byte_level(normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """A small tokenizer like Qwen's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(["the " * 20, " " * 64, "ᾄᾄᾄᾄ " * 9], trainer)
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def sentencepiece() -> Tokenizer:
    """As Llama 2's and Gemma's in `tokenizers`."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "▁": 257, "t": 258, "▁t": 259}
    made = Tokenizer(models.BPE(vocab, [("▁", "t")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


@pytest.mark.parametrize(
    "made", [byte_level(), byte_level(normalizers.NFC()), sentencepiece()], ids=["bytes", "nfc", "sentencepiece"]
)
@pytest.mark.parametrize("text", [" " * 5000, "the " * 999, "α\u0313\u0301\u0345" * 999, "😀" * 999, "x" * 999])
def test_no_token_stands_for_more_characters_than_said(made: Tokenizer, text: str) -> None:
    bound = characters_per_token(made)
    assert bound is not None
    assert len(text) <= bound * len(made.encode(text).ids)


def dropping(made: Tokenizer) -> Tokenizer:
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), made.pre_tokenizer])
    return made


def greedy(made: Tokenizer) -> Tokenizer:
    made.add_special_tokens([AddedToken("<|user|>", rstrip=True)])
    return made


def bytes_missing() -> Tokenizer:
    made = Tokenizer(models.BPE({"a": 0}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def test_the_letters_of_bytes_are_those_of_tokenizers() -> None:
    assert sorted(_LETTERS.values()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    ((word, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("é\n\x00😀~ ")
    assert word == "".join(_LETTERS[byte] for byte in "é\n\x00😀~ ".encode())


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (byte_level(normalizers.Strip()), " " * 5000 + "x"),
        (byte_level(normalizers.Replace("ab", "")), "ab" * 5000 + "x"),
        (dropping(byte_level()), " " * 5000 + "x"),
        (greedy(byte_level()), "<|user|>" + " " * 5000),
        (Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")), "x" * 5000),
        (Tokenizer(models.BPE({"<unk>": 0}, [], unk_token="<unk>", fuse_unk=True)), "x" * 5000),
        (bytes_missing(), "x" * 5000),
    ],
    ids=["strips", "replaces", "drops", "takes spaces", "wordpiece", "fuses", "lacks bytes"],
)
def test_no_bound_where_a_token_may_stand_for_any_text(made: Tokenizer, text: str) -> None:
    assert len(made.encode(text).ids) <= 1
    assert characters_per_token(made) is None


def test_long_texts_have_the_same_tokens(tokenizer: ChatTokenizer) -> None:
    line = "The answer is 42.  <|im_end|>\n ᾄ😀"
    text = line * (LONG_TEXT // len(line) + 1)
    for encode in (tokenizer.encode_rendered, tokenizer.encode_beginning):
        ids = encode(text)
        assert tokenizer.decode(ids) == text
        assert encode(text, max_tokens=len(ids)) == ids
        with pytest.raises(TextTooLong, match=rf"^{len(ids)} tokens"):
            encode(text, max_tokens=len(ids) - 2)
    assert tokenizer.encode_rendered(text) == tokenizer._plain.encode(text, add_special_tokens=False).ids


def test_a_text_that_can_never_fit_is_not_tokenised(tokenizer: ChatTokenizer) -> None:
    bound = characters_per_token(tokenizer._plain)
    assert bound == len("<|endoftext|>")
    with pytest.raises(TextTooLong, match=r"^100000 characters, at least 7693 tokens$"):
        tokenizer.encode_rendered("\ud800" * 100_000, max_tokens=7000)  # half a character: no tokenizer takes it
    assert len(tokenizer.encode_rendered("<|endoftext|>" * 7000, max_tokens=7000)) == 7000


class Watched:
    """A tokenizer, and whether one of its methods has been entered and left."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.entered, self.left = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.entered.set()
            try:
                return getattr(self._tokenizer, name)(*args, **kwargs)
            finally:
                self.left.set()

        return call


def test_other_threads_run_while_a_long_text_is_tokenised(tokenizer: ChatTokenizer) -> None:
    """No thread is made to give up the interpreter's lock here, so this one runs only if the tokenizer releases it."""
    watched = Watched(tokenizer._plain)
    options: dict[str, Any] = {"add_special_tokens": False, "max_tokens": None}
    thread = threading.Thread(target=encode_long, args=(watched, "Hello, world 12 " * 30_000), kwargs=options)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread.start()
        watched.entered.wait()
        was_left = watched.left.is_set()
        thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not was_left
