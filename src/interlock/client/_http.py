"""A minimal HTTP/1.1 client over keep-alive connections, for the hot path of a worker.

A worker makes hundreds of small calls per second in addition to its work, so the cost of one call matters.
General-purpose clients use three to ten times the CPU time for the same exchange. httptools parses the replies (the
servers use it, too); this module adds a pool of idle connections. It has no redirects, cookies, proxies or compression.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import NamedTuple, Self, cast
from urllib.parse import urlsplit

import httptools

IDLE_SECONDS = 4.0
"""Servers commonly close a connection after five idle seconds. A call must not race with that."""
CONNECT_SECONDS = 10.0


_FIRST_FAILURE = 300

Take = Callable[[bytes], object]


class Reply(NamedTuple):
    status: int
    body: bytes
    retry_after: str | None


class NotSent(ConnectionError):
    """No connection was established. The server has not seen the request, so any call may be retried."""


class BrokenExchange(ConnectionError):
    """The connection broke or timed out before the reply was complete."""


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[Reply] | None = None
        self._body: list[bytes] = []
        self._retry_after: str | None = None
        self._take: Take | None = None
        self.idle_since = 0.0
        self.usable = False

    async def exchange(self, request: bytes, timeout: float, take: Take | None = None) -> Reply:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Reply] = loop.create_future()
        self._waiter = waiter
        self.usable, self._body, self._retry_after, self._take = False, [], None, take
        self._transport.write(request)
        alarm = loop.call_later(timeout, self._fail, f"no reply within {timeout:g} s")
        try:
            return await waiter
        except asyncio.CancelledError:
            self.usable = False  # the reply may arrive together with the cancellation
            raise
        finally:
            alarm.cancel()
            self._waiter = None
            if not self.usable:
                self.close()

    def close(self) -> None:
        self._transport.close()

    def _fail(self, reason: str) -> None:
        self.usable = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(BrokenExchange(reason))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._waiter is None:
            # No request is pending. Discard the data, so that it is not taken for the reply to the next request.
            self.usable = False
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the reply is not HTTP ({error})")

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(str(exc) if exc else "the server closed the connection")

    # httptools

    def on_message_begin(self) -> None:
        if self._waiter is None or self._waiter.done():
            self.usable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self._retry_after = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        if self._take is not None and self._parser.get_status_code() < _FIRST_FAILURE:
            self._hand_on(self._take, body)
        else:
            self._body.append(body)

    def _hand_on(self, take: Take, body: bytes) -> None:
        if self._waiter is None or self._waiter.done():
            return
        try:
            take(body)
        except Exception as error:  # the caller's own failure: a full disk, a closed pipe
            self.usable = False
            self._waiter.set_exception(error)

    def on_message_complete(self) -> None:
        if self._waiter is None or self._waiter.done():
            return
        self.usable = self._parser.should_keep_alive()
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._waiter.set_result(Reply(self._parser.get_status_code(), body, self._retry_after))


class Http:
    """A pool of connections to one server. It grows with the calls in flight."""

    def __init__(self, url: str, *, verify: ssl.SSLContext | bool = True, headers: dict[str, str]) -> None:
        parts = urlsplit(url.rstrip("/"))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a server address: write http://host:port or https://host:port")
        self._host, self._secure = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        self._prefix = parts.path
        self._tls = _tls(verify) if self._secure else None
        self._head = self._prepare(parts.netloc.rpartition("@")[2], headers)
        self._idle: list[Connection] = []

    def _prepare(self, netloc: str, headers: dict[str, str]) -> bytes:
        """Encodes the header lines that every request shares."""
        lines = {"Host": netloc, "Accept": "application/json", "Content-Type": "application/json"} | headers
        for name, value in lines.items():
            refuse_line_breaks(name, value)
        return "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode("latin-1")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def exchange(
        self,
        method: str,
        target: str,
        body: bytes,
        *,
        extra: str = "",
        timeout: float,
        fresh: bool = False,
        take: Take | None = None,
    ) -> Reply:
        """Sends one request and returns its reply.

        `fresh` opens a new connection: a pooled one may be closed already, and a call that must not be repeated cannot
        be retried. `take` receives the body of a successful reply as it arrives; the body is then not kept.
        """
        line = f"{method} {self._prefix}{target} HTTP/1.1\r\n{extra}Content-Length: {len(body)}\r\n"
        request = b"".join((line.encode("latin-1"), self._head, b"\r\n", body))
        connection = None if fresh else self._kept()
        if connection is None:
            connection = await self._connect()
        reply = await connection.exchange(request, timeout, take)
        if connection.usable:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        return reply

    def _kept(self) -> Connection | None:
        oldest = time.monotonic() - IDLE_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.idle_since > oldest:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        except TimeoutError:
            raise NotSent(f"no connection within {CONNECT_SECONDS:g} s") from None
        except ssl.SSLCertVerificationError:
            raise
        except OSError as error:
            raise NotSent(error.strerror or str(error)) from error
        return connection


def refuse_line_breaks(name: str, value: str) -> None:
    """Rejects a header value with a line break, which would start another header."""
    if any(character in value for character in "\r\n\0"):
        raise ValueError(f"{name} must not contain a line break")


def _tls(verify: ssl.SSLContext | bool) -> ssl.SSLContext:
    if isinstance(verify, ssl.SSLContext):
        return verify
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
