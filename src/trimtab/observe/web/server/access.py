"""Who may ask, and what a browser may do with the answer.

- A browser that another site has sent here under its own name (DNS rebinding) is refused: `Host` must be an address or a name
  that is known. No name service can answer for an address.
- Beyond this machine a token is needed: in the address once, which sets a cookie, or as `Authorization: Bearer TOKEN`.
- POST is for pages of this server alone: another page's `Origin` is refused, and so is a body that is not JSON.
- Nothing is shared with other origins; scripts and styles come from files of this server, never from a page's text.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin-allow-popups",  # Perfetto is handed a trace in a tab of its own
}
OPEN_PATHS = ("/healthz",)
"""Answered without a token: they say nothing about runs."""
LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")
COOKIE_AGE_S = 30 * 24 * 3600


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    if host.lower() in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def known_names(host: str, more: Iterable[str] = ()) -> frozenset[str]:
    """Names that a browser may know this server by."""
    own = () if is_loopback(host) else (socket.gethostname(), socket.getfqdn())
    return frozenset(name.lower().rstrip(".") for name in (*LOOPBACK_NAMES, host, *own, *more))


def new_token() -> str:
    return secrets.token_urlsafe(24)


class AccessGuard:
    """Refuses what may not ask, before any route sees it."""

    def __init__(self, app: ASGIApp, names: frozenset[str], token: str | None, port: int) -> None:
        self.app, self.names, self.token = app, names, token
        self.cookie = f"trimtab_{port}"  # cookies are shared by all ports of a host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        answer = self._refusal(scope, headers) or self._token_answer(scope, headers)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    added.setdefault(name, value)
                added.setdefault("cache-control", "no-store")
            await send(message)

        await (answer or self.app)(scope, receive, sending)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._known(hosts[0]):
            text = "This server does not answer to that name. Start it with --allow-host NAME, or use its address.\n"
            return PlainTextResponse(text, 421)
        if scope["method"] in ("GET", "HEAD"):
            return None
        if scope["method"] != "POST":
            return PlainTextResponse("Nothing can be changed here.\n", 405, {"allow": "GET, HEAD"})
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
        if (origin is not None and urlsplit(origin).netloc != hosts[0]) or site not in ("same-origin", "none"):
            return PlainTextResponse("A page of another origin asked; only pages of this server may.\n", 403)
        if headers.get("content-type", "").split(";")[0].strip() != "application/json":
            return PlainTextResponse("Send JSON, as application/json.\n", 415)
        return None

    def _known(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if not set(host) & set("/@?#\\ \t"):
                ipaddress.ip_address(name)
                return True
        except ValueError:
            return name.rstrip(".") in self.names
        return False

    def _token_answer(self, scope: Scope, headers: Headers) -> Response | None:
        """None where the token is not needed, or was shown."""
        if self.token is None or scope["path"] in OPEN_PATHS:
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        asked = [value for name, value in query if name == "token"]
        if asked and scope["method"] != "POST" and self._right(asked[-1]):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            # Only this server's own paths: //other.example would be another site.
            path = "/" + scope["path"].lstrip("/")
            answer = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
            answer.set_cookie(self.cookie, self.token, max_age=COOKIE_AGE_S, path="/", httponly=True, samesite="strict")
            return answer
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        if (kind.lower() == "bearer" and self._right(bearer)) or self._right(self._held(headers)):
            return None
        return PlainTextResponse("Open the address that `trimtab serve` has printed: it has a token in it.\n", 401)

    def _held(self, headers: Headers) -> str:
        try:
            held = SimpleCookie("; ".join(headers.getlist("cookie"))).get(self.cookie)
        except CookieError:
            return ""
        return held.value if held else ""

    def _right(self, shown: str) -> bool:
        return self.token is not None and secrets.compare_digest(shown.strip().encode(), self.token.encode())
