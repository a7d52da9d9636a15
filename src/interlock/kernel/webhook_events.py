"""What webhooks are told, written in the transaction in which it happens."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from interlock.adapters.postgres import Connection, Row, queries
from interlock.kernel.reads import run_view
from interlock.wire import WebhookEvent, WebhookEventType, WebhookJob

_sql = queries("webhooks")


async def tell_of_runs(
    connection: Connection, run_ids: Sequence[UUID], *, ended: Sequence[UUID], now: datetime, retention_days: float
) -> int:
    """Of runs whose counters have changed: of those in `ended` their end, of all the shares they have passed.
    `retention_days` is that of runs that do not say it themselves."""
    rows: list[Row] = await _sql.news_of_runs(connection, run_ids=run_ids, ended=ended)
    if rows:
        await _sql.insert_deliveries(
            connection,
            ids=[row["delivery_id"] for row in rows],
            org_ids=[row["org_id"] for row in rows],
            webhook_ids=[row["webhook_id"] for row in rows],
            events=[row["event"] for row in rows],
            run_ids=[row["run_id"] for row in rows],
            bodies=[_run_event(row, now, retention_days) for row in rows],
        )
    return len(rows)


def _run_event(row: Row, now: datetime, retention_days: float) -> str:
    return _text(
        WebhookEvent(
            id=row["delivery_id"],
            type=WebhookEventType(row["event"]),
            created_at=now,
            org=row["org"],
            webhook=row["webhook"],
            job=WebhookJob(job_id=row["job_id"], dag_name=row["dag_name"], name=row["job_name"]),
            run=run_view(row, retention_days),
        )
    )


def trial_event(delivery_id: UUID, org: str, webhook: str, now: datetime) -> str:
    """About nothing."""
    event = WebhookEvent(id=delivery_id, type=WebhookEventType.TEST, created_at=now, org=org, webhook=webhook)
    return _text(event)


def _text(event: WebhookEvent) -> str:
    return msgspec.json.encode(event).decode()
