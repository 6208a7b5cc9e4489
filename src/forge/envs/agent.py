"""The agent: a policy in a conversation, as an episode's program sees it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from forge.envs.agent_checks import check_credit, check_messages, check_options, check_reward, check_temperature
from forge.envs.history import Extension, History
from forge.envs.journal import TurnEntry
from forge.envs.limits import EpisodeOver, Fault
from forge.envs.state import EpisodeState
from forge.envs.tool_calls import opens_reasoning, parse_answer
from forge.envs.tools import Tool, ToolResult, as_tools, cut_middle, run_call
from forge.envs.trace import Message, path_to
from forge.errors import OptionError
from forge.types import DEFAULT_AGENT, Completion, Task, Turn

if TYPE_CHECKING:
    from forge.envs.endpoint import Endpoint

T = TypeVar("T")
_LONG_TEXT: Final = 16_384
"""Characters whose tokenisation would keep other episodes waiting."""


def branch_place(agent: str, path: tuple[int, ...]) -> tuple[str | int, ...]:
    """Return what names a branch in its episode, for seeds and journals: the agent's name, where it has one, and the
    branch."""
    return path if agent == DEFAULT_AGENT else (agent, *path)


class Agent:
    """Talks to the policy for one branch of an episode. Where an episode has several agents, each has conversations of
    its own: it sees the messages that the program gives it, and no others.

    Example:
        >>> turn = await agent.generate(task.messages)
        >>> turn = await agent.run_tools([{"role": "user", "content": "And now?"}], tools=[search], max_turns=8)
        >>> agent.add_reward(0.5, name="style")
    """

    def __init__(
        self,
        state: EpisodeState,
        *,
        name: str = DEFAULT_AGENT,
        path: tuple[int, ...] = (),
        history: History | None = None,
        last: int | None = None,
        session: str | None = None,
    ) -> None:
        """`name` is the agent's, and `path` its branch; `history` and its `last` turn are what the branch continues;
        `session` is a name for its requests."""
        self._state, self.name, self.path = state, name, path
        self._binding, self._used = state.binding(name), state.used(name)
        self._place = branch_place(name, path)
        self._history, self._last = history or History(), last
        self._session = session or f"{state.key}-{'.'.join(map(str, self._place))}"
        self._num_turns = self._num_forks = self._num_records = 0
        self._is_generating = False
        self.rng = random.Random(state.key.seed("rng", *self._place))
        """Random numbers that are the same when the episode is run again."""

    @property
    def task(self) -> Task:
        return self._state.task

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation of this branch, with each answer as the text that was sampled."""
        return self._history.messages

    @property
    def history(self) -> History:
        """The conversation of this branch as the engine has it."""
        return self._history

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of the whole episode so far, those of other agents included."""
        return tuple(self._state.turns)

    # ---- Talking ----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        messages: Sequence[Message] = (),
        *,
        tools: Sequence[Tool | Callable[..., Any]] = (),
        template: Mapping[str, Any] | None = None,
        train: bool = True,
        **options: Any,
    ) -> Turn:
        """Append messages to the history, sample an answer and append it too.

        `options` override the run's sampling for this turn (`max_tokens`, `stop`, …). With `train=False` the turn is
        left out of training; only then may it have another `temperature` than the run's. `template` are further
        arguments of the chat template. Raises `EpisodeOver` where a limit leaves no room for another turn, and again
        whenever it is called after that.
        """
        check_messages(messages, "agent.generate")
        self._check_options(options, train=train)
        return await self._generate(messages, as_tools(tools), template, options, train=train)

    async def run_tools(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool | Callable[..., Any]],
        max_turns: int | None = None,
        template: Mapping[str, Any] | None = None,
        train: bool = True,
        **options: Any,
    ) -> Turn:
        """Generate, run the tools that the answer calls, and continue with their results until no tool is called.

        Calls of one answer run at the same time. After `max_turns` turns it returns with the calls unanswered, and the
        episode's outcome is `turn_limit`. `train` and `options` are those of `generate`, for every turn.
        """
        check_messages(messages, "agent.run_tools")
        self._check_options(options, train=train)
        if max_turns is not None and max_turns < 1:
            raise OptionError(
                "max_turns leaves no turn",
                path="agent.run_tools(max_turns=)",
                value=max_turns,
                rule="a whole number of at least 1",
                repair="leave it out for the episode's own limit",
            )
        known = as_tools(tools)
        turn = await self._generate(messages, known, template, options, train=train)
        num_turns = 1
        while turn.calls:
            if max_turns is not None and num_turns >= max_turns:
                self._state.outcome = "turn_limit"
                break
            results = await self._run_calls(turn, known)
            turn = await self._generate([each.as_message() for each in results], known, template, options, train=train)
            num_turns += 1
        return turn

    def replace_history(self, messages: Sequence[Message]) -> None:
        """Continue with another history: a summary, or one without old reasoning. The next turn starts a new root."""
        check_messages(messages, "agent.replace_history")
        self._history = self._history.replaced(messages)

    def fork(self) -> Agent:
        """Return an agent with this history, whose turns are a branch of their own. Limits are shared."""
        return Agent(self._state, name=self.name, path=self._next_fork(), history=self._history, last=self._last)

    def endpoint(
        self, *, allow: Sequence[str] = (), ignore: Sequence[str] = ()
    ) -> AbstractAsyncContextManager[Endpoint]:
        """Open an OpenAI-compatible endpoint for programs that talk to the policy over HTTP, until the block ends.

        Requests with another `temperature` or the like than the run's are refused, because what is sampled is trained
        on. Parameters in `allow` are honoured instead; those in `ignore` are accepted without effect. Answers at
        another temperature than the run's are left out of training.

        Example:
            >>> async with agent.endpoint() as endpoint:
            ...     client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        """
        from forge.envs.endpoint import open_endpoint  # loads a web server

        return open_endpoint(self._state, agent=self.name, path=self._next_fork(), allow=allow, ignore=ignore)

    def _next_fork(self) -> tuple[int, ...]:
        self._num_forks += 1
        return (*self.path, self._num_forks - 1)

    # ---- Rewards and side effects -----------------------------------------------------------------------------------

    def add_reward(self, value: float, *, name: str = "reward", turn: Turn | None = None) -> None:
        """Add to the agent's reward `name`; with `turn`, to what that turn earned itself."""
        state = self._state
        check_credit(name, turn, state.turns, agent=self.name)
        number = check_reward(value, name)
        self._check_open()
        self._used.rewards[name] = self._used.rewards.get(name, 0.0) + number
        if turn is not None:
            state.turn_rewards[turn.index] = state.turn_rewards.get(turn.index, 0.0) + number

    async def record(self, make: Callable[[], Awaitable[T] | T]) -> T:
        """Return what `make()` returns, and keep it in the journal: a replay returns it without calling `make` again.

        Use it for whatever a deterministic episode does that is not a turn or a tool call of `run_tools`. The value
        must be plain (JSON).
        """
        key = (*self._place, self._num_records)
        self._num_records += 1
        return await self._state.journal.record(key, make)

    # ---- One turn ---------------------------------------------------------------------------------------------------

    async def _generate(
        self,
        messages: Sequence[Message],
        tools: Mapping[str, Tool],
        template: Mapping[str, Any] | None,
        options: Mapping[str, Any],
        *,
        train: bool,
    ) -> Turn:
        state = self._state
        self._check_open()
        if state.over is not None:
            await asyncio.sleep(0)  # a program that catches everything in a loop must not keep others waiting
            raise state.over
        if self._is_generating:
            raise OptionError(
                "a branch generates one turn at a time",
                path="agent.generate",
                value=f"branch {self.path}",
                rule="await the turn under way first",
                repair="fork the agent for turns at the same time",
            )
        self._is_generating = True
        try:
            words = dict(template or {})
            if tools:
                words["tools"] = [each.schema for each in tools.values()]
            extension = await self._extend(messages, words)
            turn = await self._sample(messages, extension, options, train=train)
            if tools:
                call_prefix = "call_" + "_".join(map(str, (*self._place, self._num_turns - 1)))
                parsed = parse_answer(
                    turn.text,
                    self._binding.tool_format,
                    id_prefix=call_prefix,
                    is_reasoning=opens_reasoning(extension.text),
                )
                turn = state.turns[turn.index] = replace(turn, calls=parsed.calls)
            self._history = self._history.after(extension, messages, turn.token_ids, self._binding.codec)
            self._last = turn.index
            self._leave_full()
            return turn
        finally:
            self._is_generating = False

    def _leave_full(self) -> None:
        """Take back that this branch was too long: its history was replaced."""
        state = self._state
        state.full_branches.discard((self.name, *self.path))
        if not state.full_branches and state.outcome == "context_full":
            state.outcome = "finished"

    async def _extend(self, messages: Sequence[Message], words: Mapping[str, Any]) -> Extension:
        """Return what to append. Long texts are tokenised on a thread, so that other episodes go on."""
        extend = partial(self._history.extend, messages, self._binding.codec, template=words)
        is_long = sum(len(str(message.get("content") or "")) for message in messages) > _LONG_TEXT
        return await asyncio.to_thread(extend) if is_long else extend()

    def _check_options(self, options: Mapping[str, Any], *, train: bool) -> None:
        check_options(options)
        if train and self._binding.learns and not self._state.is_evaluation:
            check_temperature(options, self._binding.sampling)

    async def _sample(
        self, messages: Sequence[Message], extension: Extension, options: Mapping[str, Any], *, train: bool
    ) -> Turn:
        state, counts = self._state, self._state.counts
        parent = None if extension.starts_over else self._last
        before = [token for turn in path_to(state.turns, parent) for token in (*turn.context_ids, *turn.token_ids)]
        prompt_ids = (*before, *extension.appended_ids)
        sampling = await self._allowed(options, len(prompt_ids))
        seed = state.key.seed(*self._place, self._num_turns)
        self._num_turns += 1
        asked = {**sampling, "seed": seed}
        entry = TurnEntry((*self._place, self._num_turns - 1), prompt_ids, asked, self._binding.label)
        num_sampled = 0
        try:
            completion = await state.journal.turn(entry, lambda: self._ask(prompt_ids, asked))
            num_sampled = len(completion)
        finally:
            self._give_back(sampling["max_tokens"], used=num_sampled)
        turn = Turn.of(
            completion,
            index=len(state.turns),
            parent=parent,
            previous=self._last,
            path=self.path,
            messages=tuple(messages),
            context_ids=extension.appended_ids,
            seed=seed,
            prefix_break=extension.prefix_break,
            is_trained=train and self._binding.learns,
            agent=self.name,
            order=len(state.turns),
        )
        state.turns.append(turn)
        if self._binding.has_tokens:
            counts.num_sampled += len(turn)
            counts.num_observed += len(turn.context_ids)
        if turn.prefix_break is not None:
            counts.prefix_breaks[turn.prefix_break] += 1
        return turn

    async def _ask(self, prompt_ids: Sequence[int], options: Mapping[str, Any]) -> Completion:
        state, task = self._state, asyncio.current_task()
        assert task is not None
        state.generating.add(task)
        try:
            async with asyncio.timeout(state.limits.turn_timeout_s) as timer:
                return await self._binding.policy.sample(prompt_ids, options=options, session=self._session)
        except TimeoutError:
            if not timer.expired():
                raise
            limit_s = state.limits.turn_timeout_s
            raise Fault(f"a turn took longer than {limit_s:g} s", kind="turn_timeout", path=str(state.key)) from None
        finally:
            state.generating.discard(task)

    async def _allowed(self, options: Mapping[str, Any], num_prompt_tokens: int) -> dict[str, Any]:
        """Return the options of a turn within what the limits leave, and count it; or raise `EpisodeOver`."""
        state, limits, counts = self._state, self._state.limits, self._state.counts
        binding, used = self._binding, self._used
        if limits.max_turns is not None and counts.num_turns >= limits.max_turns:
            raise state.end(EpisodeOver("turn_limit", f"{limits.max_turns} turns"))
        if binding.limits.max_turns is not None and used.num_turns >= binding.limits.max_turns:
            raise state.end(EpisodeOver("turn_limit", f"{binding.limits.max_turns} turns of {self.name}"))
        most = binding.policy.max_seq_len
        room = most - num_prompt_tokens
        if room < 1:
            state.full_branches.add((self.name, *self.path))
            raise state.end(EpisodeOver("context_full", f"{num_prompt_tokens} tokens of {most}"))
        chosen = {**binding.sampling, **options, "n": 1}
        wanted = chosen.get("max_tokens")
        room = room if wanted is None else min(room, int(wanted))
        counts.num_turns += 1  # before it waits for tokens: turns are counted in the order in which they start
        used.num_turns += 1
        given = 0
        try:
            given = await self._take(room)
        finally:
            counts.num_turns -= given == 0
            used.num_turns -= given == 0
        if not given:
            raise state.end(EpisodeOver("token_limit", f"{limits.max_tokens} tokens"))
        return {**chosen, "max_tokens": given}

    async def _take(self, wanted: int) -> int:
        """Return how many tokens a turn may sample: no more than the agent's own limit and the episode's leave."""
        if not self._binding.has_tokens:
            return wanted
        own = await self._used.tokens.take(wanted)
        if not own:
            limit = self._binding.limits.max_tokens
            raise self._state.end(EpisodeOver("token_limit", f"{limit} tokens of {self.name}"))
        given = 0
        try:
            given = await self._state.tokens.take(own)
        finally:
            self._used.tokens.shrink(own, given)
        return given

    def _give_back(self, given: int, *, used: int) -> None:
        if self._binding.has_tokens:
            self._used.tokens.give_back(given, used=used)
            self._state.tokens.give_back(given, used=used)

    async def _run_calls(self, turn: Turn, tools: Mapping[str, Tool]) -> list[ToolResult]:
        state, limits, counts = self._state, self._state.limits, self._state.counts
        if limits.max_tool_calls is not None and counts.num_tool_calls + len(turn.calls) > limits.max_tool_calls:
            raise state.end(EpisodeOver("tool_call_limit", f"{limits.max_tool_calls} tool calls"))
        counts.num_tool_calls += len(turn.calls)
        results = await state.journal.tools(
            [call.id for call in turn.calls],
            lambda number: run_call(turn.calls[number], tools, timeout_s=limits.tool_timeout_s),
            lambda number: turn.calls[number],
        )
        found = []
        for result in results:
            counts.tools_s += result.seconds
            if result.error is not None:
                counts.tool_errors[result.error] += 1
            found.append(replace(result, text=cut_middle(result.text, limits.max_tool_tokens, self._binding.codec)))
        return found

    def _check_open(self) -> None:
        if self._state.is_closed:
            raise OptionError(
                "the episode is over",
                path="agent",
                value=str(self._state.key),
                rule="an agent is used only inside its episode",
                repair="await everything that uses the agent before the program returns",
            )
