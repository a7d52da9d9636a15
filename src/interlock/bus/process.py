"""The loops of `interlock bus`, on the stores that it is handed."""

from __future__ import annotations

from interlock.adapters.notifications import Wakeups
from interlock.adapters.objects import Objects
from interlock.adapters.postgres import Database
from interlock.bus.alert_mail import AlertMail
from interlock.bus.archive import Archive, ArchiveRetention
from interlock.bus.auditor import Auditor
from interlock.bus.ingress import Ingress
from interlock.bus.keys import KeyRotation, ServiceKeys
from interlock.bus.model import Registry
from interlock.bus.monitor import Monitor
from interlock.bus.replaying import Replaying
from interlock.bus.secrets import Seal
from interlock.bus.selecting import ArchiveSelection
from interlock.bus.slow import SlowStage
from interlock.bus.sweep import BusSweep
from interlock.bus.telemetry import TelemetryAgeOut, TelemetryBatches
from interlock.kernel.loop import Service
from interlock.settings import Settings


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
        Replaying(database, settings, ArchiveSelection(database, settings, objects, archive), registry, ingress),
    ]
