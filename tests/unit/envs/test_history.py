"""Histories extend token by token, or say why they cannot."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from forge.envs.history import Extension, History, answer_message
from forge.models.tokenizer import ChatTokenizer

USER = {"role": "user", "content": "How many?"}
MORE = {"role": "user", "content": "And now?"}
TOOL = {"role": "tool", "content": "12"}


def ids_of(codec: ChatTokenizer, text: str) -> tuple[int, ...]:
    return tuple(codec.encode_rendered(text))


def test_the_first_turn_is_the_whole_prompt(codec):
    extension = History().extend([USER], codec)
    assert extension == Extension(tuple(codec.encode_prompt([USER])), True, None, codec.render_prompt([USER]))


def test_only_what_is_new_is_tokenised_and_the_whole_is_the_template_s_text(codec):
    first = History().extend([USER], codec)
    sampled = ids_of(codec, "Four.<|im_end|>")
    history = History().after(first, [USER], sampled, codec)
    second = history.extend([MORE], codec)
    assert not second.starts_over
    assert second.prefix_break is None
    whole = first.appended_ids + sampled + second.appended_ids
    assert codec.decode(whole) == codec.render_prompt([USER, {"role": "assistant", "content": "Four."}, MORE])


def test_sampled_tokens_stay_although_the_tokenizer_would_split_the_text_otherwise(codec):
    first = History().extend([USER], codec)
    sampled = tuple(token for letter in "How many" for token in ids_of(codec, letter)) + ids_of(codec, "<|im_end|>")
    assert sampled != ids_of(codec, "How many<|im_end|>")
    history = History().after(first, [USER], sampled, codec)
    second = history.extend([MORE], codec)
    assert not second.starts_over
    assert codec.decode(first.appended_ids + sampled + second.appended_ids) == second.text


def test_an_answer_that_was_cut_off_gets_its_end_from_the_template(codec):
    first = History().extend([USER], codec)
    history = History().after(first, [USER], ids_of(codec, "Fou"), codec)
    second = history.extend([MORE], codec)
    assert not second.starts_over
    assert codec.decode(second.appended_ids).startswith("<|im_end|>\n<|im_start|>user\nAnd now?")


def test_reasoning_that_the_template_strips_starts_a_new_root(thinking):
    first = History().extend([USER], thinking)
    sampled = ids_of(thinking, "<think>\n2+2\n</think>\n\nFour.<|im_end|>")
    history = History().after(first, [USER], sampled, thinking)
    assert not history.extend([TOOL], thinking).starts_over  # no new question: the reasoning stays
    second = history.extend([MORE], thinking)
    assert (second.starts_over, second.prefix_break) == (True, "template")
    assert "2+2" not in second.text
    assert second.appended_ids == ids_of(thinking, second.text)


def test_a_replaced_history_is_a_compaction(codec):
    first = History().extend([USER], codec)
    history = History().after(first, [USER], ids_of(codec, "Four.<|im_end|>"), codec)
    compact = history.replaced([{"role": "system", "content": "Four was said."}])
    second = compact.extend([MORE], codec)
    assert (second.starts_over, second.prefix_break) == (True, "compaction")
    after = compact.after(second, [MORE], ids_of(codec, "Five.<|im_end|>"), codec)
    assert after.extend([MORE], codec).prefix_break is None  # only the turn after the edit breaks
    assert History().replaced([USER]).extend([MORE], codec).prefix_break is None  # nothing was sampled yet


class Spaced:
    """A tokenizer that puts a space before every text it reads, as some sentencepiece models do."""

    stop_token_ids = ()

    special_tokens = tag_tokens = ()

    def render_prompt(self, messages, **options):
        return "".join(f"[{message['content']}]" for message in messages)

    def encode_rendered(self, text):
        return [ord(" "), *map(ord, text)]

    def decode(self, ids):
        return "".join(map(chr, ids))


def test_tokens_that_cannot_be_joined_start_a_new_root():
    codec = Spaced()
    first = History().extend([USER], codec)
    history = History(messages=(USER, {"role": "assistant", "content": "4"}), text="[How many?][4]", tail=(91, 52, 93))
    second = history.extend([MORE], codec)
    assert first.prefix_break is None
    assert (second.starts_over, second.prefix_break) == (True, "retokenization")


def test_an_answer_keeps_special_tokens_but_not_its_end(codec):
    ids = ids_of(codec, "a<|im_start|>b<|im_end|>")
    assert answer_message(ids, codec) == {"role": "assistant", "content": "a<|im_start|>b"}
    assert answer_message(ids_of(codec, "a"), codec) == {"role": "assistant", "content": "a"}
    assert answer_message((), codec) == {"role": "assistant", "content": ""}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_is_sampled_the_branch_is_what_the_engine_has(codec, data):
    """Random token ids, also halves of characters: the branch's tokens are kept, and their text is the template's."""
    history, held = History(), ()
    for _ in range(data.draw(st.integers(1, 4))):
        new = [{"role": "user", "content": data.draw(st.text(max_size=8))}]
        extension = history.extend(new, codec)
        held = extension.appended_ids if extension.starts_over else held + extension.appended_ids
        if not extension.starts_over or extension.prefix_break is not None:
            assert codec.decode(held) == extension.text
        sampled = tuple(data.draw(st.lists(st.integers(0, 508), max_size=6)))
        if data.draw(st.booleans()):
            sampled += ids_of(codec, "<|im_end|>")
        history = history.after(extension, new, sampled, codec)
        held += sampled
        assert history.text is not None
        assert history.tail == held[-16:]
