"""Another server's OpenAI-compatible endpoint as the policy of episodes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from forge.envs.character_codec import CharacterCodec, ChatPrompt
from forge.envs.limits import Fault
from forge.errors import ConfigError
from forge.types import INITIAL_VERSION, Completion, FinishReason, Task, Timings, VersionSpan

if TYPE_CHECKING:
    import httpx

NO_LIMIT: Final = 2**30
"""Tokens that no endpoint is asked for: a completion of so many has no limit."""
_PASSED_ON: Final = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
_EXTRA: Final[Mapping[str, tuple[str, object]]] = {
    "top_k": ("top_k", 0),
    "min_p": ("min_p", 0.0),
    "repetition_penalty": ("repetition_penalty", 1.0),
    "min_tokens": ("min_tokens", 0),
    "stop_token_ids": ("stop_token_ids", ()),
    "ignore_eos": ("ignore_eos", False),
    "include_stop": ("include_stop_str_in_output", False),
    "adapter": ("adapter", None),
}
"""Options that are not OpenAI's: the name that servers know them by, and the value that is not sent."""
_BUSY: Final = (429, 503)
_MAX_WAITS: Final = 8
_FIRST_WAIT_S: Final = 0.25
_LONGEST_WAIT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of one turn, as the endpoint reports them."""

    num_prompt: int
    num_sampled: int


@dataclass(frozen=True, slots=True)
class EndpointAddress:
    """Where an endpoint is, and which model answers.

    Attributes:
        url: its address, which usually ends in /v1.
        model: the model's name there.
        api_key: the key that requests are sent with; None for none.
        timeout_s: seconds that one request may take; None for no limit.
    """

    url: str
    model: str
    api_key: str | None
    timeout_s: float | None


class EndpointPolicy:
    """Another server's chat completions as the policy of episodes. Tokens are characters: see `CharacterCodec`.

    Args:
        client: sends requests to the endpoint.
        model: the model's name there.
        codec: reads the conversation from a prompt.
    """

    max_seq_len = 2 * NO_LIMIT

    def __init__(self, client: httpx.AsyncClient, model: str, codec: CharacterCodec) -> None:
        self._client, self._model, self._codec = client, model, codec
        self._answers: dict[str, Mapping[str, Any]] = {}
        self.usage: dict[int, Usage] = {}

    async def sample(self, token_ids: Sequence[int], *, options: Mapping[str, Any], session: str) -> Completion:
        """See `forge.envs.state.Policy.sample`."""
        began = time.perf_counter()
        request = self._request(self._codec.read_prompt(token_ids), options)
        answer = await ask(self._client, "chat/completions", request)
        try:
            choice = answer["choices"][0]
            message = choice["message"]
            text = answer_text(message)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise _not_completion(answer, error) from None
        self._answers[text] = message
        usage = read_usage(answer)
        if usage is not None:
            self.usage[options["seed"]] = usage
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        ids = self._codec.encode_answer(text, max_tokens=None)
        return Completion(
            prompt_ids=tuple(token_ids),
            token_ids=ids,
            logprobs=(0.0,) * len(ids),
            full_logprobs=None,
            text=text,
            finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
            versions=(VersionSpan(INITIAL_VERSION, 0, len(ids)),),
            timings=Timings(total_s=time.perf_counter() - began),
            num_shared=int(details.get("cached_tokens") or 0),
        )

    def _request(self, prompt: ChatPrompt, options: Mapping[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._model, "messages": self._messages(prompt.messages)}
        body |= request_options(options)
        if prompt.tools:
            body["tools"] = list(prompt.tools)
        return body

    def _messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the conversation as the server knows it: its own answers as it gave them, results by its own ids."""
        found: list[dict[str, Any]] = []
        ids: list[str] = []
        for message in messages:
            plain = dict(message)
            if message["role"] == "assistant":
                known = self._answers.get(str(message.get("content")))
                if known is not None:
                    plain = {name: known.get(name) for name in ("role", "content", "tool_calls") if known.get(name)}
                    plain.setdefault("role", "assistant")
                    plain.setdefault("content", "")
                ids = [call["id"] for call in plain.get("tool_calls") or () if "id" in call]
            elif message["role"] == "tool" and ids:
                plain["tool_call_id"] = ids.pop(0)
            found.append(plain)
        return found


def request_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling options as parameters of a request. Those that are not OpenAI's are sent where they are set."""
    found: dict[str, Any] = {name: options[name] for name in _PASSED_ON if name in options}
    found["seed"] = options["seed"] % 2**31
    if options.get("max_tokens") is not None and options["max_tokens"] < NO_LIMIT:
        found["max_tokens"] = options["max_tokens"]
    if options.get("stop"):
        found["stop"] = list(options["stop"])
    for name, (sent, default) in _EXTRA.items():
        if options.get(name, default) != default:
            value = options[name]
            found[sent] = list(value) if isinstance(value, tuple) else value
    return found


async def ask(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> Any:
    """Return an endpoint's answer as plain values. While it is too busy (429, 503), ask again after a while.

    What fails is a `Fault`.
    """
    import httpx

    for waits_left in reversed(range(_MAX_WAITS)):
        try:
            response = await client.post(path, json=body)
            if response.status_code in _BUSY and waits_left:
                await asyncio.sleep(_wait_s(response, _MAX_WAITS - 1 - waits_left))
                continue
            response.raise_for_status()
            return response.json()
        except httpx.HTTPStatusError as error:
            refusal = error.response
            text = f"the endpoint answered {refusal.status_code}: {refusal.text[:500]}"
            raise Fault(text, kind="endpoint", path=str(refusal.url)) from None
        except (httpx.HTTPError, ValueError) as error:
            text = f"the endpoint did not answer: {type(error).__name__}: {error}"
            raise Fault(text, kind="endpoint", path=str(client.base_url)) from None
    raise AssertionError("the last attempt returns or raises")


def _wait_s(response: httpx.Response, num_waits: int) -> float:
    """Return the seconds that a busy server asks for; without them, twice as long each time."""
    asked = response.headers.get("retry-after", "")
    wanted = float(asked) if asked.replace(".", "", 1).isdecimal() else _FIRST_WAIT_S * 2**num_waits
    return min(wanted, _LONGEST_WAIT_S)


class EndpointPrompts:
    """Another server's endpoint as what completes prompts: conversations, and text to continue.

    Completions have the server's text and no tokens.

    Args:
        client: sends requests to the endpoint.
        model: the model's name there.
    """

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client, self._model = client, model

    async def complete(self, task: Task, options: Mapping[str, Any]) -> tuple[Completion, Usage | None]:
        """Return one completion of a prompt, and its tokens where the endpoint reports them."""
        began = time.perf_counter()
        body = {"model": self._model, **request_options(options)}
        if task.messages:
            messages = [dict(message) for message in task.messages]
            answer = await ask(self._client, "chat/completions", {**body, "messages": messages})
        else:
            answer = await ask(self._client, "completions", {**body, "prompt": task.text})
        try:
            choice = answer["choices"][0]
            text = answer_text(choice["message"]) if task.messages else str(choice["text"])
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise _not_completion(answer, error) from None
        reason: FinishReason = "length" if choice.get("finish_reason") == "length" else "stop"
        seconds = time.perf_counter() - began
        completion = Completion((), (), (), None, text, reason, timings=Timings(total_s=seconds))
        return completion, read_usage(answer)


def read_usage(answer: Mapping[str, Any]) -> Usage | None:
    """Return the tokens that an endpoint reports for an answer; None where it reports none."""
    usage = answer.get("usage") or {}
    if "completion_tokens" not in usage:
        return None
    return Usage(int(usage.get("prompt_tokens") or 0), int(usage["completion_tokens"]))


def _not_completion(answer: object, error: Exception) -> Fault:
    text = f"the endpoint's answer is not a completion: {error!r}: {json.dumps(answer)[:300]}"
    return Fault(text, kind="endpoint", path="--endpoint")


def answer_text(message: Mapping[str, Any]) -> str:
    """Return an answer as text, with its tool calls in the format `hermes`."""
    parts = [message["content"]] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        body = f'{{"name": {json.dumps(function["name"])}, "arguments": {function.get("arguments") or "{}"}}}'
        parts.append(f"<tool_call>\n{body}\n</tool_call>")
    return "\n".join(parts)


def make_client(url: str, *, api_key: str | None, timeout_s: float | None) -> httpx.AsyncClient:
    """Return a client of an endpoint; `timeout_s` bounds one request."""
    import httpx

    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    timeout = httpx.Timeout(timeout_s, connect=30.0)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    return httpx.AsyncClient(base_url=url.rstrip("/") + "/", headers=headers, timeout=timeout, limits=limits)


async def first_model(client: httpx.AsyncClient, url: str, *, path: str | None = None) -> str:
    """Return the name of the first model that an endpoint lists. `path` is the section that names the endpoint; None
    for the command line."""
    import httpx

    try:
        response = await client.get("models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"the endpoint cannot be reached: {type(error).__name__}: {error}",
            path="--endpoint" if path is None else f"{path}.url",
            value=url,
            rule="the address of a server that runs",
            repair="check the address; `forge serve MODEL_DIR` prints that of its own",
        ) from None
    if response.status_code in (401, 403):
        raise ConfigError(
            f"the endpoint refuses the request: {response.status_code}",
            path="--api-key" if path is None else f"{path}.api_key_env",
            rule="the key that the server demands",
            repair="give --api-key, or set OPENAI_API_KEY" if path is None else "set that environment variable",
        )
    try:
        return str(response.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"the endpoint lists no model: {type(error).__name__}: {error}",
            path="--model" if path is None else f"{path}.model",
            value=None,
            rule="the name of a model at the endpoint",
            repair=f"name it with {'--model' if path is None else f'{path}.model'}; the address usually ends in /v1",
        ) from None
