"""Calls webhooks with pending events, and deletes old deliveries.

due ─► taken, with a lease ─► called ─┬─► 2xx: Delivered
                                      ├─► anything else: due again later; Dead after the last try
                                      └─► this process dies: due again when the lease expires, with the same id

A receiver that is down delays no other. It gets a few concurrent calls, and only one after a failed call. After several
failures in a row it rests, longer each time. All failing receivers share half of the slots, so the other half is always
available to the rest.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final
from uuid import UUID

import structlog

from interlock.access.secrets import Seal
from interlock.errors import ConfigurationError
from interlock.failpoints import failpoint
from interlock.outbound.guard import Guard, OutboundFailed
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.notifications import Wakeups
from interlock.stores.postgres import CONTENT_ERRORS, Database, Row, queries, set_aside
from interlock.tasks.completion import clean
from interlock.telemetry import WEBHOOK_DELIVERIES
from interlock.webhooks.registry import purpose
from interlock.wire.webhooks import DELIVERY, EVENT, KEY_VERSION, SIGNATURE, DeliveryStatus, signed

if TYPE_CHECKING:
    from interlock.outbound.exchange import Reply, Request, Sender

log = structlog.get_logger()
_sql = queries(__name__, "webhooks")

TOPIC: Final = "webhooks"
_REPLY_BYTES: Final = 64 * 1024
_HOLD_SLACK_SECONDS: Final = 2.0
"""Time to record the outcome of a call."""
_BASE_SECONDS: Final = 5.0
_LONGEST_WAIT_SECONDS: Final = 3600.0
_REST_AFTER: Final = 5
"""Failed calls in a row."""
_LONGEST_REST_SECONDS: Final = 600.0
_PAGE: Final = 1_000
_BATCH: Final = 1_000
_TRIMMED: Final = 10
_REASON: Final = 500
_GONE: Final = 410
_FIRST: Final = UUID(int=0)


@dataclass(frozen=True)
class _Outcome:
    http_status: int | None = None
    reason: str | None = None
    """None if the event was delivered."""
    final: bool = False
    """A retry would give the same outcome."""
    wait_seconds: float = 0.0
    """The delay that the receiver asked for."""


class WebhookDeliveries:
    name = "webhooks"

    def __init__(self, database: Database, settings: Settings, wakeups: Wakeups, guard: Guard, seal: Seal) -> None:
        self.seconds = settings.webhook_seconds
        self._seal = seal
        self._database = database
        self._settings = settings
        self._wakeups = wakeups
        self._guard = guard
        self._sender: Sender | None = None
        self._after = _FIRST

    async def idle(self, seconds: float) -> None:
        await self._wakeups.wait(TOPIC, seconds)

    async def run_once(self) -> int:
        """Runs until nothing is due or in flight, so that new events do not wait for a slow call."""
        calls: dict[asyncio.Task[None], bool] = {}
        done = 0
        try:
            while True:
                await self._begin(calls)
                if not calls:
                    return done
                for call in await self._some_ended(calls):
                    del calls[call]
                    call.result()
                    done += 1
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _begin(self, calls: dict[asyncio.Task[None], bool]) -> None:
        places = self._settings.webhook_concurrency
        for failing in (False, True):
            room = places - len(calls)
            if failing:
                room = min(room, max(1, places // 2) - sum(calls.values()))
            if room > 0:
                for row in await self._take(room, failing=failing):
                    calls[asyncio.create_task(self._deliver(row), name=f"webhook {row['delivery_id']}")] = failing

    async def _some_ended(self, calls: dict[asyncio.Task[None], bool]) -> list[asyncio.Task[None]]:
        """Waits until a call ends or new events arrive. Returns the ended calls."""
        more = asyncio.create_task(self._wakeups.wait(TOPIC, self.seconds))
        try:
            await asyncio.wait({*calls, more}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            more.cancel()
            await asyncio.gather(more, return_exceptions=True)
        return [call for call in calls if call.done()]

    async def _take(self, room: int, *, failing: bool) -> list[Row]:
        """Takes due deliveries. The walk over webhooks continues where it ended, so that none is always last."""
        async with self._database.transaction() as connection:
            found = await _sql.waiting_webhooks(connection, after=self._after, limit=_PAGE)
            if len(found) < _PAGE and self._after != _FIRST:
                found += await _sql.waiting_webhooks(connection, after=_FIRST, limit=_PAGE - len(found))
            if not found:
                return []
            rows: list[Row] = await _sql.take_deliveries(
                connection,
                webhook_ids=[row["webhook_id"] for row in found],
                failing=failing,
                each=self._settings.webhook_endpoint_concurrency,
                limit=room,
                hold_seconds=self._settings.webhook_timeout_seconds + _HOLD_SLACK_SECONDS,
            )
        self._after = rows[-1]["webhook_id"] if len(rows) == room else found[-1]["webhook_id"]
        return rows

    async def _deliver(self, row: Row) -> None:
        await failpoint("webhook.before_sent")
        outcome = await self._call(row)
        await failpoint("webhook.sent")
        await self._settle(row, outcome)

    async def _call(self, row: Row) -> _Outcome:
        # This import takes a third of a second, which a process without webhooks should not pay.
        from interlock.outbound.exchange import Bounds, Request, Sender  # noqa: PLC0415

        if self._sender is None:
            self._sender = Sender(self._guard)
        bounds = Bounds(seconds=self._settings.webhook_timeout_seconds, reply_bytes=_REPLY_BYTES, cut=True)
        try:
            request = _request(Request, row, self._secrets(row), self._database.clock.now())
            return _outcome(await self._sender.send(request, bounds))
        except OutboundFailed as error:
            return _Outcome(reason=clean(str(error)[:_REASON]), final=not error.retryable)
        except ConfigurationError as error:
            log.warning("webhook.not_opened", webhook_id=str(row["webhook_id"]), reason=error.detail)
            return _Outcome(reason="The webhook's secret cannot be opened: rotate it, then redrive the delivery.")
        except CONTENT_ERRORS as error:
            # A call that cannot be made must not fail the others.
            set_aside(self.name, error, delivery_id=str(row["delivery_id"]))
            return _Outcome(reason=f"The call cannot be made: {type(error).__name__}.", final=True)

    def _secrets(self, row: Row) -> list[str]:
        """Returns the current secret and, during a rotation, the previous one."""
        of = purpose(row["org_id"], row["name"])
        return [self._seal.open(each, of).decode() for each in (row["sealed"], row["previous_sealed"]) if each]

    async def _settle(self, row: Row, outcome: _Outcome) -> None:
        which = {"delivery_id": row["delivery_id"], "org_id": row["org_id"], "tries": row["tries"]}
        async with self._database.connection() as connection:
            if outcome.reason is None:
                settled = await _sql.set_delivered(connection, http_status=outcome.http_status, **which)
                status = DeliveryStatus.DELIVERED
            else:
                settled = await _sql.set_failed(
                    connection,
                    http_status=outcome.http_status,
                    reason=outcome.reason,
                    final=outcome.final,
                    wait_seconds=outcome.wait_seconds,
                    most_tries=self._settings.webhook_tries,
                    base=_BASE_SECONDS,
                    cap=_LONGEST_WAIT_SECONDS,
                    rest_after=_REST_AFTER,
                    rest_cap=_LONGEST_REST_SECONDS,
                    **which,
                )
                status = DeliveryStatus(settled["status"]) if settled is not None else DeliveryStatus.PENDING
        if settled is None:
            return
        WEBHOOK_DELIVERIES.labels(outcome=_WORDS[status]).inc()
        if status is DeliveryStatus.DEAD:
            log.warning(
                "webhook.dead",
                webhook_id=str(row["webhook_id"]),
                delivery_id=str(row["delivery_id"]),
                event_type=row["event"],
                reason=outcome.reason,
            )


_WORDS: Final = {
    DeliveryStatus.DELIVERED: "delivered",
    DeliveryStatus.PENDING: "again",
    DeliveryStatus.DEAD: "dead",
}


def _request(kind: type[Request], row: Row, secrets: list[str], now: datetime) -> Request:
    body = row["body"].encode()
    headers = {
        "Content-Type": "application/json",
        "Accept-Encoding": "identity",
        "Idempotency-Key": str(row["delivery_id"]),
        DELIVERY: str(row["delivery_id"]),
        EVENT: row["event"],
        KEY_VERSION: str(row["key_version"]),
        SIGNATURE: signed(secrets, int(now.timestamp()), body),
    }
    return kind(row["url"], "POST", headers, body)


def _outcome(reply: Reply) -> _Outcome:
    if 200 <= reply.status < 300:
        return _Outcome(reply.status)
    if 300 <= reply.status < 400:
        return _Outcome(
            reply.status,
            f"The receiver answered {reply.status}. Redirects are not followed: set the webhook to the final URL.",
        )
    if reply.status == _GONE:
        return _Outcome(reply.status, f"The receiver answered {_GONE} (Gone).", final=True)
    return _Outcome(reply.status, f"The receiver answered {reply.status}.", wait_seconds=_asked_wait(reply))


def _asked_wait(reply: Reply) -> float:
    """Reads Retry-After in seconds. Ignores a date, since the backoff grows anyway."""
    text = reply.headers.get("retry-after", "")
    return min(float(text), _LONGEST_WAIT_SECONDS) if text.isascii() and text.isdigit() and len(text) < 10 else 0.0


class WebhookSweep(Periodic):
    """Marks deliveries that took too long as dead, and deletes those that are too old or too many."""

    name = "webhook_sweep"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.retention_seconds
        self._database = database
        self._settings = settings
        self._after = _FIRST

    async def run_once(self) -> int:
        async with self._database.connection() as connection:
            expired = await _sql.expire_deliveries(
                connection, age_seconds=self._settings.webhook_expire_hours * 3600, limit=_BATCH
            )
            old = await _sql.delete_old_deliveries(
                connection, age_seconds=self._settings.retention_days * 86_400, limit=_BATCH
            )
        WEBHOOK_DELIVERIES.labels(outcome="dead").inc(len(expired))
        return len(expired) + len(old) + await self._trim()

    async def _trim(self) -> int:
        """Trims the history of a few webhooks per pass, in rotation."""
        trimmed = 0
        async with self._database.connection() as connection:
            found: list[Row] = await _sql.webhooks_with_history(connection, after=self._after, limit=_TRIMMED)
            for row in found:
                gone = await _sql.trim_deliveries(
                    connection,
                    webhook_id=row["webhook_id"],
                    there=row["there"],
                    keep=self._settings.webhook_keep,
                    limit=_BATCH,
                )
                trimmed += len(gone)
        self._after = found[-1]["webhook_id"] if len(found) == _TRIMMED else _FIRST
        return trimmed
