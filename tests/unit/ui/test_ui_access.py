"""Who may see a page: tokens, cookies, names of the server, other sites; and the headers of every answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse

from certificates import make_certificates
from forge.errors import ConfigError, DataError, InsecureBindError
from forge.ui.access import HEADERS
from run_folders import write_metrics
from ui_serving import Client, ui_client

BROWSER = {"Accept": "text/html,*/*", "Sec-Fetch-Mode": "navigate"}
Body = Callable[[Client], Awaitable[None]]


def with_ui(folder: Path, body: Body, **options: Any) -> None:
    async def inside() -> None:
        async with ui_client(folder, **options) as client:
            await body(client)

    asyncio.run(inside())


async def fetch(client: Client, path: str, *, method: str = "GET", **headers: str) -> ClientResponse:
    """An answer to a request with these headers alone, `_` for `-`; its body has been read."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"{client.ui.base_url}{path}"
    async with client.http.request(method, url, headers=given, allow_redirects=False, ssl=False) as answer:
        await answer.read()
        return answer


async def cookie_of(client: Client) -> str:
    answer = await fetch(client, f"/?token={client.ui.token}", **BROWSER)
    (morsel,) = SimpleCookie(answer.headers["Set-Cookie"]).values()
    return f"{morsel.key}={morsel.value}"


def refresh_of(text: str) -> str:
    (place,) = re.findall(r'http-equiv="refresh" content="0;url=([^"]*)"', text)
    return str(place)


def test_the_token_becomes_a_cookie_that_scripts_and_other_sites_do_not_get(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        ui = client.ui
        answer = await fetch(client, f"/run/a%20b?view=events&token={ui.token}", **BROWSER)
        assert answer.status == 200
        (morsel,) = SimpleCookie(answer.headers["Set-Cookie"]).values()
        assert morsel.key == f"forge_ui_{ui.port}"
        assert (morsel["httponly"], morsel["samesite"], morsel["path"]) == (True, "Strict", "/")
        assert morsel.value != ui.token
        text = await answer.text()
        assert refresh_of(text) == "/run/a%20b?view=events"
        assert ui.token not in text
        page = await fetch(client, "/run/a%20b?view=events", Cookie=f"{morsel.key}={morsel.value}", **BROWSER)
        assert page.status == 200
        assert '<div id="app">' in await page.text()

    with_ui(tmp_path, body)


@pytest.mark.parametrize(
    "place", ["//evil.example/x", "/%5Cevil.example", "/\\evil.example", "//evil.example/%2e%2e", "/run/..//x"]
)
def test_it_sends_nobody_to_another_server(tmp_path: Path, place: str) -> None:
    async def body(client: Client) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.ui.port)
        request = f"GET {place}?token={client.ui.token} HTTP/1.1\r\nHost: localhost\r\nAccept: text/html\r\n"
        writer.write(f"{request}Connection: close\r\n\r\n".encode())
        text = (await reader.read()).decode()
        writer.close()
        target = refresh_of(text) if "refresh" in text else "/"
        assert target.startswith("/")
        assert target[1:2] not in ("/", "\\")

    with_ui(tmp_path, body)


def test_a_ticket_is_good_once(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        path = client.ui.ticket_url("some/run").removeprefix(client.ui.base_url)
        assert path.startswith("/run/some/run?ticket=")
        wrong = await fetch(client, "/?ticket=wrong", **BROWSER)
        assert (wrong.status, "Set-Cookie" in wrong.headers) == (401, False)
        first, second = await fetch(client, path, **BROWSER), await fetch(client, path, **BROWSER)
        assert (first.status, "Set-Cookie" in first.headers) == (200, True)
        assert (second.status, "Set-Cookie" in second.headers) == (401, False)
        empty = await fetch(client, "/?ticket=", **BROWSER)
        assert empty.status == 401

    with_ui(tmp_path, body)


@pytest.mark.parametrize(
    "path", ["/", "/run/x", "/compare", "/api/runs", "/api/run?run=x", "/api/events", "/assets/x.js", "/no"]
)
def test_nothing_is_shown_without_the_token(tmp_path: Path, path: str) -> None:
    async def body(client: Client) -> None:
        right = await cookie_of(client)
        name, _, value = right.partition("=")
        for headers in (
            {}, {"Cookie": f"{name}={client.ui.token}"}, {"Cookie": f"{name}={value}x"}, {"Cookie": f"other={value}"},
            {"Cookie": f"{name}="}, {"Authorization": "Bearer x"}, {"Authorization": f"Basic {client.ui.token}"},
            {"Authorization": f"Bearer {value}"},
        ):  # fmt: skip
            answer = await fetch(client, path, **headers)
            assert answer.status == 401, headers
            assert (await answer.json())["error"]["code"] == "invalid_token"
            shown = await fetch(client, path, **headers, **BROWSER)
            assert shown.status == 401
            if not path.startswith("/api/"):
                assert "needs its token" in await shown.text()
        answer = await fetch(client, f"{path}{'&' if '?' in path else '?'}token=wrong", **BROWSER)
        assert answer.status == 401

    with_ui(tmp_path, body)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 200), ("localhost:{port}", 200), ("LOCALHOST", 200), ("localhost:9000", 200),
        ("[::1]:8000", 200), ("192.168.1.5", 200), ("my.localhost", 200), ("localhost.", 200),
        ("evil.example:{port}", 421), ("evil.example", 421), ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421), ("", 421), ("localhost@evil.example", 421), ("localhost evil", 421),
        ("[evil", 421), ("xn--80ak6aa92e.com", 421), ("notlocalhost", 421), ("999.1.1.1", 421),
    ],
)  # fmt: skip
def test_a_name_that_is_not_its_own_is_refused(tmp_path: Path, host: str, status: int) -> None:
    async def body(client: Client) -> None:
        given = host.format(port=client.ui.port)
        answer = await fetch(client, "/api/runs", Host=given, Authorization=f"Bearer {client.ui.token}")
        assert answer.status == status
        entered = await fetch(client, f"/?token={client.ui.token}", Host=given, **BROWSER)
        assert ("Set-Cookie" in entered.headers) == (status == 200)

    with_ui(tmp_path, body)


def test_data_goes_to_this_page_alone(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        cookie = await cookie_of(client)
        for site, status in (("same-origin", 200), ("none", 200), ("same-site", 403), ("cross-site", 403), ("x", 403)):
            answer = await fetch(client, "/api/runs", Cookie=cookie, Sec_Fetch_Site=site)
            assert answer.status == status
            assert "Access-Control-Allow-Origin" not in answer.headers
        linked = await fetch(client, "/run/x", Cookie=cookie, Sec_Fetch_Site="cross-site", **BROWSER)
        assert linked.status == 200  # a link to a page is only a link

    with_ui(tmp_path, body)


def test_a_link_on_another_site_comes_again_from_here_because_the_browser_holds_the_cookie_back(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        first = await fetch(client, "/run/x?at=5", Sec_Fetch_Site="cross-site", **BROWSER)
        assert (first.status, refresh_of(await first.text())) == (200, "/run/x?at=5")
        again = await fetch(client, "/run/x?at=5", Sec_Fetch_Site="same-origin", **BROWSER)
        assert again.status == 401

    with_ui(tmp_path, body)


def test_a_request_that_would_change_something_needs_this_page_as_its_origin(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        cookie, own = await cookie_of(client), client.ui.base_url
        for origin in (None, "null", "http://evil.example", own.replace("http", "https"), f"{own}0", own.upper() + "x"):
            headers = {"Cookie": cookie, "Sec_Fetch_Site": "same-origin"} | (
                {} if origin is None else {"Origin": origin}
            )
            answer = await fetch(client, "/api/runs", method="POST", **headers)
            assert (answer.status, (await answer.json())["error"]["code"]) == (403, "cross_origin"), origin
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            answer = await fetch(client, "/api/runs", method=method, Cookie=cookie, Origin=own)
            assert answer.status == 405  # nothing can be changed here
            answer = await fetch(client, "/api/runs", method=method, Authorization=f"Bearer {client.ui.token}")
            assert answer.status == 405

    with_ui(tmp_path, body)


def test_every_answer_has_the_headers(tmp_path: Path) -> None:
    write_metrics(tmp_path, 1)

    async def body(client: Client) -> None:
        key = {"Authorization": f"Bearer {client.ui.token}"}
        text = await (await fetch(client, "/", **key)).text()
        program, style = re.findall(r'(?:src|href)="(/assets/[^"]+)"', text)
        paths = [
            "/",
            "/run/x",
            "/api/runs",
            "/api/run?run=.",
            "/api/metrics?run=.",
            "/no",
            "/api/run?run=no",
            style,
            program,
        ]
        for path in paths:
            answer = await fetch(client, path, **key)
            for name, value in HEADERS.items():
                if name != "Cache-Control" or not path.startswith("/assets/"):
                    assert answer.headers[name] == value, (path, name)
        assert (await fetch(client, program, **key)).headers["Cache-Control"] == "private, max-age=31536000, immutable"
        for path in ("/", "/api/runs"):
            answer = await fetch(client, path, **BROWSER)
            assert answer.headers["Content-Security-Policy"] == HEADERS["Content-Security-Policy"]

    with_ui(tmp_path, body)


def test_the_policy_lets_nothing_run_but_the_servers_own_files() -> None:
    rules = dict(rule.partition(" ")[::2] for rule in HEADERS["Content-Security-Policy"].split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


def test_with_certificates_it_speaks_https_and_the_cookie_is_for_https_alone(tmp_path: Path) -> None:
    make_certificates(tmp_path, {"ui": "IP:127.0.0.1"})

    async def body(client: Client) -> None:
        assert client.ui.base_url.startswith("https://")
        async with client.http.get(client.ui.url(), ssl=False, headers=BROWSER) as answer:
            (morsel,) = SimpleCookie(answer.headers["Set-Cookie"]).values()
        assert (morsel.key, morsel["secure"]) == (f"__Host-forge_ui_{client.ui.port}", True)
        own = client.ui.base_url
        cookie = f"{morsel.key}={morsel.value}"
        refused = await fetch(client, "/api/runs", method="POST", Cookie=cookie, Origin=own.replace("https", "http"))
        assert refused.status == 403
        assert (await fetch(client, "/api/runs", method="POST", Cookie=cookie, Origin=own)).status == 405

    with_ui(tmp_path, body, tls_cert=tmp_path / "ui.crt", tls_key=tmp_path / "ui.key")


def test_off_loopback_it_needs_tls_or_leave(tmp_path: Path) -> None:
    async def nothing(client: Client) -> None:
        raise AssertionError("it was served")

    with pytest.raises(InsecureBindError) as caught:
        with_ui(tmp_path, nothing, host="0.0.0.0")
    assert (caught.value.path, caught.value.value) == ("--host", "0.0.0.0")
    assert "--tls-cert" in str(caught.value.repair)

    async def reach(client: Client) -> None:
        assert client.ui.base_url.startswith("http://127.0.0.1:")
        assert (await client.get("/api/runs"))["runs"] == []

    with_ui(tmp_path, reach, host="0.0.0.0", insecure=True)


def test_what_cannot_be_served_is_named(tmp_path: Path) -> None:
    async def nothing(client: Client) -> None:
        raise AssertionError("it was served")

    async def twice(client: Client) -> None:
        async with ui_client(tmp_path, port=client.ui.port):
            raise AssertionError("it was served")

    with pytest.raises(DataError) as missing:
        with_ui(tmp_path / "no", nothing)
    assert (missing.value.path, missing.value.value) == ("RUNS_DIR", str(tmp_path / "no"))
    with pytest.raises(ConfigError) as taken:
        with_ui(tmp_path, twice)
    assert taken.value.path == "--port"
    for port in (-1, 70000):
        with pytest.raises(ConfigError) as wrong:
            with_ui(tmp_path, nothing, port=port)
        assert (wrong.value.path, wrong.value.value) == ("--port", port)
    with pytest.raises(ConfigError) as host:
        with_ui(tmp_path, nothing, host="192.0.2.1", insecure=True)
    assert host.value.path == "--host"
    (tmp_path / "x.pem").write_text("nonsense")
    with pytest.raises(ConfigError) as half:
        with_ui(tmp_path, nothing, tls_cert=tmp_path / "x.pem")
    assert half.value.path == "--tls-key"
    with pytest.raises(ConfigError) as bad:
        with_ui(tmp_path, nothing, tls_cert=tmp_path / "x.pem", tls_key=tmp_path / "x.pem")
    assert bad.value.path == "--tls-cert"
    assert bad.value.rule == "PEM files: --tls-cert a certificate, --tls-key its private key"
