"""What operators print: collected per attempt, and sent to the dispatcher in batches.

An attempt that prints nothing costs nothing. If one prints more than the limit, half of the limit is kept from the
beginning. The other half are its latest lines, which the dispatcher replaces by newer ones while the attempt runs.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import structlog

from interlock.errors import Forbidden, InterlockError, NotFound, Unauthenticated
from interlock.failpoints import failpoint
from interlock.wire.logs import CHUNK_BYTES, LETTERS, LogBatch, LogChunk

if TYPE_CHECKING:
    from interlock.client import WorkerClient
    from interlock.workers.claimed_tasks import Held

log = structlog.get_logger()

SHIP_SECONDS: Final = 0.5
TAIL_SECONDS: Final = 2.0
"""Interval at which the latest lines of an attempt that has printed too much are sent."""
PATIENCE_SECONDS: Final = 2.0
"""Longest time that a report of an attempt waits for its log."""
MAX_PER_CALL: Final = 500
LINE_HEAD: Final = 14
"""Bytes of the time and the letter of a line."""
_LETTER: Final = {stream: letter for letter, stream in LETTERS.items()}


class AttemptLog:
    """The lines of one attempt that are not sent yet."""

    def __init__(self, held: Held, limit: int) -> None:
        self.held = held
        self._half = limit // 2
        self._position = 0
        """Bytes printed so far."""
        self._head: list[str] = []
        self._head_at = 0
        self._tail: deque[str] = deque()
        self._tail_bytes = 0
        self._tail_sent = 0.0

    def add(self, stream: str, line: str) -> None:
        at = int(time.time() * 1000)
        for part in line.split("\n"):
            text = f"{at:013d}{_LETTER.get(stream, 'r')}{part}\n"
            size = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
            if self._position + size <= self._half and not self._tail:
                self._head.append(text)
            else:
                self._keep_last(text, size)
            self._position += size

    def _keep_last(self, text: str, size: int) -> None:
        self._tail.append(text)
        self._tail_bytes += size
        while self._tail and self._tail_bytes > self._half:
            self._tail_bytes -= len(self._tail.popleft().encode("utf-8", "replace"))

    def take(self) -> list[LogChunk]:
        """Removes and returns what is due."""
        chunks = self._chunks(self._head, self._head_at)
        self._head_at += sum(len(one.encode("utf-8", "replace")) for one in self._head)
        self._head = []
        now = time.monotonic()
        if self._tail and (self.held.ended or now - self._tail_sent >= TAIL_SECONDS):
            start = max(self._position - self._tail_bytes, self._half)
            chunks += self._chunks(list(self._tail), start)
            self._tail.clear()
            self._tail_bytes, self._tail_sent = 0, now
        return chunks

    @property
    def waiting(self) -> bool:
        return bool(self._head or self._tail)

    def _chunks(self, lines: list[str], start: int) -> list[LogChunk]:
        chunks: list[LogChunk] = []
        part: list[str] = []
        size = 0
        for line in [*lines, ""]:
            length = len(line.encode("utf-8", "replace"))
            if part and (not line or size + length > CHUNK_BYTES):
                chunks.append(self._chunk("".join(part), start))
                start += size
                part, size = [], 0
            part.append(line)
            size += length
        return chunks

    def _chunk(self, text: str, start: int) -> LogChunk:
        held = self.held
        return LogChunk(
            task_id=held.task_id,
            run_id=held.lease.work.run_id,
            attempt=held.attempt,
            lease_token=held.lease_token,
            start=start,
            text=text,
        )


class LogShipper:
    """Sends the logs of a worker's attempts, one call at a time."""

    def __init__(self, client: WorkerClient, limit: int) -> None:
        self._client, self._limit = client, limit
        self._waiting: dict[int, AttemptLog] = {}
        """Attempts with lines to send, by slot."""
        self._sending = asyncio.Lock()
        self._flight: asyncio.Task[None] | None = None

    def printed(self, held: Held, stream: str, line: str) -> None:
        if not self._limit or held.lost:
            return
        if held.log is None:
            held.log = AttemptLog(held, self._limit)
        held.log.add(stream, line)
        self._waiting[held.slot] = held.log

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SHIP_SECONDS)
            await self.run_once()

    async def run_once(self) -> int:
        """Sends all lines that are due. Returns the number of chunks."""
        async with self._sending:
            chunks = [chunk for one in self._waiting.values() for chunk in one.take()]
            self._waiting = {slot: one for slot, one in self._waiting.items() if one.waiting}
            for at in range(0, len(chunks), MAX_PER_CALL):
                await self._send(chunks[at : at + MAX_PER_CALL])
        return len(chunks)

    async def before_reports(self) -> None:
        """Sends the logs of ended attempts before their reports, so that a user who sees the end finds the log.

        A report waits only briefly: the log must not cost an attempt its lease.
        """
        if not self._waiting and not self._sending.locked():
            return
        flight = asyncio.ensure_future(self.run_once())
        await asyncio.wait({flight}, timeout=PATIENCE_SECONDS)
        if flight.done():
            flight.result()

    async def _send(self, chunks: list[LogChunk]) -> None:
        await failpoint("worker.before_logs")
        try:
            await self._client.keep_logs(LogBatch(items=chunks))
        except (Unauthenticated, Forbidden):
            raise
        except NotFound:
            # The dispatcher has an older version.
            self._limit = 0
            log.warning("worker.logs_not_kept", reason="the dispatcher has no endpoint for logs")
        except InterlockError as error:
            log.warning("worker.logs_lost", chunks=len(chunks), code=error.code, reason=error.detail)
