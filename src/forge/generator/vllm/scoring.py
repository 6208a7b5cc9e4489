"""The logprobs of tokens that are given."""

from __future__ import annotations

import contextlib
from typing import Any

from forge.errors import EngineDead, PromptError
from forge.generator.engine import Request


async def score_one(llm: Any, request: Request, *, max_seq_len: int, is_singly: bool = False) -> list[float]:
    """Those of a request's prompt; the first token's is 0.

    All but the last token are read as a prompt, and the last one is only asked about. So a sequence may be as long as
    the context, which has to have room for one token after a prompt.

    `is_singly` asks about one token at a time, which is slow: with room for adapters on the CPU, vLLM 0.32.0 ends with
    an error when it is asked for the logprobs of a prompt while it works on another request.
    """
    ids = list(request.prompt_ids)
    if not 1 <= len(ids) <= max_seq_len:
        raise PromptError(
            "A sequence of this length cannot be scored.",
            path="score(token_ids)",
            value=f"{len(ids)} tokens",
            rule=f"from 1 to {max_seq_len} tokens",
            repair="cut it, or raise generator.max_seq_len",
        )
    if len(ids) == 1:
        return [0.0]
    if is_singly:
        return [0.0, *[(await _ask(llm, ids[:end], ids[end], f"{request.id}.{end}"))[1] for end in range(1, len(ids))]]
    table, last = await _ask(llm, ids[:-1], ids[-1], request.id, with_prompt=True)
    return [0.0, *(table[place][ids[place]].logprob for place in range(1, len(ids) - 1)), last]


async def _ask(llm: Any, ids: list[int], token: int, name: str, *, with_prompt: bool = False) -> tuple[Any, float]:
    """What vLLM has for every token of a prompt, and the logprob of a token after it."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        prompt_logprobs=0 if with_prompt else None,
        logprob_token_ids=[token],
        detokenize=False,
        skip_reading_prefix_cache=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    async with contextlib.aclosing(llm.generate(tokens_input(ids), params, name)) as outputs:
        (found,) = [output async for output in outputs]
    part = found.outputs[0]
    if part.finish_reason == "abort":
        raise EngineDead(
            "The score was cut short by an update of the weights.",
            path="score(token_ids)",
            rule="no update with mode abort comes between",
            repair="ask again",
        )
    return found.prompt_logprobs, part.logprobs[0][token].logprob
