"""Builds the jobs capability: submission, run control, results, receipts, exports and reruns."""

from __future__ import annotations

from dataclasses import dataclass

from interlock.access.build import Access
from interlock.http.parameters import Connection
from interlock.jobs.backfills import Backfills
from interlock.jobs.bulk_submission import BulkSubmissions
from interlock.jobs.exports import Exports, ExportStaging
from interlock.jobs.receipts import Receipts, Results
from interlock.jobs.reruns import RerunCopies, Reruns
from interlock.jobs.run_control import Deadlines, RunControl, RunWakes
from interlock.jobs.staged_lists import Uploads
from interlock.jobs.submission import Submissions
from interlock.processes.loop import Service
from interlock.settings import Settings
from interlock.stores.objects import Objects
from interlock.stores.postgres import Database
from interlock.tasks.build import TaskKernel
from interlock.tasks.result_packs import Packs


@dataclass(frozen=True)
class Jobs:
    submissions: Submissions
    bulk: BulkSubmissions
    uploads: Uploads
    run_control: RunControl
    results: Results
    receipts: Receipts
    exports: Exports
    reruns: Reruns
    backfills: Backfills


def build_jobs(settings: Settings, database: Database, access: Access, tasks: TaskKernel, packs: Packs) -> Jobs:
    reads, objects = tasks.reads, access.objects
    submissions = Submissions(database, settings, tasks.operators)
    uploads = Uploads(database, settings, objects)
    return Jobs(
        submissions=submissions,
        bulk=BulkSubmissions(database, settings, submissions, uploads, reads),
        uploads=uploads,
        run_control=RunControl(database, settings, reads, tasks.actions, tasks.status),
        results=Results(database, reads, packs, access.result_urls),
        receipts=Receipts(database, access.keyring, reads, issuer=settings.token_issuer),
        exports=Exports(database, settings, objects, reads),
        reruns=Reruns(database, settings, submissions, uploads, reads),
        backfills=Backfills(database, settings, tasks.actions),
    )


def job_loops(settings: Settings, database: Database, objects: Objects) -> list[Service]:
    return [
        RunWakes(database, settings),
        Deadlines(database, settings),
        ExportStaging(database, settings, objects),
        RerunCopies(database, settings, objects),
    ]


def jobs_of(connection: Connection) -> Jobs:
    jobs: Jobs = connection.app.state.jobs
    return jobs
