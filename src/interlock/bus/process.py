"""The loops of `interlock bus`, on the stores that it is handed."""

from __future__ import annotations

from interlock.adapters.notifications import Wakeups
from interlock.adapters.objects import Objects
from interlock.adapters.postgres import Database
from interlock.bus.alert_mail import AlertMail
from interlock.bus.archive import Archive, ArchiveRetention
from interlock.bus.auditor import Auditor
from interlock.bus.keys import KeyRotation, ServiceKeys
from interlock.bus.monitor import Monitor
from interlock.bus.secrets import Seal
from interlock.bus.slow import SlowStage
from interlock.bus.sweep import BusSweep
from interlock.bus.telemetry import TelemetryAgeOut, TelemetryBatches
from interlock.kernel.loop import Service
from interlock.settings import Settings


def services(settings: Settings, database: Database, objects: Objects, wakeups: Wakeups) -> list[Service]:
    return [
        SlowStage(database, settings, wakeups),
        BusSweep(database, settings),
        Auditor(database, settings),
        TelemetryBatches(database, settings),
        TelemetryAgeOut(database, settings),
        Archive(database, settings, objects),
        ArchiveRetention(database, settings),
        AlertMail(database, settings),
        Monitor(database, settings),
        KeyRotation(ServiceKeys(database, settings, Seal(settings.signing_keys_dir))),
    ]
