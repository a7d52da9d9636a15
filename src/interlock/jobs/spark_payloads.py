"""Inputs of the Spark tasks that the platform creates: list loads, run exports and batch queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

import msgspec

from interlock.settings import Settings
from interlock.stores.postgres import Connection, Row, queries
from interlock.tasks.result_packs import results_prefix
from interlock.wire import ListLoad, RunExport

BATCH_QUERY: Final = "batch_query"
"""The operator that runs batch queries on Spark."""
_sql = queries("jobs", "ingest")
LIST_LOAD: Final = "list_load"


class _Staged(msgspec.Struct):
    prefix: str
    format: str
    parts: list[msgspec.Raw]


_staged = msgspec.json.Decoder(_Staged)


async def list_loads(connection: Connection, settings: Settings, held: Sequence[Row]) -> dict[UUID, ListLoad]:
    """Returns the loads by task, for tasks that an ingest created."""
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


_exports_sql = queries("jobs", "exports")

RUN_EXPORT: Final = "run_export"
"""The operator that runs on Spark."""
MANIFEST: Final = "manifest.json"


def export_prefix(root: str, org_id: UUID, export_id: UUID) -> str:
    return f"{root}/exports/{org_id}/_runs/{export_id}/"


def rows_prefix(root: str, org_id: UUID, export_id: UUID) -> str:
    return f"{export_prefix(root, org_id, export_id)}rows/"


def attempt_prefix(root: str, org_id: UUID, export_id: UUID, attempt: int) -> str:
    return f"{export_prefix(root, org_id, export_id)}{attempt}/"


def staged_uri(rows: str, number: int) -> str:
    return f"{rows}{number:06}.jsonl"


async def run_exports(connection: Connection, root: str, held: Sequence[Row]) -> dict[UUID, RunExport]:
    """Returns the exports by task. A task that no export created gets none."""
    asking = {row["task_id"]: row for row in held if row["operator"] == RUN_EXPORT}
    if not asking:
        return {}
    rows = await _exports_sql.exports_of_tasks(connection, task_ids=list(asking))
    return {row["task_id"]: _grant(root, row, asking[row["task_id"]]["attempt"]) for row in rows}


def _grant(root: str, row: Row, attempt: int) -> RunExport:
    which = (root, row["org_id"], row["export_id"])
    return RunExport(
        export_id=row["export_id"],
        run_id=row["run_id"],
        format=row["format"],
        stretches=-(-(row["last_index"] + 1) // row["stretch"]),
        rows_prefix=rows_prefix(*which),
        packs_prefix=results_prefix(root, row["run_id"]),
        prefix=attempt_prefix(*which, attempt),
    )


def batch_prefix(root: str, org_id: UUID, task_id: UUID | None) -> str:
    """Returns the prefix of a batch query; each attempt writes to its own folder below it."""
    return f"{root}/exports/{org_id}/_batch/{task_id}/"
