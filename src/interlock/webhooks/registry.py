"""Webhooks of an org: create, show, pause, rotate secrets, delete; and their deliveries.

A signature cannot be computed from a hash, so secrets are stored sealed. A secret is shown once, when it is created.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final, TypeVar
from urllib.parse import urlsplit
from uuid import UUID

from msgspec import Raw

from interlock.access.secrets import Seal
from interlock.errors import BadRequest, Conflict, NotFound
from interlock.http.cursors import LAST, next_cursor, uuid_cursor
from interlock.outbound.guard import AddressRefused, Guard, literal
from interlock.settings import Settings
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.idempotency import Repeat, once
from interlock.tasks.runs import Delivery, insert_deliveries, trial_event
from interlock.wire.tasks import Changed
from interlock.wire.webhooks import (
    DeliveryPage,
    DeliveryRedrive,
    DeliveryStatus,
    DeliveryView,
    RotateRequest,
    RunEnd,
    WebhookEventType,
    WebhookPage,
    WebhookRequest,
    WebhookSecret,
    WebhookView,
)

_sql = queries(__name__, "webhooks")

MOST: Final = 100
"""Limit per org: each end of a run is delivered to all that subscribe to it."""
_PAGE: Final = 500
_ODD: Final = re.compile(r"[\x00-\x20\x7f\\]")

R = TypeVar("R", WebhookSecret, DeliveryView)


@dataclass(frozen=True)
class Caller:
    """The caller of a request."""

    org_id: UUID
    org: str
    user: str
    sees_urls: bool


class Webhooks:
    def __init__(self, database: Database, settings: Settings, guard: Guard, seal: Seal) -> None:
        self._database = database
        self._settings = settings
        self._guard = guard
        self._seal = seal

    # Changes

    async def create(self, request: WebhookRequest, caller: Caller, repeat: Repeat) -> WebhookSecret:
        if not request.events and request.failed_share is None and request.done_share is None:
            raise BadRequest(
                "This webhook would never be called: give `events`, or set failed_share or done_share.",
                code="nothing_to_tell",
            )
        await self._check_url(request.url)

        async def work(connection: Connection) -> WebhookSecret:
            await _sql.lock_org(connection, org_id=caller.org_id)
            if await _sql.count_webhooks(connection, org_id=caller.org_id) >= MOST:
                raise Conflict(f"An org has at most {MOST} webhooks; remove one first.", code="too_many_webhooks")
            secret = secrets.token_urlsafe(32)
            sealed = self._seal.seal(secret.encode(), purpose(caller.org_id, request.name))
            row = await _sql.insert_webhook(connection, sealed=sealed, **_columns(request, caller))
            if row is None:
                raise Conflict(f"A webhook {request.name!r} already exists.", code="webhook_exists")
            return WebhookSecret(secret=secret, view=_view(row, caller))

        return await self._once("/v1/webhooks", caller, repeat, WebhookSecret, work)

    async def _check_url(self, url: str) -> None:
        """Refuses an IP address that may not be called. A host name is resolved and checked at each call."""
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            raise _bad_url() from None
        named = parts.username is not None or parts.password is not None
        if parts.scheme not in ("http", "https") or not parts.hostname or named or parts.fragment or _ODD.search(url):
            raise _bad_url()
        if literal(parts.hostname) is not None:
            try:
                await self._guard.addresses(parts.hostname, port)
            except AddressRefused as error:
                raise BadRequest(str(error), code="address_refused") from None

    async def set_paused(self, which: str, caller: Caller, *, paused: bool) -> WebhookView:
        async with self._database.transaction() as connection:
            found = await _found(connection, which, caller)
            row = await _sql.set_paused(connection, paused=paused, **_key(found))
        return _view(row or found, caller)

    async def rotate(self, which: str, request: RotateRequest, caller: Caller, repeat: Repeat) -> WebhookSecret:
        async def work(connection: Connection) -> WebhookSecret:
            found = await _found(connection, which, caller)
            secret = secrets.token_urlsafe(32)
            sealed = self._seal.seal(secret.encode(), purpose(caller.org_id, found["name"]))
            row = await _sql.rotate_secret(
                connection, sealed=sealed, overlap_seconds=request.overlap_seconds, **_key(found)
            )
            if row is None:
                raise _missing(which)
            return WebhookSecret(secret=secret, view=_view(row, caller))

        return await self._once(f"/v1/webhooks/{which}/rotate", caller, repeat, WebhookSecret, work)

    async def delete(self, which: str, caller: Caller) -> WebhookView:
        """Deletes a webhook and its pending deliveries. A call in flight may still arrive."""
        async with self._database.transaction() as connection:
            found = await _found(connection, which, caller)
            row = await _sql.delete_webhook(connection, **_key(found))
        return _view(row or found, caller)

    async def test(self, which: str, caller: Caller, repeat: Repeat) -> DeliveryView:
        async def work(connection: Connection) -> DeliveryView:
            found = await _found(connection, which, caller)
            if found["paused"]:
                raise Conflict("The webhook is paused; resume it before testing it.", code="webhook_paused")
            delivery_id = await _sql.new_delivery_id(connection)
            body = trial_event(delivery_id, caller.org, found["name"], self._database.clock.now())
            delivery = Delivery(delivery_id, caller.org_id, found["webhook_id"], WebhookEventType.TEST.value, body)
            await insert_deliveries(connection, [delivery])
            return _delivery(await _sql.find_delivery(connection, delivery_id=delivery_id, **_key(found)))

        return await self._once(f"/v1/webhooks/{which}/test", caller, repeat, DeliveryView, work)

    async def redrive(self, which: str, request: DeliveryRedrive, caller: Caller) -> Changed:
        async with self._database.transaction() as connection:
            found = await _found(connection, which, caller)
            rows = await _sql.redrive_deliveries(
                connection, delivery_ids=request.delivery_ids, limit=request.limit, **_key(found)
            )
        return Changed(matched=len(rows))

    async def _once(
        self,
        endpoint: str,
        caller: Caller,
        repeat: Repeat,
        kind: type[R],
        work: Callable[[Connection], Awaitable[R]],
    ) -> R:
        sealed = replace(repeat, seal=self._seal)
        return await once(self._database, self._settings, caller.org_id, endpoint, sealed, kind, 201, work)

    # Reads

    async def page(self, caller: Caller, cursor: str | None, limit: int) -> WebhookPage:
        async with self._database.connection() as connection:
            rows = await _sql.list_webhooks(connection, org_id=caller.org_id, after=cursor or "", limit=limit)
        return WebhookPage(
            webhooks=[_view(row, caller) for row in rows],
            next_cursor=next_cursor(rows, limit, "name"),
        )

    async def webhook(self, which: str, caller: Caller) -> WebhookView:
        async with self._database.connection() as connection:
            return _view(await _found(connection, which, caller), caller)

    async def deliveries(
        self, which: str, caller: Caller, status: DeliveryStatus | None, cursor: str | None, limit: int
    ) -> DeliveryPage:
        """Lists deliveries, newest first."""
        before = uuid_cursor(cursor, LAST)
        async with self._database.connection() as connection:
            page = _key(await _found(connection, which, caller)) | {"before": before, "limit": limit}
            if status is None:
                rows = await _sql.list_deliveries(connection, **page)
            else:
                rows = await _sql.list_deliveries_by_status(connection, status=status, **page)
        return DeliveryPage(
            deliveries=[_delivery(row) for row in rows],
            next_cursor=next_cursor(rows, limit, "delivery_id"),
        )

    async def delivery(self, which: str, delivery_id: UUID, caller: Caller) -> DeliveryView:
        async with self._database.connection() as connection:
            found = await _found(connection, which, caller)
            row = await _sql.find_delivery(connection, delivery_id=delivery_id, **_key(found))
        if row is None:
            raise NotFound(f"There is no delivery {delivery_id} of the webhook {found['name']!r}.")
        return _delivery(row)


def purpose(org_id: UUID, name: str) -> str:
    """Returns the purpose that the secrets of a webhook are sealed for."""
    return f"webhook/{org_id}/{name}"


async def seal_stored_webhooks(database: Database, seal: Seal) -> None:
    """Seals the secrets that an older version stored in clear, a page at a time."""

    def sealed(row: Row, secret: str | None) -> bytes | None:
        return None if secret is None else seal.seal(secret.encode(), purpose(row["org_id"], row["name"]))

    async def work(connection: Connection) -> int:
        rows = await _sql.clear_secrets(connection, limit=_PAGE)
        if rows:
            await _sql.seal_secrets(
                connection,
                webhook_ids=[row["webhook_id"] for row in rows],
                sealed=[sealed(row, row["secret"]) for row in rows],
                previous_sealed=[sealed(row, row["previous_secret"]) for row in rows],
            )
        return len(rows)

    while await database.run(work) == _PAGE:
        continue


async def _found(connection: Connection, which: str, caller: Caller) -> Row:
    """Finds a webhook by name or id."""
    row: Row | None = await _sql.find_webhook(connection, org_id=caller.org_id, name=which)
    webhook_id = _uuid(which)
    if row is None and webhook_id is not None:
        row = await _sql.webhook_by_id(connection, org_id=caller.org_id, webhook_id=webhook_id)
    if row is None:
        raise _missing(which)
    return row


def _missing(which: str) -> NotFound:
    return NotFound(f"There is no webhook {which[:200]!r} in this org.")


def _bad_url() -> BadRequest:
    return BadRequest(
        "`url` must start with https:// or http://, have a host, and contain no user, password, spaces or fragment.",
        code="bad_webhook_url",
    )


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _key(row: Row) -> dict[str, UUID]:
    return {"org_id": row["org_id"], "webhook_id": row["webhook_id"]}


def _columns(request: WebhookRequest, caller: Caller) -> dict[str, object]:
    return {
        "org_id": caller.org_id,
        "name": request.name,
        "url": request.url,
        "events": sorted(set(request.events)),
        "dag_name": request.dag,
        "job_name": request.job,
        "failed_share": request.failed_share,
        "done_share": request.done_share,
        "paused": request.paused,
        "created_by": caller.user,
    }


def _view(row: Row, caller: Caller) -> WebhookView:
    return WebhookView(
        webhook_id=row["webhook_id"],
        name=row["name"],
        url=row["url"] if caller.sees_urls else _origin(row["url"]),
        events=[RunEnd(event) for event in row["events"]],
        dag=row["dag_name"],
        job=row["job_name"],
        failed_share=row["failed_share"],
        done_share=row["done_share"],
        paused=row["paused"],
        key_version=row["key_version"],
        previous_until=row["previous_until"],
        failures=row["failures"],
        resting_until=row["resting_until"],
        created_by=row["created_by"],
        created_at=row["created_at"],
    )


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _delivery(row: Row) -> DeliveryView:
    status = DeliveryStatus(row["status"])
    return DeliveryView(
        delivery_id=row["delivery_id"],
        webhook_id=row["webhook_id"],
        event=WebhookEventType(row["event"]),
        run_id=row["run_id"],
        status=status,
        tries=row["tries"],
        due_at=row["due_at"] if status is DeliveryStatus.PENDING else None,
        created_at=row["created_at"],
        ended_at=row["ended_at"],
        http_status=row["http_status"],
        reason=row["reason"],
        body=Raw(row["body"].encode()),
    )
