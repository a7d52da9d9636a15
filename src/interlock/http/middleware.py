"""Middleware: request ids, access metrics and lockout. It records nothing of the request's content."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from functools import cache
from urllib.parse import unquote

import structlog
from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send
from prometheus_client import Counter, Histogram

from interlock.http.connection import peer_of
from interlock.http.problems import PROBLEM_JSON, problem_document
from interlock.http.request_limits import Lockout, too_many_failures
from interlock.telemetry import REQUEST_SECONDS, REQUESTS

_CREDENTIALS = frozenset({b"authorization", b"x-trace-worker-token", b"x-trace-task-capability"})
_JOBS = b"/v1/jobs/"
_SLASH = re.compile(rb"%2f", re.IGNORECASE)
_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def observed(listener: str, lockout: Lockout) -> Callable[[ASGIApp], ASGIApp]:
    """Returns the middleware of a listener. A request keeps its own id if that id is valid."""

    def wrap(app: ASGIApp) -> ASGIApp:
        async def middleware(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != ScopeType.HTTP:
                await app(scope, receive, send)
                return
            _keep_slashes_of_jobs(scope)
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

            peer, credentials = peer_of_scope(scope), _credentials(scope)
            wait = lockout.wait(peer, credentials) if credentials else None
            try:
                if wait is None:
                    await app(scope, receive, send_with_id)
                else:
                    await _refuse(send_with_id, request_id, wait)
            finally:
                if status == 401 and credentials:
                    lockout.failed(peer)
                _count(listener, _route(scope), status, time.perf_counter() - started)

        return middleware

    return wrap


def _keep_slashes_of_jobs(scope: Scope) -> None:
    """Keeps the encoded slash in `/v1/jobs/dag%2Fjob`. Decoded, it would separate two segments of the path."""
    raw: bytes = scope.get("raw_path") or b""
    if raw.startswith(_JOBS) and _SLASH.search(raw):
        segments = raw.partition(b"?")[0].decode("latin-1").split("/")
        scope["path"] = "/".join(unquote(segment).replace("/", "%2F") for segment in segments)


def peer_of_scope(scope: Scope) -> str:
    """The address that failed logins of this request count for."""
    client = scope.get("client")
    return peer_of(client[0]) if client else ""


def _credentials(scope: Scope) -> list[str]:
    return [value.decode("latin-1").strip(" \t") for name, value in scope["headers"] if name in _CREDENTIALS]


async def _refuse(send: Send, request_id: str, wait: float) -> None:
    error = too_many_failures(wait)
    body = problem_document(error, request_id)
    headers = [(b"content-type", PROBLEM_JSON.encode()), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


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
    """Returns the path template, because ids in labels would create one metric per task."""
    return str(scope.get("path_template") or "unmatched")
