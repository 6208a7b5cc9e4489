"""The rewards for form: `tags` and `length`."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.rewards import length, tags
from scored_texts import asked, said

GOOD = "<think>a</think><answer>b</answer>"


@pytest.mark.parametrize(
    ("text", "args", "score"),
    [
        (GOOD, {}, 1),
        ("\n<think>\na\n</think>\n\n<answer>b</answer>\n", {}, 1),
        ("", {}, 0),
        ("a", {}, 0),
        (f"x{GOOD}", {}, 0),
        (f"{GOOD}x", {}, 0),
        ("<think>a</think>x<answer>b</answer>", {}, 0),
        (f"{GOOD}<answer>c</answer>", {}, 0),
        ("<think>a<answer></think><answer>b</answer>", {}, 0),
        ("<answer>b</answer><think>a</think>", {}, 0),
        ("<think><answer>b</answer></think>", {}, 0),
        ("</think>a<think><answer>b</answer>", {}, 0),
        ("<think>a</think><answer>b", {}, 0),
        ("<Think>a</Think><answer>b</answer>", {}, 0),
        ("<think></think><answer>b</answer>", {}, 0),
        ("<think></think><answer>b</answer>", {"allow_empty": True}, 1),
        ("<think>a</think><answer> </answer>", {}, 0),
        ("a</think><answer>b</answer>", {"opened": True}, 1),
        (GOOD, {"opened": True}, 0),
        ("<a>1</a><b>2</b><c>3</c>", {"tags": ["a", "b", "c"]}, 1),
        ("<answer>b</answer>", {"tags": ["answer"]}, 1),
        (GOOD, {"partial": True}, 1),
        ("", {"partial": True}, 0),
        ("<think>a</think>", {"partial": True}, 2 / 8),
        ("<think>a</think><answer>b</answer></answer>", {"partial": True}, 3 / 8),
        (f"{GOOD}x", {"partial": True}, 7 / 8),
        ("<think></think><answer>b</answer>", {"partial": True}, 7 / 8),
        ("<answer>b</answer><think>a</think>", {"partial": True}, 4 / 8),
        (f"{GOOD}x", {"partial": True, "allow_empty": True}, 5 / 6),
    ],
)
def test_tags(text: str, args: dict[str, object], score: float) -> None:
    assert tags(asked(), said(text), **args) == score


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "a", " "]), max_size=8))
def test_full_marks_only_for_the_form(parts: list[str]) -> None:
    text = "".join(parts)
    words = [part for part in parts if part != " "]
    inside = [word for word in words if word == "a"]
    once = [word for word in words if word != "a"] == ["<think>", "</think>", "<answer>", "</answer>"]
    right = once and words[0] == "<think>" and words[-1] == "</answer>" and "</think><answer>" in "".join(words)
    right = right and len(inside) >= 2 and "<think></think>" not in "".join(words) and "a</answer>" in "".join(words)
    assert tags(asked(), said(text)) == float(right)
    assert (tags(asked(), said(text), partial=True) == 1) == right


def test_a_megabyte_of_tags() -> None:
    assert tags(asked(), said("<think>" * 150_000), partial=True) == 0


@pytest.mark.parametrize(
    ("size", "args", "score"),
    [
        (10, {"max_tokens": 10}, 1),
        (11, {"max_tokens": 10}, 0),
        (12, {"max_tokens": 10, "margin": 4}, 0.5),
        (14, {"max_tokens": 10, "margin": 4}, 0),
        (99, {"max_tokens": 10, "margin": 4}, 0),
        (4, {"min_tokens": 5, "max_tokens": 10}, 0),
        (4, {"min_tokens": 5, "margin": 2}, 0.5),
        (1000, {"min_tokens": 5}, 1),
        (0, {"max_tokens": 0}, 1),
        (20, {"target": 20}, 1),
        (19, {"target": 20}, 0),
        (25, {"target": 20, "margin": 10}, 0.5),
        (15, {"target": 20, "margin": 10}, 0.5),
        (40, {"target": 20, "margin": 10}, 0),
    ],
)
def test_length(size: int, args: dict[str, int], score: float) -> None:
    assert length(asked(), said("any text at all", num_tokens=size), **args) == score
