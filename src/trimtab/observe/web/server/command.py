"""`trimtab serve`: checks what it was given, opens the port, and serves until Ctrl-C.

Ctrl-C ends it within a second, whatever pages are open: streams look at uvicorn's own flag, and work that takes longer is in
threads that end with the process."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trimtab.base.errors import ConfigError, Problem

TOKEN_VARIABLE = "TRIMTAB_SERVE_TOKEN"
MIN_TOKEN_CHARACTERS = 16
END_SECONDS = 1
"""Answers that are under way when the server is stopped have so long."""


def refuse_without_packages() -> None:
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        what = f"the {error.name} package is not installed"
        raise ConfigError([Problem("trimtab serve", what, "Install it with: pip install 'trimtab[serve]'")]) from error


def serve(
    root: Path, host: str, port: int, allow_hosts: Sequence[str] = (), tell: Callable[[str], Any] = print
) -> None:
    """Serve the runs in a folder until somebody stops it."""
    refuse_without_packages()
    import uvicorn

    from trimtab.observe.web.server.access import AccessGuard, is_loopback, known_names
    from trimtab.observe.web.server.app import make_app

    server: uvicorn.Server | None = None
    app = make_app(root, lambda: server is not None and server.should_exit)
    token = None if is_loopback(host) else _token()
    with listen(host, port) as listening:
        port = listening.getsockname()[1]
        guarded = AccessGuard(app, known_names(host, allow_hosts), token, port)
        config = uvicorn.Config(
            guarded, log_level="warning", access_log=False, lifespan="off", server_header=False, proxy_headers=False,
            timeout_graceful_shutdown=END_SECONDS, ws="none",
        )  # fmt: skip
        server = uvicorn.Server(config)
        runs = len(app.state.served.table.runs())
        tell(f"{runs:,} run{'s' * (runs != 1)} in {root}")
        tell(f"serving at {address(host, port, token)}")
        if token is not None:
            tell("Whoever has this address sees all of it; it goes over the network without encryption.")
        tell("Ctrl-C ends it; runs go on.")
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again when it has ended
            server.run(sockets=[listening])


def _token() -> str:
    """Random, or the one that a variable sets, for whoever has to write it down, as Prometheus' config does."""
    from trimtab.observe.web.server.access import new_token

    given = os.environ.get(TOKEN_VARIABLE)
    if given is not None and len(given) < MIN_TOKEN_CHARACTERS:
        what = f"has {len(given)} characters"
        raise ConfigError([Problem(TOKEN_VARIABLE, what, f"Write at least {MIN_TOKEN_CHARACTERS}, or unset it")])
    return given or new_token()


def address(host: str, port: int, token: str | None) -> str:
    """What to open in a browser."""
    name = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
    name = f"[{name}]" if ":" in name else name
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; a ConfigError where the port is taken or the host is no address of this machine."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        fix = "Write an address of this machine, such as 127.0.0.1 or 0.0.0.0"
        raise ConfigError([Problem("--host", f"{host!r} is not known: {error}", fix)]) from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(128)
    except OSError as error:
        listening.close()
        what = f"port {port} of {host} cannot be used: {error.strerror}"
        raise ConfigError(
            [Problem("--port", what, f"Write another, such as --port {port + 1}, or 0 for any")]
        ) from error
    return listening
