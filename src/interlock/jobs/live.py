"""One live stream for all open pages of an org: computed once per second and process, however many read it.

A stream sends a new overview after each change. It ends with its session, which one statement per tick checks for all
streams of an org.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

import msgspec
import structlog

from interlock.access.sessions import Sessions
from interlock.errors import InterlockError, TooManyRequests
from interlock.jobs.bulk_operations import BulkOperations
from interlock.stores.notifications import Wakeups
from interlock.tasks.overview import Overviews
from interlock.wire.overview import LiveUpdate

log = structlog.get_logger()

TICK_SECONDS: Final = 1.0
MAX_STREAMS: Final = 1_000
"""Open streams of one process."""
_HEARTBEAT_TICKS: Final = 15
_MINUTES: Final = 2
_FAILURES: Final = 5
_OPERATIONS: Final = 20
_NO_TIME: Final = datetime.fromtimestamp(0, UTC)


@dataclass(eq=False)
class _Stream:
    session_id: str
    updates: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(maxsize=1))

    def offer(self, update: bytes | None) -> None:
        """Replaces an update that was not read yet: a slow page skips updates."""
        with contextlib.suppress(asyncio.QueueEmpty):
            self.updates.get_nowait()
        self.updates.put_nowait(update)


@dataclass(eq=False)
class _Channel:
    """The streams of one org, and the task that feeds them while there is one."""

    streams: set[_Stream] = field(default_factory=set)
    task: asyncio.Task[None] | None = None
    newest: bytes | None = None
    shown: LiveUpdate | None = None
    """The content of `newest`, without its time."""


class LiveStreams:
    def __init__(self, overviews: Overviews, operations: BulkOperations, sessions: Sessions, wakeups: Wakeups) -> None:
        self._overviews = overviews
        self._operations = operations
        self._sessions = sessions
        self._wakeups = wakeups
        self._channels: dict[UUID, _Channel] = {}
        self.computed = 0
        """Number of updates that were computed, for all orgs."""

    @property
    def open(self) -> int:
        return sum(len(channel.streams) for channel in self._channels.values())

    @property
    def channels(self) -> int:
        """Number of orgs for which updates are computed."""
        return len(self._channels)

    def require_room(self) -> None:
        if self.open >= MAX_STREAMS:
            raise TooManyRequests(f"This process has {MAX_STREAMS} live streams open; retry later.", retry_after=10)

    async def events(self, org_id: UUID, session_id: str) -> AsyncIterator[bytes]:
        """Yields server-sent events until the session or the process ends."""
        channel = self._channels.setdefault(org_id, _Channel())
        stream = _Stream(session_id)
        channel.streams.add(stream)
        if channel.newest is not None:
            stream.offer(channel.newest)
        if channel.task is None:
            channel.task = asyncio.create_task(self._feed(org_id, channel), name=f"live {org_id}")
        try:
            yield b"retry: 2000\n\n"
            while (update := await stream.updates.get()) is not None:
                yield update
            if not self._wakeups.closed:
                yield _event("end", b'{"code":"session_expired"}')
        finally:
            channel.streams.discard(stream)

    async def _feed(self, org_id: UUID, channel: _Channel) -> None:
        """Computes updates while the channel has streams."""
        tick = 0
        try:
            while channel.streams and not self._wakeups.closed:
                try:
                    await self._tick(org_id, channel, tick)
                except InterlockError as error:  # the pages keep what they show
                    log.warning("live.failed", reason=error.detail)
                tick += 1
                await asyncio.sleep(TICK_SECONDS)
        finally:
            if self._channels.get(org_id) is channel:
                del self._channels[org_id]
            for stream in channel.streams:
                stream.offer(None)

    async def _tick(self, org_id: UUID, channel: _Channel, tick: int) -> None:
        live = await self._sessions.live(sorted({stream.session_id for stream in channel.streams}), org_id)
        for stream in [each for each in channel.streams if each.session_id not in live]:
            channel.streams.discard(stream)
            stream.offer(None)
        if not channel.streams:
            return
        update = await self._update(org_id)
        shown = msgspec.structs.replace(update, overview=msgspec.structs.replace(update.overview, at=_NO_TIME))
        if shown != channel.shown:
            channel.shown, channel.newest = shown, _event("overview", msgspec.json.encode(update))
            for stream in channel.streams:
                stream.offer(channel.newest)
        elif tick % _HEARTBEAT_TICKS == 0:
            for stream in channel.streams:
                stream.offer(b": alive\n\n")

    async def _update(self, org_id: UUID) -> LiveUpdate:
        self.computed += 1
        overview = await self._overviews.overview(org_id, minutes=_MINUTES, failures=_FAILURES)
        return LiveUpdate(overview=overview, operations=await self._operations.running(org_id, _OPERATIONS))


def _event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
