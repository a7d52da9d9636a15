"""Batches loaded by the sink process, compared with bare COPY and INSERT of the same rows.

The bare side has the rows ready in memory in COPY format. It writes to a table like the sink's, with the same columns
and indexes, on the same server.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

import asyncpg
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from bench.access.deployment import AccessBench, Held, Steps, Stopwatch
from bench.spark.transformation import ARROW, LOGS_PER_BLOCK, rows_of
from interlock.apps.sink import sink as sink_here
from interlock.datasets.buffers import batch, binary_copy
from interlock.datasets.buffers.records import Records
from interlock.datasets.buffers.store import Store
from interlock.stores.objects.directory import DirectoryObjects
from interlock.tasks.postgres_queue import PgQueue

NAMES: Final = ", ".join(field.name for field in ARROW)
_AT_ONCE: Final = 4
"""Number of attempts that publish concurrently."""
_BARE_ROWS: Final = 100_000
"""Rows per bare transaction; this number was the fastest here."""
_json = msgspec.json.Encoder()

STEPS: Final[Steps] = {
    "messages": [(PgQueue, "receive"), (PgQueue, "ack"), (Records, "behind")],
    "read": [(DirectoryObjects, "head"), (DirectoryObjects, "read")],
    "parse, check": [(batch, "read_all")],
    "combine": [(binary_copy, "together")],
    "encode for COPY": [(binary_copy, "_written")],
    "COPY": [(asyncpg.Connection, "copy_to_table")],
    "insert": [(Store, "_merge")],
    "record, event": [(Records, "loaded")],
    "data database, total": [(Store, "load")],
}


@dataclass(frozen=True)
class Layout:
    """The division of rows into batches."""

    name: str
    rows: int
    """Rows per batch."""
    parquet: bool = False

    @property
    def suffix(self) -> str:
        return "parquet" if self.parquet else "jsonl"


LAYOUTS: Final = (
    Layout("jsonl_10k", 10_000),
    Layout("jsonl_1k", 1_000),
    Layout("parquet_10k", 10_000, parquet=True),
)


@dataclass(frozen=True)
class Written:
    """A batch file, and the attempt that publishes it."""

    by: Held
    uri: str
    rows: int


class Loading:
    """One layout: its dataset, the publishing attempts, and the bare table for comparison."""

    def __init__(self, site: AccessBench, layout: Layout, attempts: Sequence[Held], rows: int) -> None:
        self._site, self.layout, self._attempts, self._rows = site, layout, attempts, rows
        self._random = np.random.default_rng(11)
        self._next = 0
        self.seconds: dict[str, list[float]] = {"sink": [], "bare": []}
        self.bytes = 0

    @property
    def table(self) -> str:
        return f"datasets.dataset_{self._attempts[0].grant.dataset_version.hex}"

    async def warm(self) -> None:
        """Warms up both sides. The sink creates its table, and the bare table is created like it."""
        written, copied = await asyncio.to_thread(self._write, self.layout.rows)
        await self._published(written)
        await self._site.data.execute(f"create table {self._bare} (like {self.table} including all)")
        await self._copy(copied)

    @property
    def _bare(self) -> str:
        return f"datasets.bare_{self.layout.name}"

    async def round(self, *, bare_first: bool) -> None:
        written, copied = await asyncio.to_thread(self._write, self._rows)
        if bare_first:
            self.seconds["bare"].append(await self._copy(copied))
        await self._site.data.execute("checkpoint")
        self.seconds["sink"].append(await self._published(written))
        await self._site.data.execute("checkpoint")
        if not bare_first:
            self.seconds["bare"].append(await self._copy(copied))
        await self._require_same()

    async def steps(self) -> dict[str, float]:
        """Returns seconds per step for a backlog, loaded by a sink in this process. Overlapping steps count in full."""
        watch = Stopwatch()
        with self._site.without("sink"):
            written, _ = await asyncio.to_thread(self._write, self._rows)
            publish_ids = await self._publish(written)
            async with sink_here(self._site.settings, wait_seconds=0) as services:
                with watch.around(STEPS), watch.step("whole"):
                    while await services[0].run_once():
                        continue
        await self._loaded(publish_ids)
        return {name: sum(seconds) for name, seconds in watch.seconds.items()}

    # Batches

    def _write(self, count: int) -> tuple[list[Written], list[bytes]]:
        """Writes the batch files, and returns the same rows in the format for the bare side."""
        written, copied, waiting = [], [], []
        for table in self._tables(count):
            written.append(self._file(table))
            waiting.append(table)
            if sum(one.num_rows for one in waiting) >= _BARE_ROWS:
                copied.append(_csv(waiting))
                waiting = []
        return written, copied + ([_csv(waiting)] if waiting else [])

    def _tables(self, count: int) -> Iterator[pa.Table]:
        for start in range(0, count, _BARE_ROWS):
            rows = min(_BARE_ROWS, count - start)
            table = rows_of(self._next, rows, self._random)
            self._next += -(-rows // LOGS_PER_BLOCK)
            for at in range(0, rows, self.layout.rows):
                yield table.slice(at, self.layout.rows)

    def _file(self, table: pa.Table) -> Written:
        by = self._attempts[table.column(0)[0].as_py() // LOGS_PER_BLOCK % len(self._attempts)]
        uri = f"{by.grant.buffer_prefix}{uuid4()}.{self.layout.suffix}"
        path = Path(uri.removeprefix("file://"))
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.layout.parquet:
            pq.write_table(table, path, compression="zstd", store_schema=False)
        else:
            path.write_bytes(_json.encode_lines(table.to_pylist()))
        self.bytes += path.stat().st_size
        return Written(by, uri, table.num_rows)

    # The sink

    async def _published(self, written: Sequence[Written]) -> float:
        """Publishes, and returns the seconds from the first publish to the last loaded batch."""
        return await self._loaded(await self._publish(written))

    async def _publish(self, written: Sequence[Written]) -> list[UUID]:
        queue = iter(written)

        async def one_after_the_other() -> list[UUID]:
            return [await _publish(each) for each in queue]

        found = await asyncio.gather(*(one_after_the_other() for _ in range(_AT_ONCE)))
        return [publish_id for some in found for publish_id in some]

    async def _loaded(self, publish_ids: list[UUID]) -> float:
        open_ = (
            "select exists (select 1 from interlock.buffer_publishes"
            " where publish_id = any($1) and status in ('Pending', 'Loading'))"
        )
        while await self._site.state.fetchval(open_, publish_ids):  # noqa: ASYNC110 - another process loads them
            await asyncio.sleep(0.05)
        row = await self._site.state.fetchrow(
            "select count(*) filter (where status = 'Loaded') as loaded, min(refusal::text) as refusal,"
            " extract(epoch from max(settled_at) - min(published_at))::float8 as seconds"
            " from interlock.buffer_publishes where publish_id = any($1)",
            publish_ids,
        )
        assert row
        assert row["loaded"] == len(publish_ids), row["refusal"]
        seconds: float = row["seconds"]
        return seconds

    # The bare side

    async def _copy(self, parts: Sequence[bytes]) -> float:
        """Returns the seconds on one connection, most of them spent in the server."""
        connection = self._site.data
        columns = ", ".join(f"{field.name} {_TYPES[str(field.type)]}" for field in ARROW)
        insert = (
            f"insert into {self._bare} (org_id, _publish_id, _batch, {NAMES}) select $1, $2, $3, {NAMES} from stage"  # noqa: S608
            " on conflict (org_id, block_number, log_index) do nothing"
        )
        began = time.perf_counter()
        for number, part in enumerate(parts):
            async with connection.transaction():
                await connection.execute(f"create temp table stage ({columns}) on commit drop")
                await connection.copy_to_table("stage", source=io.BytesIO(part), format="csv")
                await connection.execute(insert, self._site_org, uuid4(), number)
        return time.perf_counter() - began

    @property
    def _site_org(self) -> UUID:
        return UUID(int=1)

    async def _require_same(self) -> None:
        counts = [
            await self._site.data.fetchval(f"select count(*) from {table}")  # noqa: S608
            for table in (self.table, self._bare)
        ]
        assert counts[0] == counts[1], f"the sides have different rows: {counts}"


_TYPES: Final = {"int64": "bigint", "int32": "int", "string": "text", "timestamp[us, tz=UTC]": "timestamptz"}


async def _publish(written: Written) -> UUID:
    grant = written.by.grant
    reply = await written.by.client.publish(grant.dataset_uuid, grant.dataset_version, written.uri, written.rows)
    return reply.publish_id


def _csv(tables: Sequence[pa.Table]) -> bytes:
    out = io.BytesIO()
    pa_csv.write_csv(pa.concat_tables(tables), out, pa_csv.WriteOptions(include_header=False))
    return out.getvalue()


async def sink(site: AccessBench, rows: int, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns seconds of both sides, which alternate, for each layout."""
    figures: dict[str, Any] = {"rows": rows}
    for layout in LAYOUTS:
        attempts = await site.attempts(layout.name, _AT_ONCE)
        loading = Loading(site, layout, attempts, rows)
        await loading.warm()
        for number in range(rounds):
            await loading.round(bare_first=bool(number % 2))
            say(f"{layout.name}: sink {loading.seconds['sink'][-1]:.2f} s, bare {loading.seconds['bare'][-1]:.2f} s")
        steps = await loading.steps()
        figures[layout.name] = {**loading.seconds, "steps": steps, "bytes": loading.bytes}
        for attempt in attempts:
            attempt.client.close()
    return figures
