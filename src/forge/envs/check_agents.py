"""Agents that check an environment without a model: one that does nothing, a random one, and a scripted oracle."""

from __future__ import annotations

import inspect
import json
import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from forge.envs.character_codec import CharacterCodec, ChatPrompt
from forge.errors import OptionError
from forge.types import INITIAL_VERSION, Completion, Task, VersionSpan

Answer: TypeAlias = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""The text of an answer, or the tool calls in it: `{"name": …, "arguments": {…}}`, one or a list of them."""

Oracle: TypeAlias = Callable[..., Any]
"""Knows right answers: `oracle(task)` returns those of all turns, or `oracle(task, messages)` the next one. Either may
be a coroutine function."""

AnswerFunction: TypeAlias = Callable[[ChatPrompt, random.Random], Awaitable[str]]

_WORDS: Final = ("yes", "no", "0", "1", "2", "7", "42", "up", "left", "the", "answer", "is", "a", "not", "help")
_NUM_WORDS: Final = (1, 1, 1, 2, 3, 6)
_DEEPEST: Final = 4


@dataclass(slots=True)
class AgentPolicy:
    """A policy whose answers a function gives. One for each episode; tokens are characters.

    Attributes:
        answer: the function. What it gets is random by the turn's seed alone.
        codec: reads the conversation from the prompt.
    """

    answer: AnswerFunction
    codec: CharacterCodec
    max_seq_len: int = 2**30

    async def sample(self, token_ids: Sequence[int], *, options: Mapping[str, Any], session: str) -> Completion:
        """See `forge.envs.state.Policy.sample`."""
        text = await self.answer(self.codec.read_prompt(token_ids), random.Random(options["seed"]))
        ids = self.codec.encode_answer(text, max_tokens=options["max_tokens"])
        is_cut = not ids or ids[-1] not in self.codec.stop_token_ids
        return Completion(
            prompt_ids=tuple(token_ids),
            token_ids=ids,
            logprobs=(0.0,) * len(ids),
            full_logprobs=None,
            text=self.codec.decode(ids if is_cut else ids[:-1]),
            finish_reason="length" if is_cut else "stop",
            versions=(VersionSpan(INITIAL_VERSION, 0, len(ids)),),
        )


async def do_nothing(prompt: ChatPrompt, rng: random.Random) -> str:
    """Answer nothing."""
    return ""


async def act_randomly(prompt: ChatPrompt, rng: random.Random) -> str:
    """Answer random words, many of them from the conversation, or call a random tool with valid arguments."""
    words = _words_of(prompt)
    if prompt.tools and rng.random() < 0.7:
        return write_calls([_random_call(rng, words, rng.choice(prompt.tools)) for _ in range(rng.choice((1, 1, 2)))])
    return " ".join(_word(rng, words) for _ in range(rng.choice(_NUM_WORDS)))


class OracleAnswers:
    """The answers of an oracle in one episode.

    Attributes:
        num_missing: turns for which the oracle had no answer left; they got an empty one.
    """

    def __init__(self, oracle: Oracle, task: Task) -> None:
        self._oracle, self._task = oracle, task
        self._answers: list[Answer] | None = None
        self._is_reactive = takes_messages(oracle)
        self.num_missing = 0

    async def __call__(self, prompt: ChatPrompt, rng: random.Random) -> str:
        if self._is_reactive:
            return write_answer(await self._call(self._task, prompt.messages))
        if self._answers is None:
            found = await self._call(self._task)
            if isinstance(found, str) or not isinstance(found, Sequence):
                raise _bad_answer(found, "a list with the answer of each turn")
            self._answers = list(found)
        if not self._answers:
            self.num_missing += 1
            return ""
        return write_answer(self._answers.pop(0))

    async def _call(self, *given: Any) -> Any:
        found = self._oracle(*given)
        return await found if inspect.isawaitable(found) else found


def takes_messages(oracle: Oracle) -> bool:
    """Return whether an oracle is `(task, messages) -> answer`; False for `(task) -> answers`, any other raises."""
    try:
        signature = inspect.signature(oracle)
    except (TypeError, ValueError):
        signature = inspect.Signature()
    for num_given in (1, 2) if "self" not in signature.parameters else ():
        try:
            signature.bind(*(None,) * num_given)
        except TypeError:
            continue
        return num_given == 2
    raise OptionError(
        "the oracle cannot be called",
        path="oracle",
        value=repr(oracle),
        rule="a function (task) -> list of answers, or (task, messages) -> the next answer",
        repair="correct its parameters; make a method of an environment's class a @staticmethod",
    )


def write_answer(answer: Any) -> str:
    """Return an answer as text, with tool calls in the format `hermes`."""
    if isinstance(answer, str):
        return answer
    calls = [answer] if isinstance(answer, Mapping) else answer
    is_list = isinstance(calls, Sequence) and not isinstance(calls, bytes)
    if not is_list or not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise _bad_answer(answer, 'text, or {"name": …, "arguments": {…}} for a tool call, or a list of calls')
    return write_calls(calls)


def write_calls(calls: Sequence[Mapping[str, Any]]) -> str:
    """Return tool calls in the format `hermes`."""
    plain = ({"name": call["name"], "arguments": dict(call.get("arguments") or {})} for call in calls)
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in plain)


def _bad_answer(value: object, rule: str) -> OptionError:
    return OptionError(
        "the oracle gave an answer that cannot be used",
        path="oracle",
        value=value,
        rule=rule,
        repair="correct what the oracle returns",
    )


# ---- Randomness ------------------------------------------------------------------------------------------------------


def _words_of(prompt: ChatPrompt) -> list[str]:
    texts = (message.get("content") for message in prompt.messages[-4:])
    return [word for text in texts if isinstance(text, str) for word in re.findall(r"\w+", text[-2000:])]


def _word(rng: random.Random, words: Sequence[str]) -> str:
    return rng.choice(words) if words and rng.random() < 0.6 else rng.choice(_WORDS)


def _random_call(rng: random.Random, words: Sequence[str], tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    schema = function.get("parameters") or {}
    return {"name": function["name"], "arguments": random_value(schema, rng, words)}


def random_value(schema: Mapping[str, Any], rng: random.Random, words: Sequence[str] = ()) -> Any:
    """Return a random value that a JSON schema admits, for the part of JSON Schema that annotations give."""
    return _value({"type": "object", **schema}, rng, words, schema.get("$defs") or {}, _DEEPEST)


def _value(
    schema: Mapping[str, Any], rng: random.Random, words: Sequence[str], defs: Mapping[str, Any], depth: int
) -> Any:
    if "$ref" in schema:
        return _value(defs[str(schema["$ref"]).rpartition("/")[2]], rng, words, defs, depth)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return _value(rng.choice(options), rng, words, defs, depth)
    kind = schema.get("type")
    match kind:
        case "object":
            return _object(schema, rng, words, defs, depth)
        case "array":
            fewest = int(schema.get("minItems", 0))
            size = rng.randint(fewest, max(fewest, int(schema.get("maxItems", 3)))) if depth else fewest
            items = schema.get("items") or {"type": "string"}
            return [_value(items, rng, words, defs, max(depth - 1, 0)) for _ in range(size)]
        case "integer":
            low = int(schema.get("minimum", schema.get("exclusiveMinimum", -4) + 1))
            high = int(schema.get("maximum", schema.get("exclusiveMaximum", max(low, 0) + 21) - 1))
            numbers = [int(word) for word in words if word.isdecimal() and low <= int(word) <= high]
            return rng.choice(numbers) if numbers and rng.random() < 0.5 else rng.randint(low, max(low, high))
        case "number":
            least = float(schema.get("minimum", schema.get("exclusiveMinimum", -3)))
            most = float(schema.get("maximum", schema.get("exclusiveMaximum", max(least, 0) + 20)))
            return least + (0.001 + 0.998 * rng.random()) * (most - least)
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
    text = " ".join(_word(rng, words) for _ in range(rng.choice(_NUM_WORDS)))
    return text.ljust(int(schema.get("minLength", 0)), "x")[: schema.get("maxLength")]


def _object(
    schema: Mapping[str, Any], rng: random.Random, words: Sequence[str], defs: Mapping[str, Any], depth: int
) -> dict[str, Any]:
    required = set(schema.get("required") or ())
    found = {}
    for name, each in (schema.get("properties") or {}).items():
        if name in required or (depth and rng.random() < 0.5):
            found[name] = _value(each, rng, words, defs, max(depth - 1, 0))
    return found
