"""An OpenAI-compatible endpoint in front of a policy service, and the record of what passed through it.

    async with serve_openai(service, ServeConfig(port=0, record="agents.jsonl")) as server:
        client = openai.AsyncOpenAI(base_url=server.base_url, api_key="none")

An agent written with any framework talks to `server.base_url`; `read_exchanges` and `exchanges_to_samples` turn what it
did into samples to train on, with exactly the tokens that were sampled. Names are imported when first used, so reading
records does not load the web server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge._lazy import lazy_names

if TYPE_CHECKING:
    from forge.generator.openai.app import OpenAIServer, check_serving, serve_openai
    from forge.generator.openai.records import Exchange, exchanges_to_samples, read_exchanges
    from forge.generator.openai.updates import UpdateOutcome, WeightPublisher

__all__ = [
    "Exchange",
    "OpenAIServer",
    "UpdateOutcome",
    "WeightPublisher",
    "check_serving",
    "exchanges_to_samples",
    "read_exchanges",
    "serve_openai",
]

__getattr__ = lazy_names(
    __name__,
    {
        "forge.generator.openai.records": "Exchange exchanges_to_samples read_exchanges",
        "forge.generator.openai.app": "OpenAIServer check_serving serve_openai",
        "forge.generator.openai.updates": "UpdateOutcome WeightPublisher",
    },
)
