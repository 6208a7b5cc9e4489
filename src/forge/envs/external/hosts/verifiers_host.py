"""The side of `forge.envs.external.verifiers` that runs where verifiers is installed."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

_KEY_VARIABLE = "OPENAI_API_KEY"
_CHAT = "forge_chat"
"""The id of the harness that is a plain conversation."""


_LATE = (
    *("mcp.server.mcpserver", "uvicorn", "httpcore", "anyio._backends._asyncio", "verifiers.v1.utils.version"),
    *("verifiers.v1.tasksets.harbor", "verifiers.v1.tasksets.nemo_gym", "verifiers.v1.tasksets.openenv"),
    "verifiers.v1.envs.isolated_verifier",
)
"""What verifiers imports in its first episode: nine tenths of the time that an episode takes."""


class Refused(Exception):
    """The options are wrong."""


def prepare() -> None:
    """Import what takes long."""
    _register_chat(importlib.import_module("verifiers.v1"))
    for name in _LATE:
        with contextlib.suppress(ImportError):  # another version has it elsewhere
            importlib.import_module(name)


class Host:
    """One episode of an environment."""

    def run(
        self,
        *,
        config: Mapping[str, Any],
        index: int,
        base_url: str,
        api_key: str,
        model: str,
        sampling: Mapping[str, Any],
        chat: bool,
    ) -> dict[str, Any]:
        """Run the task with this index, and return what it earned."""
        vf: Any = importlib.import_module("verifiers.v1")
        os.environ[_KEY_VARIABLE] = api_key
        try:
            env = vf.load_environment(vf.resolve_env_config(_with_chat(vf, config) if chat else dict(config)))
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise Refused(f"the environment cannot be made: {type(error).__name__}: {error}") from error
        task = next(iter(env.taskset.include(idx=[str(index)])), None)
        if task is None:
            raise Refused(f"the taskset has no task {index}")
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=_KEY_VARIABLE)
        context = vf.ModelContext(model=model, client=client, sampling=vf.SamplingConfig(**sampling))
        episode = asyncio.run(_run(env, task, context))
        trained = [trace for trace in episode.traces if getattr(trace.agent, "trainable", True)] or episode.traces
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        return {
            "ok": bool(episode.ok),
            "errors": [f"{error.type}: {error.message}"[:1000] for error in errors][-5:],
            "rewards": _rewards(trained),
        }


async def _run(env: Any, task: Any, context: Any) -> Any:
    async with env.serving():
        return await env.run_episode(task, context)


def _rewards(traces: Any) -> dict[str, float | None]:
    """Return the weighted rewards by name: of several agents, the mean."""
    found: dict[str, list[float | None]] = {}
    for trace in traces:
        for name, reward in trace.rewards.items():
            found.setdefault(name, []).append(None if reward is None else float(reward.value))
    return {
        name: None if None in values else sum(each or 0.0 for each in values) / len(traces)
        for name, values in found.items()
    }


def _with_chat(vf: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with a plain conversation on this machine for agents that do not say otherwise."""
    taskset = config.get("taskset")
    kind = vf.env_config_type((taskset or {}).get("id", ""), config.get("id", ""))
    agents = [name for name, field in kind.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
    plain = {"harness": {"id": _CHAT}, "runtime": {"type": "subprocess"}}
    return {**config, **{name: {**plain, **(config.get(name) or {})} for name in agents}}


def _register_chat(vf: Any) -> None:
    """Make the harness `forge_chat` importable: a conversation without tools, in this process."""
    httpx: Any = importlib.import_module("httpx")
    to_wire = importlib.import_module("verifiers.v1.dialects.chat").message_to_wire

    class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
        """Asks for one answer, and for another whenever the user speaks again."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages.extend(map(to_wire, prompt or ()))
            async with httpx.AsyncClient(timeout=None) as client:
                response = await client.post(
                    f"{endpoint.rstrip('/')}/chat/completions",
                    json={"model": ctx.model, "messages": messages},
                    headers={"Authorization": f"Bearer {secret}"},
                )
            is_answered = response.status_code == 200
            return vf.ProgramResult(exit_code=int(not is_answered), stdout="", stderr=response.text[:2000])

    module = ModuleType(_CHAT)
    module.__dict__.update(ChatHarness=ChatHarness, __all__=["ChatHarness"])
    ChatHarness.__module__ = _CHAT
    module.__spec__ = importlib.util.spec_from_loader(_CHAT, loader=None)
    sys.modules[_CHAT] = module
