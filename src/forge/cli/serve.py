"""`forge serve`: a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from forge.cli.chat import add_policy_arguments, read_policy

if TYPE_CHECKING:
    from pathlib import Path

    from forge.config import PolicyConfig
    from forge.models.tokenizer import ChatTokenizer

_KEYS = {
    "host": "serve.host",
    "port": "serve.port",
    "api_key": "serve.api_key",
    "record": "serve.record",
    "num_replicas": "generator.num_replicas",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `serve`."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model to OpenAI's clients",
        description="Start generators and an OpenAI-compatible endpoint in front of them: /v1/chat/completions, "
        "/v1/completions and /v1/models. It prints its address when it is ready, and ends on Ctrl-C or SIGTERM.",
        epilog="example: forge serve models/qwen3-0.6b --port 8000 --record agents.jsonl generator.max_batch=128",
    )
    add_policy_arguments(parser)
    parser.add_argument("--host", metavar="ADDRESS", help="address to listen on; default: 127.0.0.1")
    parser.add_argument("--port", metavar="N", type=int, help="port to listen on, 0 for a free one; default: 8000")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="API key that requests must send; prefer FORGE_API_KEY, because others can see command lines",
    )
    parser.add_argument("--record", metavar="FILE", help="a .jsonl file to append every exchange to")
    parser.add_argument("--num-replicas", metavar="N", type=int, help="generators that share the requests; default: 1")
    parser.set_defaults(handler=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    import asyncio
    import logging

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    return asyncio.run(serve_until_stopped(configure(arguments)))


def configure(arguments: argparse.Namespace) -> PolicyConfig:
    """The configuration that the command line asks for. Overrides win over options, and options over files."""
    return read_policy(arguments, {key: getattr(arguments, name) for name, key in _KEYS.items()}, command="forge serve")


async def serve_until_stopped(config: PolicyConfig) -> int:
    """Serve a configuration's model until SIGINT or SIGTERM, end in order, and return 0.

    The signals are heeded from here on, also while the model is loading. What is wrong with `config` raises first.
    """
    import asyncio
    import signal

    is_asked = False
    work = asyncio.create_task(_work(config))

    def stop() -> None:
        nonlocal is_asked
        is_asked = True
        work.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        await work
    except asyncio.CancelledError:
        if not is_asked:
            raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return 0


async def _work(config: PolicyConfig) -> None:
    import asyncio

    import forge
    from forge.generator.actor import start_policy
    from forge.generator.openai import check_serving, serve_openai
    from forge.models.locate import resolve

    await check_serving(config.serve)
    folder = (await asyncio.to_thread(resolve, config.model)).folder
    # Beside the model, which takes longer.
    loading = asyncio.create_task(asyncio.to_thread(_load_tokenizer, folder, config.generator.chat_template))
    try:
        async with forge.run(config.launcher):
            service = await start_policy(config)
            async with serve_openai(service, config.serve, tokenizer=await loading) as server:
                print(f"Serving {server.model_name} at {server.base_url}", flush=True)
                await asyncio.Event().wait()  # until cancelled
    finally:
        loading.cancel()


def _load_tokenizer(folder: Path | None, template: str | None) -> ChatTokenizer | None:
    from forge.models.tokenizer import ChatTokenizer

    return None if folder is None else ChatTokenizer.load(folder, chat_template=template)
