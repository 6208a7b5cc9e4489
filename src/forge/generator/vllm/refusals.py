"""vLLM's errors as ours."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

from forge.errors import EngineDead, PromptError
from forge.generator.engine import Request


def dead(what: str) -> EngineDead:
    return EngineDead(
        f"vLLM's engine {what}.",
        path="generator.engine",
        value="vllm",
        rule="its process serves requests",
        repair="send the request again: the replica is replaced",
    )


@contextlib.contextmanager
def refusals(request: Request) -> Iterator[None]:
    """What vLLM says of a request that it cannot serve, as `PromptError`."""
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
    """The end of the engine as `EngineDead`, and refusals as `PromptError`."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        if request is None:
            yield
        else:
            with refusals(request):
                yield
    except EngineDeadError as error:
        raise dead("has ended") from error
