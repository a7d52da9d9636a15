"""Builds the DAG capability: deployment, routing, sources, backpressure and backfills."""

from __future__ import annotations

from dataclasses import dataclass

from interlock.access.build import Access
from interlock.access.secrets import Seal
from interlock.dags.backpressure import Pauses, Pressure
from interlock.dags.control import DagControl, JobWakes
from interlock.dags.cutover import CutOver, Retirement
from interlock.dags.deployment import Deployments
from interlock.dags.invalidation import Invalidations
from interlock.dags.routing import Router, ScopeExplanations, ScopeReconciler
from interlock.dags.sources import AlwaysOn, ManualEvents, Sources, Triggers
from interlock.dags.versions import DagReads
from interlock.dags.webhook_sources import Hooks
from interlock.datasets.build import Datasets
from interlock.http.requests import Connection
from interlock.jobs.backfills import Backfills
from interlock.processes.loop import Service
from interlock.settings import Settings
from interlock.stores.notifications import Wakeups
from interlock.stores.postgres import Database
from interlock.tasks.build import TaskKernel


@dataclass(frozen=True)
class Dags:
    deployments: Deployments
    control: DagControl
    reads: DagReads
    sources: Sources
    manual_events: ManualEvents
    hooks: Hooks
    pauses: Pauses
    invalidations: Invalidations
    backfills: Backfills
    scope_explanations: ScopeExplanations


def build_dags(
    settings: Settings,
    database: Database,
    access: Access,
    tasks: TaskKernel,
    *,
    datasets: Datasets,
    backfills: Backfills,
) -> Dags:
    deployments, reads = Deployments(database, settings, tasks.operators), DagReads(database)
    return Dags(
        deployments=deployments,
        control=DagControl(database, settings, deployments, reads),
        reads=reads,
        sources=Sources(database),
        manual_events=ManualEvents(database, settings),
        hooks=Hooks(database, settings, database.clock, access.lockout, Seal(settings.signing_keys_dir)),
        pauses=Pauses(database),
        invalidations=Invalidations(database, settings, datasets.registry),
        backfills=backfills,
        scope_explanations=ScopeExplanations(database),
    )


def dag_loops(settings: Settings, database: Database, wakeups: Wakeups, tasks: TaskKernel) -> list[Service]:
    return [
        Router(database, settings, wakeups),
        Triggers(database, settings, wakeups),
        AlwaysOn(database, settings, wakeups),
        ScopeReconciler(database, settings, wakeups),
        CutOver(database, settings, wakeups),
        Retirement(database, settings, tasks.actions),
        JobWakes(database, settings, wakeups),
        Pressure(database, settings, wakeups),
    ]


def dags_of(connection: Connection) -> Dags:
    dags: Dags = connection.app.state.dags
    return dags
