"""HTTP beneath the requests: what cannot be parsed, heads that do not end, and replies that leave in one piece."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, cast
from uuid import uuid4

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from interlock.api.problems import PROBLEM_JSON, problem_document
from interlock.errors import BadRequest, HeadersTooLarge, InterlockError

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together. The parser has no limit of its own: a stranger could fill the memory."""


MOST_GATHERED = 64 * 1024
"""Bytes that are held back until the turn of the loop ends. To slow down who writes more is for the transport."""


class Gathered:
    """A connection on which all that is written in one turn of the loop goes out together: the head of a reply and its
    body come one after the other, and each would cost both sides a system call."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._parts: list[bytes] = []
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        """Everything else about a connection."""
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._parts:
            asyncio.get_running_loop().call_soon(self._flush)
        self._parts.append(data)
        self._size += len(data)
        if self._size > MOST_GATHERED:
            self._flush()

    def _flush(self) -> None:
        parts, self._parts, self._size = self._parts, [], 0
        if parts:
            self._transport.write(b"".join(parts))

    def close(self) -> None:
        self._flush()
        self._transport.close()


class Protocol(HttpToolsProtocol):
    """Refuses in the same form as everything behind it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        gathered = Gathered(cast("asyncio.Transport", transport))
        super().connection_made(cast("asyncio.Transport", gathered))

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_bytes = 0
        self._in_head = False

    def on_message_begin(self) -> None:
        self._head_bytes, self._in_head = 0, True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._head_bytes = MAX_HEAD_BYTES + 1
            raise httptools.HttpParserError
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("")

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - the base class' signature
        """Where the base class ends up with whatever it cannot parse."""
        if self._head_bytes > MAX_HEAD_BYTES:
            error: InterlockError = HeadersTooLarge(
                f"The request line and headers have more than {MAX_HEAD_BYTES} bytes; send less."
            )
        else:
            error = BadRequest("This is not an HTTP/1.1 request that can be read.")
        self.transport.write(_response(error))
        self.transport.close()


def _response(error: InterlockError) -> bytes:
    request_id = uuid4().hex
    body = problem_document(error, request_id)
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        f"content-type: {PROBLEM_JSON}\r\n"
        f"content-length: {len(body)}\r\n"
        f"x-request-id: {request_id}\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode() + body
