"""Tokenizers of a teacher and its student: the same, or refused with the first token that differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge.errors import ConfigError
from forge.models.tiny import make_tiny
from forge.models.tokenizer import ChatTokenizer
from forge.models.vocabulary import check_same_vocabulary, digest_of, vocabulary_digest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder, num_layers=1)
    return folder


def changed(folder: Path, target: Path, **tokens: str) -> ChatTokenizer:
    """A tokenizer whose added tokens have other texts."""
    target.mkdir()
    for file in folder.iterdir():
        text = file.read_bytes()
        if file.name.endswith(".json") and file.name != "config.json":
            for old, new in tokens.items():
                text = text.replace(json.dumps(f"<|{old}|>").encode(), json.dumps(f"<|{new}|>").encode())
        (target / file.name).write_bytes(text)
    return ChatTokenizer.load(target)


def test_the_same_tokens_with_another_template_are_the_same_vocabulary(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "other.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    one, other = ChatTokenizer.load(folder), ChatTokenizer.load(folder, chat_template=template)
    check_same_vocabulary(one, other, path="teacher.path")
    assert vocabulary_digest(one) == vocabulary_digest(other)


def test_the_first_token_that_differs_is_named_with_both_folders(folder: Path, tmp_path: Path) -> None:
    student = ChatTokenizer.load(folder)
    teacher = changed(folder, tmp_path / "other", im_end="im_over")
    assert teacher.vocabulary != student.vocabulary
    number = student.vocabulary["<|im_end|>"]
    with pytest.raises(ConfigError) as caught:
        check_same_vocabulary(student, teacher, path="teacher.path")
    error = caught.value
    assert (error.path, error.value) == ("teacher.path", str(tmp_path / "other"))
    said = f'token {number} is "<|im_end|>" in the student, and "<|im_over|>" in the teacher'
    assert error.rule == f"the tokens and numbers of {folder}: {said}"
    assert error.repair
    assert vocabulary_digest(teacher) != vocabulary_digest(student)


def test_a_token_that_one_side_lacks_is_a_difference(folder: Path) -> None:
    assert digest_of({"a": 0, "b": 1}) == digest_of({"b": 1, "a": 0})
    assert digest_of({"a": 0}) != digest_of({"a": 0, "b": 1})
    assert digest_of({"a": 0, "b": 1}) != digest_of({"a": 1, "b": 0})
