"""Results of the tasks of a run, one at a time: to who asks with a key, and to who holds a signed URL."""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec

from interlock.access.signed_urls import SignedUrls
from interlock.adapters.postgres import Database, queries
from interlock.errors import NotFound
from interlock.kernel.packs import Packs
from interlock.kernel.reads import Reads
from interlock.kernel.shards import Shards
from interlock.wire import TaskStatus, TaskView

_sql = queries("results")
URL_SECONDS: Final = 24 * 3600.0


class Results:
    def __init__(self, database: Database, reads: Reads, packs: Packs, urls: SignedUrls) -> None:
        self._database = database
        self._reads = reads
        self._packs = packs
        self._shards = Shards(database)
        self.urls = urls

    async def task(self, job: str, index: int, run_id: UUID | None, org_id: UUID) -> TaskView:
        """With its result, and a URL that gives the result alone."""
        run = await self._reads.run_of_job(job, run_id, org_id)
        view = await self._reads.task_of_run(run, index, org_id)
        if view.status is not TaskStatus.COMPLETED:
            return view
        url = await self.urls.sign("GET", result_key(run["run_id"], index), URL_SECONDS, [("org", str(org_id))])
        return msgspec.structs.replace(view, result_url=url)

    async def body(self, run_id: UUID, index: int, org_id: UUID) -> bytes:
        """Byte for byte what the operator has returned, as JSON."""
        for shard in (await self._shards.of_runs([run_id])).values():
            async with self._database.connection() as connection:
                row = await _sql.result_place(connection, shard=shard, run_id=run_id, index=index, org_id=org_id)
            body = None if row is None else await self._packs.result_of(row)
            if body is not None:
                return body
        raise NotFound(f"Task {index} of run {run_id} has no result, or it has been deleted in its time.")


def result_key(run_id: UUID, index: int) -> str:
    return f"{run_id}/{index}"
