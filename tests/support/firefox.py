"""Firefox for tests, driven over WebDriver BiDi, which it speaks by itself. It sees loopback alone."""

from __future__ import annotations

import asyncio
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
OPTIONS = ("--headless", "--no-remote", "--remote-debugging-port=0")
PREFERENCES = {
    "app.update.enabled": False,
    "app.normandy.enabled": False,
    "browser.shell.checkDefaultBrowser": False,
    "browser.startup.homepage_override.mstone": "ignore",
    "datareporting.policy.dataSubmissionEnabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "network.dns.localDomains": "",
    "network.proxy.type": 1,
    "network.proxy.http": "127.0.0.1",
    "network.proxy.http_port": 9,
    "network.proxy.ssl": "127.0.0.1",
    "network.proxy.ssl_port": 9,
    "network.proxy.no_proxies_on": "127.0.0.1",
    "toolkit.telemetry.enabled": False,
}
"""Among them a proxy that is not there, for every host but this one."""
VIOLATIONS = (
    "() => { window.violations = []; "
    "addEventListener('securitypolicyviolation', (event) => window.violations.push(event.violatedDirective)); }"
)


def find_firefox() -> str | None:
    return next(filter(None, map(shutil.which, ("firefox-esr", "firefox"))), None)


class FirefoxPage:
    """One tab. `errors` has whatever its programs complained about."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self._socket = socket
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())
        self._context = ""

    async def begin(self) -> None:
        await self.call("session.new", capabilities={})
        await self.call("session.subscribe", events=["log.entryAdded"])
        await self.call("script.addPreloadScript", functionDeclaration=VIOLATIONS)
        tree = await self.call("browsingContext.getTree")
        self._context = tree["contexts"][0]["context"]

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        return await answer

    async def open(self, url: str, *, width: int = 1280, height: int = 900) -> None:
        viewport = {"width": width, "height": height}
        await self.call("browsingContext.setViewport", context=self._context, viewport=viewport)
        await self.call("browsingContext.navigate", context=self._context, url=url, wait="complete")

    async def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript, a text, a number or a truth; what it throws is raised here."""
        found = await self.call(
            "script.evaluate", expression=expression, target={"context": self._context}, awaitPromise=True
        )
        if found["type"] == "exception":
            raise AssertionError(found["exceptionDetails"]["text"])
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        look = f"if ({expression}) done(1); else setTimeout(look, 15);"
        await self.ask(f"new Promise((done) => {{ const look = () => {{ {look} }}; look(); }})")

    async def press(self, key: str) -> None:
        actions = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        source = {"type": "key", "id": "keys", "actions": actions}
        await self.call("input.performActions", context=self._context, actions=[source])

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._socket.close()

    async def _read(self) -> None:
        async for message in self._socket:
            event = message.json()
            if "id" in event and event["id"] is not None:
                answer = self._answers.pop(event["id"])
                if event["type"] == "error":
                    answer.set_exception(AssertionError(f"{event['error']}: {event['message']}"))
                else:
                    answer.set_result(event["result"])
            elif event.get("method") == "log.entryAdded" and event["params"]["level"] in ("error", "warn"):
                self.errors.append(str(event["params"]["text"]))


@asynccontextmanager
async def open_firefox(folder: Path) -> AsyncIterator[FirefoxPage]:
    """Firefox with one tab, whose profile is in `folder`. It and its children have ended when this is left."""
    program = find_firefox()
    assert program is not None
    profile = folder / "profile"
    profile.mkdir(parents=True)
    texts = [f'user_pref("{name}", {_literal(value)});\n' for name, value in PREFERENCES.items()]
    (profile / "user.js").write_text("".join(texts))
    process = await asyncio.create_subprocess_exec(
        *bound(program, *OPTIONS, "--profile", str(profile), "about:blank"),
        stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "HOME": str(folder), "MOZ_CRASHREPORTER_DISABLE": "1"},
    )  # fmt: skip
    assert process.stderr is not None
    drain: asyncio.Task[bytes] | None = None
    try:
        async with asyncio.timeout(LIMIT_S), aiohttp.ClientSession() as session:
            async for line in process.stderr:
                if b"WebDriver BiDi listening on ws://" in line:
                    address = line.split(b"ws://")[1].decode().strip()
                    break
            else:
                raise AssertionError("Firefox ended before it listened")
            drain = asyncio.create_task(process.stderr.read())
            page = FirefoxPage(await session.ws_connect(f"ws://{address}/session", max_msg_size=0))
            try:
                await page.begin()
                yield page
            finally:
                await page.close()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if drain is not None:
            await drain


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)
