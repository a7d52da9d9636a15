"""Builds the capability for outgoing webhooks."""

from __future__ import annotations

from dataclasses import dataclass

from interlock.access.secrets import Seal
from interlock.http.requests import Connection
from interlock.outbound.guard import Exceptions, Guard
from interlock.processes.loop import Service
from interlock.settings import Settings
from interlock.stores.notifications import Wakeups
from interlock.stores.postgres import Database
from interlock.webhooks.delivery import WebhookDeliveries, WebhookSweep
from interlock.webhooks.registry import Webhooks


@dataclass(frozen=True)
class WebhookCapability:
    registry: Webhooks
    outbound: Guard


def build_webhooks(settings: Settings, database: Database) -> WebhookCapability:
    outbound = Guard(Exceptions.read(settings.outbound_allow), ports=settings.outbound_ports)
    return WebhookCapability(Webhooks(database, settings, outbound, Seal(settings.signing_keys_dir)), outbound)


def webhook_loops(
    settings: Settings, database: Database, wakeups: Wakeups, webhooks: WebhookCapability
) -> list[Service]:
    return [
        WebhookDeliveries(database, settings, wakeups, webhooks.outbound, Seal(settings.signing_keys_dir)),
        WebhookSweep(database, settings),
    ]


def webhooks_of(connection: Connection) -> WebhookCapability:
    webhooks: WebhookCapability = connection.app.state.webhooks
    return webhooks
