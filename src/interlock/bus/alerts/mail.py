"""E-mails of alerts, through the mail server of the platform. Delivery is at least once, with retries."""

from __future__ import annotations

import asyncio
import smtplib
import ssl
from email.message import EmailMessage
from typing import Final
from urllib.parse import unquote, urlsplit

import msgspec
import structlog

from interlock.bus.alerts.alerts import alert_view
from interlock.failpoints import failpoint
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.isolation import CONTENT_ERRORS, set_aside
from interlock.stores.postgres import Database, Row, queries
from interlock.tasks.completion import clean

log = structlog.get_logger()
_sql = queries("bus", "alerts")

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
