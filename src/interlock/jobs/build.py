"""Builds the jobs capability: submission, run control, results, receipts, exports and reruns."""

from __future__ import annotations

from dataclasses import dataclass

from interlock.access.build import Access
from interlock.http.requests import Connection
from interlock.jobs.backfills import Backfills
from interlock.jobs.bulk_operations import BulkOperationLoop, BulkOperations
from interlock.jobs.exports import Exports, ExportStaging
from interlock.jobs.live import LiveStreams
from interlock.jobs.receipts import Receipts, Results
from interlock.jobs.reruns import RerunCopies, Reruns
from interlock.jobs.run_control import Deadlines, RunControl, RunWakes
from interlock.jobs.staged_lists import Uploads
from interlock.jobs.submission import ClosedRuns, Submissions
from interlock.processes.loop import Service
from interlock.settings import Settings
from interlock.stores.notifications import Wakeups
from interlock.stores.objects import Objects
from interlock.stores.postgres import Database
from interlock.tasks.build import TaskKernel
from interlock.tasks.result_packs import Packs


@dataclass(frozen=True)
class Jobs:
    closed_runs: ClosedRuns
    submissions: Submissions
    uploads: Uploads
    run_control: RunControl
    results: Results
    receipts: Receipts
    exports: Exports
    reruns: Reruns
    backfills: Backfills
    bulk_operations: BulkOperations
    live: LiveStreams


def build_jobs(
    settings: Settings, database: Database, wakeups: Wakeups, access: Access, tasks: TaskKernel, packs: Packs
) -> Jobs:
    reads, objects = tasks.reads, access.objects
    closed = ClosedRuns(database, settings, tasks.operators)
    uploads = Uploads(database, settings, objects)
    bulk_operations = BulkOperations(database, settings, reads)
    return Jobs(
        closed_runs=closed,
        submissions=Submissions(database, settings, closed, uploads, reads),
        uploads=uploads,
        run_control=RunControl(database, settings, reads, tasks.actions, tasks.status),
        results=Results(database, reads, packs, access.result_urls),
        receipts=Receipts(database, access.keyring, reads, issuer=settings.token_issuer),
        exports=Exports(database, settings, objects, reads),
        reruns=Reruns(database, settings, closed, uploads, reads),
        backfills=Backfills(database, settings, tasks.actions),
        bulk_operations=bulk_operations,
        live=LiveStreams(tasks.dashboard.overviews, bulk_operations, access.sessions, wakeups),
    )


def job_loops(settings: Settings, database: Database, objects: Objects, tasks: TaskKernel) -> list[Service]:
    return [
        RunWakes(database, settings),
        Deadlines(database, settings),
        ExportStaging(database, settings, objects),
        RerunCopies(database, settings, objects),
        BulkOperationLoop(database, tasks.actions),
    ]


def jobs_of(connection: Connection) -> Jobs:
    jobs: Jobs = connection.app.state.jobs
    return jobs
