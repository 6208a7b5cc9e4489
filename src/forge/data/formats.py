"""The layouts of a record, each turned into the messages of a conversation or into plain text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from forge.data.files import Record
from forge.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_RESPONSES = ("response", "completion", "answer")
_KEYS = (
    *("messages", "conversations", "instruction", "input", "output", "prompt", *_RESPONSES, "text"),
    *("system", "tools"),
)
_LAYOUTS = (
    "messages: [{role, content}, …] under `messages` or `conversations`; sharegpt: [{from, value}, …] under "
    "`conversations`; alpaca: instruction, input, output; prompt_response: prompt and response, completion or answer; "
    "text: text"
)
_SKIP = "correct or remove it, or set data.on_bad_record to skip"


@dataclass(frozen=True, slots=True)
class Layout:
    """How the records of one source are laid out.

    Attributes:
        format: messages, sharegpt, alpaca, prompt_response or text.
        columns: a format's key → the name that the source has for it.
    """

    format: str
    columns: Mapping[str, str]

    def name(self, key: str) -> str:
        """What the source calls a key of the format."""
        return self.columns.get(key, key)


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is to be learnt from one record: messages, or plain text.

    Attributes:
        messages: role, content, and whatever else the chat template reads; never the key `train`.
        trained: for each message False where the record took it out of the loss.
        text: the text, where there are no messages.
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    trained: tuple[bool, ...] = ()
    text: str | None = None


@dataclass(frozen=True, slots=True)
class RecordFormats:
    """The formats that records of one kind may have.

    Attributes:
        keys: all that any of the formats could ask for.
        format_of: returns the format of a record, given names of columns that differ; a DataError if it has none.
    """

    keys: tuple[str, ...]
    format_of: Callable[[Record, Mapping[str, str]], str]

    def wanted(self, columns: Mapping[str, str]) -> frozenset[str]:
        """Return the columns that any format could ask for; nothing else is read from Parquet."""
        return frozenset(columns.get(key, key) for key in self.keys)


def wanted_columns(columns: Mapping[str, str]) -> frozenset[str]:
    """The columns that any format of conversations could ask for; nothing else is read from Parquet."""
    return CONVERSATIONS.wanted(columns)


def detect(
    records: Iterable[Record], *, columns: Mapping[str, str], lenient: bool, formats: RecordFormats | None = None
) -> str:
    """The format of the first record; with `lenient`, of the first among these that has one."""
    problem: DataError | None = None
    for record in records:
        try:
            return (formats or CONVERSATIONS).format_of(record, columns)
        except DataError as error:
            problem = problem or error
            if not lenient:
                break
    if problem is None:
        raise ValueError("there must be a record to detect a format from")
    raise problem


def convert(record: Record, *, layout: Layout, system_prompt: str | None = None) -> Conversation:
    """A record as a conversation. A record that does not follow its layout is a DataError that names its place."""
    value = record.value()
    if layout.format == "text":
        return Conversation(text=read_text(value, "text", layout=layout, place=record.place))
    if layout.format == "alpaca":
        turns = _alpaca(value, layout=layout, place=record.place)
    elif layout.format == "prompt_response":
        turns = _prompt_response(value, layout=layout, place=record.place)
    else:
        turns = _turns(value, layout=layout, place=record.place)
    system = read_system(value, layout=layout, place=record.place) or system_prompt
    if system is not None and all(turn["role"] not in ("system", "developer") for turn, _ in turns):
        turns.insert(0, ({"role": "system", "content": system}, True))
    return Conversation(tuple(turn for turn, _ in turns), tuple(trained for _, trained in turns))


def read_system(value: Mapping[str, Any], *, layout: Layout, place: str) -> str | None:
    """The system message that a record has beside its turns. Tools beside them are not rendered, so not accepted."""
    if value.get(layout.name("tools")):
        rule = "no `tools`: what a chat template makes of them is not supported yet"
        refuse(place, "the record has tools", value[layout.name("tools")], rule)
    system = value.get(layout.name("system"))
    if system is None or system == "":
        return None
    return read_text(value, "system", layout=layout, place=place)


def _format_of(record: Record, columns: Mapping[str, str]) -> str:
    value = record.value()
    name = Layout("auto", columns).name
    for key in ("messages", "conversations"):
        turns = value.get(name(key))
        if isinstance(turns, list) and turns and isinstance(turns[0], Mapping):
            if turns[0].get(name("role")) is not None:
                return "messages"
            if turns[0].get(name("from")) is not None:
                return "sharegpt"
    if value.get(name("instruction")) is not None and value.get(name("output")) is not None:
        return "alpaca"
    if value.get(name("prompt")) is not None and any(value.get(name(key)) is not None for key in _RESPONSES):
        return "prompt_response"
    if value.get(name("text")) is not None:
        return "text"
    raise DataError(
        f"{record.place}: the format of this record is not known",
        path=record.place,
        value=sorted(value),
        rule=f"its keys are those of one format: {_LAYOUTS}",
        repair="name its keys with `columns`, such as {prompt: question, response: answer}, or set `format`",
    )


CONVERSATIONS = RecordFormats(_KEYS, _format_of)
"""The formats of conversations and texts, which fine-tuning learns from."""


def _alpaca(value: Mapping[str, Any], *, layout: Layout, place: str) -> list[tuple[dict[str, Any], bool]]:
    prompt = read_text(value, "instruction", layout=layout, place=place)
    if value.get(layout.name("input")) not in (None, ""):
        prompt = f"{prompt}\n\n{read_text(value, 'input', layout=layout, place=place)}"
    return _pair(prompt, read_text(value, "output", layout=layout, place=place))


def _prompt_response(value: Mapping[str, Any], *, layout: Layout, place: str) -> list[tuple[dict[str, Any], bool]]:
    key = next((key for key in _RESPONSES if value.get(layout.name(key)) is not None), "response")
    prompt = read_text(value, "prompt", layout=layout, place=place)
    return _pair(prompt, read_text(value, key, layout=layout, place=place))


def _pair(prompt: str, answer: str) -> list[tuple[dict[str, Any], bool]]:
    return [({"role": "user", "content": prompt}, True), ({"role": "assistant", "content": answer}, True)]


def read_text(value: Mapping[str, Any], key: str, *, layout: Layout, place: str) -> str:
    """Return the text under a key, which must not be empty."""
    name = layout.name(key)
    text = value.get(name)
    if not isinstance(text, str) or not text.strip():
        what = f"has no text under `{name}`" if text is None else f"has something under `{name}` that is not text"
        refuse(place, f"this record {what}", text, f"format {layout.format}: `{name}` is text that is not empty")
    return text


def _turns(value: Mapping[str, Any], *, layout: Layout, place: str) -> list[tuple[dict[str, Any], bool]]:
    name = next(
        (layout.name(key) for key in ("messages", "conversations") if value.get(layout.name(key)) is not None),
        layout.name("messages" if layout.format == "messages" else "conversations"),
    )
    turns = value.get(name)
    if not isinstance(turns, list) or not turns:
        rule = f"format {layout.format}: `{name}` is a list of messages that is not empty"
        refuse(place, f"this record has no messages under `{name}`", turns, rule)
    return [read_turn(turn, f"{name}[{index}]", layout=layout, place=place) for index, turn in enumerate(turns)]


def read_turn(turn: object, where: str, *, layout: Layout, place: str) -> tuple[dict[str, Any], bool]:
    """Return a message as chat templates want it, and whether it is learnt from."""
    if not isinstance(turn, Mapping):
        refuse(place, f"{where} is not a message", turn, f"format {layout.format}: a message is an object")
    fields = {key: item for key, item in turn.items() if item is not None}
    keys = ("from", "value") if layout.format == "sharegpt" else ("role", "content")
    speaker, content = (fields.pop(layout.name(key), None) for key in keys)
    train = fields.pop(layout.name("train"), None)
    known = _SPEAKERS if layout.format == "sharegpt" else {role: role for role in ROLES}
    role = known.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        rule = f"format {layout.format}: `{layout.name(keys[0])}` is one of {', '.join(known)}"
        refuse(place, f"{where} has no valid role", speaker, rule)
    content = _content(content)
    if content is None and not (role == "assistant" and fields.get("tool_calls")):
        rule = f"format {layout.format}: `{layout.name(keys[1])}` is text, or a list of parts of type text"
        refuse(place, f"{where} has no text", turn.get(layout.name(keys[1])), rule)
    if role == "assistant" and not content and not fields.get("tool_calls"):
        refuse(place, f"{where} is empty", content, "the assistant's message is not empty")
    if train is not None and (not isinstance(train, bool) or (train and role != "assistant")):
        refuse(place, f"{where} has `train` that cannot be followed", train, "`train` is false, or true for assistant")
    return {"role": role, "content": content or "", **fields}, train is not False


def _content(content: object) -> str | None:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        parts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content
        ]
        if all(isinstance(part, str) for part in parts):
            return "".join(str(part) for part in parts)
    return None


def refuse(place: str, what: str, value: object, rule: str) -> NoReturn:
    """Raise the DataError of a record that does not follow its layout."""
    raise DataError(f"{place}: {what}", path=place, value=value, rule=rule, repair=_SKIP)
