"""A shorter way for a request that comes by the thousand: no framework between the connection and its handler.

The same path is served by a handler of the framework too: that one stands in the OpenAPI document, and takes whoever
writes the path in another way. Both call the same function, with what they found in the request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

import msgspec
from litestar.types import ASGIApp, Receive, Scope, Send

from interlock.api.auth import Headers
from interlock.api.problems import PROBLEM_JSON, ended_too_soon, problem_document, refusal, too_large
from interlock.wiring import Kernel

Answer = Callable[[Kernel, Headers, Callable[[], Awaitable[bytes]]], Awaitable[msgspec.Struct]]
"""The reply to a request; the body is read when it is asked for, once the caller is known."""

_JSON: Final = b"application/json"
_encoder: Final = msgspec.json.Encoder()


class Express(NamedTuple):
    """One way of one path."""

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
        kernel: Kernel = scope["litestar_app"].state.kernel
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))

        def values(name: str) -> list[str]:
            return headers.get(name, [])

        try:
            limit = kernel.settings.body_limit_bytes
            reply = await express.answer(kernel, values, lambda: _body(receive, values("content-length"), limit))
        except Exception as found:  # each becomes a problem, as it does on the longer way
            error = refusal(found)
            document = problem_document(error, str(scope.get("interlock.request_id", "")))
            told = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
            await _send(send, error.status, document, [(b"content-type", PROBLEM_JSON.encode()), *told])
        else:
            await _send(send, express.status, _encoder.encode(reply), [(b"content-type", _JSON)])

    return direct


async def _body(receive: Receive, announced: Sequence[str], limit: int) -> bytes:
    if announced and announced[0].isdigit() and int(announced[0]) > limit:
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
