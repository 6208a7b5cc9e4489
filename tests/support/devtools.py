"""A real browser for tests, driven through the DevTools protocol. It sees loopback and files alone."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from bound_program import bound

LIMIT_S = 600

OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """One tab. `errors` has whatever its programs complained about, and every request that was not a file."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._socket = socket
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        return await answer

    async def open(self, path: Path | str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a file, or an address."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded.clear()
        await self.call("Page.navigate", url=path if isinstance(path, str) else path.resolve().as_uri())
        await self._loaded.wait()

    async def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript; what it throws is raised here."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression is true; its value. The page may go to another one meanwhile."""
        look = f"const found = ({expression}); if (found) done(found); else setTimeout(look, 15);"
        while True:
            try:
                return await self.ask(f"new Promise((done) => {{ const look = () => {{ {look} }}; look(); }})")
            except AssertionError as error:
                if "navigated" not in str(error) and "context was destroyed" not in str(error):
                    raise

    async def settled(self) -> None:
        """Wait until the browser has drawn what was asked for."""
        await self.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    async def middle(self, selector: str, *, right: float = 0.5) -> tuple[float, float]:
        """A place in an element, `right` of its width from its left edge, after it was scrolled into view."""
        await self.ask(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        await self.settled()
        box = await self.ask(f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()")
        return box["left"] + right * box["width"], box["top"] + box["height"] / 2

    async def mouse(self, kind: str, place: tuple[float, float]) -> None:
        pressed = kind != "mouseMoved"
        button = {"button": "left", "clickCount": 1} if pressed else {}
        await self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], **button)

    async def click(self, selector: str) -> None:
        place = await self.middle(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            await self.mouse(kind, place)
        await self.settled()

    async def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        await self.settled()

    async def picture(self, path: Path, *, whole: bool = False) -> None:
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._socket.close()

    async def _read(self) -> None:
        async for message in self._socket:
            event = message.json()
            if "id" in event:
                self._answer(event)
            else:
                self._notice(event["method"], event["params"])

    def _answer(self, event: dict[str, Any]) -> None:
        answer = self._answers.pop(event["id"])
        if "error" in event:
            answer.set_exception(AssertionError(event["error"]["message"]))
        else:
            answer.set_result(event["result"])

    def _notice(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.errors.append(str([argument.get("value") for argument in parameters["args"]]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])


@asynccontextmanager
async def open_browser(folder: Path) -> AsyncIterator[Page]:
    """A browser with one tab, whose profile is in `folder`. It and its children have ended when this is left."""
    program = find_browser()
    assert program is not None
    process = await asyncio.create_subprocess_exec(
        *bound(program, *OPTIONS, f"--user-data-dir={folder / 'profile'}", "about:blank"),
        stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    drain: asyncio.Task[bytes] | None = None
    try:
        async with asyncio.timeout(LIMIT_S), aiohttp.ClientSession() as session:
            async for line in process.stderr:
                if b"DevTools listening on ws://" in line:
                    address = line.split(b"ws://")[1].split(b"/")[0].decode()
                    break
            else:
                raise AssertionError("the browser ended before it listened")
            drain = asyncio.create_task(process.stderr.read())
            async with session.get(f"http://{address}/json/list") as answer:
                tabs = await answer.json()
            target = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
            page = Page(await session.ws_connect(target, max_msg_size=0))
            try:
                yield page
            finally:
                await page.close()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if drain is not None:
            await drain
