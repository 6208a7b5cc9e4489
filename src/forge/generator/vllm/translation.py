"""Translate between our records and vLLM's: sampling parameters, outputs, errors and scores."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeVar

from forge.config import Sampling
from forge.errors import EngineDead, PromptError
from forge.generator.engine import Request, TopScores
from forge.generator.native.randomness import completion_seed
from forge.generator.text import TextTracker
from forge.types import INITIAL_VERSION, Completion, Delta, FinishReason, Timings, VersionSpan, joined_spans

if TYPE_CHECKING:
    from forge.models.tokenizer import ChatTokenizer

T = TypeVar("T", Completion, Delta)

_REASONS: Final[dict[str, FinishReason]] = {"stop": "stop", "repetition": "stop", "length": "length", "abort": "abort"}
_STRUCTURES: Final = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}


def sampling_params(sampling: Sampling, *, room: int, is_stream: bool) -> Any:
    """Return vLLM's sampling parameters. `room` is how many tokens the context has left after the prompt."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    from forge.generator.vllm.arguments import to_plain

    longest = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    structured = None
    if sampling.structured is not None:
        structured = StructuredOutputsParams(
            **{_STRUCTURES[kind]: to_plain(value) for kind, value in sampling.structured.items()}
        )
    return SamplingParams(
        n=1 if sampling.is_greedy else sampling.n,  # more would be the same again, and vLLM refuses them
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        max_tokens=longest,
        min_tokens=min(sampling.min_tokens, longest),
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        include_stop_str_in_output=sampling.include_stop,
        seed=_spread(sampling.seed),
        detokenize=bool(sampling.stop),  # only to look for them: the text is made in `Reader`
        logprobs=0,
        flat_logprobs=True,
        structured_outputs=structured,
        output_kind=RequestOutputKind.DELTA if is_stream else RequestOutputKind.FINAL_ONLY,
    )


def sampled_logprobs(logprobs: Any) -> tuple[float, ...]:
    """Return the logprobs of the sampled tokens: the first of each position."""
    if logprobs is None:
        return ()
    return tuple(logprobs.logprobs[start] for start in logprobs.start_indices)


def version_number(label: str) -> int:
    """Return the number of a version, which vLLM names with a string; "default" is the model's own weights."""
    return INITIAL_VERSION if label == "default" else int(label)


def version_spans(spans: Sequence[Any] | None) -> tuple[VersionSpan, ...]:
    """Return vLLM's spans as ours, without empty ones."""
    found: tuple[VersionSpan, ...] = ()
    for span in spans or ():
        if span.end > span.start:
            found = joined_spans(found, [VersionSpan(version_number(span.version), span.start, span.end)], offset=0)
    return found


def timings(metrics: Any) -> Timings:
    """Return the timings of a request, in the engine's own time."""
    if metrics is None or not metrics.queued_ts:
        return Timings()
    began = metrics.queued_ts

    def since(moment: float) -> float:
        return max(moment - began, 0.0) if moment else 0.0

    return Timings(since(metrics.scheduled_ts), since(metrics.first_token_ts), since(metrics.last_token_ts))


@dataclass(slots=True)
class Growing:
    """One completion as it is streamed."""

    tracker: TextTracker
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reader:
    """Turns what vLLM gives for one request into completions.

    The text is made here, from the tokens of the completion alone. vLLM's own goes back into the prompt where that ends
    inside a character, and leaves out a last character that is not whole.

    `has_full` says whether logprobs are those of the model's whole distribution, because nothing else shapes it.
    `version` is that of all tokens; None where it is the engine's.
    """

    request: Request
    tokenizer: ChatTokenizer
    has_full: bool
    version: int | None = None

    def begin(self) -> Growing:
        return Growing(TextTracker(self.tokenizer, self.request.sampling))

    def completion(self, output: Any, part: Any, *, grown: Growing | None = None) -> Completion:
        """The whole completion. `grown` is what was streamed of it, this part included."""
        token_ids = tuple(part.token_ids if grown is None else grown.token_ids)
        logprobs = sampled_logprobs(part.logprobs) if grown is None else tuple(grown.logprobs)
        reason = _REASONS.get(str(part.finish_reason))
        if reason is None:
            raise EngineDead(
                f"vLLM dropped this request: {part.finish_reason}.",
                path=f"request {self.request.id}",
                value=part.finish_reason,
                rule="ends by a stop, by its length or by being aborted",
                repair="send it again; see the engine's log",
            )
        stop_reason = part.stop_reason
        if reason == "stop" and stop_reason is None and token_ids:
            stop_reason = token_ids[-1]
        return Completion(
            prompt_ids=self.request.prompt_ids,
            token_ids=token_ids,
            logprobs=logprobs,
            full_logprobs=logprobs if self.has_full else None,
            text=self._text(part) if grown is None else grown.tracker.text,
            finish_reason=reason,
            stop_reason=stop_reason,
            versions=self._spans(part.weight_versions, len(token_ids)),
            timings=timings(output.metrics),
            index=part.index,
            num_shared=max(output.num_cached_tokens or 0, 0),
        )

    def _spans(self, found: Sequence[Any] | None, num_tokens: int) -> tuple[VersionSpan, ...]:
        if self.version is None:
            return version_spans(found)
        return (VersionSpan(self.version, 0, num_tokens),) if num_tokens else ()

    def _text(self, part: Any) -> str:
        shown = _shown(part)
        if not self.request.sampling.stop:
            return self.tokenizer.decode(shown, skip_special=True)
        tracker = TextTracker(self.tokenizer, self.request.sampling)
        tracker.add(shown)
        tracker.finish()
        return tracker.text

    def deltas(self, output: Any, part: Any, grown: Growing, starts: Sequence[tuple[str, int]]) -> list[Delta]:
        """Return what is new, split where the weights changed. `starts` has the first token of each version."""
        first = len(grown.token_ids)
        grown.token_ids += part.token_ids
        grown.logprobs += sampled_logprobs(part.logprobs)
        text = grown.tracker.add(_shown(part))
        completion = None
        if part.finish_reason is not None:
            text += grown.tracker.finish()
            completion = self.completion(output, part, grown=grown)
            starts = [(str(span.version), span.start) for span in completion.versions] or starts
        pieces = _pieces(starts, first, len(grown.token_ids))
        deltas = []
        for number, (version, start, end) in enumerate(pieces):
            is_last = number == len(pieces) - 1
            deltas.append(
                Delta(
                    index=part.index,
                    token_ids=tuple(grown.token_ids[start:end]),
                    logprobs=tuple(grown.logprobs[start:end]),
                    text=text if is_last else "",
                    version=version,
                    completion=completion if is_last else None,
                )
            )
        return deltas

    def repeated(self, items: list[T]) -> list[T]:
        """Return n items: greedy sampling makes one completion, and all n are copies of it."""
        sampling = self.request.sampling
        if not sampling.is_greedy or sampling.n == 1:
            return items
        return [_numbered(item, index) for index in range(sampling.n) for item in items]


def _shown(part: Any) -> Sequence[int]:
    """Return the tokens that are part of the text: not the one that ended it."""
    ended = part.finish_reason == "stop" and not isinstance(part.stop_reason, str)
    return tuple(part.token_ids[:-1] if ended else part.token_ids)


def _numbered(item: T, index: int) -> T:
    if isinstance(item, Delta) and item.completion is not None:
        return replace(item, index=index, completion=replace(item.completion, index=index))
    return replace(item, index=index)


def _pieces(starts: Sequence[tuple[str, int]], first: int, end: int) -> list[tuple[int, int, int]]:
    """Split the tokens [first, end) where versions start: (version, start, end). At least one piece, maybe empty."""
    bounds = [*starts, ("", max(end, starts[-1][1]))]
    cut = [
        (version_number(label), max(start, first), min(following, end))
        for (label, start), (_, following) in pairwise(bounds)
        if min(following, end) > max(start, first)
    ]
    return cut or [(version_number(starts[-1][0]), first, end)]


class SpanFinder:
    """Finds which versions sampled the tokens of a request in progress.

    vLLM reports it with the last output only, but keeps it from the first token on. A request that can no longer be
    found has ended, and its last output has the spans.
    """

    def __init__(self, llm: Any) -> None:
        self._processor = llm.output_processor
        self._states: dict[int, Any] = {}

    def starts(self, name: str, index: int) -> list[tuple[str, int]]:
        if index not in self._states:
            for internal in self._processor.external_req_ids.get(name, ()):
                state = self._processor.request_states.get(internal)
                if state is not None:
                    self._states[state.request_index] = state
        state = self._states.get(index)
        return [] if state is None else list(state.weight_version_starts)


def _spread(seed: int | None) -> int | None:
    """Return a seed far from those of neighbours: vLLM gives completion i of a request the seed plus i."""
    return None if seed is None else completion_seed(seed, 0) >> 1


# ---- Errors ----------------------------------------------------------------------------------------------------------


def dead(what: str) -> EngineDead:
    return EngineDead(
        f"vLLM's engine {what}.",
        path="generator.engine",
        value="vllm",
        rule="its process serves requests",
        repair="send the request again: the replica is replaced",
    )


def prompt_room(request: Request, *, max_seq_len: int) -> int:
    """Return how many tokens the context has left after a prompt. Raise `PromptError` if there is none."""
    room = max_seq_len - len(request.prompt_ids)
    if room < 1 or not request.prompt_ids:
        raise PromptError(
            "The prompt leaves no room for a completion." if request.prompt_ids else "The prompt is empty.",
            path=f"request {request.id}",
            value=f"{len(request.prompt_ids)} tokens",
            rule=f"from 1 to {max_seq_len - 1} tokens: the longest sequence has {max_seq_len}",
            repair="shorten the prompt, or raise generator.max_seq_len",
        )
    return room


def check_speculation(sampling: Sampling) -> None:
    """Refuse speculation with a temperature on the CPU: vLLM 0.32.0 divides the logits of speculated tokens by
    uninitialised memory instead of the temperature."""
    if not sampling.is_greedy:
        raise PromptError(
            "vLLM on the CPU speculates correctly only with greedy sampling.",
            path="sampling.temperature",
            value=sampling.temperature,
            rule="is 0 with speculative decoding on the CPU: vLLM 0.32.0 samples from a wrong distribution there",
            repair="set temperature to 0, or remove generator.engine_args.speculative_config",
        )


@contextlib.contextmanager
def refusals(request: Request) -> Iterator[None]:
    """Raise vLLM's error about a request that it cannot serve as `PromptError`."""
    from vllm.exceptions import VLLMClientError

    try:
        yield
    except (VLLMClientError, ValueError) as error:
        raise PromptError(
            "vLLM refuses this request.",
            path=f"request {request.id}",
            value=request.sampling.model_dump(exclude_defaults=True),
            rule=str(error),
            repair="change what the rule names",
        ) from error


@contextlib.asynccontextmanager
async def translated(request: Request | None = None) -> AsyncIterator[None]:
    """Raise the end of the engine as `EngineDead`, and refusals as `PromptError`."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        if request is None:
            yield
        else:
            with refusals(request):
                yield
    except EngineDeadError as error:
        raise dead("has ended") from error


# ---- Scores ----------------------------------------------------------------------------------------------------------


async def score_one(
    llm: Any, request: Request, *, max_seq_len: int, adapter: Any = None, is_singly: bool = False
) -> list[float]:
    """Return the logprobs of a request's prompt; the first token's is 0. `adapter` is vLLM's record of one.

    All but the last token are the prompt, and only the logprob of the last is asked for. So a sequence may be as
    long as the context, which must have room for one token after a prompt.

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
    ask = functools.partial(_ask, llm, adapter=adapter)
    if is_singly:
        return [0.0, *[(await ask(ids[:end], ids[end], f"{request.id}.{end}"))[1] for end in range(1, len(ids))]]
    table, last = await ask(ids[:-1], ids[-1], request.id, with_prompt=True)
    return [0.0, *(table[place][ids[place]].logprob for place in range(1, len(ids) - 1)), last]


async def top_one(llm: Any, request: Request, k: int, *, max_seq_len: int, adapter: Any = None) -> TopScores:
    """Return the k likeliest tokens at each place of a request's prompt, after which the context has room for one."""
    ids = list(request.prompt_ids)
    if not 1 <= len(ids) < max_seq_len:
        raise PromptError(
            "The likeliest tokens of a sequence of this length cannot be found.",
            path="score_top(token_ids)",
            value=f"{len(ids)} tokens",
            rule=f"from 1 to {max_seq_len - 1} tokens: one less than the context",
            repair="cut it, or raise generator.max_seq_len",
        )
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        prompt_logprobs=k,
        detokenize=False,
        skip_reading_prefix_cache=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    with refusals(request):
        stream = llm.generate(tokens_input(ids), params, request.id, lora_request=adapter)
        async with contextlib.aclosing(stream) as outputs:
            (found,) = [output async for output in outputs]
    places = [
        sorted(((token, each.logprob) for token, each in table.items()), key=lambda pair: (-pair[1], pair[0]))[:k]
        for table in found.prompt_logprobs[1:]
    ]
    return TopScores.of(
        [[token for token, _ in place] for place in places], [[value for _, value in place] for place in places], k=k
    )


async def _ask(
    llm: Any, ids: list[int], token: int, name: str, *, adapter: Any = None, with_prompt: bool = False
) -> tuple[Any, float]:
    """Return vLLM's logprobs of every token of a prompt, and the logprob of a token after it."""
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
    async with contextlib.aclosing(llm.generate(tokens_input(ids), params, name, lora_request=adapter)) as outputs:
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
