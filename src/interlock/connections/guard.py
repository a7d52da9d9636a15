"""All connections of one server: how many there are, and how long each may wait for its client."""

from __future__ import annotations

import heapq
import ipaddress
from collections import Counter
from functools import lru_cache
from typing import Final

from interlock.connections.limits import ConnectionLimits
from interlock.connections.protocol import Parsing, Protocol
from interlock.errors import InterlockError, RequestTimeout, TooManyRequests, Unavailable
from interlock.telemetry import CONNECTIONS_REFUSED

KEEP_ALIVE_SECONDS: Final = 75
_EVICTED_AT_ONCE: Final = 64
"""Finding the connections that have waited longest takes a look at all: once for many new ones."""


class Guard:
    """Time is what the server's tick says, a tenth of a second old at most: a request need not look at a clock."""

    def __init__(self, limits: ConnectionLimits, now: float) -> None:
        self.limits = limits
        self.now = now
        self._open: dict[Protocol, str | None] = {}
        """By connection, its peer; None where there is none to tell apart, as on a socket of the file system."""
        self._peers: Counter[str] = Counter()
        self._swept = now
        self._pause = min(1.0, limits.head_seconds / 4, limits.body_window_seconds / 4)

    def __len__(self) -> int:
        return len(self._open)

    @staticmethod
    def count(reason: str) -> None:
        CONNECTIONS_REFUSED.labels(reason).inc()

    def admit(self, connection: Protocol) -> InterlockError | None:
        """Counts a new connection, or returns the error to refuse it with."""
        peer = peer_of(connection.client[0]) if connection.client else None
        limits = self.limits
        if limits.most_per_peer and peer is not None and self._peers[peer] >= limits.most_per_peer:
            self.count("peer_connections")
            return TooManyRequests(
                f"This peer has {limits.most_per_peer} connections already; close some, or raise "
                "max_connections_per_peer.",
                retry_after=1,
                code="too_many_connections",
            )
        if limits.most and len(self._open) >= limits.most and not self._evict():
            self.count("connections")
            return Unavailable(
                f"All {limits.most} connections of this listener are in use; come again later, or raise "
                "max_connections.",
                code="too_many_connections",
            )
        self._open[connection] = peer
        if peer is not None:
            self._peers[peer] += 1
        return None

    def release(self, connection: Protocol) -> None:
        """Does nothing for a connection that was refused."""
        peer = self._open.pop(connection, None)
        if peer is not None:
            self._peers[peer] -= 1
            if not self._peers[peer]:
                del self._peers[peer]

    def _evict(self) -> int:
        """Closes those that have waited longest for a request, idle or half sent. An honest client sends its request
        as soon as it is connected, so that at the cap it is the idle and the slow that make room."""
        waiting = [each for each in self._open if not each.busy and each.parsing is not Parsing.BODY]
        oldest = heapq.nsmallest(_EVICTED_AT_ONCE, waiting, key=lambda each: each.since)
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
                connection.since = self.now  # some clients send a stray line end after a body, and then wait
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
        """A window begins anew whenever the server does not read: a client cannot send against backpressure."""
        rate, window = self.limits.body_bytes_per_second, self.limits.body_window_seconds
        enough = connection.window_bytes >= rate * window
        if enough or connection.flow.read_paused or connection.cycle.waiting_for_100_continue:
            connection.since, connection.window_bytes = self.now, 0
        elif waited > window:
            self._end(connection, "body_rate", f"body at {rate} bytes per second")

    def _check_reply(self, connection: Protocol) -> None:
        """Of a connection that is closing, too: that waits until the client has taken what is left."""
        unsent = (connection.transport.written, connection.transport.get_write_buffer_size())  # type: ignore[attr-defined]
        if not unsent[1] or unsent != connection.unsent:
            connection.unsent, connection.unsent_since = unsent, self.now
        elif 0 < self.limits.reply_stall_seconds < self.now - connection.unsent_since:
            self.count("reply_stall")
            connection.transport.abort()

    def _end(self, connection: Protocol, reason: str, missing: str) -> None:
        self.count(reason)
        connection.refuse(RequestTimeout(f"The request did not arrive in time: its {missing} did not come."))


@lru_cache(4096)
def peer_of(host: str) -> str:
    """Addresses that one client may have at will count as one: those of an IPv6 network of 64 bits."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
