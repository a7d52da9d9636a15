"""The capabilities of one installation, built on its stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import asyncpg

from interlock.access.build import Access, build_access, verifying_with_published_keys
from interlock.access.secrets import Seal, require_seal
from interlock.apps.stores import Stores, close_task, state_database, state_url
from interlock.bus.build import Bus, build_bus
from interlock.clock import Clock, SystemClock
from interlock.dags import range_operators
from interlock.dags.build import Dags, build_dags
from interlock.dags.partitioning import RANGES
from interlock.dags.webhook_sources import seal_stored_hooks
from interlock.datasets.build import Datasets, build_datasets
from interlock.jobs.build import Jobs, build_jobs
from interlock.query.build import QueryHistory, build_query_history
from interlock.settings import Settings, load
from interlock.stores.notifications import Listener, Wakeups
from interlock.stores.postgres import Database
from interlock.stores.valkey import Coordination
from interlock.tasks import inline_runtime
from interlock.tasks.build import TaskKernel, build_tasks
from interlock.tasks.dataset_changes import Inputs
from interlock.tasks.result_packs import Packs
from interlock.untrusted.build import Untrusted, build_untrusted
from interlock.webhooks.build import WebhookCapability, build_webhooks
from interlock.webhooks.registry import seal_stored_webhooks


@dataclass(frozen=True)
class App:
    """Everything a gateway or a dispatcher works with. A handler receives its own capability, never the App."""

    settings: Settings
    stores: Stores
    access: Access
    tasks: TaskKernel
    jobs: Jobs
    datasets: Datasets
    dags: Dags
    query: QueryHistory
    untrusted: Untrusted
    webhooks: WebhookCapability
    bus: Bus


def assemble(
    settings: Settings,
    database: Database,
    *,
    coordination: Coordination | None,
    state_url: str,
    commands: bool = True,
) -> App:
    """Builds every capability. Opens nothing: see `open_app`."""
    wakeups = Wakeups()
    access = build_access(settings, database, coordination)
    inputs = Inputs(settings.objects_root, RANGES)
    packs = Packs(database, access.objects, inline_bytes=settings.result_inline_bytes)
    tasks = build_tasks(
        settings,
        database,
        coordination,
        wakeups,
        access,
        inputs=inputs,
        packs=packs,
        inline_operators=inline_runtime.OPERATORS | range_operators.OPERATORS,
    )
    datasets = build_datasets(settings, database, access, tasks, inputs)
    jobs = build_jobs(settings, database, wakeups, access, tasks, packs)
    return App(
        settings=settings,
        stores=Stores(database, coordination, wakeups, Listener(state_url, wakeups, commands=commands)),
        access=access,
        tasks=tasks,
        jobs=jobs,
        datasets=datasets,
        dags=build_dags(settings, database, access, tasks, datasets=datasets, backfills=jobs.backfills),
        query=build_query_history(settings, database, access.objects, packs),
        untrusted=build_untrusted(settings, database, wakeups, access, tasks),
        webhooks=build_webhooks(settings, database),
        bus=build_bus(settings, database, wakeups, access, tasks.queue),
    )


def without_stores() -> App:
    """Builds an App that is never opened, to describe the routes of its listeners."""
    nowhere = "postgresql://nowhere"
    database = Database(asyncpg.create_pool(nowhere, min_size=0), SystemClock())
    return assemble(load(), database, coordination=None, state_url=nowhere)


def with_published_keys(app: App, clock: Clock | None = None) -> App:
    access = verifying_with_published_keys(app.access, app.settings, app.stores.database, clock or app.stores.clock)
    return replace(app, access=access)


@asynccontextmanager
async def open_app(
    settings: Settings,
    *,
    process: str,
    clock: Clock | None = None,
    signs: bool = True,
    commands: bool = True,
    seals: bool = True,
) -> AsyncIterator[App]:
    """Opens the stores named in the settings, checks the schema, and closes everything at the end.

    A process that does not sign creates no signing key: no other process could use it. A process without `commands`
    is not notified of commands; one without `seals` opens no sealed secret.
    """
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(state_database(settings, process, clock))
        coordination = None
        if settings.valkey_url is not None:
            coordination = Coordination(settings.valkey_url.get_secret_value())
            stack.push_async_callback(coordination.close)
        app = assemble(settings, database, coordination=coordination, state_url=state_url(settings), commands=commands)
        stack.push_async_callback(app.access.keyring.signers.close)
        stack.push_async_callback(app.datasets.credentials.close)
        stack.push_async_callback(app.bus.ingress.close)
        if seals:
            seal = Seal(settings.signing_keys_dir)
            await require_seal(database, seal)
            await seal_stored_webhooks(database, seal)
            await seal_stored_hooks(database, seal)
        if signs:
            await app.access.keyring.ensure()
        else:
            app = with_published_keys(app)
        stack.push_async_callback(app.untrusted.invoker.close)
        listening = asyncio.create_task(app.stores.listener.run(), name="listener")
        stack.push_async_callback(close_task, listening)
        yield app
