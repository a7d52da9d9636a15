"""All connections of one server: their number, and the timeouts of each."""

from __future__ import annotations

import heapq
import ipaddress
from collections import Counter
from functools import lru_cache
from typing import Final

from interlock.errors import InterlockError, RequestTimeout, TooManyRequests, Unavailable
from interlock.http.connection import Parsing, Protocol
from interlock.http.limits import ConnectionLimits
from interlock.telemetry import CONNECTIONS_REFUSED

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
