"""block_follower for tests: run in a thread or a process, with a reader that copies what events announce."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID, uuid4

import asyncpg
import msgspec

from interlock.wire.attempts import Event, WriteGrant
from interlock.workers import TaskCanceled, TaskContext
from interlock.workers.block_follower.operator import block_follower
from interlock.workers.block_follower.store import table_of
from interlock.workers.protocol import Assignment, Outbound, Work
from tests.support.dev_chain import expected_rows

KINDS = ("blocks", "transactions", "logs")
HERE = Outbound(["127.0.0.1"])
"""Test nodes run on this machine."""
FAST = {"poll_seconds": 0.02, "rpc_patience_seconds": 20}
KEYS = {
    "blocks": ("block_number",),
    "transactions": ("block_number", "transaction_index"),
    "logs": ("block_number", "log_index"),
}


@asynccontextmanager
async def data_database(postgres_url: str) -> AsyncIterator[str]:
    """An empty data database, as in a new installation."""
    name = f"data_{uuid4().hex[:12]}"
    connection = await asyncpg.connect(postgres_url)
    await connection.execute(f"create database {name}")
    yield urlunsplit(urlsplit(postgres_url)._replace(path=f"/{name}"))
    await connection.execute(f"drop database {name} with (force)")
    await connection.close()


class FollowedDatasets:
    """The datasets of one follower, and all events on them."""

    def __init__(self, data_url: str, connection: asyncpg.Connection[Any], kinds: tuple[str, ...] = KINDS) -> None:
        self.data_url, self.connection, self.kinds = data_url, connection, kinds
        self.task_id = uuid4()
        self.datasets = {kind: (uuid4(), uuid4()) for kind in kinds}
        self.events: list[Event] = []
        self.progress: list[str] = []
        self.paused = False
        self.outbound = HERE
        self.before_emit: Callable[[list[Event]], None] = lambda _: None
        self._copies: dict[str, dict[int, list[dict[str, Any]]]] = {kind: {} for kind in kinds}
        self._heard = asyncio.Condition()
        self._loop = asyncio.get_running_loop()
        self._stopped = False
        self._shown = asyncio.Event()

    def version(self, kind: str) -> UUID:
        return self.datasets[kind][1]

    # A follower

    def context(self, attempt: int, **config: Any) -> TaskContext:
        named = {} if self.kinds == KINDS else {"outputs": list(self.kinds)}
        grants = [
            WriteGrant(index, *self.datasets[kind], write_prefix="", buffer_prefix="")
            for index, kind in enumerate(self.kinds)
        ]
        body = msgspec.json.encode(FAST | named | config)
        names = ("dag", "follow")
        work = Work("block_follower", names, None, attempt, body, [], grants, self.data_url, outbound=self.outbound)
        return TaskContext(work, Assignment(1, self.task_id, None, b"null"), _Wire(self))

    async def follow(self, url: str, attempt: int = 1, **config: Any) -> dict[str, Any]:
        """Runs until `end_block`."""
        context = self.context(attempt, rpc_url=url, **config)
        return await asyncio.to_thread(block_follower, None, context)

    @asynccontextmanager
    async def following(self, url: str, attempt: int = 1, **config: Any) -> AsyncIterator[None]:
        """Runs until the context exits."""
        self._stopped = False
        running = asyncio.create_task(self.follow(url, attempt, **config))
        try:
            yield
        finally:
            self._stopped = True
            await asyncio.gather(running, return_exceptions=True)

    def stop_if_told(self) -> None:
        if self._stopped:
            raise TaskCanceled

    # Its reader

    def emit(self, events: list[Event]) -> int:
        """Called in the follower's thread."""
        self.before_emit(events)
        asyncio.run_coroutine_threadsafe(self.hear(events), self._loop).result()
        return len(events)

    async def hear(self, events: list[Event]) -> None:
        """Reads exactly the rows that the events announce as new or rewritten."""
        async with self._heard:
            by_version = {version: kind for kind, (_, version) in self.datasets.items()}
            for event in events:
                kind = by_version[event.dataset_version]
                copy = self._copies[kind]
                if event.cursor is not None:
                    await self._read(kind, max(copy, default=-1) + 1, event.cursor)
                else:
                    assert event.start is not None
                    assert event.end is not None
                    await self._read(kind, event.start, min(event.end, max(copy, default=-1)))
            self.events += events
            self._heard.notify_all()

    async def _read(self, kind: str, first: int, last: int) -> None:
        copy = self._copies[kind]
        for number in range(first, last + 1):
            copy[number] = []
        for row in await self.rows(kind, first, last):
            copy[row["block_number"]].append(row)

    async def heard(self, check: Callable[[], Any]) -> None:
        async with asyncio.timeout(30), self._heard:
            await self._heard.wait_for(check)

    async def reaches(self, cursor: int) -> None:
        """Waits until every output was announced up to the cursor."""
        await self.heard(lambda: all(self.cursor(kind) >= cursor for kind in self.kinds))

    def cursor(self, kind: str) -> int:
        cursors = [event.cursor for event in self.of(kind) if event.cursor is not None]
        return max(cursors, default=-1)

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.dataset_version == self.version(kind)]

    def rewritten(self, kind: str) -> list[tuple[int | None, int | None]]:
        return [(event.start, event.end) for event in self.of(kind) if event.cursor is None]

    def show(self, text: str) -> None:
        """Called in the follower's thread."""
        self.progress.append(text)
        self._loop.call_soon_threadsafe(self._shown.set)

    async def shows(self, text: str, times: int = 1) -> None:
        """Waits until the progress contains the text that many more times."""
        wanted = times + sum(text in line for line in self.progress)
        async with asyncio.timeout(30):
            while sum(text in line for line in self.progress) < wanted:
                self._shown.clear()
                await self._shown.wait()

    # Stored rows

    async def rows(self, kind: str, first: int = 0, last: int = 2**40) -> list[dict[str, Any]]:
        found = await self.connection.fetch(
            f"select * from datasets.{table_of(self.version(kind))} where block_number between $1 and $2"
            f" order by {', '.join(KEYS[kind])}",
            first,
            last,
        )
        return [dict(row) for row in found]

    async def check(self, chain: Any, first: int, last: int, *, in_order: bool = True) -> None:
        """Checks that the tables, and the reader's copy, equal the chain row by row."""
        expected = expected_rows(chain, first, last)
        for kind in self.kinds:
            assert await self.rows(kind) == expected[kind], kind
            copied = [row for number, rows in sorted(self._copies[kind].items()) for row in rows]
            assert copied == expected[kind], f"{kind}, as its reader has it"
            cursors = [event.cursor for event in self.of(kind) if event.cursor is not None]
            assert not in_order or cursors == sorted(cursors)


class _Wire:
    """The worker process around the operator, simulated by the site."""

    def __init__(self, site: FollowedDatasets) -> None:
        self._site = site

    def progress(self, slot: int, fraction: float, text: str | None) -> None:
        self._site.stop_if_told()
        self._site.show(text or "")

    def emit(self, slot: int, events: list[Event]) -> int:
        self._site.stop_if_told()
        return self._site.emit(events)

    def canceled(self, slot: int) -> bool:
        return False

    def paused(self, slot: int) -> bool:
        return self._site.paused


# In a separate process

PROCESS = """
import os, pathlib, signal, sys
import msgspec
from interlock.workers.block_follower.operator import block_follower
from interlock.workers.context import TaskContext, TaskFailed
from interlock.workers.protocol import Assignment, Outbound, Work

work, task, journal, lives, holder = sys.argv[1:]

class Wire:
    emitted = 0
    def progress(self, slot, fraction, text): pass
    def canceled(self, slot): return False
    def paused(self, slot): return False
    def emit(self, slot, events):
        if self.emitted == int(lives):
            os.kill(os.getpid(), signal.SIGKILL)
        self.emitted += 1
        if int(pathlib.Path(holder).read_text()) != work.attempt:
            raise TaskFailed("The attempt was fenced off.", "EmitRefused")
        with open(journal, "ab") as file:
            file.write(msgspec.json.encode(events) + b"\\n")
        return len(events)

work = msgspec.json.decode(work, type=Work)
print(block_follower(None, TaskContext(work, msgspec.json.decode(task, type=Assignment), Wire())), flush=True)
"""
FOREVER = 1_000_000


class Attempt:
    """An attempt in a separate process. It can be set to die at its n-th announcement."""

    def __init__(self, site: FollowedDatasets, process: asyncio.subprocess.Process, journal: Path) -> None:
        self.process, self._site, self._journal = process, site, journal
        self._heard = 0

    def announced(self) -> list[list[Event]]:
        lines = self._journal.read_bytes().splitlines() if self._journal.exists() else []
        return [msgspec.json.decode(line, type=list[Event]) for line in lines]

    async def hear(self) -> None:
        """Passes the announcements since the last call to the reader."""
        announced = self.announced()
        for events in announced[self._heard :]:
            await self._site.hear(events)
        self._heard = len(announced)

    async def ended(self) -> tuple[int, str]:
        async with asyncio.timeout(60):
            out, error = await self.process.communicate()
        return self.process.returncode or 0, (out + error).decode()


def lease(folder: Path, number: int) -> Path:
    """Sets the holder of the lease. Announcements of other attempts are refused, as by a dispatcher."""
    holder, written = folder / "holder", folder / "holder.new"
    written.write_text(str(number))
    return written.replace(holder)


@asynccontextmanager
async def attempt(
    site: FollowedDatasets, folder: Path, number: int, lives: int = FOREVER, **config: Any
) -> AsyncIterator[Attempt]:
    context = site.context(number, **{"poll_seconds": 0.02} | config)
    journal = folder / f"journal-{number}"
    words = [msgspec.json.encode(context._work).decode(), msgspec.json.encode(context._assignment).decode()]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROCESS,
        *words,
        str(journal),
        str(lives),
        str(lease(folder, number)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    started = Attempt(site, process, journal)
    try:
        yield started
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
