"""HTTP connections of one server: limits on their number and memory, timeouts, and responses sent in one piece."""

from __future__ import annotations

import asyncio
import heapq
import ipaddress
from collections import Counter
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final, cast
from uuid import uuid4

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from interlock.errors import BadRequest, HeadersTooLarge, InterlockError, RequestTimeout, TooManyRequests, Unavailable
from interlock.telemetry import CONNECTIONS_REFUSED
from interlock.wire.base import Problem


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of one listener. 0 disables a limit, except for `head_seconds`."""

    head_seconds: float = 10.0
    """Timeout from the connection, or the first byte of a request, to the end of its headers; also of TLS handshakes.
    """
    body_bytes_per_second: int = 256
    body_window_seconds: float = 20.0
    """Window over which the body rate is averaged. Only time in which the server reads counts."""
    reply_stall_seconds: float = 120.0
    """A client that reads no byte of a pending response for this long is disconnected."""
    connections: int = 4096
    per_peer: int = 1024


MAX_HEAD_BYTES: Final = 64 * 1024
"""Maximum size of request line, headers and trailers together. The parser itself has no limit."""
FRAMING_PER_BODY_BYTE: Final = 4
"""Maximum ratio of chunk sizes and extensions to body bytes. Chunks of one byte exceed it, and each costs the parser
a call; chunks of two bytes, for example the line `1\\n`, do not."""
DRAIN_BYTES: Final = 64 * 1024 * 1024
"""Maximum bytes read and discarded after the response to a request is complete. Without this, a client that is still
sending would see a connection reset instead of the response with the reason."""
MAX_PIPELINED: Final = 32
"""Maximum requests parsed ahead of the current one. Each costs kilobytes, and one read may contain thousands."""
MAX_GATHERED: Final = 64 * 1024
"""Maximum bytes buffered until the end of the current loop iteration; flow control of the transport handles more."""


class Gathered:
    """A transport that sends everything written in one iteration of the event loop together.

    uvicorn writes headers and body of a response separately, and each write would cost both sides a system call.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._parts: list[bytes] = []
        self._size = 0
        self.written = 0
        """Bytes passed to the transport since the connection was made."""

    def __getattr__(self, name: str) -> Any:
        """Delegates everything else to the transport."""
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._parts:
            asyncio.get_running_loop().call_soon(self._flush)
        self._parts.append(data)
        self._size += len(data)
        if self._size > MAX_GATHERED:
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
    """Including chunk framing and trailers."""


class _Trailers:
    """Replaces the list of headers once the head is complete: counts trailers and discards them.

    A trailer must never become a header of the request, because an application may read credentials late.
    """

    def __init__(self) -> None:
        self.room = 0

    def append(self, header: tuple[bytes, bytes]) -> None:
        self.room -= _cost(header)
        if self.room < 0:
            raise httptools.HttpParserError


def _cost(header: tuple[bytes, bytes]) -> int:
    return len(header[0]) + len(header[1]) + 4  # colon, space and line end


class Protocol(HttpToolsProtocol):
    """An HTTP protocol that refuses requests with the same problem documents as the application."""

    def __init__(self, *arguments: Any, guard: Guard, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._guard = guard
        self._trailers = _Trailers()
        self.parsing = Parsing.HEAD
        self.since = guard.now
        """Start of the current wait."""
        self.window_bytes = 0
        """Body bytes since the guard last checked the rate."""
        self.unsent = (0, 0)
        self.unsent_since = guard.now
        self._body = 0
        self._framing = 0
        """Bytes of this request outside the body."""
        self._run = 0
        """Bytes since the last body byte or the end of a request: an incomplete line, or trailers."""
        self._moved = False
        self._drained = 0

    @property
    def busy(self) -> bool:
        """True if the response to a received request is not complete."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    @property
    def draining(self) -> bool:
        """True if the response was complete before the request."""
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
        if room < 0 or len(self.pipeline) >= MAX_PIPELINED:
            self._run = MAX_HEAD_BYTES + 1
            raise httptools.HttpParserError
        super().on_headers_complete()
        self._trailers.room, self.headers = room, cast("list[tuple[bytes, bytes]]", self._trailers)
        self.parsing, self.since, self.window_bytes, self._drained = Parsing.BODY, self._guard.now, 0, 0
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False  # the parser stops reading this connection

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
        """Logs nothing: a client could fill the log, and the response is the same as without the upgrade header."""

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - signature of the base class
        """Called by the base class for input that it cannot parse."""
        if self._run > MAX_HEAD_BYTES or self._trailers.room < 0:
            self._refuse_length()
        else:
            self.refuse(BadRequest("This is not a valid HTTP/1.1 request."))

    def _refuse_length(self) -> None:
        self._guard.count("head_size")
        self.refuse(
            HeadersTooLarge(
                f"Request line, headers, trailers and chunk framing exceed {MAX_HEAD_BYTES} bytes; send less."
            )
        )

    def refuse(self, error: InterlockError) -> None:
        """Closes the connection.

        Sends the error first, unless that would interfere with the response to another request.
        """
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


KEEP_ALIVE_SECONDS: Final = 75
_EVICTION_BATCH: Final = 64
"""Finding the connections that have waited longest scans all of them, so one scan makes room for many."""


class Guard:
    """Enforces the limits of one server.

    It uses the time of the server's tick, which is at most 0.1 s old, so that a request needs no clock read.
    """

    def __init__(self, limits: ConnectionLimits, now: float) -> None:
        self.limits = limits
        self.now = now
        self._open: dict[Protocol, str | None] = {}
        """Maps each connection to its peer, or to None without a peer address, for example on a Unix socket."""
        self._peers: Counter[str] = Counter()
        self._swept = now
        self._pause = min(1.0, limits.head_seconds / 4, limits.body_window_seconds / 4)

    def __len__(self) -> int:
        return len(self._open)

    @staticmethod
    def count(reason: str) -> None:
        CONNECTIONS_REFUSED.labels(reason).inc()

    def admit(self, connection: Protocol) -> InterlockError | None:
        """Registers a new connection, or returns the error to refuse it with."""
        peer = peer_of(connection.client[0]) if connection.client else None
        limits = self.limits
        if limits.per_peer and peer is not None and self._peers[peer] >= limits.per_peer:
            self.count("peer_connections")
            return TooManyRequests(
                f"This client has {limits.per_peer} open connections, the limit; close some, or raise "
                "max_connections_per_peer.",
                retry_after=1,
                code="too_many_connections",
            )
        if limits.connections and len(self._open) >= limits.connections and not self._evict():
            self.count("connections")
            return Unavailable(
                f"All {limits.connections} connections are in use; retry later, or raise max_connections.",
                code="too_many_connections",
            )
        self._open[connection] = peer
        if peer is not None:
            self._peers[peer] += 1
        return None

    def release(self, connection: Protocol) -> None:
        """Unregisters a connection. Does nothing for one that was refused."""
        peer = self._open.pop(connection, None)
        if peer is not None:
            self._peers[peer] -= 1
            if not self._peers[peer]:
                del self._peers[peer]

    def _evict(self) -> int:
        """Closes the connections that have waited longest for a request, idle or with incomplete headers.

        An honest client sends its request as soon as it is connected, so at the limit, idle and slow clients make room.
        """
        waiting = [each for each in self._open if not each.busy and each.parsing is not Parsing.BODY]
        oldest = heapq.nsmallest(_EVICTION_BATCH, waiting, key=lambda each: each.since)
        for connection in oldest:
            self.count("evicted")
            self.release(connection)
            connection.transport.abort()
        return len(oldest)

    def tick(self, now: float) -> None:
        self.now = now
        if now - self._swept >= self._pause:
            self._swept = now
            for connection in list(self._open):
                self._check(connection)

    def _check(self, connection: Protocol) -> None:
        self._check_reply(connection)
        if connection.transport.is_closing():
            return
        waited = self.now - connection.since
        if connection.parsing is Parsing.HEAD:
            if connection.busy or connection.flow.read_paused:
                connection.since = self.now  # some clients send a stray newline after a body, then wait
            elif waited > self.limits.head_seconds:
                self._end(connection, "head_timeout", "headers")
        elif connection.draining:
            if waited > self.limits.head_seconds:
                self.count("unread_body")
                connection.transport.close()
        elif connection.parsing is Parsing.BODY:
            self._check_rate(connection, waited)
        elif not connection.busy and waited > KEEP_ALIVE_SECONDS:
            connection.transport.close()

    def _check_rate(self, connection: Protocol, waited: float) -> None:
        """Restarts the window whenever the server does not read, because a client cannot send against backpressure."""
        rate, window = self.limits.body_bytes_per_second, self.limits.body_window_seconds
        enough = connection.window_bytes >= rate * window
        if enough or connection.flow.read_paused or connection.cycle.waiting_for_100_continue:
            connection.since, connection.window_bytes = self.now, 0
        elif waited > window:
            self._end(connection, "body_rate", f"body at {rate} bytes per second")

    def _check_reply(self, connection: Protocol) -> None:
        """Also applies to a closing connection, which waits until the client has read the remaining bytes."""
        unsent = (connection.transport.written, connection.transport.get_write_buffer_size())  # type: ignore[attr-defined]
        if not unsent[1] or unsent != connection.unsent:
            connection.unsent, connection.unsent_since = unsent, self.now
        elif 0 < self.limits.reply_stall_seconds < self.now - connection.unsent_since:
            self.count("reply_stall")
            connection.transport.abort()

    def _end(self, connection: Protocol, reason: str, missing: str) -> None:
        self.count(reason)
        connection.refuse(RequestTimeout(f"The request did not arrive in time: its {missing} did not arrive."))


@lru_cache(4096)
def peer_of(host: str) -> str:
    """Returns the unit for counting: a whole /64 network for IPv6, because one client can use all its addresses."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
