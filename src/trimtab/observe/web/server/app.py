"""Routes of the server. All but one read; POST /api/plan computes, and writes nothing either."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from trimtab.base.errors import DataError, TrimtabError
from trimtab.observe.charts import catalogue
from trimtab.observe.web.earlier import findings_at
from trimtab.observe.web.server import judged
from trimtab.observe.web.server.answers import as_json, gone, http_error, number, user_error
from trimtab.observe.web.server.columns import metrics_body
from trimtab.observe.web.server.explorer import explore
from trimtab.observe.web.server.files import plain_file
from trimtab.observe.web.server.looks import Looks
from trimtab.observe.web.server.pages import Pages
from trimtab.observe.web.server.question import parse_question
from trimtab.observe.web.server.samples import KINDS, read_step
from trimtab.observe.web.server.scan import RunTable
from trimtab.observe.web.server.search import Query, parse_cursor, search
from trimtab.observe.web.server.shell import asset, shell
from trimtab.observe.web.server.stream import Poll, live_id, stream
from trimtab.observe.web.server.threads import Threads
from trimtab.record.columns import MAX_STEP
from trimtab.record.jsonl import dump_line
from trimtab.record.layout import TRACE_FILE
from trimtab.record.prometheus import exposition

MAX_STREAMS = 64
MAX_BODY_BYTES = 64 << 10
MAX_COMPARED = 8
TRACE_BLOCK_BYTES = 1 << 20


@dataclass
class Served:
    """What the routes share."""

    table: RunTable
    ended: Callable[[], bool]
    """Whether the server is about to end: uvicorn's own flag."""
    pages: Pages
    looks: Looks
    threads: Threads
    planning: Threads
    streams: int = 0
    """Streams that are open."""


def make_app(root: Path, ended: Callable[[], bool]) -> Starlette:
    looks = Looks()
    served = Served(RunTable(root), ended, Pages(looks), looks, Threads(), Threads(1))

    def bound(handler: Callable[[Served, Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        return partial(handler, served)

    run = "/api/runs/{id}"
    routes = [
        Route("/", bound(_shell)),
        Route("/assets/{name}", bound(_asset)),
        Route("/healthz", bound(_healthz)),
        Route("/metrics", bound(_prometheus)),
        Route("/api/runs", bound(_runs)),
        Route(run, bound(_run)),
        Route(f"{run}/metrics", bound(_metrics)),
        Route(f"{run}/findings", bound(_findings)),
        Route(f"{run}/samples", bound(_samples)),
        Route(f"{run}/search", bound(_search)),
        Route(f"{run}/trace", bound(_trace)),
        Route(f"{run}/events", bound(_events)),
        Route("/api/compare", bound(_compare)),
        Route("/api/plan", bound(_plan), methods=["POST"]),
    ]
    app = Starlette(
        routes=routes, exception_handlers={HTTPException: http_error, TrimtabError: user_error, OSError: gone}
    )
    app.state.served = served
    return app


async def _shell(_: Served, request: Request) -> Response:
    return shell()


async def _asset(_: Served, request: Request) -> Response:
    found = asset(request.path_params["name"], request.headers.get("if-none-match"))
    if found is None:
        raise HTTPException(404, "there is no such file")
    return found


async def _healthz(_: Served, request: Request) -> Response:
    return PlainTextResponse("ok\n")


async def _prometheus(served: Served, request: Request) -> Response:
    def text() -> bytes:
        return exposition(lambda: served.pages.last_rows(served.table.runs()))

    body = await served.threads.run(text)
    return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")


async def _runs(served: Served, request: Request) -> Response:
    found = await served.threads.run(lambda: served.pages.heads(served.table.runs()))
    return as_json({"runs": found, "catalogue": catalogue(), "mode": "serve"})


async def _folder(served: Served, request: Request) -> tuple[str, Path]:
    id = request.path_params["id"]
    return id, await _find(served, id)


async def _find(served: Served, id: str) -> Path:
    folder = await served.threads.run(served.table.find, id)
    if folder is None:
        raise HTTPException(404, "there is no such run")
    return folder


async def _run(served: Served, request: Request) -> Response:
    id, folder = await _folder(served, request)
    return Response(
        await served.threads.run(lambda: dump_line(served.pages.run(id, folder))), media_type="application/json"
    )


async def _metrics(served: Served, request: Request) -> Response:
    _, folder = await _folder(served, request)
    names = request.query_params.get("names")
    first, last = number(request, "from"), number(request, "until")
    points = number(request, "points")

    def body() -> bytes:
        live = live_id(folder)  # before the rows are read: what comes meanwhile is in both, never in none
        wanted, most = names.split(",") if names else None, None if points is None else int(points)
        return served.looks.ask(
            folder, lambda look: metrics_body(look.reader.metrics, wanted, first, last, most, {"live": live})
        )

    return Response(await served.threads.run(body), media_type="application/octet-stream")


async def _findings(served: Served, request: Request) -> Response:
    _, folder = await _folder(served, request)
    step = number(request, "step")
    if step is None or not 0 <= step < MAX_STEP:
        raise DataError("findings: write step=N")
    found = await served.threads.run(served.looks.ask, folder, lambda look: findings_at(look, int(step)))
    return as_json({"findings": found})


async def _samples(served: Served, request: Request) -> Response:
    _, folder = await _folder(served, request)
    kind, step = request.query_params.get("kind") or "train", number(request, "step")
    if kind not in KINDS or step is None or not 0 <= step < MAX_STEP:
        raise DataError("samples: write step=N and kind=train or kind=eval")
    found = await served.threads.run(read_step, folder, served.table.root, kind, int(step))
    if found is None:
        raise HTTPException(404, "no samples were kept of this step")
    return as_json(found)


async def _search(served: Served, request: Request) -> Response:
    _, folder = await _folder(served, request)
    asked = request.query_params
    kind = asked.get("kind") or "all"
    if kind not in (*KINDS, "all"):
        raise DataError("search: write kind=train, kind=eval or kind=all")
    cursor = parse_cursor(asked["cursor"]) if asked.get("cursor") else None
    regex = asked.get("regex", "") not in ("", "0", "false")
    query = Query(asked.get("q", ""), regex, KINDS if kind == "all" else (kind,))
    return as_json(await served.threads.run(search, folder, served.table.root, query, cursor, served.ended))


async def _trace(served: Served, request: Request) -> Response:
    _, folder = await _folder(served, request)
    if request.query_params.get("raw", "") not in ("", "0"):
        path = folder / TRACE_FILE
        if not plain_file(path, served.table.root):
            raise HTTPException(404, "this run has no trace")
        return StreamingResponse(_raw_trace(path), media_type="application/json")
    first, last = number(request, "from"), number(request, "until")
    return as_json(await served.threads.run(judged.trace_of, folder, first, last))


def _raw_trace(path: Path) -> Any:
    """The file as Perfetto reads it: the array that it begins is left open, there as here."""
    with path.open("rb") as file:
        while block := file.read(TRACE_BLOCK_BYTES):
            yield block


async def _events(served: Served, request: Request) -> Response:
    _, folder = await _folder(served, request)
    if served.streams >= MAX_STREAMS:
        raise HTTPException(503, f"{MAX_STREAMS} pages are following runs already; close one")
    after = request.headers.get("last-event-id") or request.query_params.get("from")
    poll = await served.threads.run(Poll, folder, served.table.root, partial(served.looks.state, folder), after)

    async def counted() -> Any:
        served.streams += 1
        try:
            async for message in stream(poll, served.threads, served.ended):
                yield message
        finally:
            served.streams -= 1

    return StreamingResponse(counted(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})


async def _compare(served: Served, request: Request) -> Response:
    ids = list(dict.fromkeys(filter(None, request.query_params.get("runs", "").split(","))))
    if not 1 <= len(ids) <= MAX_COMPARED:
        raise DataError(f"compare: write runs=ID,ID with at most {MAX_COMPARED} runs")
    folders = {id: await _find(served, id) for id in ids}
    return as_json(await served.threads.run(judged.compared, folders))


async def _plan(served: Served, request: Request) -> Response:
    body = bytearray()
    async for block in request.stream():
        body += block
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, "the question is too long")
    try:
        asked = json.loads(bytes(body))
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON") from None
    question = parse_question(asked)
    folder = await _find(served, str(asked.get("run", "")))
    return as_json(await served.planning.run(explore, folder, question))
