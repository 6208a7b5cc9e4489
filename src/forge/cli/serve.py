"""`forge serve`: a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import argparse
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from forge.cli.chat import add_policy_arguments, read_policy
from forge.log_levels import add_log_flags

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Coroutine
    from pathlib import Path

    from forge.cli.serve_weights import ModelPublisher
    from forge.config import PolicyConfig
    from forge.generator.openai import OpenAIServer
    from forge.models.tokenizer import ChatTokenizer

_KEYS = {
    "host": "serve.host",
    "port": "serve.port",
    "api_key": "serve.api_key",
    "tls_cert": "serve.tls_cert",
    "tls_key": "serve.tls_key",
    "insecure": "serve.insecure",
    "record": "serve.record",
    "model_name": "serve.model_name",
    "access_log": "serve.access_log",
    "update_from": "serve.update_from",
    "follow": "serve.follow_s",
    "num_replicas": "generator.num_replicas",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `serve`."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model to OpenAI's clients",
        description="Start generators and an OpenAI-compatible endpoint in front of them: /v1/chat/completions, "
        "/v1/completions and /v1/models. It prints its address when it is ready. Ctrl-C and SIGTERM let it finish its "
        "requests and end, a second signal ends it at once, and SIGHUP updates the weights.",
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
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate for HTTPS, PEM")
    parser.add_argument("--tls-key", metavar="FILE", help="its private key, PEM")
    parser.add_argument(
        "--insecure", action="store_true", default=None, help="allow plain HTTP on an address other than loopback"
    )
    parser.add_argument("--record", metavar="FILE", help="a .jsonl file to append every exchange to")
    parser.add_argument("--model-name", metavar="NAME", help="name under /v1/models; default: the folder's or run's")
    parser.add_argument("--access-log", metavar="FILE", help="`stdout`, or a file for a JSON line of every request")
    parser.add_argument(
        "--update-from", metavar="FOLDER", help="model or run that weight updates come from; default: the one served"
    )
    parser.add_argument(
        "--follow", metavar="SECONDS", type=float, help="look for newer weights this often, and serve them"
    )
    parser.add_argument("--num-replicas", metavar="N", type=int, help="generators that share the requests; default: 1")
    add_log_flags(parser)
    parser.set_defaults(handler=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    import asyncio

    from forge.observe.logs import logging_where_asked, start_logging

    start_logging("warning")
    config = configure(arguments)
    with logging_where_asked():
        return asyncio.run(serve_until_stopped(config))


def configure(arguments: argparse.Namespace) -> PolicyConfig:
    """The configuration that the command line asks for. Overrides win over options, and options over files."""
    from forge.config import split_words

    options = {key: getattr(arguments, name) for name, key in _KEYS.items()}
    config = read_policy(arguments, options, command="forge serve")
    folders, _ = split_words(arguments.words)
    if folders and config.serve.update_from is None:  # of a run, its newest checkpoint, and not only its last model
        serve = config.serve.model_copy(update={"update_from": folders[0]})
        config = config.model_copy(update={"serve": serve})
    return config


class _Stop:
    """What signals ask for: the first one ends the server in order, and the second at once."""

    def __init__(self) -> None:
        import asyncio

        self.work: asyncio.Task[None] | None = None
        self.server: OpenAIServer | None = None
        self.asked = asyncio.Event()

    def __call__(self) -> None:
        is_first = not self.asked.is_set()
        self.asked.set()
        if self.server is not None and not is_first:
            self.server.hurry()
        elif self.server is None and self.work is not None:
            self.work.cancel()


async def serve_until_stopped(config: PolicyConfig) -> int:
    """Serve a configuration's model until SIGINT or SIGTERM, end in order, and return 0.

    The signals are heeded from here on, also while the model is loading. What is wrong with `config` raises first.
    """
    import asyncio
    import signal

    stop, loop = _Stop(), asyncio.get_running_loop()
    stop.work = asyncio.create_task(_work(config, stop))
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        await stop.work
    except asyncio.CancelledError:
        if not stop.asked.is_set():
            raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return 0


async def _work(config: PolicyConfig, stop: _Stop) -> None:
    import asyncio

    import forge
    from forge.cli.serve_weights import ModelPublisher
    from forge.generator.actor import start_policy
    from forge.generator.openai import check_serving, serve_openai
    from forge.models.locate import resolve
    from forge.observe.monitor import shown_start

    await check_serving(config.serve)
    folder = (await asyncio.to_thread(resolve, config.model)).folder
    # Beside the model, which takes longer.
    loading = asyncio.create_task(asyncio.to_thread(_load_tokenizer, folder, config.generator.chat_template))
    try:
        async with forge.run(config.launcher):
            with shown_start():
                service = await start_policy(config)
            publisher = ModelPublisher(config)
            async with serve_openai(service, config.serve, tokenizer=await loading, publisher=publisher) as server:
                stop.server = server
                async with _updates(config, server, publisher):
                    print(f"Serving {server.model_name} at {server.base_url}", flush=True)
                    await stop.asked.wait()
                if server.num_open:
                    text = f"Finishing {server.num_open} open requests; a second signal ends them at once."
                    print(text, file=sys.stderr, flush=True)
    finally:
        loading.cancel()


@asynccontextmanager
async def _updates(config: PolicyConfig, server: OpenAIServer, publisher: ModelPublisher) -> AsyncIterator[None]:
    """Update the weights on SIGHUP, and whenever there are newer ones if the configuration says so."""
    import asyncio
    import signal

    from forge.cli.serve_weights import follow, update_and_report

    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    def start(work: Coroutine[Any, Any, None]) -> None:
        task = loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    if config.serve.follow_s is not None:
        served = None if config.model.path is None else str(config.model.path)
        start(follow(server, publisher, every_s=config.serve.follow_s, served=served))
    on_terminal = sys.stdin is not None and sys.stdin.isatty()  # there, SIGHUP says that the terminal is gone
    if not on_terminal:
        loop.add_signal_handler(signal.SIGHUP, lambda: start(update_and_report(server)))
    try:
        yield
    finally:
        if not on_terminal:
            loop.remove_signal_handler(signal.SIGHUP)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _load_tokenizer(folder: Path | None, template: str | None) -> ChatTokenizer | None:
    from forge.models.tokenizer import ChatTokenizer

    return None if folder is None else ChatTokenizer.load(folder, chat_template=template)
