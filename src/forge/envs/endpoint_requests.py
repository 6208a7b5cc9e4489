"""What a client of an episode's endpoint may ask for.

The run's sampling is what is trained. So `max_tokens` and `stop` are honoured, and everything else that changes how
tokens are sampled must be the run's own value, unless the program that opened the endpoint says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from forge.config import Sampling
from forge.envs.chat_api.errors import parameter_error
from forge.envs.chat_api.requests import read_flag, read_messages, read_options, read_template
from forge.envs.responses_api import as_chat_body
from forge.envs.trace import Message
from forge.errors import OptionError

_OWN: Final = frozenset(
    ("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort")
)
_NOT_SAMPLING: Final = ("seed", "tool_choice", "response_format")
"""What can be ignored besides."""

_FIXED: Final = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "stop_token_ids", "ignore_eos", "include_stop", "adapter"),
)
"""Fields of `Sampling` that are the run's."""


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """What an endpoint does with the sampling that its clients ask for.

    Attributes:
        run: the run's sampling.
        allow: parameters whose values are honoured.
        ignore: parameters that are accepted without effect.
    """

    run: Mapping[str, Any]
    allow: frozenset[str]
    ignore: frozenset[str]

    @classmethod
    def of(cls, run: Mapping[str, Any], *, allow: Sequence[str], ignore: Sequence[str]) -> SamplingRules:
        """Return the rules, or raise `OptionError` for names that cannot be allowed or ignored."""
        for path, names, known in (
            ("agent.endpoint(allow=)", allow, set(_FIXED)),
            ("agent.endpoint(ignore=)", ignore, {*_FIXED, *_NOT_SAMPLING}),
        ):
            wrong = sorted(set(names) - known)
            if wrong:
                raise OptionError(
                    "an endpoint cannot treat these parameters so",
                    path=path,
                    value=wrong,
                    rule=f"names among {', '.join(sorted(known))}",
                    repair="leave them out; the members of a group need different seeds, so a client's is never used"
                    if "seed" in wrong
                    else "leave them out",
                )
        defaults = Sampling().model_dump()
        return cls({**defaults, **run}, frozenset(allow), frozenset(ignore))

    def apply(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a turn, or raise `RequestError` for what the run's sampling rules out."""
        found: dict[str, Any] = {}
        for name, value in asked.items():
            if name in self.ignore:
                continue
            if name == "max_tokens":
                most = self.run["max_tokens"]
                found[name] = value if most is None else min(value, most)
            elif name == "stop":
                found[name] = [*self.run["stop"], *(stop for stop in value if stop not in self.run["stop"])]
            elif name in self.allow:
                found[name] = value
            elif name == "seed" or not _is_same(value, self.run[name]):
                raise parameter_error(name, self._rule(name, value), code="unsupported_value")
        return found

    def _rule(self, name: str, value: Any) -> str:
        if name == "seed":
            return "seeds derive from the episode; leave it out, or open the endpoint with ignore=['seed']"
        return (
            f"is {value!r}, but this run samples with {self.run[name]!r}, and what is sampled is trained on; leave it "
            f"out, or open the endpoint with ignore=['{name}'] to sample as the run does, or allow=['{name}'] to "
            "honour it"
        )


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for the next answer of a conversation.

    Attributes:
        model: the name that the client uses for the policy. Any name is accepted.
        messages: the conversation, in the form that chat templates expect.
        template: arguments of the chat template; `tools` among them where the client has tools.
        options: sampling options of this turn.
        stream, include_usage, logprobs, one_call: what the response is like.
        is_responses: whether it is one of the Responses protocol.
        body: the request as it came.
    """

    model: str
    messages: tuple[Message, ...]
    template: Mapping[str, Any]
    options: Mapping[str, Any]
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    one_call: bool = False
    is_responses: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, given: Mapping[str, Any], rules: SamplingRules, *, is_responses: bool = False) -> ChatRequest:
        """Check the body of a request. `RequestError` names what is wrong with it."""
        body = _free_choice(as_chat_body(given) if is_responses else given, rules)
        if body.get("response_format") not in (None, {"type": "text"}):
            name = "text.format" if is_responses else "response_format"
            if "response_format" not in rules.ignore:
                rule = (
                    "constrains what is sampled, and what is sampled is trained on; leave it out, or open the endpoint "
                    "with ignore=['response_format'] to sample without it"
                )
                raise parameter_error(name, rule, code="unsupported_value")
            body = {**body, "response_format": None}
        if body.get("return_token_ids"):
            raise parameter_error(
                "return_token_ids", "is not supported: the episode keeps them", code="unsupported_value"
            )
        wants_logprobs = read_flag(body, "logprobs")
        asked = read_options(body, own=_OWN, has_structured_output=False, logprobs=wants_logprobs, header=None)
        if asked.n != 1:
            rule = "must be 1: an answer is one turn of the episode; send several requests instead"
            raise parameter_error("n", rule, code="unsupported_value")
        return cls(
            model=body["model"],
            messages=tuple(read_messages(body)),
            template=read_template(body),
            options=rules.apply(asked.sampling),
            stream=asked.stream,
            include_usage=asked.include_usage,
            logprobs=wants_logprobs,
            one_call=not read_flag(body, "parallel_tool_calls", default=True),
            is_responses=is_responses,
            body=given if is_responses else {},
        )


def _free_choice(body: Mapping[str, Any], rules: SamplingRules) -> Mapping[str, Any]:
    """Return a request whose `tool_choice` is not a call that has to be made: sampling cannot be forced into one."""
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return body
    tools = body.get("tools") or ()
    functions = [tool.get("function") or {} for tool in tools if isinstance(tool, dict)]
    named = [{"type": "function", "function": {"name": each.get("name")}} for each in functions]
    if not named or (choice != "required" and choice not in named):
        rule = 'must be "auto", "none", "required", or name one of `tools`'
        raise parameter_error("tool_choice", rule)
    if "tool_choice" not in rules.ignore:
        rule = (
            "a call cannot be forced: what is sampled is trained on; leave it out, or open the endpoint with "
            "ignore=['tool_choice'] to treat it as \"auto\""
        )
        raise parameter_error("tool_choice", rule, code="unsupported_value")
    return {**body, "tool_choice": "auto"}


def _is_same(value: Any, own: Any) -> bool:
    if isinstance(own, Sequence) and not isinstance(own, str):
        return list(value) == list(own)
    return bool(value == own)
