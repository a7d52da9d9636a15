"""Request ids, access metrics, and nothing of the request's content."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from functools import cache

import structlog
from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send
from prometheus_client import Counter, Histogram

from interlock.telemetry import REQUEST_SECONDS, REQUESTS

_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def observed(listener: str) -> Callable[[ASGIApp], ASGIApp]:
    """Middleware factory: a request keeps the id it came with, when that is a sane one."""

    def wrap(app: ASGIApp) -> ASGIApp:
        async def middleware(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != ScopeType.HTTP:
                await app(scope, receive, send)
                return
            request_id = _request_id(scope)
            scope["interlock.request_id"] = request_id  # type: ignore[typeddict-unknown-key]
            structlog.contextvars.bind_contextvars(request_id=request_id)
            started, status = time.perf_counter(), 500

            async def send_with_id(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                    message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
                await send(message)

            try:
                await app(scope, receive, send_with_id)
            finally:
                _count(listener, _route(scope), status, time.perf_counter() - started)

        return middleware

    return wrap


def _count(listener: str, route: str, status: int, seconds: float) -> None:
    _requests(listener, route, status).inc()
    _seconds(listener, route).observe(seconds)


@cache
def _requests(listener: str, route: str, status: int) -> Counter:
    return REQUESTS.labels(listener=listener, route=route, status=str(status))


@cache
def _seconds(listener: str, route: str) -> Histogram:
    return REQUEST_SECONDS.labels(listener=listener, route=route)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ID.fullmatch(value):
            return value.decode()
    return os.urandom(16).hex()


def _route(scope: Scope) -> str:
    """The path's template: ids in labels would make a metric per task."""
    return str(scope.get("path_template") or "unmatched")
