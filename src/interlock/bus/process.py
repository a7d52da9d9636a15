"""The loops of `interlock bus`, on the stores that it is handed."""

from __future__ import annotations

from interlock.adapters.objects import Objects
from interlock.adapters.postgres import Database
from interlock.bus.archive import Archive, ArchiveRetention
from interlock.bus.telemetry import TelemetryAgeOut, TelemetryBatches
from interlock.kernel.loop import Service
from interlock.settings import Settings


def services(settings: Settings, database: Database, objects: Objects) -> list[Service]:
    return [
        TelemetryBatches(database, settings),
        TelemetryAgeOut(database, settings),
        Archive(database, settings, objects),
        ArchiveRetention(database, settings),
    ]
