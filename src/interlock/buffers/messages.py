"""The messages that wake the sink. What they say is in the record of the publish as well."""

from __future__ import annotations

from collections.abc import Sequence

from interlock.adapters.postgres import Connection, Row, queries
from interlock.kernel.effects import buffer_message
from interlock.settings import BUFFER_QUEUE, Settings

_sql = queries("buffers")


async def rearm(connection: Connection, publishes: Sequence[Row], settings: Settings) -> None:
    """Sends the messages of batches that are to be loaded, in the transaction that says so."""
    await _sql.rearm(
        connection,
        queue=BUFFER_QUEUE,
        bodies=[buffer_message(publish) for publish in publishes],
        dedupe_keys=[str(publish["publish_id"]) for publish in publishes],
        direct=settings.queue_direct,
    )
