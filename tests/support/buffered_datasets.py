"""Buffered datasets for tests: a producer whose batches are published over HTTP, and a sink in this process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import asyncpg

from interlock.apps.sink import sink
from interlock.clock import Clock
from interlock.processes.loop import Service
from interlock.settings import BUFFER_QUEUE
from tests.support.block_followers import data_database
from tests.support.datasets import claim_of, deploy, job_id
from tests.support.system import System, fence, running

COLUMNS: Final = (
    "id: bigint, name: string, small: smallint, exact: 'decimal(38,4)', ratio: double, good: boolean, "
    "day: date, at: timestamp, local: timestamp_ntz, raw: binary, must: int not null"
)
DAG: Final = """
name: {name}
jobs:
  - name: produce
    activation: source
    source: {{ kind: manual }}
    operator: echo
    outputs:
      - {{ name: rows, storage: buffered, unique_key: [{key}], on_conflict: {on_conflict}, columns: {{ {columns} }} }}
  - name: read
    operator: echo
    inputs: [{{ from: {{ job: produce, output: rows }} }}]
    outputs: [out]
"""


@dataclass
class Depot:
    """A system with both databases, and a sink whose loops run only when the test calls them."""

    system: System
    data_url: str
    services: Sequence[Service]
    data: asyncpg.Connection[Any]

    async def pass_of(self, name: str = "sink") -> int:
        return await next(service for service in self.services if service.name == name).run_once()

    async def drain(self) -> None:
        while await self.pass_of():
            continue

    async def visible(self) -> None:
        """Makes released messages, and those of a dead sink, visible now."""
        await self.system.value(
            "update interlock.queue_messages set visible_at = interlock.clock() where queue = $1", BUFFER_QUEUE
        )

    async def deploy(
        self, name: str, *, on_conflict: str = "nothing", columns: str = COLUMNS, key: str = "id"
    ) -> Dataset:
        await deploy(self.system, DAG.format(name=name, on_conflict=on_conflict, columns=columns, key=key))
        row = await self.system.value(
            "select dataset_version from interlock.dataset_versions where job_id = $1",
            await job_id(self.system, name, "produce"),
        )
        return Dataset(self, name, row)

    async def buffer(self, publish_id: str) -> dict[str, Any]:
        reply = await self.system.user("GET", f"/v1/buffers/{publish_id}")
        assert reply.status_code == 200, reply.text
        view: dict[str, Any] = reply.json()
        return view


@dataclass
class Dataset:
    depot: Depot
    dag: str
    version: UUID

    @property
    def table(self) -> str:
        return f"datasets.dataset_{self.version.hex}"

    async def publish(
        self, content: bytes | Sequence[dict[str, Any]] | None, name: str = "batch.jsonl", count: int | None = None
    ) -> str:
        """Publishes a batch and returns its id. With None, the batch file is missing."""
        claim = await claim_of(self.depot.system, self.dag, "produce")
        return await self.published(claim, content, name, count)

    async def published(
        self,
        claim: dict[str, Any],
        content: bytes | Sequence[dict[str, Any]] | None,
        name: str = "batch.jsonl",
        count: int | None = None,
    ) -> str:
        grant = claim["task"]["outputs"][0]
        data = content if content is None or isinstance(content, bytes) else lines(content)
        uri = grant["buffer_prefix"] + name
        if isinstance(data, bytes):
            write(uri, data)
        rows = count if count is not None else len([line for line in (data or b"").splitlines() if line.strip()])
        body = fence(claim) | {
            "dataset_uuid": grant["dataset_uuid"],
            "dataset_version": grant["dataset_version"],
            "batch_uri": uri,
            "record_count": rows,
        }
        reply = await self.depot.system.attempt("/v1/task/buffer-publish", claim["capability_token"], body)
        assert reply.status_code == 200, reply.text
        publish_id: str = reply.json()["publish_id"]
        return publish_id

    async def rows(self, columns: str = "*") -> list[dict[str, Any]]:
        return [dict(row) for row in await self.depot.data.fetch(f"select {columns} from {self.table} order by id")]

    async def events(self) -> list[int]:
        """Returns the cursors of the emitted events, in order."""
        async with self.depot.system.kernel.stores.database.connection() as connection:
            rows = await connection.fetch(
                "select cursor from interlock.dataset_events where dataset_version = $1 order by event_id", self.version
            )
        return [row["cursor"] for row in rows]


def lines(rows: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write(uri: str, data: bytes) -> Path:
    path = Path(uri.removeprefix("file://"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def is_there(uri: str) -> bool:
    return Path(uri.removeprefix("file://")).exists()


def row(number: int, **more: Any) -> dict[str, Any]:
    return {"id": number, "must": number} | more


@asynccontextmanager
async def depot(
    postgres_url: str, state_url: str, folder: Path, clock: Clock | None = None, **settings: Any
) -> AsyncIterator[Depot]:
    async with AsyncExitStack() as stack:
        data_url = await stack.enter_async_context(data_database(postgres_url))
        system = await stack.enter_async_context(running(state_url, folder, clock, data_url=data_url, **settings))
        services = await stack.enter_async_context(sink(system.kernel.settings, clock=clock, wait_seconds=0))
        connection = await asyncpg.connect(data_url)
        stack.push_async_callback(connection.close)
        yield Depot(system, data_url, services, connection)
