"""OpenEnv: environments on a server, one WebSocket session for each episode.

What the policy gets wrong comes back to it as text. A server that cannot be reached, is too slow, loses the session or
violates its schema is a `Fault`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import random
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from pydantic import Field

from forge.config.base import ConfigModel
from forge.envs.agent import Agent
from forge.envs.environment import Observation
from forge.envs.external.adapting import content_text, cut_text, options_of, program_of, with_text
from forge.envs.external.processes import Server, ServerPool, ServerSpec, least_used, pool_of, shared_task
from forge.envs.external.schemas import CompiledSchema, Schema, SchemaTool, problem_in, resolved
from forge.envs.external.sockets import MessageSocket, fetch_json
from forge.envs.limits import EpisodeOver, Fault
from forge.envs.tools import as_text
from forge.envs.trace import Message
from forge.errors import OptionError
from forge.registry import import_attribute
from forge.types import Task

_LONGEST_PAUSE_S: Final = 2.0
_DAY_S: Final = 86_400.0
_MCP_TOOL: Final = {
    "type": "object",
    "required": ["name", "input_schema"],
    "properties": {"name": {"type": "string"}, "description": {"type": "string"}, "input_schema": {"type": "object"}},
}
_HIDDEN: Final = ("done", "reward", "metadata")  # fields of every observation that the policy does not read


class OpenEnvServer(ConfigModel):
    """How servers of an environment are started: the argument `server`."""

    app: str = Field(description="The ASGI application, `module:attribute`.")
    requirements: tuple[str, ...] = Field(
        default=("openenv>=0.10,<0.11",), description="What pip installs into a venv of its own, once per machine."
    )
    folders: tuple[str, ...] = Field(default=(), description="Where the module is found, beside the venv.")
    instances: int = Field(default=1, ge=1, description="Processes.")
    max_sessions: int | None = Field(default=None, ge=1, description="Episodes that share a process; null for any.")
    env: Mapping[str, str] = Field(default_factory=dict, description="Environment variables.")
    start_limit_s: float = Field(default=120.0, gt=0, description="Seconds until a process must be ready.")

    def spec(self) -> ServerSpec:
        """Return the command that starts one."""
        listening = ("--host", "127.0.0.1", "--port", "{port}", "--log-level", "warning")
        return ServerSpec(
            command=("{python}", "-m", "uvicorn", self.app, *listening),
            requirements=self.requirements,
            instances=self.instances,
            folders=tuple(map(os.path.abspath, self.folders)),
            env=tuple(sorted(self.env.items())),
            max_users=self.max_sessions,
            start_limit_s=self.start_limit_s,
        )


class OpenEnvOptions(ConfigModel):
    """The arguments of `openenv_episode`."""

    url: str | tuple[str, ...] | None = Field(default=None, description="One or more servers that run already.")
    server: OpenEnvServer | None = Field(default=None, description="Servers that are started.")
    reset: Mapping[str, Any] = Field(default_factory=dict, description="Arguments of every reset.")
    headers: Mapping[str, str] = Field(default_factory=dict, description="HTTP headers, such as Authorization.")
    action: str | None = Field(default=None, description="`module:attribute`: (message) -> action, a dict.")
    observe: str | None = Field(default=None, description="`module:attribute`: (observation, a dict) -> text.")
    max_steps: int | None = Field(default=None, ge=1, description="Steps after which the episode ends; null for any.")
    tool_name: str = Field(default="act", description="The tool that an action of several fields becomes.")
    ends_on_text: bool | None = Field(default=None, description="Whether an answer without a call ends the episode.")
    errors: Literal["fault", "text"] = Field(default="fault", description="What an exception in a step becomes.")
    check_observations: bool = Field(default=True, description="Whether observations must fit the server's schema.")
    connect_timeout_s: float = Field(default=15.0, gt=0, description="Seconds until a server must be reached.")
    capacity_timeout_s: float = Field(default=600.0, ge=0, description="Seconds to wait for a free session.")
    step_timeout_s: float = Field(default=60.0, gt=0, description="Seconds that a reset or a step may take.")
    keep_alive_s: float = Field(default=15.0, gt=0, description="Seconds between pings while the policy generates.")
    max_message_bytes: int = Field(default=4 << 20, ge=1024, description="A longer message of the server is a fault.")
    max_chars: int = Field(default=32_768, ge=64, description="Longer observations lose their middle.")


class OpenEnvError(Exception):
    """What a server answered instead of an observation: its code and message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a reset or a step gave."""

    observation: dict[str, Any]
    reward: float | None
    done: bool


@dataclass(frozen=True, slots=True)
class EnvSchemas:
    """What a server's `/schema` says of actions, and of observations of steps and resets."""

    actions: CompiledSchema
    steps: CompiledSchema
    resets: CompiledSchema | None


class OpenEnvSession:
    """One session on a server's WebSocket."""

    def __init__(self, url: str, options: OpenEnvOptions) -> None:
        self.url, self.options = url, options
        self._socket = MessageSocket(
            f"{url}/ws",
            name="openenv",
            headers=options.headers,
            max_bytes=options.max_message_bytes,
            keep_alive_s=options.keep_alive_s,
        )

    def fault(self, what: str, kind: str) -> Fault:
        """Return a fault of this server."""
        return self._socket.fault(what, kind)

    async def connect(self) -> None:
        """Open the connection."""
        await self._socket.connect(self.options.connect_timeout_s)

    async def reset(self, data: Mapping[str, Any], schema: CompiledSchema | None = None) -> StepResult:
        """Start an episode. Raises `OpenEnvError` where the server refuses."""
        return self._result(await self._request({"type": "reset", "data": data}, "observation"), schema)

    async def step(self, action: Mapping[str, Any], schema: CompiledSchema | None = None) -> StepResult:
        """Take an action. Raises `OpenEnvError` where the environment raises."""
        return self._result(await self._request({"type": "step", "data": action}, "observation"), schema)

    async def state(self) -> dict[str, Any]:
        """Return the environment's state."""
        return await self._request({"type": "state"}, "state")

    async def close(self) -> None:
        """End the session, on the server first where it still listens. May be called more than once."""
        await self._socket.close('{"type": "close"}')

    async def _request(self, message: Mapping[str, Any], expected: str) -> dict[str, Any]:
        text = await self._socket.ask(json.dumps(message), self.options.step_timeout_s)
        try:
            reply = json.loads(text)
        except (ValueError, RecursionError):
            raise self._violation("the message is not JSON", text) from None
        data = reply.get("data") if isinstance(reply, dict) else None
        if not isinstance(data, dict):
            raise self._violation("data: expected an object", text)
        if reply.get("type") == "error":
            raise OpenEnvError(str(data.get("code")), f"{data.get('message')} {data.get('errors') or ''}".strip())
        if reply.get("type") != expected:
            raise self._violation(f'type: expected "{expected}"', text)
        return data

    def _result(self, data: dict[str, Any], schema: CompiledSchema | None) -> StepResult:
        observation, reward, done = data.get("observation"), data.get("reward"), data.get("done", False)
        if not isinstance(observation, dict):
            raise self._violation("data.observation: expected an object", as_text(data))
        if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
            raise self._violation("data.reward: expected a finite number or null", as_text(reward))
        if not isinstance(done, bool):
            raise self._violation("data.done: expected true or false", as_text(done))
        problem = None if schema is None else schema.problem(observation, "data.observation")
        if problem is not None:
            raise self._violation(problem, as_text(observation))
        return StepResult(observation, None if reward is None else float(reward), done)

    def _violation(self, problem: str, text: str) -> Fault:
        _schemas.get(asyncio.get_running_loop(), {}).pop(self.options.server or self.url, None)  # it may have changed
        return self.fault(f"violates its schema: {problem}. It sent {text[:200]}", "schema")


_Schemas = dict[OpenEnvServer | str, asyncio.Task[EnvSchemas]]
_schemas: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Schemas] = weakref.WeakKeyDictionary()


async def _schema_of(session: OpenEnvSession) -> EnvSchemas:
    """Return what a server's `/schema` says, asked for once for all episodes of this event loop."""
    known, key = _schemas.setdefault(asyncio.get_running_loop(), {}), session.options.server or session.url
    if key not in known:
        known[key] = shared_task(_fetch_schema(session.url, session.options), "schema")
    try:
        return await asyncio.shield(known[key])
    except Fault:
        known.pop(key, None)
        raise


async def _fetch_schema(url: str, options: OpenEnvOptions) -> EnvSchemas:
    limits = {"max_bytes": options.max_message_bytes, "limit_s": options.step_timeout_s}
    found = await fetch_json(f"{url}/schema", name="openenv", headers=options.headers, **limits)
    problem = problem_in(found, {"required": ["action", "observation"], "additionalProperties": {"type": "object"}})
    if problem is not None:
        raise Fault(f"{url}/schema: {problem}", kind="openenv_schema", path=f"{url}/schema")
    checks = {
        key: CompiledSchema({**each, "required": [name for name in each.get("required") or () if name not in _HIDDEN]})
        for key, each in found.items()
    }
    resets = checks.get("reset_observation", checks["observation"])
    # Environments of MCP tools reset with an observation of another class, which most of them do not declare.
    is_undeclared = _is_mcp(found["action"]) and resets.schema == checks["observation"].schema
    return EnvSchemas(checks["action"], checks["observation"], None if is_undeclared else resets)


def _is_mcp(action: Schema) -> bool:
    return {"tool_name", "arguments"} <= set(action.get("properties") or ())


class OpenEnv:
    """One episode on an OpenEnv server; options as `OpenEnvOptions`. Play it with `openenv_episode`, or, where the
    action is one text, as any `forge.envs.environment.Env`.

    Attributes:
        tools: what the policy calls, after `reset`; empty where its answer is the action.
        is_over: whether the environment has ended the episode.
        on_reward: called with each reward of an action that is a tool.
    """

    def __init__(self, **options: Any) -> None:
        self.options = given = options_of(OpenEnvOptions, options)
        if (given.url is None) == (given.server is None) or given.url == ():
            raise OptionError(
                "OpenEnv needs a server",
                path="episode.args",
                value=options,
                rule="either url, of servers that run, or server, to start some",
                repair='give url: "http://host:8000", or server: {app: "my_env.server.app:app"}',
            )
        self.tools: list[SchemaTool] = []
        self.is_over = self.has_mcp_tools = False
        self.on_reward: Callable[[float], None] = lambda reward: None
        self._action = None if given.action is None else import_attribute(given.action, path="episode.args.action")
        self._observe = None if given.observe is None else import_attribute(given.observe, path="episode.args.observe")
        self._stack = contextlib.AsyncExitStack()
        self._session: OpenEnvSession  # from `reset` on
        self._borrowed: tuple[ServerPool, Server] | None = None
        self._schemas: EnvSchemas
        self._text_field: str | None = None
        self._has_choices = False
        self._one_step = asyncio.Lock()
        self._num_steps = 0

    async def reset(self, task: Task) -> Observation:
        """Open a session and start the task: its `metadata` may have a `seed`, and `reset` with further arguments.

        Without a seed, one is made of the task's id: all episodes of a group play the same game.
        """
        digest = hashlib.blake2b(task.id.encode(), digest_size=8).hexdigest()
        seed = task.metadata.get("seed", int(digest, 16) >> 33)
        data = {"seed": seed, "episode_id": f"forge-{digest}", **self.options.reset, **task.metadata.get("reset", {})}
        url = await self._stack.enter_async_context(self._server())
        with self._reporting_faults():
            result = await self._begin(url, data)
            if self._action is None:
                await self._find_tools()
        self.is_over = result.done
        self._num_steps = 0
        shown = with_text(task.messages, self._text_of(result.observation))
        return Observation(shown, reward=result.reward, terminated=result.done)

    async def step(self, message: Message) -> Observation:
        """Take the policy's answer as the action. One that does not fit the action's schema is answered with text."""
        if self._action is not None:
            action = self._action(message)
        else:
            assert self._text_field is not None, "an action of several fields is a tool: use openenv_episode"
            text = str(message.get("content") or "")
            action = {self._text_field: text.strip() if self._has_choices else text}
            problem = self._schemas.actions.problem(action)
            if problem is not None:
                return Observation([{"role": "user", "content": f"Error: this is not a valid answer: {problem}."}])
        try:
            result = await self._step(action)
        except OpenEnvError as error:
            return Observation([{"role": "user", "content": f"Error: {error.message}"}])
        shown = [{"role": "user", "content": self._text_of(result.observation)}]
        return Observation(shown, reward=result.reward, terminated=result.done, truncated=self.is_over)

    async def state(self) -> dict[str, Any]:
        """Return the environment's own state."""
        return await self._session.state()

    async def close(self) -> None:
        """End the session."""
        await self._stack.aclose()

    @contextlib.asynccontextmanager
    async def _server(self) -> AsyncIterator[str]:
        """Choose the server with the fewest episodes of this process, and yield its URL."""
        if self.options.server is not None:
            pool = pool_of(self.options.server.spec())
            async with pool.borrow(self.options.capacity_timeout_s) as server:
                self._borrowed = pool, server
                yield server.url
            return
        with least_used((self.options.url,) if isinstance(self.options.url, str) else self.options.url or ()) as url:
            yield url

    @contextlib.contextmanager
    def _reporting_faults(self) -> Iterator[None]:
        """Have a server of ours replaced where a session is stuck, and checked where one was lost."""
        try:
            yield
        except Fault as fault:
            if self._borrowed is not None:
                pool, server = self._borrowed
                if fault.kind == "openenv_timeout":
                    pool.retire(server)
                elif fault.kind in ("openenv_lost", "openenv_unreachable"):
                    pool.doubt(server)
            raise

    async def _begin(self, url: str, data: Mapping[str, Any]) -> StepResult:
        """Connect and reset. A server without a free session is asked again until `capacity_timeout_s` have passed."""
        loop, limit_s, pause_s = asyncio.get_running_loop(), self.options.capacity_timeout_s, 0.05
        until = loop.time() + limit_s
        while True:
            self._session = session = OpenEnvSession(url, self.options)
            self._stack.push_async_callback(session.close)
            await session.connect()
            self._schemas = await _schema_of(session)
            try:
                return await session.reset(data, self._schemas.resets if self.options.check_observations else None)
            except OpenEnvError as error:
                if error.code != "CAPACITY_REACHED":
                    raise session.fault(f"cannot reset: {error}", "error") from None
                if loop.time() + pause_s > until:
                    raise session.fault(f"had no free session for {limit_s:g} s: {error}", "capacity") from None
            await session.close()
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _find_tools(self) -> None:
        """Decide what an action is: the answer's text, a tool, or one of the environment's own MCP tools."""
        schema = self._schemas.actions.schema
        fields = {key: each for key, each in (schema.get("properties") or {}).items() if key != "metadata"}
        if _is_mcp(schema):
            self.has_mcp_tools = True
            listed = (await self._step({"type": "list_tools"}, check=False)).observation.get("tools")
            self.tools = [self._mcp_tool(each) for each in listed or ()]
            return
        needed = [key for key in schema.get("required") or () if key in fields] or list(fields)
        if len(needed) == 1 and resolved(fields[needed[0]], schema).get("type") == "string":
            self._text_field, self._has_choices = needed[0], "enum" in resolved(fields[needed[0]], schema)
            return
        parameters = {**schema, "properties": fields}
        description = schema.get("description") or "Take an action."
        self.tools = [self._tool(self.options.tool_name, description, parameters, lambda arguments: arguments)]

    def _tool(self, name: str, description: str, parameters: Schema, action: Callable[..., Any]) -> SchemaTool:
        async def act(arguments: dict[str, Any]) -> str:
            async with self._one_step:  # calls of one answer are taken in their order
                if not self.is_over:
                    try:
                        result = await self._step(action(arguments))
                    except OpenEnvError as error:
                        return f"Error: {error.message}"
                    if result.reward is not None:
                        self.on_reward(result.reward)
                    if not self.is_over:
                        return self._text_of(result.observation)
            raise EpisodeOver("finished", "the environment has ended the episode")

        return SchemaTool(act, name=name, description=description, parameters=parameters, timeout_s=_DAY_S)

    def _mcp_tool(self, listed: Any) -> SchemaTool:
        problem = problem_in(listed, _MCP_TOOL, "data.observation.tools")
        if problem is not None:
            raise self._session.fault(f"lists a tool badly: {problem}", "schema")
        name, parameters = listed["name"], listed["input_schema"]
        call = {"type": "call_tool", "tool_name": name}
        return self._tool(name, listed.get("description", ""), parameters, lambda given: {**call, "arguments": given})

    async def _step(self, action: Mapping[str, Any], *, check: bool = True) -> StepResult:
        """Take an action. Raises `OpenEnvError` for what the policy did wrong, and `Fault` for everything else."""
        schema = self._schemas.steps if check and self.options.check_observations else None
        with self._reporting_faults():
            try:
                result = await self._session.step(action, schema)
            except OpenEnvError as error:
                if error.code == "VALIDATION_ERROR" or self.options.errors == "text":
                    raise
                raise self._session.fault(f"failed: {error}", "error") from None
        self._num_steps += 1
        self.is_over = result.done or self._num_steps == self.options.max_steps
        return result

    def _text_of(self, observation: Mapping[str, Any]) -> str:
        """Return what the policy reads: the one text of an observation, else its fields as JSON."""
        if self._observe is not None:
            return cut_text(as_text(self._observe(observation)), self.options.max_chars)
        shown = {key: each for key, each in observation.items() if key not in _HIDDEN}
        if self.has_mcp_tools and "result" in shown:
            error = shown.get("error")
            shown = {"result": f"Error: {error.get('message')}" if error else content_text(shown["result"])}
        texts = list(shown.values())
        text = texts[0] if len(texts) == 1 and isinstance(texts[0], str) else as_text(shown) if shown else ""
        return cut_text(as_text(text), self.options.max_chars)


async def _play(task: Task, agent: Agent, **args: Any) -> None:
    env = OpenEnv(**args)
    try:
        seen = await env.reset(task)
        if seen.reward is not None:
            agent.add_reward(cast("float", seen.reward))
        if not env.tools:
            while not seen.is_over:
                turn = await agent.generate(seen.messages)
                seen = await env.step(agent.messages[-1])
                if seen.reward is not None:
                    agent.add_reward(cast("float", seen.reward), turn=turn)
            return
        env.on_reward = lambda reward: agent.add_reward(reward, turn=agent.turns[-1])
        ends_on_text = env.has_mcp_tools if env.options.ends_on_text is None else env.options.ends_on_text
        messages: Sequence[Message] = seen.messages
        while not env.is_over:
            await agent.run_tools(messages, tools=env.tools)  # ends with `EpisodeOver` where the environment does
            if ends_on_text:
                return
            names = ", ".join(each.name for each in env.tools)
            messages = [{"role": "user", "content": f"Error: an answer must call a tool: {names}."}]
    except EpisodeOver as over:
        if over.outcome != "finished":
            raise
    finally:
        await env.close()


openenv_episode = program_of(_play, OpenEnvOptions, "openenv_episode")
"""Plays an OpenEnv environment; arguments as `OpenEnvOptions`."""
