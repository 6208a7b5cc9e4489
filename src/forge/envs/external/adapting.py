"""What integrations share: their arguments, their programs, and what the policy reads."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from forge.envs.environment import Env, episode_from_env
from forge.envs.episode import EpisodeProgram, episode
from forge.envs.tools import as_text
from forge.envs.trace import Message
from forge.errors import OptionError
from forge.types import Task

Options = TypeVar("Options", bound=BaseModel)


def options_of(kind: type[Options], given: Mapping[str, Any], path: str = "episode.args") -> Options:
    """Return the arguments of an integration as its model, or raise `OptionError` for the first that is wrong."""
    try:
        return kind.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        raise OptionError(
            f"an argument is wrong: {first['msg']}",
            path=".".join((path, *map(str, first["loc"]))),
            value=first["input"],
            rule=f"arguments: {', '.join(kind.model_fields)}",
            repair="correct episode.args",
        ) from None


def program_of(play: Callable[..., Awaitable[Any]], options: type[BaseModel], name: str) -> EpisodeProgram:
    """Return `play(task, agent, **args)` as an episode whose arguments are the fields of `options`: a run checks their
    names before it starts."""
    task, agent, *_ = inspect.signature(play).parameters.values()
    fields = [inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=None) for field in options.model_fields]
    play.__signature__ = inspect.Signature([task, agent, *fields])  # type: ignore[attr-defined]
    play.__qualname__ = name
    return episode(play)


def env_program(make: Callable[..., Env], options: type[BaseModel], name: str) -> EpisodeProgram:
    """Return an environment as an episode whose arguments are the fields of `options`."""

    def made(**args: Any) -> Env:
        return make(**args)

    fields = [
        inspect.Parameter(
            key, inspect.Parameter.KEYWORD_ONLY, default=inspect.Parameter.empty if each.is_required() else None
        )
        for key, each in options.model_fields.items()
    ]
    made.__signature__ = inspect.Signature(fields)  # type: ignore[attr-defined]
    made.__qualname__ = name
    return episode_from_env(made)


def seed_of(task: Task) -> int:
    """Return the seed of a task: what its metadata says, else a number made of its id, the same for its whole group."""
    found = task.metadata.get("seed")
    if isinstance(found, int):
        return found
    return int.from_bytes(hashlib.blake2b(task.id.encode(), digest_size=8).digest()) >> 33


def said_text(message: Message) -> str:
    """Return what an answer says after its reasoning."""
    text = str(message.get("content") or "")
    return text.rpartition("</think>")[2]


def cut_text(text: str, max_chars: int) -> str:
    """Return a text of more than `max_chars` characters as its beginning, a note and its end."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[… the text has {len(text)} characters; its middle is left out …]\n{text[-half:]}"


def with_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Return a task's messages with what an environment shows: in the last message where that is the user's."""
    if not text:
        return list(messages)
    *before, last = messages or ({"role": "system", "content": ""},)
    if last.get("role") == "user" and isinstance(last.get("content"), str):
        return [*before, {**last, "content": f"{last['content']}\n\n{text}"}]
    return [*messages, {"role": "user", "content": text}]


def content_text(result: Any) -> str:
    """Return the text of an MCP tool's result: its `content`, or the value itself."""
    content = result.get("content") if isinstance(result, Mapping) else None
    if not isinstance(content, list):
        return as_text(result)
    texts = [each.get("text") for each in content if isinstance(each, Mapping)]
    return "\n".join(each for each in texts if isinstance(each, str))
