"""The messages that wake whoever ingests. What is to be done stands in the record alone."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from interlock.adapters.postgres import Connection, queries
from interlock.settings import INGEST_QUEUE, Settings

_sql = queries("ingest")


async def announce(connection: Connection, settings: Settings, run_ids: Sequence[UUID]) -> None:
    """The wake-up of whoever ingests, in the transaction that says what there is to do."""
    await _sql.announce(connection, queue=INGEST_QUEUE, run_ids=list(run_ids), direct=settings.queue_direct)
