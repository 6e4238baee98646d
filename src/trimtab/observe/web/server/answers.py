"""Answers that all routes give alike: JSON, errors, and what a query says."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from trimtab.base.errors import DataError
from trimtab.record.jsonl import dump_line


def as_json(value: Any, status: int = 200) -> Response:
    return Response(dump_line(value), status, media_type="application/json")


async def http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return as_json({"error": error.detail}, error.status_code)


async def user_error(_: Request, error: Exception) -> Response:
    return as_json({"error": str(error), "kind": type(error).__name__}, 422)


async def gone(_: Request, error: Exception) -> Response:
    assert isinstance(error, OSError)
    return as_json({"error": f"a file cannot be read: {error.strerror}"}, 503)


def number(request: Request, name: str) -> float | None:
    text = request.query_params.get(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise DataError(f"{name}: {text[:40]!r} is not a number") from None
    if not abs(value) < 1e18:
        raise DataError(f"{name}: {text[:40]!r} is not a number")
    return value
