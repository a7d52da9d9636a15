"""Alerts on large transfers: reads the transfers of one range and publishes a row for each one above a threshold.

`interlock bundle upload examples/bundles/alerts --name alerts`, then deploy examples/dags/alerts.yaml.

An alert refers to one log of one block, by the block's hash. After a reorg the range is processed again, and the new
blocks get their own alerts. Alerts of the replaced blocks remain, as a record of what was reported at the time.
To read only alerts that are still valid, select those whose transfer still exists:

    select a.* from alert_events a semi join transfers t on a.block_hash = t.block_hash and a.log_index = t.log_index
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlock.client.task import Task

COLUMNS = "block_number, block_hash, log_index, token, from_address, to_address, value"


def handler(event: dict[str, Any], task: Task) -> dict[str, Any]:
    threshold, critical = int(event["config"]["threshold"]), int(event["config"]["critical"])
    # Only numbers are formatted into the statement. An amount of more than 38 digits has a null value.
    rows = task.query(
        f"select {COLUMNS} from transfers "  # noqa: S608
        f"where block_number between {task.start:d} and {task.end:d} and (value is null or value >= {threshold:d})"
    )
    if rows.truncated:
        raise ValueError("too many large transfers for one reply: choose a higher threshold")
    task.progress(0.5, f"{len(rows)} large transfers")
    if rows:
        task.publish(alert(row, critical) for row in rows)
    return {"alerts": len(rows)}


def alert(row: dict[str, Any], critical: int) -> dict[str, Any]:
    return {
        # The same in every attempt, so a batch that is published twice adds no rows.
        "dedupe_key": f"{row['block_hash']}:{row['log_index']}",
        **row,
        "severity": "critical" if row["value"] is None or row["value"] >= critical else "warning",
    }
