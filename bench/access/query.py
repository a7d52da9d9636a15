"""The query service over HTTP beside bare DuckDB, warm, in this process, on the same files with the same threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import duckdb
import msgspec

from bench.access.site import Held, Site, Steps, Stopwatch
from bench.harness import percentile
from bench.spark.source import Partition, Shape
from bench.spark.work import WANTED
from interlock.access.query import Engine, Result
from interlock.api.run_query import query_service
from interlock.kernel.queries import Queries
from interlock.kernel.query_service import QueryService
from interlock.wire import QueryReply, TaskQuery
from interlock.wiring import kernel

ROWS_OF_A_FILE: Final = 250_000
_PROBED_FILES: Final = 24
_MOST_FILES: Final = 60
_NEAR: Final = 0.1
"""As a share of the target: how far the bare query may be from it."""
_LOOKS: Final = 6
_WARM: Final = 5
_REST_SECONDS: Final = 0.05
SQL: Final = f"""
select address, date_trunc('hour', block_timestamp) as hour, count(*) as transfers, max(value) as largest
from logs where topic0 = '{WANTED}'
group by address, date_trunc('hour', block_timestamp)
order by transfers desc, largest desc, address
limit 100
"""  # noqa: S608 - a constant of the benchmark's
TRIVIAL: Final = "select 1 as one"

MEANWHILE: Final = "record opened, beside the next three"
STEPS: Final[Steps] = {
    MEANWHILE: [(Queries, "_insert")],
    "names": [(QueryService, "_resolved")],
    "fork": [(Engine, "_begun")],
    "confine, parse, judge": [(Engine, "_judged")],
    "plan": [(Engine, "_planned")],
    "run": [(Result, "begin"), (QueryService, "_rows")],
    "record closed": [(Queries, "close")],
}


class Bare:
    """What somebody would have who is trusted: one connection that stays open."""

    def __init__(self, files: Sequence[Partition], threads: int, memory_mb: int) -> None:
        self._connection = duckdb.connect(config={"threads": threads, "memory_limit": f"{memory_mb}MiB"})
        paths = ", ".join(f"'{file.path}'" for file in files)
        self._connection.execute(f"create view logs as from read_parquet([{paths}])")
        self._connection.execute("set TimeZone = 'UTC'")

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql).fetchall()

    def milliseconds(self, sql: str, times: int) -> float:
        """The median, which is what the sides are compared by."""
        return percentile([_timed(lambda: self.ask(sql)) for _ in range(times)], 0.5)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


async def query(site: Site, target_ms: float, pairs: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Milliseconds of both sides, which take turns call by call."""
    settings = site.settings
    probe = await site.pipeline.bring("probe", Shape(_PROBED_FILES, ROWS_OF_A_FILE), say)
    count = _files_for(target_ms, probe, lambda some: Bare(some, settings.query_threads, settings.query_memory_mb))
    files = await site.pipeline.bring("feed", Shape(count, ROWS_OF_A_FILE), say)
    bare = Bare(files, settings.query_threads, settings.query_memory_mb)
    asker = await site.held((await site.pipeline.tasks("ask", count))[0])
    figures: dict[str, Any] = {"files": count, "rows": count * ROWS_OF_A_FILE}
    try:
        figures["large"] = await _pairs(bare, asker, SQL, pairs)
        figures["trivial"] = await _pairs(bare, asker, TRIVIAL, pairs)
        figures["steps"] = {name: await _steps(site, asker, sql, pairs) for name, sql in _STATEMENTS.items()}
    finally:
        asker.client.close()
    return figures


def _files_for(target_ms: float, probe: Sequence[Partition], opened: Callable[[Sequence[Partition]], Bare]) -> int:
    """How many files make the bare query take so long, measured on so many: threads share them out, so that what one
    takes alone says nothing. The feed's first files are the probe's, row by row."""
    count = len(probe)
    for _ in range(_LOOKS):
        bare = opened(probe[:count])
        bare.ask(SQL)
        found = bare.milliseconds(SQL, 15)
        if abs(found - target_ms) <= _NEAR * target_ms:
            break
        wanted = min(_MOST_FILES, max(1, round(count * target_ms / found)))
        if wanted == count or wanted > len(probe):
            return wanted
        count = wanted
    return count


_STATEMENTS: Final = {"large": SQL, "trivial": TRIVIAL}


async def _pairs(bare: Bare, asker: Held, sql: str, pairs: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"bare": [], "service": []}
    for number in range(_WARM + pairs):
        # Whoever is second finds the files warmer: each is, every other time. Neither pays for what the other has left
        # to do after its answer.
        for side in ("bare", "service") if number % 2 else ("service", "bare"):
            await asyncio.sleep(_REST_SECONDS)
            began = time.perf_counter()
            if side == "bare":
                bare.ask(sql)
            else:
                await asker.client.query(sql)
            found[side].append((time.perf_counter() - began) * 1000)
    _require_same(bare.ask(sql), await asker.client.query(sql))
    return {side: times[_WARM:] for side, times in found.items()}


def _require_same(rows: list[tuple[Any, ...]], reply: QueryReply) -> None:
    given = msgspec.json.decode(reply.rows)
    assert [[row[0], row[-1]] for row in rows] == [[row[0], row[-1]] for row in given], "the sides answer differently"


async def _steps(site: Site, asker: Held, sql: str, times: int) -> dict[str, float]:
    """Milliseconds, medians, of the service's own steps: the same code, in this process and without HTTP."""
    watch = Stopwatch()
    async with kernel(site.settings, process="bench") as parts, query_service(parts) as service:
        assert asker.claim.capability_token
        body = TaskQuery(**asker.client.fence._asdict(), sql=sql)
        for number in range(_WARM + times):
            if number == _WARM:
                watch.seconds.clear()
            with watch.around(STEPS), watch.step("whole"):
                claims = await parts.tokens.verify(asker.claim.capability_token)
                await service.ask_as_task(claims, body)
    return {name: _per_query(seconds, times) for name, seconds in watch.seconds.items()}


def _per_query(seconds: Sequence[float], times: int) -> float:
    """A step that a query takes twice counts with both."""
    each = len(seconds) // times
    return percentile([sum(seconds[at : at + each]) for at in range(0, len(seconds), each)], 0.5) * 1000
