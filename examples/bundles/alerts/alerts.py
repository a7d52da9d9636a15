"""Alerts on large transfers: reads the transfers of one range, and publishes a row for each above a threshold.

`interlock bundle upload examples/bundles/alerts --name alerts`, then deploy examples/dags/alerts.yaml.

An alert is about one log of one block, by the block's hash. When a chain takes blocks back, their range is looked
through again and the new blocks get alerts of their own; those of the old blocks stay, as what was said at the time.
Whoever wants those that hold asks for the ones whose transfer is still there:

    select a.* from alert_events a semi join transfers t on a.block_hash = t.block_hash and a.log_index = t.log_index
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlock.client.task import Task

COLUMNS = "block_number, block_hash, log_index, token, from_address, to_address, value"


def handler(event: dict[str, Any], task: Task) -> dict[str, Any]:
    threshold, critical = int(event["config"]["threshold"]), int(event["config"]["critical"])
    # Numbers, and nothing else, are put into the statement. An amount of more than 38 digits has no value.
    rows = task.query(
        f"select {COLUMNS} from transfers "  # noqa: S608
        f"where block_number between {task.start:d} and {task.end:d} and (value is null or value >= {threshold:d})"
    )
    if rows.truncated:
        raise ValueError("there are more large transfers than one reply has: choose a higher threshold")
    task.progress(0.5, f"{len(rows)} transfers are large")
    if rows:
        task.publish(alert(row, critical) for row in rows)
    return {"alerts": len(rows)}


def alert(row: dict[str, Any], critical: int) -> dict[str, Any]:
    return {
        # The same in every attempt: a batch that is published twice adds nothing.
        "dedupe_key": f"{row['block_hash']}:{row['log_index']}",
        **row,
        "severity": "critical" if row["value"] is None or row["value"] >= critical else "warning",
    }
