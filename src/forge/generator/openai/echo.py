"""`echo` of `/v1/completions`: the prompt and its logprobs, which evaluations by likelihood ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from forge.envs.chat_api.errors import parameter_error
from forge.envs.chat_api.requests import read_flag
from forge.generator.engine import PromptScores, TopScores
from forge.types import Completion

if TYPE_CHECKING:
    from forge.generator.openai.policy import Policy


TOKENS_BY_NUMBER: Final = "return_tokens_as_token_ids"
"""The parameter of a request, as in vLLM, that asks for tokens by their numbers, such as `token_id:17`."""
MOST_TOP: Final = 1024
"""The most likeliest tokens of a place that a request may ask for."""


@dataclass(frozen=True, slots=True)
class EchoOptions:
    """What a request with `echo` asks for.

    Attributes:
        is_prompt_only: whether nothing is to be completed (`max_tokens: 0`).
        wants_best: whether the likeliest token of each place is wanted (`logprobs: 1`).
        knows_best: whether it is known for the completion, too: a greedy one consists of the likeliest tokens.
        num_top: so many of the likeliest tokens of each place are wanted, named by their numbers; 0 for none.
    """

    is_prompt_only: bool
    wants_best: bool
    knows_best: bool
    num_top: int = 0


def read_echo(body: Mapping[str, Any], *, can_score: bool) -> EchoOptions | None:
    """Return what a request asks to be echoed; None for nothing. `can_score`: whether the engine scores prompts."""
    if not read_flag(body, "echo"):
        return None
    if read_flag(body, "stream"):
        raise parameter_error("echo", "is not supported with stream", code="unsupported_value")
    if body.get("logprobs") is not None and not can_score:
        rule = "logprobs of a prompt are not supported by this engine; serve with generator.engine=native"
        raise parameter_error("echo", rule, code="unsupported_value")
    is_prompt_only = body.get("max_tokens") == 0 and not isinstance(body.get("max_tokens"), bool)
    temperature = body.get("temperature")
    is_greedy = temperature == 0 and not isinstance(temperature, bool)
    num_top = body.get("logprobs") if is_prompt_only and read_flag(body, TOKENS_BY_NUMBER) else 0
    return EchoOptions(
        is_prompt_only,
        wants_best=body.get("logprobs") == 1 and not num_top,
        knows_best=is_prompt_only or is_greedy,
        num_top=num_top if type(num_top) is int and num_top > 0 else 0,
    )


def with_top(logprobs: Mapping[str, Any], scores: TopScores) -> dict[str, Any]:
    """Return logprobs of a prompt with the likeliest tokens of each place, by their numbers. The first has none."""
    tops = zip(scores.ids[1:], scores.logprobs[1:], strict=True)
    named = [{f"token_id:{token}": value for token, value in zip(ids, values, strict=True)} for ids, values in tops]
    return {**logprobs, "top_logprobs": [None, *named]}


def echoed_logprobs(
    policy: Policy, completion: Completion, scores: PromptScores, *, echo: EchoOptions
) -> dict[str, Any]:
    """Return the logprobs of a prompt and its completion, in the form of /v1/completions. The first token has none."""
    ids, values = list(completion.prompt_ids), list(scores.logprobs)
    best = list(zip(scores.best_ids, scores.best_logprobs, strict=True))
    if not echo.is_prompt_only:
        ids += completion.token_ids
        values += completion.logprobs
        best += zip(completion.token_ids, completion.logprobs, strict=True)
    texts = [policy.token_text(token) for token in ids]
    offsets = list(accumulate(map(len, texts), initial=0))[:-1]
    top: list[dict[str, float] | None] | None = None
    if echo.wants_best:
        top = [_top(policy, *own, *other) for own, other in zip(zip(ids, values, strict=True), best, strict=True)]
        top[0] = None
    return {
        "tokens": texts,
        "token_logprobs": [None, *values[1:]],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def _top(policy: Policy, token: int, value: float, best: int, best_value: float) -> dict[str, float]:
    """Return the likeliest token and the token itself. Of two tokens with the same text, the likelier one counts."""
    found = {policy.token_text(token): value}
    text = policy.token_text(best)
    found[text] = max(best_value, found.get(text, best_value))
    return found
