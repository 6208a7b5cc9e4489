"""The parts of a response that chat and plain completions share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from forge.generator.openai.policy import Policy
from forge.types import Completion


def usage_of(completions: Iterable[Completion]) -> dict[str, Any]:
    """What completions cost. The n completions of one prompt read it once."""
    listed = list(completions)
    prompts = [one for one in listed if one.index == 0]
    num_read = sum(len(one.prompt_ids) for one in prompts)
    num_drawn = sum(len(one.token_ids) for one in listed)
    return {
        "prompt_tokens": num_read,
        "completion_tokens": num_drawn,
        "total_tokens": num_read + num_drawn,
        "prompt_tokens_details": {"cached_tokens": sum(one.num_shared for one in prompts)},
    }


def chat_logprobs(policy: Policy, token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    """The logprobs of tokens as /v1/chat/completions has them. Alternatives are never given."""
    content = []
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        text = policy.token_text(token_id)
        code = None if "\ufffd" in text else list(text.encode("utf-8", "backslashreplace"))
        content.append({"token": text, "logprob": logprob, "bytes": code, "top_logprobs": []})
    return {"content": content, "refusal": None}


def text_logprobs(
    policy: Policy, token_ids: Sequence[int], logprobs: Sequence[float], *, start: int = 0
) -> dict[str, Any]:
    """They as /v1/completions has them; `start` is the number of characters before them."""
    texts = [policy.token_text(token_id) for token_id in token_ids]
    offsets = list(accumulate(map(len, texts), initial=start))[:-1]
    return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": offsets}


def exact_tokens(completion: Completion) -> dict[str, Any]:
    """What `return_token_ids` adds to a choice: the tokens, and which weights made which of them."""
    return {"token_ids": list(completion.token_ids), "weight_versions": weight_versions(completion)}


def weight_versions(completion: Completion) -> list[dict[str, int]]:
    """Which weights made which tokens."""
    return [{"version": span.version, "start": span.start, "end": span.end} for span in completion.versions]
