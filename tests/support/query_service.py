"""A query service in the test process: real sockets, real Parquet files, a real data database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import asyncpg
import httpx
import pyarrow as pa
import pyarrow.parquet as pq

from interlock.apps.app import App, with_published_keys
from interlock.apps.process import serve
from interlock.apps.query import query, query_service
from interlock.http.listener import bind, url_of
from interlock.query.service import QueryService
from interlock.schemas import Column, DatasetSchema
from interlock.wire.access import Role
from tests.support.dataset_files import marked, path_of
from tests.support.datasets import claim_of, key_of
from tests.support.system import System, fence, until

BLOCKS = DatasetSchema(
    [Column("block_number", "bigint", nullable=False), Column("miner", "string"), Column("reward", "decimal(38,0)")],
    "block_number",
)
_ARROW = pa.schema(
    [pa.field("block_number", pa.int64(), nullable=False), ("miner", pa.string()), ("reward", pa.decimal128(38, 0))]
)
DAG = """
name: chain
jobs:
  - { name: feed, activation: source, source: { kind: manual }, operator: echo, outputs: [blocks] }
  - name: derive
    operator: echo
    inputs: [{ from: { job: feed, output: blocks } }]
    outputs: [facts]
  - name: hot
    activation: source
    source: { kind: manual }
    operator: echo
    outputs: [{ name: logs, storage: postgres }]
publish:
  blocks: { from: { job: feed, output: blocks } }
  secrets: { from: { job: derive, output: facts }, read_roles: [admin] }
  hot_logs: { from: { job: hot, output: logs } }
"""


def rows_of(start: int, end: int) -> list[dict[str, Any]]:
    return [
        {"block_number": number, "miner": f"miner {number % 3}", "reward": 10**20 + number}
        for number in range(start, end + 1)
    ]


@dataclass
class QuerySystem:
    system: System
    service: QueryService
    url: str
    data_url: str

    async def ask(self, sql: str, *, key: str | None = None, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key or self.system.admin_key}"}
        return await self.system.http.post(f"{self.url}/v1/query", headers=headers, json={"sql": sql} | more)

    async def rows(self, sql: str, **more: Any) -> list[list[Any]]:
        reply = await self.ask(sql, **more)
        assert reply.status_code == 200, reply.text
        found: list[list[Any]] = reply.json()["rows"]
        return found

    async def ask_as(self, claim: dict[str, Any], sql: str, **more: Any) -> httpx.Response:
        headers = {"X-Trace-Task-Capability": claim["capability_token"]}
        body = fence(claim) | {"sql": sql} | more
        return await self.system.http.post(f"{self.url}/v1/task/query", headers=headers, json=body)

    async def record(self, query_id: str) -> dict[str, Any]:
        """Returns the record of a query once it has ended."""

        async def ended() -> dict[str, Any] | None:
            reply = await self.system.user("GET", f"/v1/queries/{query_id}")
            view: dict[str, Any] = reply.json()
            return None if view.get("outcome") == "Running" else view

        found: dict[str, Any] = await until(ended)
        return found

    async def newest(self) -> dict[str, Any]:
        page = (await self.system.user("GET", "/v1/queries?limit=1")).json()
        return await self.record(page["queries"][0]["query_id"])

    async def idle(self) -> None:
        """Waits until no query holds a slot and no query process is left."""

        async def free() -> bool:
            await asyncio.to_thread(lambda: None)
            return self.service.places.running == 0 and self.service.processes == 0

        await until(free)


async def bring(system: System, start: int, end: int, *, commit: bool = True) -> None:
    """Commits a partition of blocks in a real file."""
    claim = await claim_of(system, "chain", "feed")
    grant = claim["task"]["outputs"][0]
    ref = {name: grant[name] for name in ("dataset_uuid", "dataset_version")} | {"start": start, "end": end}
    name = f"blocks_{start}_{end}.parquet"
    facts = marked(grant["write_prefix"], name, BLOCKS, rows=end - start + 1, min=start, max=end)
    pq.write_table(pa.Table.from_pylist(rows_of(start, end), _ARROW), path_of(grant["write_prefix"] + name))
    if commit:
        output = ref | facts | {"min": start, "max": end}
        reply = await system.complete(claim, outputs=[output], events=[ref])
        assert reply.status_code == 200, reply.text
        await system.settle()


async def version_of(system: System, job: str) -> UUID:
    found: UUID = await system.value(
        "select current_version from interlock.datasets where org_id = $1 and job_name = $2", system.org_id, job
    )
    return found


async def reader_of(system: System) -> str:
    return await key_of(system, Role.READER)


async def fill_hot_table(system: System, data_url: str, rows: int) -> None:
    """Writes rows as a follower would."""
    table = f"datasets.dataset_{(await version_of(system, 'hot')).hex}"
    connection = await asyncpg.connect(data_url)
    await connection.execute(f"create table {table} (block_number bigint, topic text, value numeric)")
    await connection.execute(
        f"insert into {table} select n, 'topic ' || n % 2, n * 10::numeric ^ 30 from generate_series(1, $1::int) n",
        rows,
    )
    await connection.close()


@asynccontextmanager
async def querying(system: System, data_url: str, **limits: Any) -> AsyncIterator[QuerySystem]:
    """Starts a query service of the system with its own limits."""
    settings = system.kernel.settings.model_copy(update=limits)
    parts = with_published_keys(replace(system.kernel, settings=settings))
    async with query_service(parts) as service, listening(parts, service) as url:
        yield QuerySystem(system, service, url, data_url)


@asynccontextmanager
async def listening(parts: App, service: QueryService) -> AsyncIterator[str]:
    """Starts a listener of the service and yields its URL."""
    listener = bind("127.0.0.1:0", setting="query")
    stop = asyncio.Event()
    app = query(parts, service)
    serving = asyncio.create_task(serve(app, listener, parts.settings, stop=stop, on_stop=lambda: None))
    yield url_of(listener, parts.settings)
    stop.set()
    await serving
