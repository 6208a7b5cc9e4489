"""Preference records: a chosen and a rejected answer to one prompt, or one answer with a label, made into samples.

A pair becomes two samples of one sequence, so that a loss that needs whole sequences finds both in one micro-batch and
their common prefix is computed once. Fields per token say which sample and which tokens these are:

- `chosen`: 1 in the chosen (or desirable) sample, 0 in the other, at all tokens.
- `completion`: 1 at the tokens of the completion that count, 0 elsewhere.
- `margin`, if asked for: by how much the chosen answer is better, 0 where the record does not say; at all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from forge.config import DataConfig
from forge.data.files import Record
from forge.data.formats import Layout, RecordFormats, read_system, read_text, read_turn, refuse
from forge.data.samples import Counters, Encoder, Tokenizer
from forge.errors import DataError
from forge.types import Sample

CHOSEN, COMPLETION, MARGIN = "chosen", "completion", "margin"
"""The fields of a preference sample."""

PAIRED: Final = ("preference", "preference_text")
_KEYS: Final = ("prompt", "chosen", "rejected", "completion", "label", "margin", "system", "tools")
_FORMATS: Final = (
    "preference: `chosen` and `rejected`, each text or [{role, content}, …], and `prompt`, which may be left out where "
    "messages begin alike; preference_text: the same as plain text without a chat template; unpaired: `prompt`, "
    "`completion` and `label`, which is true or false; unpaired_text: the same as plain text"
)

_LARGEST_MARGIN: Final = 3.4e38
"""What float32 holds; also NaN is not below it."""

Turn = tuple[Mapping[str, Any], bool]
"""A message, and whether it is learnt from."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to a prompt: its messages, or its text.

    Attributes:
        prompt: the messages before it; empty for plain text.
        completion: its own messages, the first of which the assistant says; empty for plain text.
        prompt_text: the text before it; None where it is what both texts of a pair begin with.
        text: prompt and completion as one text; None for messages.
        is_chosen: whether it is the chosen, or a desirable, answer.
    """

    prompt: tuple[Turn, ...] = ()
    completion: tuple[Turn, ...] = ()
    prompt_text: str | None = None
    text: str | None = None
    is_chosen: bool = True


def _format_of(record: Record, columns: Mapping[str, str]) -> str:
    value, name = record.value(), Layout("auto", columns).name
    has = {key: value.get(name(key)) is not None for key in _KEYS}
    if has["chosen"] and has["rejected"]:
        is_text = not has["prompt"] and isinstance(value[name("chosen")], str)
        return "preference_text" if is_text else "preference"
    if has["prompt"] and has["completion"] and has["label"]:
        return "unpaired"
    raise DataError(
        f"{record.place}: the format of this record is not known",
        path=record.place,
        value=sorted(value),
        rule=f"its keys are those of one format: {_FORMATS}",
        repair="name its keys with `columns`, such as {chosen: better, rejected: worse}, or set `format`",
    )


PREFERENCES: Final = RecordFormats(_KEYS, _format_of)
"""The formats of preference records."""


def read_answers(record: Record, *, layout: Layout, system_prompt: str | None = None) -> tuple[Answer, ...]:
    """Return the answers of a record: the chosen and the rejected one, or the only one.

    A record that does not follow its layout is a DataError that names its place.
    """
    value, place = record.value(), record.place
    if layout.format in ("preference_text", "unpaired_text"):
        return _read_texts(value, layout=layout, place=place)
    if layout.format == "unpaired":
        prompt = _messages(value, "prompt", "user", layout=layout, place=place)
        completion = _messages(value, "completion", "assistant", layout=layout, place=place)
        found = [(prompt, completion, _label(value, layout=layout, place=place))]
    else:
        prompt, chosen, rejected = _read_pair(value, layout=layout, place=place)
        found = [(prompt, chosen, True), (prompt, rejected, False)]
    system = read_system(value, layout=layout, place=place) or system_prompt
    answers = []
    for before, completion, is_chosen in found:
        _check_roles(before, completion, layout=layout, place=place)
        if system is not None and all(turn["role"] not in ("system", "developer") for turn, _ in before):
            before = [({"role": "system", "content": system}, True), *before]
        answers.append(Answer(tuple(before), tuple(completion), is_chosen=is_chosen))
    return tuple(answers)


def read_margin(record: Record, *, layout: Layout) -> float:
    """Return by how much the chosen answer is better, as the record says; 0 where it does not say."""
    name = layout.name("margin")
    margin = record.value().get(name)
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) <= _LARGEST_MARGIN:
        rule = f"format {layout.format}: `{name}` is a finite number, or left out"
        refuse(record.place, f"this record has something under `{name}` that is not a number", margin, rule)
    return float(margin)


def _read_texts(value: Mapping[str, Any], *, layout: Layout, place: str) -> tuple[Answer, ...]:
    has_prompt = value.get(layout.name("prompt")) is not None
    if layout.format == "unpaired_text":
        prompt = read_text(value, "prompt", layout=layout, place=place)
        text = prompt + read_text(value, "completion", layout=layout, place=place)
        return (Answer(prompt_text=prompt, text=text, is_chosen=_label(value, layout=layout, place=place)),)
    before = read_text(value, "prompt", layout=layout, place=place) if has_prompt else None
    chosen, rejected = (read_text(value, key, layout=layout, place=place) for key in ("chosen", "rejected"))
    _refuse_identical(chosen, rejected, layout=layout, place=place)
    return tuple(
        Answer(prompt_text=before, text=(before or "") + text, is_chosen=is_chosen)
        for text, is_chosen in ((chosen, True), (rejected, False))
    )


def _read_pair(value: Mapping[str, Any], *, layout: Layout, place: str) -> tuple[list[Turn], list[Turn], list[Turn]]:
    """Return prompt, chosen and rejected messages; the prompt is what both begin with where it is not given."""
    chosen, rejected = (
        _messages(value, key, "assistant", layout=layout, place=place) for key in ("chosen", "rejected")
    )
    is_text = [isinstance(value[layout.name(key)], str) for key in ("chosen", "rejected")]
    if is_text[0] != is_text[1]:
        rule = f"format {layout.format}: both are text, or both are lists of messages"
        refuse(place, "one of `chosen` and `rejected` is text, the other is messages", is_text, rule)
    _refuse_identical(chosen, rejected, layout=layout, place=place)
    given = value.get(layout.name("prompt"))
    if given is not None and (is_text[0] or chosen[0][0]["role"] == "assistant"):
        return _messages(value, "prompt", "user", layout=layout, place=place), chosen, rejected
    if is_text[0]:
        rule = f"format {layout.format}: texts need a `{layout.name('prompt')}`; format preference_text does without"
        refuse(place, "there is no prompt", sorted(value), rule)
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if shared == 0:
        rule = f"format {layout.format}: without `{layout.name('prompt')}`, both begin with the same messages"
        refuse(place, "`chosen` and `rejected` have no common prompt", [chosen[0][0], rejected[0][0]], rule)
    if shared in (len(chosen), len(rejected)):
        rule = f"format {layout.format}: each has an answer of its own after what they have in common"
        refuse(place, "one of `chosen` and `rejected` is the beginning of the other", shared, rule)
    prompt = chosen[:shared]
    if given is not None:
        _check_prompt(
            _messages(value, "prompt", "user", layout=layout, place=place), prompt, layout=layout, place=place
        )
    return prompt, chosen[shared:], rejected[shared:]


def _check_prompt(given: Sequence[Turn], found: Sequence[Turn], *, layout: Layout, place: str) -> None:
    """Refuse a prompt that is not what whole conversations under `chosen` and `rejected` begin with."""
    asked = [turn["content"] for turn, _ in given]
    if asked != [turn["content"] for turn, _ in found][-len(asked) :]:
        rule = f"format {layout.format}: the prompt is what the messages of `chosen` and `rejected` have in common"
        refuse(place, f"`{layout.name('prompt')}` is not the prompt of the messages", asked, rule)


def _check_roles(prompt: Sequence[Turn], completion: Sequence[Turn], *, layout: Layout, place: str) -> None:
    first, last = completion[0][0]["role"], completion[-1][0]["role"]
    if first != "assistant" or last != "assistant":
        rule = f"format {layout.format}: an answer starts and ends with a message of the assistant"
        refuse(place, "an answer is not the assistant's", [turn["role"] for turn, _ in completion], rule)
    if prompt and prompt[-1][0]["role"] == "assistant":
        rule = f"format {layout.format}: a prompt ends with a message of the user or of a tool"
        refuse(place, "the prompt ends with a message of the assistant", prompt[-1][0], rule)


def _refuse_identical(chosen: object, rejected: object, *, layout: Layout, place: str) -> None:
    if chosen == rejected:
        rule = f"format {layout.format}: the two answers differ"
        refuse(place, "`chosen` and `rejected` are identical", chosen, rule)


def _messages(value: Mapping[str, Any], key: str, role: str, *, layout: Layout, place: str) -> list[Turn]:
    """Return what a key holds as messages; text is one message of `role`."""
    name = layout.name(key)
    found = value.get(name)
    if isinstance(found, str) or found is None:
        return [({"role": role, "content": read_text(value, key, layout=layout, place=place)}, True)]
    if not isinstance(found, list) or not found:
        rule = f"format {layout.format}: `{name}` is text, or a list of messages that is not empty"
        refuse(place, f"this record has no messages under `{name}`", found, rule)
    messages = Layout("messages", layout.columns)
    return [read_turn(turn, f"{name}[{index}]", layout=messages, place=place) for index, turn in enumerate(found)]


def _label(value: Mapping[str, Any], *, layout: Layout, place: str) -> bool:
    name = layout.name("label")
    label = value.get(name)
    if not isinstance(label, bool) and (not isinstance(label, int) or label not in (0, 1)):
        rule = f"format {layout.format}: `{name}` is true or false, or 1 or 0"
        refuse(place, f"this record has no label under `{name}`", label, rule)
    return bool(label)


class PreferenceEncoder(Encoder):
    """Makes the samples of preference records.

    With `paired` a record is a pair, two samples of one sequence, and a record with one answer is refused. Otherwise
    each answer is a sample of its own. With `margin` samples have that field.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, data: DataConfig, max_seq_len: int, paired: bool = True, margin: bool = False
    ) -> None:
        super().__init__(tokenizer, data=data, max_seq_len=max_seq_len)
        self._paired, self._margin = paired, margin

    def encode_all(self, record: Record, *, layout: Layout, counters: Counters) -> tuple[Sample, ...]:
        """Return the samples of a record; none where it was left out and counted.

        A pair is left out as a whole, and counted once. Raises DataError for a record that cannot be read
        (data.on_bad_record: error) or is too long (data.oversize: error).
        """
        try:
            self._check_paired(record, layout)
            answers = read_answers(record, layout=layout, system_prompt=self._data.system_prompt)
            margin = read_margin(record, layout=layout) if self._margin else None
            encoded = self._encoded(answers, record.place, layout=layout)
        except DataError as error:
            if self._data.on_bad_record == "error":
                raise
            self._leave_out(error, counters)
            return ()
        kept, is_cut = [], False
        for answer, (ids, mask) in zip(answers, encoded, strict=True):
            cut = self._cut(ids, mask, place=record.place, counters=counters)
            if cut is not None:
                kept.append(self._sample(*cut, answer, place=record.place, margin=margin))
                is_cut |= len(ids) > self.max_seq_len
            elif self._paired:
                return ()
        if self._paired and kept[0].token_ids.equal(kept[1].token_ids):
            counters.without_loss += 1  # what they differ in was cut off
            return ()
        counters.truncated += is_cut
        return tuple(kept)

    def _check_paired(self, record: Record, layout: Layout) -> None:
        if self._paired and layout.format not in PAIRED:
            rule = "pairs, with `chosen` and `rejected`: this loss compares two answers to one prompt"
            refuse(record.place, "this record has one answer and a label", layout.format, rule)

    def _encoded(self, answers: Sequence[Answer], place: str, *, layout: Layout) -> list[tuple[list[int], list[bool]]]:
        """Return the tokens of each answer, and which of them are its completion's that count."""
        if answers[0].text is None:
            return [self._chat(answer, place, layout=layout) for answer in answers]
        ids = [self._call(place, self._tokenizer.encode_text, answer.text) for answer in answers]
        if answers[0].prompt_text is None:
            length = self._num_shared(ids)
        else:
            prompt = self._call(place, self._tokenizer.encode_text, answers[0].prompt_text)
            prompt = prompt[:-1] if prompt[-1] == self._tokenizer.eos_token_id else prompt
            length = min(common_prefix(prompt, each) for each in ids)
        if any(length >= len(each) for each in ids):
            refuse(place, "an answer has no tokens", ids, f"format {layout.format}: each answer has at least one")
        return [(each, [False] * length + [True] * (len(each) - length)) for each in ids]

    def _num_shared(self, ids: Sequence[Sequence[int]]) -> int:
        """Return how many tokens are the prompt of two texts that come without one."""
        return common_prefix(*ids)

    def _chat(self, answer: Answer, place: str, *, layout: Layout) -> tuple[list[int], list[bool]]:
        turns = (*answer.prompt, *answer.completion)
        ids, is_assistant = self._call(place, self._tokenizer.encode_chat, [turn for turn, _ in turns])
        counts = [
            index >= len(answer.prompt) and trained
            for index, (turn, trained) in enumerate(turns)
            if turn["role"] == "assistant"
        ]
        mask = _of_messages(is_assistant, counts)
        if mask is None:
            rule = "the chat template marks each message of the assistant by itself"
            refuse(place, "the messages of the prompt and of the answer cannot be told apart", len(counts), rule)
        if not any(mask[1:]):
            refuse(place, "no token of an answer counts", None, f"format {layout.format}: at least one does")
        return ids, mask

    def _cut(
        self, ids: list[int], mask: list[bool], *, place: str, counters: Counters
    ) -> tuple[list[int], list[bool]] | None:
        """Return what fits into max_seq_len; None, and counted, where the sample is dropped."""
        if len(ids) > self.max_seq_len:
            if self._data.oversize == "error":
                raise self._too_long(len(ids), place)
            if self._data.oversize == "drop":
                counters.oversize += 1
                return None
        ids, mask = ids[: self.max_seq_len], mask[: self.max_seq_len]
        if not any(mask[1:]):
            counters.without_loss += 1
            return None
        return ids, mask

    def _sample(self, ids: list[int], mask: list[bool], answer: Answer, *, place: str, margin: float | None) -> Sample:
        import torch

        completion = torch.tensor(mask, dtype=torch.float32)
        completion[0] = 0.0
        weights = completion
        if self._data.loss_on == "all" and answer.is_chosen:
            weights = torch.ones(len(ids))
            weights[0] = 0.0
        fields = {CHOSEN: torch.full((len(ids),), float(answer.is_chosen)), COMPLETION: completion}
        if margin is not None:
            fields[MARGIN] = torch.full((len(ids),), margin)
        sequence = 0 if self._paired else None
        return Sample(torch.tensor(ids, dtype=torch.int64), weights, fields, identity=place, sequence=sequence)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two lists begin with alike."""
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += 1
    return length


def _of_messages(is_assistant: Sequence[bool], counts: Sequence[bool]) -> list[bool] | None:
    """Return the marked tokens of those messages of the assistant that count; None where they run into each other.

    Headers part one message of the assistant from the next, so the runs of marked tokens are its messages in order.
    """
    mask, run, before = [], -1, False
    for mark in is_assistant:
        run += mark and not before
        mask.append(bool(mark) and run < len(counts) and counts[run])
        before = mark
    if all(counts):
        return [bool(mark) for mark in is_assistant]
    return mask if run + 1 == len(counts) else None
