"""A direct ASGI route for frequent requests, without the framework between connection and handler.

A handler of the framework serves the same path: it is in the OpenAPI document, and it takes requests with another
spelling of the path. Both call the same function.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

import msgspec
from litestar.datastructures import State
from litestar.types import ASGIApp, Receive, Scope, Send

from interlock.http.parameters import Headers
from interlock.http.problems import PROBLEM_JSON, ended_too_soon, problem_document, refusal, too_large

Answer = Callable[[State, Headers, Callable[[], Awaitable[bytes]]], Awaitable[msgspec.Struct]]
"""Returns the reply to a request. It reads the body itself, once the caller is authenticated."""

_JSON: Final = b"application/json"
_encoder: Final = msgspec.json.Encoder()


class Express(NamedTuple):
    """One method of one path."""

    method: str
    path: str
    status: int
    answer: Answer


def with_express(express: Express, app: ASGIApp) -> ASGIApp:
    async def direct(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != express.path or scope.get("method") != express.method:
            await app(scope, receive, send)
            return
        scope["path_template"] = express.path
        state = scope["litestar_app"].state
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))

        def values(name: str) -> list[str]:
            return headers.get(name, [])

        try:
            limit = state.settings.body_limit_bytes
            reply = await express.answer(state, values, lambda: _body(receive, values("content-length"), limit))
        except Exception as found:  # becomes a problem document, as in the framework's handlers
            error = refusal(found)
            document = problem_document(error, str(scope.get("interlock.request_id", "")))
            extra = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
            await _send(send, error.status, document, [(b"content-type", PROBLEM_JSON.encode()), *extra])
        else:
            await _send(send, express.status, _encoder.encode(reply), [(b"content-type", _JSON)])

    return direct


async def _body(receive: Receive, declared: Sequence[str], limit: int) -> bytes:
    if declared and declared[0].isdigit() and int(declared[0]) > limit:
        raise too_large()
    parts, size = [], 0
    while True:
        event = await receive()
        if event["type"] != "http.request":
            raise ended_too_soon()
        parts.append(event["body"])
        size += len(event["body"])
        if size > limit:
            raise too_large()
        if not event.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _send(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body, "more_body": False})
