"""Puts the parts together. The only place that chooses adapters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from interlock.access.keyring import Keyring
from interlock.access.principals import Principals
from interlock.access.tokens import CapabilityTokens
from interlock.adapters.notifications import Listener, Wakeups
from interlock.adapters.objects import Objects
from interlock.adapters.pgqueue import PgQueue
from interlock.adapters.postgres import Database, require_schema
from interlock.adapters.queue import Queue
from interlock.adapters.valkey import Coordination
from interlock.clock import Clock, SystemClock
from interlock.dags import ranges
from interlock.dags.backfills import Backfills, BackfillTasks
from interlock.dags.cutover import CutOver
from interlock.dags.dataset_lineage import DatasetLineage
from interlock.dags.deploying import Deployments
from interlock.dags.hooks import Hooks
from interlock.dags.invalidation import Invalidations
from interlock.dags.manual import ManualEvents
from interlock.dags.operators import RANGES
from interlock.dags.pressure import Pauses, Pressure
from interlock.dags.reasons import ScopeExplanations
from interlock.dags.registry import Registry
from interlock.dags.retirement import Retirement
from interlock.dags.routing import Router, ScopeReconciler
from interlock.dags.scheduler import Scheduler
from interlock.dags.sources import AlwaysOn, Sources
from interlock.dags.triggers import Triggers
from interlock.dags.versions import DagReads
from interlock.errors import ConfigurationError
from interlock.kernel.actions import Actions
from interlock.kernel.claims import Claims
from interlock.kernel.effects import Effects
from interlock.kernel.explain import Explanations
from interlock.kernel.files import Files
from interlock.kernel.inline import OPERATORS, InlineRunner
from interlock.kernel.loop import Service
from interlock.kernel.markers import Markers
from interlock.kernel.presence import Presence
from interlock.kernel.reads import Reads
from interlock.kernel.reaper import Reaper
from interlock.kernel.reconcile import Reconciler
from interlock.kernel.relay import Relay
from interlock.kernel.retention import Retention
from interlock.kernel.retries import Retries
from interlock.kernel.runs import RunCancels, RunCounters
from interlock.kernel.submission import Submissions
from interlock.kernel.sweeper import Sweeper
from interlock.kernel.tasks import Tasks
from interlock.settings import Settings


@dataclass(frozen=True)
class Kernel:
    """Everything a gateway or a dispatcher works with."""

    settings: Settings
    clock: Clock
    database: Database
    wakeups: Wakeups
    listener: Listener
    queue: Queue
    coordination: Coordination | None
    keyring: Keyring
    tokens: CapabilityTokens
    principals: Principals
    claims: Claims
    tasks: Tasks
    effects: Effects
    files: Files
    objects: Objects
    submissions: Submissions
    reads: Reads
    actions: Actions
    explanations: Explanations
    inline: InlineRunner
    pauses: Pauses
    backfills: Backfills
    presence: Presence
    sources: Sources
    manual_events: ManualEvents
    hooks: Hooks
    deployments: Deployments
    dags: DagReads
    registry: Registry
    dataset_lineage: DatasetLineage
    invalidations: Invalidations
    scope_explanations: ScopeExplanations

    def services(self) -> list[Service]:
        """The background loops of a dispatcher; any number of dispatchers may run them at once."""
        database, settings = self.database, self.settings
        return [
            Relay(database, settings, self.queue, self.inline.invoke, self.wakeups),
            Retries(database, settings),
            Reaper(database, settings),
            RunCounters(database, settings),
            RunCancels(database, settings, self.actions),
            Reconciler(database, settings),
            Retention(database, settings, self.keyring),
            Router(database, settings, self.wakeups),
            Triggers(database, settings, self.wakeups),
            AlwaysOn(database, settings),
            ScopeReconciler(database, settings, self.wakeups),
            CutOver(database, settings),
            Retirement(database, settings, self.actions),
            Pressure(database, settings, self.wakeups),
            BackfillTasks(database, settings),
            Sweeper(database, settings, self.objects),
        ]


def assemble(settings: Settings, database: Database, *, coordination: Coordination | None, state_url: str) -> Kernel:
    clock = database.clock
    wakeups = Wakeups()
    queue = PgQueue(database, wakeups, max_receives=settings.queue_max_receives, bulk_share=settings.bulk_share)
    keyring = Keyring(database, settings.signing_keys_dir, verify_seconds=2 * settings.token_ttl_seconds)
    tokens = CapabilityTokens(
        database, keyring, clock, issuer=settings.token_issuer, ttl_seconds=settings.token_ttl_seconds
    )
    claims = Claims(database, settings, queue, tokens)
    objects = Objects(settings.objects_root)
    tasks = Tasks(database, settings, tokens, Markers(objects))
    effects = Effects(database, settings)
    reads = Reads(database)
    registry = Registry(database)
    actions = Actions(database, settings, reads)
    return Kernel(
        settings=settings,
        clock=clock,
        database=database,
        wakeups=wakeups,
        listener=Listener(state_url, wakeups),
        queue=queue,
        coordination=coordination,
        keyring=keyring,
        tokens=tokens,
        principals=Principals(database, clock),
        claims=claims,
        tasks=tasks,
        effects=effects,
        files=Files(database, settings, tasks, RANGES),
        objects=objects,
        submissions=Submissions(database, settings),
        reads=reads,
        actions=actions,
        explanations=Explanations(database),
        inline=InlineRunner(database, claims, tasks, effects, OPERATORS | ranges.OPERATORS),
        pauses=Pauses(database),
        backfills=Backfills(database, settings, actions),
        presence=Presence(database),
        sources=Sources(database),
        manual_events=ManualEvents(database, settings),
        hooks=Hooks(database, settings, clock),
        deployments=Deployments(database, settings),
        dags=DagReads(database),
        registry=registry,
        dataset_lineage=DatasetLineage(database, registry),
        invalidations=Invalidations(database, settings, registry),
        scope_explanations=ScopeExplanations(database),
    )


@asynccontextmanager
async def kernel(settings: Settings, *, process: str, clock: Clock | None = None) -> AsyncIterator[Kernel]:
    """Opens the stores named in the settings, checks the schema, and closes everything at the end."""
    url = _state_url(settings)
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(_state_database(settings, process, clock))
        coordination = None
        if settings.valkey_url is not None:
            coordination = Coordination(settings.valkey_url.get_secret_value())
            stack.push_async_callback(coordination.close)
        parts = assemble(settings, database, coordination=coordination, state_url=url)
        await parts.keyring.ensure()
        listening = asyncio.create_task(parts.listener.run(), name="listener")
        stack.push_async_callback(_stop, listening)
        yield parts


@asynccontextmanager
async def scheduler(settings: Settings, *, clock: Clock | None = None) -> AsyncIterator[Service]:
    """The loop of a scheduler, which needs the state database and nothing else."""
    async with _state_database(settings, "scheduler", clock) as database:
        yield Scheduler(database, settings)


@asynccontextmanager
async def _state_database(settings: Settings, process: str, clock: Clock | None) -> AsyncIterator[Database]:
    url = _state_url(settings)
    await require_schema(url)
    database = await Database.open(
        url,
        size=settings.database_connections,
        timeout=settings.database_timeout_seconds,
        clock=clock or SystemClock(),
        name=f"interlock-{process}",
    )
    try:
        yield database
    finally:
        await database.close()


def _state_url(settings: Settings) -> str:
    if settings.state_url is None:
        raise ConfigurationError(
            "state_url is not set. `interlock up` starts an embedded database and sets it for its processes; "
            "a process of its own needs INTERLOCK_STATE_URL."
        )
    return settings.state_url.get_secret_value()


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
