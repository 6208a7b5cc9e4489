"""Who may see a page: a browser that was given the token, at an address that is this server's own.

The token is in the address that `forge ui` prints. The browser gets a cookie for it, which scripts cannot read and
other sites cannot send, and its address loses the token. What is checked of every request:

    Host             an address, `localhost`, or a name that the server was given: no name that a stranger's DNS answers
    cookie or token  compared in constant time; both are random numbers of 256 bits
    Sec-Fetch-Site   data goes to this page alone, not to pages of other ports of this machine
    Origin           of a request that changes something: this page
"""

from __future__ import annotations

import hmac
import html
import ipaddress
import re
import secrets
from collections.abc import Iterable
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler
from multidict import MultiDict, MultiMapping

from forge.envs.chat_api.errors import RequestError
from forge.envs.chat_api.listening import admit
from forge.envs.chat_api.requests import bearer_key

API: Final = "/api/"
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_HOST: Final = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(:[0-9]{1,5})?")
_OWN_SITE: Final = ("same-origin", "none")
_MAX_AGE_S: Final = 30 * 24 * 3600


class Access:
    """The secrets of one server, and the check of a request.

    Args:
        names: host names that requests may have, beside addresses and `localhost`.
        port: what the server listens on. Cookies do not know ports, so it is in the cookie's name.
        has_tls: whether the server speaks HTTPS.
    """

    def __init__(self, *, names: Iterable[str] = (), port: int = 0, has_tls: bool = False) -> None:
        self.token = secrets.token_urlsafe(32)
        self._session = secrets.token_urlsafe(32)
        self._ticket: str | None = None
        self._names = frozenset(name.lower().rstrip(".") for name in names)
        self._has_tls = has_tls
        self.cookie = f"{'__Host-' if has_tls else ''}forge_ui_{port}"

    def new_ticket(self) -> str:
        """Return a word that is good for one browser, once. Others can see the command line of the browser that is
        started with it."""
        self._ticket = secrets.token_urlsafe(32)
        return self._ticket

    @web.middleware
    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Pass a request on that may be answered."""
        self._check_host(request)
        is_page = request.method == "GET" and not request.path.startswith(API)
        if is_page and ("token" in request.query or "ticket" in request.query):
            return self._enter(request)
        has_token = _same(bearer_key(request), self.token)
        if not (has_token or _same(request.cookies.get(self.cookie), self._session)):
            return self._refuse(request, is_page=is_page)
        site = request.headers.get("Sec-Fetch-Site", "none")
        if not is_page and site not in _OWN_SITE:
            raise RequestError(
                "Only this page may ask for that.", status=403, kind="permission_error", code="cross_site"
            )
        changes = request.method not in ("GET", "HEAD")
        if changes and not has_token and request.headers.get("Origin") != _origin(request):
            text = "The header Origin must name this page."
            raise RequestError(text, status=403, kind="permission_error", code="cross_origin")
        admit(request)
        return await handler(request)

    def _check_host(self, request: web.Request) -> None:
        given = request.headers.get("Host", "")
        found = _HOST.fullmatch(given.lower())
        if found is None or not self._is_own(found[1].rstrip(".")):
            text = f"This server has no name like {given[:100]!r}: use an address, localhost, or the name of --host."
            raise _forbidden(text, status=421, code="unknown_host")

    def _is_own(self, name: str) -> bool:
        if name == "localhost" or name.endswith(".localhost") or name in self._names:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True

    def _enter(self, request: web.Request) -> web.StreamResponse:
        """Give a browser that has the token the cookie, and send it to the same page without the token.

        It is sent by a page: a browser that comes from another site would not send the cookie after a redirect.
        """
        if _same(request.query.get("ticket"), self._ticket):
            self._ticket = None
        elif not _same(request.query.get("token"), self.token):
            return self._refuse(request, is_page=True)
        admit(request)
        rest = MultiDict((name, value) for name, value in request.query.items() if name not in ("token", "ticket"))
        response = _page(f'<meta http-equiv="refresh" content="0;url={html.escape(_place(request, rest))}">')
        response.set_cookie(
            self.cookie, self._session, path="/", httponly=True, samesite="Strict", secure=self._has_tls,
            max_age=_MAX_AGE_S,
        )  # fmt: skip
        return response

    def _refuse(self, request: web.Request, *, is_page: bool) -> web.StreamResponse:
        if not is_page or "text/html" not in request.headers.get("Accept", ""):
            raise RequestError(
                "The token is missing or wrong: use the address that forge ui printed, or the header "
                "`Authorization: Bearer TOKEN`.",
                status=401, kind="authentication_error", code="invalid_token",
            )  # fmt: skip
        site, mode = request.headers.get("Sec-Fetch-Site"), request.headers.get("Sec-Fetch-Mode")
        if mode == "navigate" and site not in (None, *_OWN_SITE) and "token" not in request.query:
            # A link on another site: the browser holds the cookie back until it comes from here.
            return _page(f'<meta http-equiv="refresh" content="0;url={html.escape(_place(request, request.query))}">')
        return _page(_NO_TOKEN, status=401)


_NO_TOKEN: Final = """<h1>This page needs its token</h1>
<p>Open the address that <code>forge ui</code> printed, which ends in <code>?token=…</code>. This browser then
remembers it until the server ends.</p>"""


def _forbidden(text: str, *, status: int = 403, code: str) -> RequestError:
    return RequestError(text, status=status, kind="permission_error", code=code)


def _page(content: str, *, status: int = 200) -> web.Response:
    text = (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title>TorchForge</title></head>\n<body>\n{content}\n</body>\n</html>\n'
    )
    return web.Response(text=text, content_type="text/html", charset="utf-8", status=status)


def _place(request: web.Request, query: MultiMapping[str]) -> str:
    """Return the address of a request on this server, with another query. It never names another server."""
    return "/" + str(request.rel_url.with_query(query)).lstrip("/\\")


def _origin(request: web.Request) -> str:
    scheme = "https" if request.secure else "http"
    return f"{scheme}://{request.headers.get('Host', '').lower()}"


def _same(given: str | None, secret: str | None) -> bool:
    if given is None or secret is None:
        return False
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), secret.encode())


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers that every answer has."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
