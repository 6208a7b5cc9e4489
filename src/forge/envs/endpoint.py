"""An episode's endpoint: programs that speak OpenAI's protocols as agents, unchanged.

Every answered request is a turn. `endpoint_branches` says which branch of the episode it continues, `endpoint_requests`
what a client may ask for, `endpoint_server` which episode a request belongs to, and `endpoint_listener` how programs in
a sandbox reach it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from aiohttp import web

from forge.envs.agent import Agent, branch_place
from forge.envs.agent_checks import has_temperature
from forge.envs.chat_api.errors import RequestError, request_error
from forge.envs.chat_api.requests import check_tools, read_body
from forge.envs.chat_api.responses import EVENT_HEADERS, event
from forge.envs.endpoint_branches import BranchIndex, BranchPoint
from forge.envs.endpoint_listener import SandboxListener
from forge.envs.endpoint_replies import Answer
from forge.envs.endpoint_requests import ChatRequest, SamplingRules
from forge.envs.endpoint_server import EndpointServer, closed_error, shared_server
from forge.envs.limits import EpisodeOver, Fault, ReplayMismatch
from forge.envs.responses_api import error_event
from forge.envs.state import EpisodeState
from forge.envs.tool_calls import opens_reasoning
from forge.envs.tools import cut_middle
from forge.envs.trace import Message, path_to
from forge.errors import DataError
from forge.types import DEFAULT_AGENT, Turn

_log = logging.getLogger("forge.episodes")

RETRY_HEADER: Final = "x-stainless-retry-count"
"""OpenAI's clients say here how often they sent the same request before."""

_MOST_READING: Final = 4
"""The most requests of an episode whose bodies are read at once: what a program can fill memory with."""

_CLOSE_LIMIT_S: Final = 10.0
_DELIVERY_LIMIT_S: Final = 1.0
_CLOSED_EARLY: Final = "The endpoint closed before the answer was complete."
_MOST_CHARACTERS: Final = 128
"""Characters that no token has more of on average: what is longer than a context of them cannot fit."""


@dataclass(slots=True)
class _Failure:
    """Why requests got no answer, where that is not the client's doing: by the requests' identity."""

    faults: dict[int, BaseException]
    over: EpisodeOver | None = None
    mismatch: ReplayMismatch | None = None


class Endpoint:
    """Where the clients of one episode reach the policy.

    Attributes:
        base_url, api_key: what OpenAI's clients are given.
        last_refusal: why the last request that broke a rule was refused.
    """

    def __init__(
        self,
        state: EpisodeState,
        server: EndpointServer,
        *,
        agent: str,
        path: tuple[int, ...],
        rules: SamplingRules,
        keep_alive_s: float,
    ) -> None:
        self._state, self._server, self._path, self._rules = state, server, path, rules
        self._agent, self._binding = agent, state.binding(agent)
        self._keep_alive_s = keep_alive_s
        self._branches = BranchIndex(f"{state.key}-{'.'.join(map(str, branch_place(agent, path)))}")
        self._context = contextvars.copy_context()
        self._jobs: set[asyncio.Task[Answer]] = set()
        self._delivering: dict[int, asyncio.Future[None]] = {}
        self._turns: dict[str, int] = {}
        self._failure = _Failure({})
        self._reading = asyncio.Semaphore(_MOST_READING)
        self.last_refusal: str | None = None
        self._checked_templates: set[str] = set()
        self._is_closed = False
        self.base_url, self.api_key = server.base_url, server.open(self)

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables for a program that uses one of OpenAI's clients."""
        return self.environ_at(self.base_url)

    def environ_at(self, base_url: str) -> dict[str, str]:
        """Return the same for a program that reaches this endpoint at another address."""
        return {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": self.api_key}

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of this endpoint so far."""
        return tuple(self._state.turns[index] for index in self._turns.values())

    @property
    def has_failed(self) -> bool:
        """Whether a request got no answer because of the policy or of a limit."""
        return bool(self._failure.faults) or self._failure.over is not None or self._failure.mismatch is not None

    @property
    def over(self) -> EpisodeOver | None:
        """The limit that a request ran into; None where none did."""
        return self._failure.over

    def turn(self, response_id: str) -> Turn:
        """Return the turn of a response by its `id`, for `agent.add_reward(…, turn=…)`. `KeyError` if there is none."""
        return self._state.turns[self._turns[response_id]]

    def accept(self, listener: socket.socket) -> SandboxListener:
        """Serve connections on a socket of a sandbox. Their requests reach this endpoint and no other."""
        return self._server.accept(listener, self.api_key)

    async def complete(self, request: web.Request, *, is_responses: bool = False) -> web.StreamResponse:
        """Answer one request of /v1/chat/completions, or of /v1/responses."""
        async with self._reading:
            body = await read_body(request)
        try:
            asked = ChatRequest.read(body, self._rules, is_responses=is_responses)
        except RequestError as error:
            self.last_refusal = error.message
            raise
        if self._is_closed:
            raise closed_error()
        # The task has the program's context: what the policy finds there, such as a session, is the episode's.
        coroutine = self._answer(asked, is_retry=_is_retry(request))
        job = asyncio.create_task(coroutine, context=self._context.copy())
        self._jobs.add(job)
        stream = web.StreamResponse(headers=EVENT_HEADERS) if asked.stream else None
        try:
            await self._wait(job, request, stream)
        except (ConnectionError, asyncio.CancelledError):  # the client is gone
            job.cancel()
            await asyncio.wait({job})
            if not job.cancelled() and job.exception() is None:
                self._mark(job.result().turn.index, is_delivered=False)
            raise
        finally:
            self._jobs.discard(job)
            self._state.counts.num_undelivered += job.cancelled()
        failed = closed_error(_CLOSED_EARLY) if job.cancelled() else job.exception()
        if failed is not None:
            return await _fail(failed, asked, stream)
        return await self._deliver(request, job.result(), asked, stream)

    async def _wait(self, job: asyncio.Task[Answer], request: web.Request, stream: web.StreamResponse | None) -> None:
        """Wait for an answer. A stream that takes long gets comments, so that its client does not think it lost."""
        if stream is None:
            await asyncio.wait({job})
            return
        done, _ = await asyncio.wait({job}, timeout=self._keep_alive_s)
        while not done:
            if not stream.prepared:
                await stream.prepare(request)
            await stream.write(b": sampling\n\n")
            done, _ = await asyncio.wait({job}, timeout=self._keep_alive_s)

    async def close(self) -> None:
        """End the requests under way, and refuse later ones."""
        if self._is_closed:
            return
        self._is_closed = True
        self._server.close(self.api_key)
        for job in self._jobs:
            job.cancel()
        if self._jobs:
            _, stuck = await asyncio.wait(set(self._jobs), timeout=_CLOSE_LIMIT_S)
            if stuck:
                _log.warning("episode %s: %d requests could not be cancelled", self._state.key, len(stuck))
        for job in self._jobs:  # its answer came too late to be sent
            if job.done() and not job.cancelled() and job.exception() is None:
                self._mark(job.result().turn.index, is_delivered=False)
        if self._delivering:
            await asyncio.wait(set(self._delivering.values()), timeout=_DELIVERY_LIMIT_S)
            for index in self._delivering:  # clients that do not read their answer
                self._mark(index, is_delivered=False)
        turns = self._state.turns
        for index, path in self._branches.paths(turns, self._path).items():
            turns[index] = replace(turns[index], path=path)

    def failure(self, error: Exception | None) -> BaseException | None:
        """Return what the program must end with, because its clients were refused for no fault of their own.

        What a program returns after its policy failed is not a score of the policy. Where it ends with the `error` of
        an HTTP client after a limit was reached, the limit is the reason.
        """
        if self._failure.mismatch is not None:
            return self._failure.mismatch
        if self._failure.faults:
            return next(iter(self._failure.faults.values()))
        return self._failure.over if error is not None and _is_http_error(error) else None

    # ---- One request ------------------------------------------------------------------------------------------------

    async def _answer(self, asked: ChatRequest, *, is_retry: bool) -> Answer:
        """Sample the answer to a request. Whatever goes wrong is raised as `RequestError`."""
        point = self._branches.find(asked.messages, asked.template, asked.options)
        if is_retry:
            unused = [index for index in self._branches.unused(point) if self._state.turns[index].is_delivered]
            if len(unused) == 1:  # with several, it is not known which of them was lost
                self._mark(unused[0], is_delivered=False)
        try:
            answer = await self._sample(asked, point)
        except BaseException as error:
            self._branches.release(point)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise self._refusal(error, point) from error
        self._failure.faults.pop(point.key[0], None)
        if self._state.outcome == "context_full":
            self._state.outcome = "finished"  # the client shortened its conversation
            self._state.full_branches.clear()
        return answer

    async def _sample(self, asked: ChatRequest, point: BranchPoint) -> Answer:
        state = self._state
        self._check_size(asked)
        self._check_template(asked, point)
        messages = self._within_limits(point)
        if point.node is not None and not state.turns[point.node.turn].is_delivered:
            self._mark(point.node.turn, is_delivered=True)  # the client has it after all
        path = (*self._path, *point.key)
        agent = Agent(state, name=self._agent, path=path, history=point.history, last=point.last, session=point.session)
        is_on_policy = has_temperature(asked.options, self._binding.sampling)
        turn = await agent.generate(messages, template=asked.template, train=is_on_policy, **asked.options)
        turn = self._classified(turn, point)
        num_read = sum(len(each.context_ids) + len(each) for each in path_to(state.turns, turn.index)) - len(turn)
        name = f"{point.key[0]:015x}-{point.key[1]}"
        prompt = (agent.history.text or "").removesuffix(self._binding.codec.decode(turn.token_ids))
        answer = Answer.of(
            turn,
            asked,
            name=name,
            tool_format=self._binding.tool_format,
            num_prompt_tokens=num_read,
            is_reasoning=opens_reasoning(prompt),
        )
        state.turns[turn.index] = answer.turn
        if answer.num_left_out:
            state.counts.tool_errors["parallel_call"] += answer.num_left_out
        self._branches.add(point, answer.turn, agent.history, answer.message)
        self._turns[answer.id] = turn.index
        return answer

    def _check_size(self, asked: ChatRequest) -> None:
        """Refuse what cannot fit, before it is tokenised."""
        most = self._binding.policy.max_seq_len
        size = sum(len(str(message.get("content"))) for message in asked.messages)
        if size > most * _MOST_CHARACTERS:
            raise EpisodeOver("context_full", f"{size} characters for a context of {most} tokens")

    def _check_template(self, asked: ChatRequest, point: BranchPoint) -> None:
        """Refuse tools that the chat template leaves out."""
        if asked.template.get("tools") and point.template not in self._checked_templates:
            check_tools((), asked.template, self._binding.codec.render_prompt(asked.messages, **asked.template))
            self._checked_templates.add(point.template)

    def _within_limits(self, point: BranchPoint) -> list[Message]:
        """Return the messages to append, with tool output cut where it is too long; count the tool calls."""
        state, limits, counts = self._state, self._state.limits, self._state.counts
        num_results = sum(message.get("role") == "tool" for message in point.messages) if point.node is not None else 0
        if num_results:
            if limits.max_tool_calls is not None and counts.num_tool_calls + num_results > limits.max_tool_calls:
                raise state.end(EpisodeOver("tool_call_limit", f"{limits.max_tool_calls} tool calls"))
            counts.num_tool_calls += num_results
        return [
            {**message, "content": cut_middle(str(message["content"]), limits.max_tool_tokens, self._binding.codec)}
            if message.get("role") == "tool"
            else message
            for message in point.messages
        ]

    def _classified(self, turn: Turn, point: BranchPoint) -> Turn:
        """Return the turn with the prefix break that is the client's doing, where there is one."""
        changed_template = point.node is not None and point.node.template != point.template
        is_edit = point.edited is not None or (changed_template and turn.prefix_break == "template")
        if not is_edit or turn.prefix_break == "client_edit":
            return turn
        breaks = self._state.counts.prefix_breaks
        if turn.prefix_break is not None:
            breaks[turn.prefix_break] -= 1
        breaks["client_edit"] += 1
        previous = turn.previous
        if point.edited is not None and self._is_after(point.edited.turn, previous):
            previous = point.edited.turn
        return replace(turn, prefix_break="client_edit", previous=previous)

    def _is_after(self, index: int | None, before: int | None) -> bool:
        while index is not None and index != before:
            index = self._state.turns[index].previous
        return index == before

    def _refusal(self, error: BaseException, point: BranchPoint) -> RequestError:
        """Return the answer to a request that failed, and keep the reason for the end of the program."""
        if isinstance(error, RequestError | DataError):  # the template may not take the client's conversation
            refused = request_error(error)
            self.last_refusal = refused.message
            return refused
        if isinstance(error, EpisodeOver):
            self._failure.over = error
            self._state.end(error)
            return _limit_error(error)
        if isinstance(error, ReplayMismatch):
            self._failure.mismatch = error
            return closed_error(f"The episode starts over: {error}")
        self._failure.faults[point.key[0]] = error
        if isinstance(error, Fault):
            return RequestError(error.message, status=503, kind="server_error", code=error.kind)
        return request_error(error)

    async def _deliver(
        self, request: web.Request, answer: Answer, asked: ChatRequest, stream: web.StreamResponse | None
    ) -> web.StreamResponse:
        index, ended = answer.turn.index, asyncio.get_running_loop().create_future()
        self._delivering[index] = ended
        try:
            codec = self._binding.codec
            response = stream or web.json_response(answer.whole(asked, codec))
            is_crowded = getattr(request.protocol, "is_crowded", None)
            if is_crowded is not None and is_crowded() and not response.prepared:
                response.force_close()
            await response.prepare(request)
            if stream is not None:
                await stream.write(answer.events(asked, codec))
            await response.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            self._mark(index, is_delivered=False)
            raise
        finally:
            del self._delivering[index]
            ended.set_result(None)
        return response

    def _mark(self, index: int, *, is_delivered: bool) -> None:
        turns = self._state.turns
        if turns[index].is_delivered != is_delivered:
            turns[index] = replace(turns[index], is_delivered=is_delivered)
            self._state.counts.num_undelivered += -1 if is_delivered else 1


@contextlib.asynccontextmanager
async def open_endpoint(
    state: EpisodeState,
    *,
    agent: str = DEFAULT_AGENT,
    path: tuple[int, ...],
    allow: Sequence[str] = (),
    ignore: Sequence[str] = (),
    keep_alive_s: float = 15.0,
) -> AsyncIterator[Endpoint]:
    """Open an endpoint whose turns are branches of an agent below `path`, until the block ends. See `Agent.endpoint`.

    `keep_alive_s` is after how many seconds without an event a stream gets a comment.
    """
    rules = SamplingRules.of(state.binding(agent).sampling, allow=allow, ignore=ignore)
    endpoint = Endpoint(state, await shared_server(), agent=agent, path=path, rules=rules, keep_alive_s=keep_alive_s)
    try:
        yield endpoint
    except Exception as error:
        await endpoint.close()
        failure = endpoint.failure(error)
        if failure is None or isinstance(error, Fault | EpisodeOver | ReplayMismatch):
            raise
        raise failure from error
    finally:
        await endpoint.close()
    failure = endpoint.failure(None)
    if failure is not None:
        raise failure


def _limit_error(over: EpisodeOver) -> RequestError:
    if over.outcome == "context_full":
        # Frameworks find these words when they shorten a conversation.
        text = f"The conversation exceeds the maximum context length: {over.detail}."
        return RequestError(text, kind="episode_over", param="messages", code=over.outcome)
    text = f"The episode is over: {over.outcome} ({over.detail})."
    return RequestError(text, status=403, kind="episode_over", code=over.outcome)


async def _fail(error: BaseException, asked: ChatRequest, stream: web.StreamResponse | None) -> web.StreamResponse:
    """Raise an error, or send it as an event on a stream that has started."""
    if stream is None or not stream.prepared:
        raise error
    refused = request_error(error)
    await stream.write(error_event(refused) if asked.is_responses else event(refused.body))
    await stream.write_eof()
    return stream


def _is_retry(request: web.Request) -> bool:
    count = request.headers.get(RETRY_HEADER, "")
    return count.isdecimal() and int(count) > 0


def _is_http_error(error: BaseException) -> bool:
    """Return whether an exception is, contains or comes from an HTTP client's error about a status."""
    if isinstance(error, BaseExceptionGroup) and any(map(_is_http_error, error.exceptions)):
        return True
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status"):
            status = getattr(holder, name, None)
            if isinstance(status, int) and status >= 400:
                return True
    return error.__cause__ is not None and _is_http_error(error.__cause__)
