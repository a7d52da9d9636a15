"""Calls for webhooks: one method per endpoint. Also `verify_webhook`, with which a receiver checks a call."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Final
from uuid import UUID, uuid4

import msgspec

from interlock.client._caller import Caller, path, query
from interlock.errors import BadRequest, Unauthenticated
from interlock.wire.tasks import Changed
from interlock.wire.webhooks import (
    SIGNATURE,
    DeliveryPage,
    DeliveryRedrive,
    DeliveryStatus,
    DeliveryView,
    RotateRequest,
    WebhookEvent,
    WebhookPage,
    WebhookRequest,
    WebhookSecret,
    WebhookView,
    signed_at,
)

PAGE: Final = 100

_event = msgspec.json.Decoder(WebhookEvent)


class WebhookCalls:
    """`client.webhooks`. A webhook is identified by its name or its id."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def create(self, request: WebhookRequest) -> WebhookSecret:
        """Creates a webhook. Only this reply contains the secret."""
        return await self._caller.call("POST", path("v1", "webhooks"), WebhookSecret, request, extra=_once())

    async def page(self, cursor: str | None = None, limit: int = PAGE) -> WebhookPage:
        return await self._caller.call("GET", query("/v1/webhooks", cursor=cursor, limit=limit), WebhookPage)

    async def webhook(self, which: str | UUID) -> WebhookView:
        return await self._caller.call("GET", path("v1", "webhooks", which), WebhookView)

    async def pause(self, which: str | UUID) -> WebhookView:
        return await self._caller.call("POST", path("v1", "webhooks", which, "pause"), WebhookView)

    async def resume(self, which: str | UUID) -> WebhookView:
        return await self._caller.call("POST", path("v1", "webhooks", which, "resume"), WebhookView)

    async def rotate(self, which: str | UUID, *, overlap_seconds: float = 86_400.0) -> WebhookSecret:
        """Replaces the secret. For `overlap_seconds`, calls are signed with both the new and the old one."""
        body = RotateRequest(overlap_seconds=overlap_seconds)
        return await self._caller.call(
            "POST", path("v1", "webhooks", which, "rotate"), WebhookSecret, body, extra=_once()
        )

    async def delete(self, which: str | UUID) -> WebhookView:
        return await self._caller.call("DELETE", path("v1", "webhooks", which), WebhookView, repeatable=False)

    async def test(self, which: str | UUID) -> DeliveryView:
        """Sends a `webhook.test` event. Poll `delivery` for the outcome."""
        return await self._caller.call("POST", path("v1", "webhooks", which, "test"), DeliveryView, extra=_once())

    async def deliveries(
        self, which: str | UUID, status: DeliveryStatus | None = None, cursor: str | None = None, limit: int = PAGE
    ) -> DeliveryPage:
        target = query(path("v1", "webhooks", which, "deliveries"), status=status, cursor=cursor, limit=limit)
        return await self._caller.call("GET", target, DeliveryPage)

    async def delivery(self, which: str | UUID, delivery_id: UUID) -> DeliveryView:
        return await self._caller.call("GET", path("v1", "webhooks", which, "deliveries", delivery_id), DeliveryView)

    async def redrive(
        self, which: str | UUID, delivery_ids: list[UUID] | None = None, *, limit: int = 1_000
    ) -> Changed:
        """Retries dead deliveries: the given ones, or the oldest."""
        body = DeliveryRedrive(delivery_ids=delivery_ids, limit=limit)
        return await self._caller.call("POST", path("v1", "webhooks", which, "redrive"), Changed, body)


def verify_webhook(
    secrets: str | Iterable[str],
    headers: Mapping[str, str],
    body: bytes,
    *,
    tolerance: float = 300.0,
    now: float | None = None,
) -> WebhookEvent:
    """Verifies a webhook call and returns its event. For use by receivers.

    The call must be signed by one of `secrets` no more than `tolerance` seconds ago. `body` is the received body, byte
    for byte. Raises Unauthenticated if the signature is missing, invalid or too old, and BadRequest if the signed body
    is not an event. A call may arrive more than once: deduplicate by `id`.
    """
    known = [secrets] if isinstance(secrets, str) else list(secrets)
    given = [value for name, value in headers.items() if name.lower() == SIGNATURE.lower()]
    moment = signed_at([secret for secret in known if secret], given[0], body) if len(given) == 1 else None
    if moment is None:
        raise Unauthenticated("The call is not signed with a secret of this webhook.", code="bad_signature")
    if not abs((time.time() if now is None else now) - moment) <= tolerance:
        raise Unauthenticated("The signature is too old, or one of the two clocks is wrong.", code="stale_signature")
    try:
        return _event.decode(body)
    except msgspec.MsgspecError as error:
        raise BadRequest("The call is signed, but its body is not a webhook event.", code="not_an_event") from error


def _once() -> str:
    """A new idempotency key, so that a retry after a lost reply returns the same reply."""
    return f"Idempotency-Key: {uuid4()}\r\n"
