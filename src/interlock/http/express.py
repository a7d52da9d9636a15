"""Requests and replies without the framework, for a frequent route: the framework costs 150 µs of CPU per request.

Middleware handles such a route and passes everything else on. A handler of the framework serves the same path: it is in
the OpenAPI document, and it takes requests with another spelling of the path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from litestar.datastructures import State
from litestar.types import Receive, Scope, Send

from interlock.http.problems import PROBLEM_JSON, ended_too_soon, problem_document, refusal, too_large

_JSON: Final = b"application/json"
_encoder: Final = msgspec.json.Encoder()


class ExpressRequest:
    """One HTTP request, and its reply."""

    def __init__(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        scope["path_template"] = path  # for the metrics
        self.state: State = scope["litestar_app"].state
        self._request_id = str(scope.get("interlock.request_id", ""))
        self._receive = receive
        self._send = send
        self._headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            self._headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))

    def header(self, name: str) -> Sequence[str]:
        """Returns all values of a header, by its name in lower case."""
        return self._headers.get(name, [])

    async def body(self, limit: int) -> bytes:
        """Reads the body. Call it once the caller is authenticated."""
        declared = self.header("content-length")
        if declared and declared[0].isdigit() and int(declared[0]) > limit:
            raise too_large()
        parts, size = [], 0
        while True:
            event = await self._receive()
            if event["type"] != "http.request":
                raise ended_too_soon()
            parts.append(event["body"])
            size += len(event["body"])
            if size > limit:
                raise too_large()
            if not event.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def reply(self, status: int, document: msgspec.Struct) -> None:
        await self._reply(status, _encoder.encode(document), [(b"content-type", _JSON)])

    async def refuse(self, found: Exception) -> None:
        """Replies with a problem document, as the framework's handlers do."""
        error = refusal(found)
        extra = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
        document = problem_document(error, self._request_id)
        await self._reply(error.status, document, [(b"content-type", PROBLEM_JSON.encode()), *extra])

    async def _reply(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
