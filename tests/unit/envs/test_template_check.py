"""Which continuations of a template are exact."""

from __future__ import annotations

from chat_templates import ALTERNATING, chatml_folder
from forge.envs.template_check import check_template
from forge.models.tokenizer import ChatTokenizer


def names(found, *, is_exact: bool) -> set[str]:
    return {each.name for each in found if each.is_exact is is_exact}


def test_a_plain_template_is_always_exact(codec):
    found = check_template(codec, tool_format="hermes", end="<|im_end|>")
    assert names(found, is_exact=False) == set()
    assert len(found) >= 9


def test_stripped_reasoning_is_named(thinking):
    found = check_template(thinking, tool_format="hermes", end="<|im_end|>")
    broken = {each.name: each for each in found if not each.is_exact}
    assert "an answer with reasoning, then a question" in broken
    assert "a tool call, then its result" not in broken
    case = broken["an answer with reasoning, then a question"]
    assert case.prefix_break == "template"
    assert "<think>" in case.detail


def test_a_template_that_refuses_says_so(tmp_path):
    codec = ChatTokenizer.load(chatml_folder(tmp_path / "model", ALTERNATING))
    found = {each.name: each for each in check_template(codec, tool_format="json", end="<|im_end|>")}
    assert "roles must alternate" in found["with a system message"].detail
