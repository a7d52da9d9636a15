"""Builds the command bus: the path of a command, the registry, inbox, alerts and replays."""

from __future__ import annotations

from dataclasses import dataclass

from interlock.access.build import Access
from interlock.access.keyring import Keyring
from interlock.access.secrets import Seal
from interlock.bus.alerts import Alerts, RouteHealths
from interlock.bus.inbox import Inbox
from interlock.bus.path.caches import Caches
from interlock.bus.path.fast_stage import Fast
from interlock.bus.path.fates import Fates
from interlock.bus.path.ingress import Ingress
from interlock.bus.path.limits import Limits
from interlock.bus.path.verification import Shield
from interlock.bus.registry.changes import Registry
from interlock.bus.registry.keys import ServiceKeys
from interlock.bus.registry.loader import RegistryReads
from interlock.bus.registry.pages import RegistryPages
from interlock.bus.registry.snapshot import Snapshots
from interlock.bus.replay.requests import Replays
from interlock.http.requests import Connection
from interlock.settings import Settings
from interlock.stores.notifications import Wakeups
from interlock.stores.objects import Objects
from interlock.stores.postgres import Database
from interlock.tasks.queue import Queue
from interlock.wire.bus_registry import DispatchMode


@dataclass(frozen=True)
class Bus:
    ingress: Ingress
    fates: Fates
    inbox: Inbox
    alerts: Alerts
    route_health: RouteHealths
    registry: Registry
    pages: RegistryPages
    service_keys: ServiceKeys
    replays: Replays


def build_bus(settings: Settings, database: Database, wakeups: Wakeups, access: Access, queue: Queue) -> Bus:
    service_keys = ServiceKeys(database, settings, Seal(settings.signing_keys_dir))
    snapshots = _snapshots(settings, database, access.objects, access.keyring)
    return Bus(
        ingress=build_ingress(settings, database, wakeups, snapshots),
        fates=Fates(database, wakeups),
        inbox=Inbox(database, queue),
        alerts=Alerts(database, settings),
        route_health=RouteHealths(database),
        registry=Registry(database, service_keys),
        pages=RegistryPages(database),
        service_keys=service_keys,
        replays=Replays(database),
    )


def build_ingress(
    settings: Settings, database: Database, wakeups: Wakeups, snapshots: Snapshots | None = None
) -> Ingress:
    registry = RegistryReads(database, Seal(settings.signing_keys_dir))
    return Ingress(
        database,
        Caches(registry, database.clock, start=snapshots),
        Shield(window_seconds=settings.command_window_seconds),
        Fast(mode=DispatchMode(settings.dispatch_mode)),
        Limits(database, prefetchers=settings.token_prefetchers),
        wakeups,
        report_seconds=settings.audit_seconds,
    )


def _snapshots(settings: Settings, database: Database, objects: Objects, keyring: Keyring) -> Snapshots | None:
    if not settings.bus_snapshots:
        return None
    return Snapshots(objects, keyring, Seal(settings.signing_keys_dir), database.clock, settings)


def bus_of(connection: Connection) -> Bus:
    bus: Bus = connection.app.state.bus
    return bus
