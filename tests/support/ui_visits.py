"""Visits to the live page in a real browser, and a run that goes on meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from devtools import Page, open_browser
from forge.observe.jsonl import JsonlSink
from forge.trainer.checkpoint_folder import WriterLock
from forge.ui.server import UiOptions, UiServer, serve_ui
from run_folders import CONFIG
from ui_serving import LIMIT_S, OFTEN_S

Visit = Callable[[Page, UiServer], Awaitable[None]]


def visit(folder: Path, body: Visit, **options: Any) -> None:
    """Run `body` with a browser and a server. Fail for what the page complained about, or asked others for."""

    async def inside() -> None:
        runs = UiOptions(folder, interval_s=OFTEN_S, **options)
        async with asyncio.timeout(LIMIT_S), serve_ui(runs) as ui, open_browser(folder.parent / "browser") as page:
            await body(page, ui)
            assert page.errors == []
            foreign = [url for url in page.requests if not url.startswith((f"{ui.base_url}/", "data:"))]
            assert foreign == []

    asyncio.run(inside())


async def text(page: Page, selector: str) -> str:
    return str(await page.ask(f"document.querySelector({selector!r}).innerText"))


def chart(title: str) -> str:
    return f"document.querySelector('.chart[data-title={json.dumps(title)}]')"


async def set_field(page: Page, selector: str, value: object) -> None:
    await page.ask(
        f"(() => {{ const field = document.querySelector({selector!r}); field.value = {value!r}; "
        "field.dispatchEvent(new Event('input')); field.dispatchEvent(new Event('change')); })()"
    )


@contextmanager
def going(folder: Path, *, max_steps: int = 100) -> Iterator[JsonlSink]:
    """A run that goes on, written by the real sinks and locked as a run locks its folder."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG.format(max_steps=max_steps))
    lock, sink = WriterLock(folder), JsonlSink(folder / "metrics.jsonl")
    try:
        yield sink
    finally:
        sink.close()
        lock.release()
