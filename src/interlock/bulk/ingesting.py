"""The loops of one ingest process, on the stores that it is handed."""

from __future__ import annotations

from interlock.adapters.objects import Objects
from interlock.adapters.postgres import Database
from interlock.adapters.queue import Queue
from interlock.bulk.heavy import SparkIngests
from interlock.bulk.held import HeldRuns
from interlock.bulk.ingest import Ingest
from interlock.bulk.records import Records
from interlock.bulk.upkeep import IngestReconciler, UnwantedRuns, UploadSweeper
from interlock.kernel.loop import Service
from interlock.settings import Settings


def services(
    settings: Settings, database: Database, queue: Queue, objects: Objects, state_url: str, *, wait_seconds: float
) -> list[Service]:
    records = Records(database, settings)
    heavy = SparkIngests(database, settings, records)
    readers = [
        Ingest(settings, database, queue, objects, state_url, heavy, wait_seconds=wait_seconds)
        for _ in range(settings.ingest_concurrency)
    ]
    return [
        *readers,
        heavy,
        HeldRuns(database, settings),
        IngestReconciler(database, settings, records),
        UnwantedRuns(database, settings),
        UploadSweeper(database, settings, objects),
    ]
