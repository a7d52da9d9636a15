"""What tasks that export runs are told: what is staged for them, and where each attempt writes.

{root}/exports/{org_id}/_runs/{export_id}/rows/000000.jsonl   the rows of the tasks, a stretch of the run each
{root}/exports/{org_id}/_runs/{export_id}/{attempt}/          the files that are made of them, and the manifest
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from interlock.adapters.postgres import Connection, Row, queries
from interlock.kernel.packs import results_prefix
from interlock.wire import RunExport

_sql = queries("exports")

RUN_EXPORT: Final = "run_export"
"""The operator on Spark."""
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
    """By task. One that somebody made up is not found, and told nothing."""
    asking = {row["task_id"]: row for row in held if row["operator"] == RUN_EXPORT}
    if not asking:
        return {}
    rows = await _sql.exports_of_tasks(connection, task_ids=list(asking))
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
