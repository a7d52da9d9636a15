"""Idempotency keys: a repeated request gets the first response again and has no effect."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID

import msgspec

from interlock.access.secrets import Seal
from interlock.errors import Conflict
from interlock.settings import Settings
from interlock.stores.postgres import Connection, Database, queries

_sql = queries(__name__, "jobs")
R = TypeVar("R")


@dataclass(frozen=True)
class Repeat:
    """A request's Idempotency-Key, if any, and its raw body: the key is bound to the bytes."""

    key: str | None = None
    body: bytes = b""
    seal: Seal | None = None
    """Encrypts the stored response, for one that contains a secret."""


async def _answered_before(
    connection: Connection, settings: Settings, org_id: UUID, endpoint: str, key: str, body: bytes
) -> bytes | None:
    """Returns the stored response, or None for a new request.

    After None, `remember_response` must follow in the same transaction.
    """
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


async def once(
    database: Database,
    settings: Settings,
    org_id: UUID,
    endpoint: str,
    repeat: Repeat,
    kind: type[R],
    status: int,
    work: Callable[[Connection], Awaitable[R]],
) -> R:
    """Runs `work` in a transaction, or returns the response of the first request."""
    purpose = f"idempotency/{org_id}/{endpoint}/{repeat.key}"

    async def unless_answered(connection: Connection) -> R:
        if repeat.key is None:
            return await work(connection)
        known = await _answered_before(connection, settings, org_id, endpoint, repeat.key, repeat.body)
        if known is not None:
            return msgspec.json.decode(_opened(known, repeat.seal, purpose), type=kind)
        reply = await work(connection)
        await _sql.remember_response(
            connection,
            org_id=org_id,
            endpoint=endpoint,
            key=repeat.key,
            status=status,
            response=_stored(msgspec.json.encode(reply), repeat.seal, purpose).decode(),
        )
        return reply

    return await database.run(unless_answered)


def _stored(response: bytes, seal: Seal | None, purpose: str) -> bytes:
    """Returns the response as JSON; a sealed one is a string in base64."""
    return response if seal is None else msgspec.json.encode(base64.b64encode(seal.seal(response, purpose)).decode())


def _opened(stored: bytes, seal: Seal | None, purpose: str) -> bytes:
    return stored if seal is None else seal.open(base64.b64decode(msgspec.json.decode(stored, type=str)), purpose)
