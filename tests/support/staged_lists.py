"""Staged lists for tests: uploaded to the gateway's URLs, and ingested in this process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlock.apps.ingest import ingest
from interlock.clock import Clock
from interlock.processes.loop import Service
from interlock.settings import INGEST_QUEUE
from tests.support.system import System, running


@dataclass
class Intake:
    """A system, and an ingest whose loops run only when the test calls them."""

    system: System
    services: Sequence[Service]

    async def pass_of(self, name: str = "ingest") -> int:
        return await next(service for service in self.services if service.name == name).run_once()

    async def drain(self) -> None:
        while await self.pass_of():
            continue

    async def visible(self) -> None:
        """Makes released messages, and those of a dead process, visible now."""
        await self.system.value(
            "update interlock.queue_messages set visible_at = interlock.clock(), receipt = null where queue = $1",
            INGEST_QUEUE,
        )

    async def upload(self, *parts: bytes) -> str:
        reply = await self.system.user("POST", "/v1/uploads", json={"parts": len(parts)})
        assert reply.status_code == 201, reply.text
        for part, content in zip(reply.json()["parts"], parts, strict=True):
            put = await self.system.http.put(part["url"], content=content)
            assert put.status_code == 200, put.text
        upload_id: str = reply.json()["upload_id"]
        return upload_id

    async def submit(self, *parts: bytes, form: str = "jsonl", checked: bool = True, **job: Any) -> dict[str, Any]:
        """Uploads a list and submits a run of it, without ingesting it."""
        source = {"upload_id": await self.upload(*parts), "format": form}
        if checked:
            source["sha256"] = hashlib.sha256(b"".join(parts)).hexdigest()
        reply = await self.system.user("POST", "/v1/jobs", json={"operator": "echo", "source": source} | job)
        assert reply.status_code == 202, reply.text
        accepted: dict[str, Any] = reply.json()
        return accepted

    async def ingested(self, *parts: bytes, form: str = "jsonl", **job: Any) -> dict[str, Any]:
        """Submits a list, ingests it completely, and returns the run."""
        accepted = await self.submit(*parts, form=form, **job)
        await self.drain()
        return await self.system.run(accepted["run_id"])

    async def payloads(self, run_id: str) -> dict[int, Any]:
        """Returns payloads by index, directly from the tables."""
        async with self.system.kernel.stores.database.connection() as connection:
            rows = await connection.fetch(
                "select task_index, payload::text as payload,"
                " task_id = interlock.run_task_id(run_id, task_index) as named"
                " from interlock.tasks where run_id = $1::text::uuid order by task_index",
                run_id,
            )
        assert all(row["named"] for row in rows)
        return {row["task_index"]: json.loads(row["payload"]) for row in rows}

    async def indexes_of_messages(self, run_id: str) -> list[int]:
        async with self.system.kernel.stores.database.connection() as connection:
            rows = await connection.fetch(
                "select (body ->> 'start')::bigint as first, (body ->> 'end')::bigint as last"
                " from interlock.queue_messages where body ->> 'run_id' = $1 and queue <> $2",
                run_id,
                INGEST_QUEUE,
            )
        return sorted(index for row in rows for index in range(row["first"], row["last"] + 1))

    async def shard(self, run_id: str) -> int:
        shard: int = await self.system.value("select shard from interlock.runs where run_id = $1::text::uuid", run_id)
        return shard


@asynccontextmanager
async def intake(
    state_url: str, directory: Path, clock: Clock | None = None, **overrides: Any
) -> AsyncIterator[Intake]:
    async with AsyncExitStack() as stack:
        system = await stack.enter_async_context(running(state_url, directory, clock, **overrides))
        services = await stack.enter_async_context(ingest(system.kernel.settings, clock=clock, wait_seconds=0))
        yield Intake(system, services)
