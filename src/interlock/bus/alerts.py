"""Alerts: opened when telemetry is delivered, and sent to the tenant's feed, by e-mail and by webhook.

They need no consumer of telemetry. Many events of one kind make one alert. A critical alert without an e-mail address
or a webhook is flagged to operations.

Route health is a loop: it checks the queue of every route and opens alerts for those that are not
drained. It also reports dead letters of the task queues to the orgs of their tasks.
"""

from __future__ import annotations

import asyncio
import re
import smtplib
import ssl
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from email.message import EmailMessage
from typing import Final
from urllib.parse import unquote, urlsplit
from uuid import UUID

import msgspec
import structlog
from msgspec import Raw

from interlock.access.principals import Principal
from interlock.bus.metrics import ALERTS, ALERTS_UNROUTED, ROUTES
from interlock.errors import BadRequest, NotFound
from interlock.failpoints import failpoint
from interlock.http.cursors import FIRST, LAST, bad_cursor, next_cursor, uuid_cursor
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.postgres import CONTENT_ERRORS, Connection, Database, Row, queries, set_aside
from interlock.tasks.completion import clean
from interlock.tasks.runs import Delivery, insert_deliveries
from interlock.wire.bus_events import (
    ALERTED,
    CRITICAL,
    DEAD_LETTERS,
    ROUTE_UNHEALTHY,
    AlertPage,
    AlertSettings,
    AlertSettingsList,
    AlertSettingsView,
    AlertView,
    Channel,
    ChannelKind,
    RouteHealth,
    RouteHealthPage,
    RouteStatus,
)
from interlock.wire.webhooks import WebhookEvent, WebhookEventType

log = structlog.get_logger()
_sql = queries(__name__, "alerts")
_channels = msgspec.json.Decoder(list[Channel])

_DEFAULT: Final = [Channel(kind=ChannelKind.DASHBOARD)]
_ADDRESS: Final = re.compile(r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*", re.ASCII)


@dataclass
class Raised:
    """Events of one kind of one tenant."""

    told: int
    sample: str
    """The first of them, JSON."""


def count_alerts(raised: dict[tuple[UUID, str], Raised], org_id: UUID, kind: str, event: Raw) -> None:
    if kind in ALERTED:
        known = raised.get((org_id, kind))
        if known is None:
            raised[org_id, kind] = Raised(1, bytes(event).decode())
        else:
            known.told += 1


async def raise_alerts(
    connection: Connection, raised: Mapping[tuple[UUID, str], Raised], *, seconds: float, now: datetime
) -> None:
    """Opens or counts alerts in the caller's transaction, with their e-mails and webhook calls."""
    if not raised:
        return
    fresh: list[Row] = await _sql.raise_alerts(
        connection,
        seconds=seconds,
        org_ids=[org_id for org_id, _ in raised],
        events=[event for _, event in raised],
        told=[each.told for each in raised.values()],
        samples=[each.sample for each in raised.values()],
        criticals=[event in CRITICAL for _, event in raised],
    )
    await _call_webhooks(connection, fresh, now)
    for row in fresh:
        ALERTS.labels(event=row["event"]).inc()
        if row["unrouted"]:
            ALERTS_UNROUTED.labels(event=row["event"]).inc()
            log.warning("alert.unrouted", org=row["org"], event_type=row["event"], alert_id=str(row["alert_id"]))


async def _call_webhooks(connection: Connection, alerts: Sequence[Row], now: datetime) -> None:
    """Queues the calls for the loop that delivers webhooks, which signs, guards and retries them."""
    wanted = [(row, name) for row in alerts for name in row["webhooks"]]
    if not wanted:
        return
    found = await _sql.webhooks_named(
        connection, org_ids=[row["org_id"] for row, _ in wanted], names=[name for _, name in wanted]
    )
    by_name = {(row["org_id"], row["name"]): row for row in found}
    calls = [(row, by_name[row["org_id"], name]) for row, name in wanted if (row["org_id"], name) in by_name]
    if calls:
        deliveries = [
            Delivery(
                webhook["delivery_id"],
                row["org_id"],
                webhook["webhook_id"],
                WebhookEventType.ALERT.value,
                _call(row, webhook, now),
            )
            for row, webhook in calls
        ]
        await insert_deliveries(connection, deliveries)


def _call(alert: Row, webhook: Row, now: datetime) -> str:
    event = WebhookEvent(
        id=webhook["delivery_id"],
        type=WebhookEventType.ALERT,
        created_at=now,
        org=alert["org"],
        webhook=webhook["name"],
        alert=alert_view(alert),
    )
    return msgspec.json.encode(event).decode()


class Alerts:
    """Alerts as tenants and operations see them, and the channels of each kind of event."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._has_mail = settings.smtp_url is not None

    async def feed(self, caller: Principal, cursor: str | None, limit: int) -> AlertPage:
        before = uuid_cursor(cursor, LAST)
        async with self._database.connection() as connection:
            return _page(await _sql.feed(connection, org_id=caller.org_id, before=before, limit=limit), limit)

    async def operations(self, cursor: str | None, limit: int) -> AlertPage:
        async with self._database.connection() as connection:
            return _page(await _sql.operations(connection, after=uuid_cursor(cursor, FIRST), limit=limit), limit)

    async def resolve(self, alert_id: UUID, caller: Principal) -> AlertView:
        async with self._database.connection() as connection:
            row = await _sql.resolve(connection, alert_id=alert_id, resolved_by=caller.user)
        if row is None:
            raise NotFound(f"There is no alert {alert_id} that is flagged to operations.")
        return alert_view(row)

    async def channels(self, caller: Principal) -> AlertSettingsList:
        async with self._database.connection() as connection:
            rows = await _sql.settings_of(connection, org_id=caller.org_id)
        known = {row["event"]: row for row in rows}
        return AlertSettingsList(events=[_settings(event, known.get(event)) for event in ALERTED])

    async def set_channels(self, event: str, wanted: AlertSettings, caller: Principal) -> AlertSettingsView:
        if event not in ALERTED:
            raise NotFound(f"The event {event[:100]!r} opens no alert; these do: {', '.join(ALERTED)}.")
        self._check(event, wanted.channels)
        async with self._database.transaction() as connection:
            named = [channel.to for channel in wanted.channels if channel.kind is ChannelKind.WEBHOOK]
            unknown = await _sql.unknown_webhooks(connection, org_id=caller.org_id, names=named)
            if unknown:
                raise BadRequest(
                    f"There is no webhook {unknown[0]['name']!r}; create it with `interlock webhook create`.",
                    code="bad_channel",
                )
            row = await _sql.set_channels(
                connection,
                org_id=caller.org_id,
                event=event,
                channels=msgspec.json.encode(wanted.channels).decode(),
                changed_by=caller.user,
            )
        return _settings(event, row)

    def _check(self, event: str, channels: Sequence[Channel]) -> None:
        if not channels and event in CRITICAL:
            raise BadRequest(
                f"{event} is critical and cannot be turned off: name at least one channel.", code="critical_alert"
            )
        for channel in channels:
            if channel.kind is ChannelKind.EMAIL and not self._has_mail:
                raise BadRequest("This platform sends no e-mail: set INTERLOCK_SMTP_URL first.", code="bad_channel")
            if channel.kind is ChannelKind.EMAIL and _ADDRESS.fullmatch(channel.to) is None:
                raise BadRequest("`to` of an e-mail channel is an address such as ops@example.org.", code="bad_channel")
            if channel.kind is ChannelKind.DASHBOARD and channel.to:
                raise BadRequest("A dashboard channel has no `to`; leave it out.", code="bad_channel")


def _page(rows: Sequence[Row], limit: int) -> AlertPage:
    return AlertPage(alerts=list(_views(rows)), next_cursor=next_cursor(rows, limit, "alert_id"))


def _views(rows: Iterable[Row]) -> Iterable[AlertView]:
    return (alert_view(row) for row in rows)


def alert_view(row: Row) -> AlertView:
    return AlertView(
        alert_id=row["alert_id"],
        org=row["org"],
        event=row["event"],
        critical=row["critical"],
        opened_at=row["opened_at"],
        last_at=row["last_at"],
        told=row["told"],
        sample=Raw(row["sample"]),
        unrouted=row["unrouted"],
        resolved_at=row["resolved_at"],
        resolved_by=row["resolved_by"],
    )


def _settings(event: str, row: Row | None) -> AlertSettingsView:
    return AlertSettingsView(
        event=event,
        critical=event in CRITICAL,
        channels=_DEFAULT if row is None else _channels.decode(row["channels"]),
        changed_by=None if row is None else row["changed_by"],
        changed_at=None if row is None else row["changed_at"],
    )


_BATCH: Final = 20
_TIMEOUT_SECONDS: Final = 20.0
_HOLD_SECONDS: Final = _BATCH * _TIMEOUT_SECONDS
_MAX_TRIES: Final = 10
_REASON: Final = 300
_PORTS: Final = {"smtp": 25, "smtps": 465}
_OLD: Final = 500


class AlertMail(Periodic):
    """Sends due e-mails over one connection. Without a mail server there are none: e-mail channels are refused."""

    name = "alert_mail"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.alert_mail_seconds
        self._database = database
        self._url = settings.smtp_url.get_secret_value() if settings.smtp_url is not None else None
        self._sender = settings.smtp_from
        self._age = settings.retention_days * 86_400

    async def run_once(self) -> int:
        async with self._database.connection() as connection:
            old = await _sql.delete_old(connection, age_seconds=self._age, limit=_OLD)
            if self._url is None:
                return len(old)
            rows: list[Row] = await _sql.take_emails(connection, hold_seconds=_HOLD_SECONDS, limit=_BATCH)
        if rows:
            outcomes = await asyncio.to_thread(_send, self._url, self._sender, rows)
            await failpoint("alert_mail.sent")
            await self._settle(rows, outcomes)
        return len(rows) + len(old)

    async def _settle(self, rows: list[Row], outcomes: list[str | None]) -> None:
        async with self._database.transaction() as connection:
            for row, reason in zip(rows, outcomes, strict=True):
                status = "Delivered" if reason is None else "Dead" if row["tries"] >= _MAX_TRIES else "Pending"
                await _sql.settle_email(
                    connection, email_id=row["email_id"], tries=row["tries"], status=status, reason=reason
                )
                if status == "Dead":
                    log.warning("alert.mail_dead", email_id=str(row["email_id"]), reason=reason)


def _message(row: Row, sender: str) -> EmailMessage:
    """Returns an e-mail with a subject for people and a JSON body for programs."""
    message = EmailMessage()
    times = "once" if row["told"] == 1 else f"{row['told']} times"
    message["Subject"] = f"[Interlock] {row['org']}: {row['event']} ({times})"
    message["From"] = sender
    message["To"] = row["address"]
    message["Message-ID"] = f"<{row['email_id']}@interlock>"
    message.set_content(msgspec.json.format(msgspec.json.encode(alert_view(row)), indent=2).decode() + "\n")
    return message


def _send(url: str, sender: str, rows: list[Row]) -> list[str | None]:
    """Returns the error of each e-mail, or None if the server accepted it."""
    try:
        with _connected(url) as server:
            return [_sent(server, sender, row) for row in rows]
    except (OSError, smtplib.SMTPException) as error:
        return [_reason(error)] * len(rows)


def _sent(server: smtplib.SMTP, sender: str, row: Row) -> str | None:
    """Returns the error. An e-mail that cannot be composed fails alone, like one that the server refuses."""
    try:
        server.send_message(_message(row, sender))
    except (*CONTENT_ERRORS, IndexError, AttributeError) as error:
        # The parser of addresses in `email` raises the last two for some texts that are no address.
        set_aside(AlertMail.name, error, email_id=str(row["email_id"]))
        return _reason(error)
    except (OSError, smtplib.SMTPException) as error:
        return _reason(error)
    return None


def _connected(url: str) -> smtplib.SMTP:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    trust = ssl.create_default_context()
    server: smtplib.SMTP
    if parts.scheme == "smtps":
        server = smtplib.SMTP_SSL(host, port, timeout=_TIMEOUT_SECONDS, context=trust)
    else:
        server = smtplib.SMTP(host, port, timeout=_TIMEOUT_SECONDS)
        server.ehlo()
        if server.has_extn("starttls"):
            server.starttls(context=trust)
        elif parts.username is not None:
            server.close()
            raise smtplib.SMTPNotSupportedError(
                f"{host}:{port} does not offer STARTTLS, and the password of smtp_url is not sent in the clear: write "
                "smtps:// where the server speaks TLS from the start, or a URL without a user"
            )
    if parts.username is not None:
        server.login(unquote(parts.username), unquote(parts.password or ""))
    return server


def _reason(error: Exception) -> str:
    return clean(f"{type(error).__name__}: {error}"[:_REASON]) or ""


_monitor_sql = queries(__name__, "monitor")

_ROUTES_PER_PAGE: Final = 200
_BOUND: Final = 10_000
LOOKS: Final = 5
"""Consecutive checks before a condition that may be temporary counts."""
_KEPT_SECONDS: Final = 86_400.0
_FIRST: Final = (UUID(int=0), "", "")


class Monitor(Periodic):
    """Checks all routes in pages. Each page is one transaction, together with the alerts that it opens."""

    name = "monitor"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.monitor_seconds
        self._database = database
        self._alert_seconds = settings.alert_seconds
        self._queues = settings.queues

    async def run_once(self) -> int:
        """Always returns 0: a pass covers all routes."""
        after, found = _FIRST, Counter[str]()
        while True:
            rows = await self._look(after)
            found.update(row["status"] for row in rows)
            if len(rows) < _ROUTES_PER_PAGE:
                break
            after = (rows[-1]["org_id"], rows[-1]["target"], rows[-1]["name"])
        for status in RouteStatus:
            if status is not RouteStatus.MISROUTED:
                ROUTES.labels(status=status.value).set(found[status.value])
        async with self._database.connection() as connection:
            await _monitor_sql.forget(connection, age_seconds=_KEPT_SECONDS, limit=_ROUTES_PER_PAGE)
        await self._report_dead_letters()
        return 0

    async def _report_dead_letters(self) -> None:
        """Opens an alert for each org with new dead letters. The query reaches back two periods, since a message may
        become a dead letter during the pass; a repeated report only raises the count of the open alert."""
        async with self._database.transaction() as connection:
            rows = await _monitor_sql.dead_letters(
                connection, queues=self._queues, seconds=2 * self.seconds, limit=_BOUND
            )
            raised = {(row["org_id"], DEAD_LETTERS): Raised(row["dead_letters"], _dead_sample(row)) for row in rows}
            await raise_alerts(connection, raised, seconds=self._alert_seconds, now=self._database.clock.now())

    async def _look(self, after: tuple[UUID, str, str]) -> list[Row]:
        async with self._database.transaction() as connection:
            rows: list[Row] = await _monitor_sql.look(
                connection,
                org_id=after[0],
                target=after[1],
                name=after[2],
                limit=_ROUTES_PER_PAGE,
                bound=_BOUND,
                looks=LOOKS,
                idle_seconds=self.seconds,
            )
            fallen = [row for row in rows if row["was"] == "healthy" and row["status"] != "healthy"]
            await raise_alerts(connection, _raised(fallen), seconds=self._alert_seconds, now=self._database.clock.now())
            await failpoint("monitor.before_commit")
        return rows


def _raised(fallen: Iterable[Row]) -> dict[tuple[UUID, str], Raised]:
    raised: dict[tuple[UUID, str], Raised] = {}
    for row in fallen:
        known = raised.get((row["org_id"], ROUTE_UNHEALTHY))
        if known is None:
            raised[row["org_id"], ROUTE_UNHEALTHY] = Raised(1, _sample(row))
        else:
            known.told += 1
    return raised


def _sample(row: Row) -> str:
    sample = {
        "event": ROUTE_UNHEALTHY,
        "target": row["target"],
        "command.name": row["name"],
        "status": row["status"],
        "depth": row["depth"],
        "oldest_age_seconds": row["oldest_age"],
        "expected_drain_seconds": row["expected_drain_seconds"],
    }
    return msgspec.json.encode(sample).decode()


def _dead_sample(row: Row) -> str:
    sample = {"event": DEAD_LETTERS, "queues": row["queues"], "dead_letters": row["dead_letters"]}
    return msgspec.json.encode(sample).decode()


async def count_misroutes(connection: Connection, misroutes: Counter[tuple[UUID, str, str]]) -> None:
    """Counts misroutes by org, target and name, in the transaction that delivers their telemetry."""
    if misroutes:
        await _monitor_sql.count_misroutes(
            connection,
            org_ids=[org_id for org_id, _, _ in misroutes],
            targets=[target for _, target, _ in misroutes],
            names=[name for _, _, name in misroutes],
            misroutes=list(misroutes.values()),
        )


class RouteHealths:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, caller: Principal, cursor: str | None, limit: int, *, only_bad: bool) -> RouteHealthPage:
        target, name = _position(cursor)
        statement = _monitor_sql.bad_health_of if only_bad else _monitor_sql.health_of
        async with self._database.connection() as connection:
            rows = await statement(connection, org_id=caller.org_id, target=target, name=name, limit=limit)
        following = next_cursor(rows, limit, "target", "name")
        return RouteHealthPage(routes=[_health(row) for row in rows], next_cursor=following)


def _position(cursor: str | None) -> tuple[str, str]:
    if cursor is None:
        return "", ""
    target, slash, name = cursor.partition("/")
    if not slash or "\x00" in cursor:
        raise bad_cursor()
    return target, name


def _health(row: Row) -> RouteHealth:
    return RouteHealth(
        target=row["target"],
        name=row["name"],
        status=RouteStatus(row["status"]),
        since=row["since"],
        checked_at=row["checked_at"],
        depth=row["depth"],
        in_flight=row["in_flight"],
        dead_letters=row["dead_letters"],
        oldest_age_seconds=row["oldest_age"],
        misroutes=row["misroutes"],
    )
