"""The background loops of `interlock serve bus`."""

from __future__ import annotations

from interlock.access.secrets import Seal
from interlock.bus.alerts.alerts import AlertMail
from interlock.bus.alerts.route_health import Monitor
from interlock.bus.model import Registry
from interlock.bus.path.fairness import Auditor
from interlock.bus.path.ingress import Ingress
from interlock.bus.path.slow_stage import BusSweep, SlowStage
from interlock.bus.registry.keys import KeyRotation, ServiceKeys
from interlock.bus.replay.archive import Archive, ArchiveRetention
from interlock.bus.replay.requests import ArchiveSelection
from interlock.bus.replay.sender import ReplaySender
from interlock.bus.telemetry.loops import TelemetryAgeOut, TelemetryBatches
from interlock.processes.loop import Service
from interlock.settings import Settings
from interlock.stores.notifications import Wakeups
from interlock.stores.objects import Objects
from interlock.stores.postgres import Database


def services(
    settings: Settings, database: Database, objects: Objects, wakeups: Wakeups, ingress: Ingress, registry: Registry
) -> list[Service]:
    archive = Archive(database, settings, objects)
    return [
        SlowStage(database, settings, wakeups),
        BusSweep(database, settings),
        Auditor(database, settings),
        TelemetryBatches(database, settings),
        TelemetryAgeOut(database, settings),
        archive,
        ArchiveRetention(database, settings),
        AlertMail(database, settings),
        Monitor(database, settings),
        KeyRotation(ServiceKeys(database, settings, Seal(settings.signing_keys_dir))),
        ReplaySender(database, settings, ArchiveSelection(database, settings, objects, archive), registry, ingress),
    ]
