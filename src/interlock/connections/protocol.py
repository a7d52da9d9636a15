"""One HTTP connection: bounds on what the parser would keep, and replies that leave in one piece."""

from __future__ import annotations

import asyncio
from enum import IntEnum
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, cast
from uuid import uuid4

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from interlock.errors import BadRequest, HeadersTooLarge, InterlockError
from interlock.wire import Problem

if TYPE_CHECKING:
    from interlock.connections.guard import Guard

MAX_HEAD_BYTES: Final = 64 * 1024
"""Request line, headers and trailers together. The parser has no limit of its own."""
FRAMING_PER_BODY_BYTE: Final = 4
"""Chunk sizes and extensions may outweigh the body by this factor. Chunks of one byte, which cost the parser a call
each, exceed it; chunks of two bytes, a line such as `1\\n`, do not."""
DRAIN_BYTES: Final = 64 * 1024 * 1024
"""Read and discarded of a request whose reply is complete. A client that is still sending would see a reset otherwise,
and not the reply that says why its request was refused."""
MOST_PIPELINED: Final = 32
"""Requests parsed ahead of the one being answered. Each costs kilobytes, and one read may bring thousands."""
MOST_GATHERED: Final = 64 * 1024
"""Bytes held back until the current iteration of the loop ends; more are left to the transport's flow control."""


class Gathered:
    """A transport that sends everything written in one iteration of the loop together: the head and the body of a
    reply come in two writes, and each would cost both sides a system call."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._parts: list[bytes] = []
        self._size = 0
        self.written = 0
        """Bytes handed to the transport since the connection was made."""

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
        parts, self.written = self._parts, self.written + self._size
        self._parts, self._size = [], 0
        if parts:
            self._transport.write(b"".join(parts))

    def close(self) -> None:
        self._flush()
        self._transport.close()


class Parsing(IntEnum):
    """The part of a request that the next byte belongs to."""

    NOTHING = 0
    HEAD = 1
    BODY = 2
    """With chunk framing and trailers."""


class _Trailers:
    """Stands in for the list of headers once the head is complete: counts trailers and keeps none. A trailer must not
    become a header of the request either: an application may look for its credential late."""

    def __init__(self) -> None:
        self.room = 0

    def append(self, header: tuple[bytes, bytes]) -> None:
        self.room -= _cost(header)
        if self.room < 0:
            raise httptools.HttpParserError


def _cost(header: tuple[bytes, bytes]) -> int:
    return len(header[0]) + len(header[1]) + 4  # a colon, a space and the end of the line


class Protocol(HttpToolsProtocol):
    """Refuses with the same documents as the application behind it."""

    def __init__(self, *arguments: Any, guard: Guard, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._guard = guard
        self._trailers = _Trailers()
        self.parsing = Parsing.HEAD
        self.since = guard.now
        """When the connection began to wait for what it waits for."""
        self.window_bytes = 0
        """Of the body, since the guard last looked at the rate."""
        self.unsent = (0, 0)
        self.unsent_since = guard.now
        self._body = 0
        self._framing = 0
        """Bytes of this request that are not body."""
        self._run = 0
        """Bytes since the last byte of a body or the end of a request: an unfinished line, or trailers."""
        self._moved = False
        self._drained = 0

    @property
    def busy(self) -> bool:
        """Whether a request has been received whose reply is not complete."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    @property
    def draining(self) -> bool:
        """Whether the reply was complete before the request."""
        return self.parsing is Parsing.BODY and not self.busy

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", Gathered(cast("asyncio.Transport", transport))))
        error = self._guard.admit(self)
        if error is not None:
            self.refuse(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.release(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.parsing is Parsing.NOTHING:
            self.parsing, self.since = Parsing.HEAD, self._guard.now
        self._framing += len(data)
        self._moved = False
        super().data_received(data)
        self._run = 0 if self._moved else self._run + len(data)
        if self.transport.is_closing():
            return
        if self._run > MAX_HEAD_BYTES or self._framing > MAX_HEAD_BYTES + FRAMING_PER_BODY_BYTE * self._body:
            self._refuse_length()
        elif self.draining:
            self._drained += len(data)
            if self._drained > DRAIN_BYTES:
                self._guard.count("unread_body")
                self.transport.close()

    def on_message_begin(self) -> None:
        self.parsing, self.since = Parsing.HEAD, self._guard.now
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        room = MAX_HEAD_BYTES - len(self.url) - sum(map(_cost, self.headers))
        if room < 0 or len(self.pipeline) >= MOST_PIPELINED:
            self._run = MAX_HEAD_BYTES + 1
            raise httptools.HttpParserError
        super().on_headers_complete()
        self._trailers.room, self.headers = room, cast("list[tuple[bytes, bytes]]", self._trailers)
        self.parsing, self.since, self.window_bytes, self._drained = Parsing.BODY, self._guard.now, 0, 0
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False  # the parser reads nothing more of this connection

    def on_body(self, body: bytes) -> None:
        self._moved = True
        self._framing -= len(body)
        self._body += len(body)
        self.window_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._moved = True
        self._framing = self._body = 0
        self.parsing, self.since = Parsing.NOTHING, self._guard.now
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.parsing is not Parsing.HEAD:
            self.since = self._guard.now
        super().on_response_complete()

    def _should_upgrade(self) -> bool:
        return False

    def _unsupported_upgrade_warning(self) -> None:
        """Silent: a stranger could fill the log, and the reply is the one to a request without an upgrade."""

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - the base class' signature
        """Called by the base class for whatever it cannot parse."""
        if self._run > MAX_HEAD_BYTES or self._trailers.room < 0:
            self._refuse_length()
        else:
            self.refuse(BadRequest("This is not an HTTP/1.1 request that can be read."))

    def _refuse_length(self) -> None:
        self._guard.count("head_size")
        self.refuse(
            HeadersTooLarge(
                f"Request line, headers, trailers and chunk framing have more than {MAX_HEAD_BYTES} bytes; send less."
            )
        )

    def refuse(self, error: InterlockError) -> None:
        """Closes the connection, with a reply unless that would get into, or before, the reply to another request."""
        own = self.parsing is Parsing.BODY and not self.pipeline
        if not self.busy or (own and not self.cycle.response_started):
            self.transport.write(_response(error))
        self.transport.close()


def _response(error: InterlockError) -> bytes:
    request_id = uuid4().hex
    body = msgspec.json.encode(
        Problem(
            type=f"urn:interlock:problem:{error.code}",
            title=error.title,
            status=error.status,
            detail=error.detail,
            code=error.code,
            request_id=request_id,
            retry_after_ms=error.extra.get("retry_after_ms"),
        )
    )
    headers = {
        "content-type": "application/problem+json",
        "content-length": str(len(body)),
        "x-request-id": request_id,
        "connection": "close",
        **error.headers,
    }
    lines = "".join(f"{name.lower()}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n{lines}\r\n".encode() + body
