"""A request that is sent again with its Idempotency-Key is answered as it was the first time, and does nothing."""

from __future__ import annotations

import hashlib
from uuid import UUID

from interlock.adapters.postgres import Connection, queries
from interlock.errors import Conflict
from interlock.settings import Settings

_sql = queries("jobs")


async def answered_before(
    connection: Connection, settings: Settings, org_id: UUID, endpoint: str, key: str, body: bytes
) -> bytes | None:
    """None when the request is a new one: then `remember` must follow in the same transaction."""
    digest = hashlib.sha256(body).digest()
    which = {"org_id": org_id, "endpoint": endpoint, "key": key}
    seconds = settings.idempotency_hours * 3600
    if await _sql.remember_request(connection, request_hash=digest, seconds=seconds, **which) is not None:
        return None
    row = await _sql.remembered_request(connection, **which)
    if bytes(row["request_hash"]) != digest:
        raise Conflict(
            "This Idempotency-Key was used with another body; use a new key for a new request.",
            code="idempotency_key_reused",
        )
    response: str = row["response"]
    return response.encode()


async def remember(connection: Connection, org_id: UUID, endpoint: str, key: str, status: int, response: bytes) -> None:
    await _sql.remember_response(
        connection, org_id=org_id, endpoint=endpoint, key=key, status=status, response=response.decode()
    )
