"""Builds the kernel: queue, claims, attempts and the loops around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from interlock.access.build import Access
from interlock.http.requests import Connection
from interlock.processes.loop import Service
from interlock.settings import Settings
from interlock.stores.notifications import Wakeups
from interlock.stores.postgres import Database
from interlock.stores.valkey import Coordination
from interlock.tasks.actions import Actions
from interlock.tasks.claims import Claims, Gates
from interlock.tasks.completion import Attempts
from interlock.tasks.dataset_changes import Inputs, Markers
from interlock.tasks.effects import Effects
from interlock.tasks.explain import Explanations, Presence
from interlock.tasks.inline_runtime import InlineOperator, InlineRunner
from interlock.tasks.limits import Rates, RunSlotRecount, RunSlots
from interlock.tasks.operators import Operators
from interlock.tasks.overview import Overviews
from interlock.tasks.postgres_queue import PgQueue
from interlock.tasks.queue import Queue
from interlock.tasks.reads import Reads
from interlock.tasks.reaper import Reaper, Reconciler, Retries
from interlock.tasks.result_packs import Packs
from interlock.tasks.retention import Retention, RunDeletions
from interlock.tasks.runs import HotStatus, Pace, RunCancels, RunCounters
from interlock.tasks.search import Search
from interlock.tasks.shards import Shards
from interlock.tasks.table_statistics import TableStatistics


@dataclass(frozen=True)
class Dashboard:
    """Reads of the dashboard."""

    overviews: Overviews
    search: Search
    presence: Presence


@dataclass(frozen=True)
class TaskKernel:
    queue: Queue
    operators: Operators
    claims: Claims
    attempts: Attempts
    effects: Effects
    actions: Actions
    inline: InlineRunner
    reads: Reads
    dashboard: Dashboard
    status: HotStatus
    explanations: Explanations
    loops: partial[list[Service]]
    """Makes the background loops of a dispatcher."""


def build_tasks(
    settings: Settings,
    database: Database,
    coordination: Coordination | None,
    wakeups: Wakeups,
    access: Access,
    *,
    inputs: Inputs,
    packs: Packs,
    inline_operators: Mapping[str, InlineOperator],
) -> TaskKernel:
    queue = open_queue(settings, database, wakeups)
    shards = Shards(database)
    turns = RunSlots(database, settings, coordination, queue, shards)
    attempts = Attempts(database, settings, access.tokens, Markers(access.objects), inputs, packs, turns)
    operators = Operators(database, settings)
    gates = Gates(turns, Rates(coordination, database.clock), operators, attempts)
    claims = Claims(database, settings, queue, access.tokens, inputs, shards, gates, access.secrets)
    effects = Effects(database, settings)
    reads = Reads(database, packs, settings.retention_days, settings.task_log_bytes)
    actions = Actions(database, settings, reads)
    pace = Pace(coordination, database.clock)
    return TaskKernel(
        queue=queue,
        operators=operators,
        claims=claims,
        attempts=attempts,
        effects=effects,
        actions=actions,
        inline=InlineRunner(database, claims, attempts, effects, wakeups, inline_operators),
        reads=reads,
        dashboard=Dashboard(Overviews(database, queue, settings.queues), Search(database, reads), Presence(database)),
        status=HotStatus(reads, pace, coordination),
        explanations=Explanations(database, coordination),
        loops=partial(_loops, settings, database, access, shards, turns, pace, actions),
    )


def open_queue(settings: Settings, database: Database, wakeups: Wakeups) -> PgQueue:
    return PgQueue(database, wakeups, max_receives=settings.queue_max_receives, bulk_share=settings.bulk_share)


def _loops(
    settings: Settings,
    database: Database,
    access: Access,
    shards: Shards,
    turns: RunSlots,
    pace: Pace,
    actions: Actions,
) -> list[Service]:
    return [
        Retries(database, settings, shards),
        Reaper(database, settings, shards, turns),
        RunCounters(database, settings, pace),
        RunCancels(database, settings, actions),
        Reconciler(database, settings, shards, turns),
        TableStatistics(database),
        Retention(database, settings, access.keyring, access.sessions),
        RunDeletions(database, settings, shards),
        RunSlotRecount(database, settings, turns),
    ]


def tasks_of(connection: Connection) -> TaskKernel:
    tasks: TaskKernel = connection.app.state.tasks
    return tasks
