"""Teachers behind an OpenAI-compatible endpoint: how likely it holds the tokens of a sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from forge.envs.limits import Fault
from forge.errors import ActorFailure, ConfigError
from forge.rollout.endpoint_policy import EndpointAddress, ask, make_client
from forge.types import Batch, Sample

if TYPE_CHECKING:
    from torch import Tensor

    from forge.models.tokenizer import ChatTokenizer

NUM_PROBES: Final = 256
"""Tokens, spread over the vocabulary, whose texts are compared with those of an endpoint."""
_NUMBER: Final = "token_id:"
"""What a token is called where its number is asked for (`return_tokens_as_token_ids`)."""
_MISSING: Final = "\ufffd"
"""What stands for bytes that are no whole character: many tokens have that text."""


class EndpointTeacher:
    """Asks an endpoint for the logprobs of given tokens. Call it as a `LogprobsFunction`."""

    def __init__(self, address: EndpointAddress, *, max_requests: int) -> None:
        self._address = address
        self._client = make_client(address.url, api_key=address.api_key, timeout_s=address.timeout_s)
        self._slots = asyncio.Semaphore(max_requests)

    async def logprobs(self, batch: Batch, temperature: float) -> list[Tensor]:
        """Return the logprobs of each sample's tokens, float32 [L]; 0 for the first.

        Raise `ActorFailure` where the endpoint does not answer: the group may be tried again.
        """
        import torch

        assert temperature == 1  # the configuration is checked
        tokens = [sample.token_ids.tolist() for sample in batch.samples()]
        found = await asyncio.gather(*map(self._score, tokens))
        return [torch.tensor(values, dtype=torch.float32) for values in found]

    async def _score(self, token_ids: Sequence[int]) -> list[float]:
        answer = await self._echo(token_ids)
        values = answer.get("token_logprobs")
        own = values[1 : len(token_ids)] if isinstance(values, list) else []
        if len(own) < len(token_ids) - 1 or not all(map(_is_number, own)):
            raise self._failure(f"no logprob for each of {len(token_ids)} tokens: {str(answer)[:200]}")
        return [0.0, *map(float, own)]

    async def top_logprobs(self, batch: Batch, k: int) -> list[tuple[Tensor, Tensor]]:
        """Return the k likeliest tokens at the places of each sample that count: logprobs [C, k] and ids [C, k]."""
        return list(await asyncio.gather(*(self._top(sample, k) for sample in batch.samples())))

    async def _top(self, sample: Sample, k: int) -> tuple[Tensor, Tensor]:
        import torch

        answer = await self._echo(sample.token_ids.tolist(), logprobs=k, return_tokens_as_token_ids=True)
        places, given = torch.nonzero(sample.loss_weights)[:, 0].tolist(), answer.get("top_logprobs")
        found = given if isinstance(given, list) else []
        rows = [_ranked(found[place], k) if place < len(found) else [] for place in places]
        if any(len(row) < k for row in rows):
            raise self._failure(f"fewer than {k} tokens with their numbers for each place: {str(answer)[:200]}")
        ids = torch.tensor([[token for token, _ in row] for row in rows], dtype=torch.int64)
        return torch.tensor([[value for _, value in row] for row in rows]).reshape(-1, k), ids.reshape(-1, k)

    async def _echo(self, token_ids: Sequence[int], *, logprobs: int = 0, **more: Any) -> dict[str, Any]:
        """Return the logprobs of a prompt in the form of /v1/completions, without completing it."""
        asked = {"max_tokens": 0, "echo": True, "logprobs": logprobs, **more}
        body = {"model": self._address.model, "prompt": list(token_ids), **asked}
        try:
            async with self._slots:
                answer = await ask(self._client, "completions", body)
            return dict(answer["choices"][0]["logprobs"])
        except (Fault, LookupError, TypeError) as error:
            raise self._failure(str(error)) from error

    def _failure(self, what: str) -> ActorFailure:
        return ActorFailure(
            f"the teacher's endpoint gave no logprobs: {what}",
            path="teacher.endpoint.url",
            value=self._address.url,
            rule="its /v1/completions answers token ids with `echo`, `max_tokens: 0` and `logprobs: 0`",
            repair="serve the teacher with `forge serve` or vLLM, with a context that is longer than the policy's",
        )

    async def check(self, tokenizer: ChatTokenizer) -> None:
        """Refuse an endpoint whose tokens have other texts than the student's, as far as some tokens tell."""
        probes = _probes(tokenizer)
        texts = (await self._echo(probes)).get("tokens") or []
        if len(texts) < len(probes):
            raise self._mismatch(tokenizer, f"{len(texts)} tokens come back for {len(probes)}")
        for token, theirs in zip(probes, texts, strict=False):
            ours = tokenizer.decode([token])
            if theirs not in (ours, f"{_NUMBER}{token}"):
                raise self._mismatch(tokenizer, f"token {token} is {ours!r} in the student, and {theirs!r} there")

    def _mismatch(self, tokenizer: ChatTokenizer, what: str) -> ConfigError:
        return ConfigError(
            "teacher and student have different tokenizers",
            path="teacher.endpoint",
            value=f"{self._address.model} at {self._address.url}",
            rule=f"the tokens and numbers of {tokenizer.name}: {what}",
            repair="choose a teacher of the same model family",
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _ranked(top: object, k: int) -> list[tuple[int, float]]:
    """Return the k likeliest of the tokens that an endpoint names for a place by their numbers, `token_id:17`."""
    named = {} if not isinstance(top, dict) else {str(name): value for name, value in top.items()}
    found = [
        (int(name.removeprefix(_NUMBER)), float(value))
        for name, value in named.items()
        if name.startswith(_NUMBER) and name.removeprefix(_NUMBER).isdecimal() and _is_number(value)
    ]
    return sorted(found, key=lambda pair: (-pair[1], pair[0]))[:k]


def _probes(tokenizer: ChatTokenizer) -> list[int]:
    """Return tokens over the whole vocabulary whose text is their own: whole characters, and not a control token."""
    left_out = {*tokenizer.special_tokens, ""}
    numbers = sorted(tokenizer.vocabulary.values())
    texts = {number: tokenizer.decode([number]) for number in numbers[:: max(1, len(numbers) // NUM_PROBES)]}
    return [number for number, text in texts.items() if text not in left_out and _MISSING not in text]
