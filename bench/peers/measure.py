"""Runs the peers one after the other. Each round has its own database, which is dropped afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias
from urllib.parse import urlsplit, urlunsplit

import asyncpg
from rich.table import Table

from bench.harness import percentile, spread
from bench.peers import graphile, pgqueuer, procrastinate
from bench.peers.process import Peer, PeerFailed, PeerProcess, started

# Names for the table, also for a peer that cannot run, and the functions that create the peers.
PEERS: dict[str, Callable[[], Awaitable[Peer]]] = {
    "graphile-worker": graphile.peer,
    "pgqueuer": pgqueuer.peer,
    "procrastinate": procrastinate.peer,
}
_STALLED_SECONDS = 60
_DATABASE = "bench_peer"
_WARMING = 100
_TIMED_PER_SECOND = 100

Tables: TypeAlias = "asyncpg.Connection[Any]"


async def measure_peers(
    server: str, tasks: int, figures: dict[str, Any], names: Sequence[str], timed: int = 300
) -> None:
    """Adds one round of each peer to the figures. For a peer that cannot run, adds the reason instead."""
    for name in names:
        known = figures.setdefault(name, {"create": [], "work": [], "whole": [], "latency_ms": []})
        try:
            peer = await PEERS[name]()
            known |= {"name": peer.name, "tasks": min(tasks, peer.max_tasks or tasks), "workers": peer.workers}
            async with _database(server) as url:
                await _round(peer, url, known, timed)
        except PeerFailed as error:
            known["skipped"] = str(error)


@contextlib.asynccontextmanager
async def _database(server: str) -> AsyncIterator[str]:
    connection = await asyncpg.connect(server)
    # Vacuum the dead rows of earlier measurements first, so that no autovacuum runs during the timing.
    await connection.execute("vacuum (skip_locked)")
    await connection.execute(f"drop database if exists {_DATABASE} with (force)")
    await connection.execute(f"create database {_DATABASE}")
    try:
        yield urlunsplit(urlsplit(server)._replace(path=f"/{_DATABASE}"))
    finally:
        await connection.execute(f"drop database {_DATABASE} with (force)")
        await connection.close()


async def _round(peer: Peer, url: str, figures: dict[str, Any], timed: int) -> None:
    count = figures["tasks"]
    tables = await asyncpg.connect(url)
    try:
        async with started(peer, url) as [client]:
            await client.ask("install")
            create = await _seconds(client.ask("create", count))
            work = await _work(peer, url, tables, count)
            whole, latencies = await _whole(peer, url, client, tables, count, timed)
    finally:
        await tables.close()
    for name, seconds in (("create", create), ("work", work), ("whole", whole)):
        figures[name].append(count / seconds)
    figures["latency_ms"].append((percentile(latencies, 0.5), percentile(latencies, 0.99)))


async def _seconds(work: Awaitable[None]) -> float:
    begun = time.perf_counter()
    await work
    return time.perf_counter() - begun


async def _work(peer: Peer, url: str, tables: Tables, count: int) -> float:
    """Returns seconds from the first task a handler saw: as for Interlock, a worker's start-up is not included."""
    async with started(peer, url, peer.workers) as workers:
        for worker in workers:
            await worker.ask("work")
        await _all_ended(peer, workers, tables, count)
        ended = time.perf_counter()
        await _verify(peer, tables, count)
    return ended - min(worker.first_handled_at or ended for worker in workers)


async def _whole(
    peer: Peer, url: str, client: PeerProcess, tables: Tables, count: int, timed: int
) -> tuple[float, list[float]]:
    """Returns seconds from the first creation to the last end, and milliseconds per task at 100 tasks per second."""
    async with started(peer, url, peer.workers) as workers:
        for worker in workers:
            await worker.ask("work")

        async def create_and_work(ended_before: int, verb: str, *numbers: int) -> None:
            await client.ask(verb, *numbers)
            await _all_ended(peer, workers, tables, ended_before + numbers[0])

        await create_and_work(0, "create", _WARMING)
        whole = await _seconds(create_and_work(_WARMING, "create", count))
        await create_and_work(_WARMING + count, "trickle", timed, _TIMED_PER_SECOND)
        await _verify(peer, tables, count + _WARMING + count + timed)
    latencies = [ms for worker in workers for ms in worker.latencies]
    if len(latencies) != timed:
        raise PeerFailed(f"its handlers saw {len(latencies):,} timed tasks, but {timed:,} were created.")
    return whole, latencies


async def _all_ended(peer: Peer, workers: Sequence[PeerProcess], tables: Tables, count: int) -> None:
    """Waits for all tasks. Queries the tables only once every handler has run, so as not to slow the peer down."""
    seen, since = -1, time.perf_counter()
    while (handled := sum(worker.handled for worker in workers)) < count or not await tables.fetchval(peer.idle):
        if any(worker.process.returncode is not None for worker in workers):
            raise PeerFailed("a worker process ended before its work was done; see its output above.")
        if handled != seen:
            seen, since = handled, time.perf_counter()
        elif time.perf_counter() - since > _STALLED_SECONDS:
            raise PeerFailed(f"no progress for {_STALLED_SECONDS} s at {handled:,} of {count:,} tasks.")
        await asyncio.sleep(0.01)


async def _verify(peer: Peer, tables: Tables, count: int) -> None:
    completed = await tables.fetchval(peer.completed) if peer.completed else count
    if completed != count:
        raise PeerFailed(f"its tables show {completed:,} completed tasks, but {count:,} were created.")


def add_peer_rows(table: Table, figures: dict[str, Any], limit: float) -> None:
    """Adds four rows for each peer, in the columns of the kernel's table."""
    for name, known in figures.items():
        table.add_section()
        if "skipped" in known:
            table.add_row(name, f"skipped: {known['skipped']}", "", "")
        if not known["whole"]:
            continue
        processes = "1 worker process" if known["workers"] == 1 else f"{known['workers']} worker processes"
        table.add_row(f"{known['name']}, {known['tasks']:,} tasks, {processes}", "", "", "")
        table.add_row("  create + work, tasks/s", *_rate(known["whole"], limit), "")
        table.add_row("  work alone, tasks/s", *_rate(known["work"], limit), "")
        table.add_row("  create alone, tasks/s", *_rate(known["create"], limit), "")
        p50, p99 = (statistics.median(values) for values in zip(*known["latency_ms"], strict=True))
        table.add_row("  created to handled at 100/s, ms", f"p50 {p50:.1f}, p99 {p99:.1f}", "", "")


def _rate(values: Sequence[float], limit: float) -> tuple[str, str]:
    return spread(values), f"{statistics.median(values) / limit:.2f}"
