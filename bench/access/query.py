"""The query service over HTTP, compared with bare warm DuckDB in this process: same files, same number of threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import duckdb
import msgspec

from bench.access.deployment import AccessBench, Held, Steps, Stopwatch
from bench.harness import percentile
from bench.spark.source import Partition, Shape
from bench.spark.transformation import WANTED
from interlock.apps.app import open_app
from interlock.apps.query import query_service
from interlock.query.engine import Engine, Result
from interlock.query.records import Queries
from interlock.query.service import QueryService
from interlock.wire.queries import QueryReply, TaskQuery

ROWS_OF_A_FILE: Final = 250_000
_PROBED_FILES: Final = 24
_MAX_FILES: Final = 60
_NEAR: Final = 0.1
"""Tolerance: share of the target by which the bare query's duration may differ."""
_LOOKS: Final = 6
_WARM: Final = 5
_REST_SECONDS: Final = 0.05
SQL: Final = f"""
select address, date_trunc('hour', block_timestamp) as hour, count(*) as transfers, max(value) as largest
from logs where topic0 = '{WANTED}'
group by address, date_trunc('hour', block_timestamp)
order by transfers desc, largest desc, address
limit 100
"""  # noqa: S608 - a constant of the benchmark
TRIVIAL: Final = "select 1 as one"

MEANWHILE: Final = "record opened, concurrent with the next three"
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
    """The unprotected alternative: one trusted connection that stays open."""

    def __init__(self, files: Sequence[Partition], threads: int, memory_mb: int) -> None:
        self._connection = duckdb.connect(config={"threads": threads, "memory_limit": f"{memory_mb}MiB"})
        paths = ", ".join(f"'{file.path}'" for file in files)
        self._connection.execute(f"create view logs as from read_parquet([{paths}])")
        self._connection.execute("set TimeZone = 'UTC'")

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql).fetchall()

    def milliseconds(self, sql: str, times: int) -> float:
        """Returns the median, by which the sides are compared."""
        return percentile([_timed(lambda: self.ask(sql)) for _ in range(times)], 0.5)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


async def query(site: AccessBench, target_ms: float, pairs: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns milliseconds of both sides, which alternate call by call."""
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
    """Returns the number of files for which the bare query takes the target time. Measured with that many files:
    threads share them, so the time for one file alone is no guide. The feed starts with the probe's files."""
    count = len(probe)
    for _ in range(_LOOKS):
        bare = opened(probe[:count])
        bare.ask(SQL)
        found = bare.milliseconds(SQL, 15)
        if abs(found - target_ms) <= _NEAR * target_ms:
            break
        wanted = min(_MAX_FILES, max(1, round(count * target_ms / found)))
        if wanted == count or wanted > len(probe):
            return wanted
        count = wanted
    return count


_STATEMENTS: Final = {"large": SQL, "trivial": TRIVIAL}


async def _pairs(bare: Bare, asker: Held, sql: str, pairs: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"bare": [], "service": []}
    for number in range(_WARM + pairs):
        # The second side finds the files warmer, so the order alternates. The pause lets each side finish its work
        # after the answer, so that the other does not pay for it.
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


async def _steps(site: AccessBench, asker: Held, sql: str, times: int) -> dict[str, float]:
    """Returns median milliseconds of the service's own steps: the same code in this process, without HTTP."""
    watch = Stopwatch()
    async with open_app(site.settings, process="bench") as parts, query_service(parts) as service:
        assert asker.claim.capability_token
        body = TaskQuery(**asker.client.fence._asdict(), sql=sql)
        for number in range(_WARM + times):
            if number == _WARM:
                watch.seconds.clear()
            with watch.around(STEPS), watch.step("whole"):
                claims = await parts.access.tokens.verify(asker.claim.capability_token)
                await service.ask_as_task(claims, body)
    return {name: _per_query(seconds, times) for name, seconds in watch.seconds.items()}


def _per_query(seconds: Sequence[float], times: int) -> float:
    """Returns the median per query. A step that runs twice per query counts both times."""
    each = len(seconds) // times
    return percentile([sum(seconds[at : at + each]) for at in range(0, len(seconds), each)], 0.5) * 1000
