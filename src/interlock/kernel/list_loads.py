"""What a task that reads a staged list on Spark is told: from the record of the ingest, whatever its payload says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

import msgspec

from interlock.adapters.postgres import Connection, Row, queries
from interlock.settings import Settings
from interlock.wire import ListLoad

_sql = queries("ingest")
LIST_LOAD: Final = "list_load"


class _Staged(msgspec.Struct):
    prefix: str
    format: str
    parts: list[msgspec.Raw]


_staged = msgspec.json.Decoder(_Staged)


async def list_loads(connection: Connection, settings: Settings, held: Sequence[Row]) -> dict[UUID, ListLoad]:
    """By task, of those that an ingest has made."""
    asking = [row["task_id"] for row in held if row["operator"] == LIST_LOAD]
    found = [await _sql.ingest_of_load(connection, task_id=task_id) for task_id in asking]
    return {row["load_task"]: _load(row, settings) for row in found if row is not None}


def _load(row: Row, settings: Settings) -> ListLoad:
    staged = _staged.decode(row["source"])
    return ListLoad(
        run_id=row["run_id"],
        shard=row["shard"],
        format=staged.format,
        parts=[f"{staged.prefix}{number:05}" for number in range(1, len(staged.parts) + 1)],
        line_limit=settings.payload_limit_bytes,
        slot_pointer=row["concurrency_key"],
    )
