"""The dispatcher process: the internal listener for workers and attempts, and the background loops."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import structlog
from litestar import Litestar, MediaType, get
from litestar.openapi.spec import Components, SecurityScheme

from interlock.access import routes as access
from interlock.access.guards import user_guard
from interlock.access.principals import PLATFORM
from interlock.apps.app import App, open_app
from interlock.apps.http_application import application, health
from interlock.apps.process import listener_of, serve, stop_on_signals
from interlock.dags.build import dag_loops, dags_of
from interlock.datasets import routes as datasets
from interlock.datasets.build import dataset_loops
from interlock.errors import ConfigurationError
from interlock.http.listener import url_of
from interlock.http.requests import Connection, Http, settings_of
from interlock.jobs.build import job_loops
from interlock.processes.loop import Service, forever
from interlock.query.build import query_loops
from interlock.settings import Settings
from interlock.tasks import worker_routes
from interlock.tasks.build import tasks_of
from interlock.tasks.outbox_relay import Relay
from interlock.tasks.overview import queue_view
from interlock.telemetry import (
    IN_FLIGHT,
    JOBS_HELD_BACK,
    OUTBOX_ROWS,
    QUEUE_DEAD,
    QUEUE_DEPTH,
    QUEUE_IN_FLIGHT,
    QUEUE_OLDEST,
    metrics_text,
)
from interlock.untrusted.build import bundle_loops
from interlock.untrusted.invocations import by_kind
from interlock.webhooks.build import webhook_loops

log = structlog.get_logger()


async def run_dispatcher(settings: Settings, *, descriptor: int | None = None) -> None:
    if settings.valkey_url is None:
        raise ConfigurationError(
            "INTERLOCK_VALKEY_URL is not set: a dispatcher checks the limits of runs in Valkey. "
            "Write INTERLOCK_VALKEY_URL=valkey://host:port/0, the same for all gateways and dispatchers."
        )
    listener = listener_of(settings, settings.internal, "internal", descriptor)
    stop = stop_on_signals()
    async with open_app(settings, process="dispatcher", commands=False) as app:
        loops = [asyncio.create_task(forever(service), name=service.name) for service in services(app)]
        log.info("listening", at=url_of(listener, settings))
        try:
            await serve(dispatcher(app), listener, settings, stop=stop, on_stop=app.stores.wakeups.close)
        finally:
            await _stop_loops(app, loops, settings.drain_seconds)


async def _stop_loops(app: App, loops: list[asyncio.Task[None]], seconds: float) -> None:
    """Cancels the loops. Every pass is one transaction or safe to repeat, so this loses nothing."""
    for task in loops:
        task.cancel()
    ended = await asyncio.gather(*loops, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            log.error("loop.died", exc_info=error)
    await asyncio.gather(app.tasks.inline.drain(seconds), app.untrusted.invoker.drain(seconds))


def services(app: App) -> list[Service]:
    """Makes the background loops. Any number of dispatchers may run them at once."""
    settings, stores, objects = app.settings, app.stores, app.access.objects
    database, wakeups = stores.database, stores.wakeups
    invoke = by_kind(settings, app.tasks.inline.invoke, app.untrusted.invoker.invoke)
    return [
        Relay(database, settings, app.tasks.queue, invoke, wakeups),
        *app.tasks.loops(),
        *job_loops(settings, database, objects, app.tasks),
        *dag_loops(settings, database, wakeups, app.tasks),
        *dataset_loops(settings, database, objects),
        *query_loops(settings, database),
        *bundle_loops(settings, database, objects),
        *webhook_loops(settings, database, wakeups, app.webhooks),
    ]


def dispatcher(app: App) -> Litestar:
    schemes: dict[str, Any] = {
        "workerToken": SecurityScheme(type="apiKey", name="X-Trace-Worker-Token", security_scheme_in="header"),
        "capability": SecurityScheme(type="apiKey", name="X-Trace-Task-Capability", security_scheme_in="header"),
        "apiKey": SecurityScheme(type="http", scheme="bearer", description="An API key of scope `platform`: `ilk_…`."),
    }
    return application(
        app,
        "dispatcher",
        HANDLERS,
        title="Interlock dispatcher",
        components=Components(security_schemes=schemes),
    )


@get(
    "/metrics",
    guards=[user_guard],
    opt={"scope": PLATFORM},
    media_type=MediaType.TEXT,
    summary="Prometheus metrics of this process and of the queues",
)
async def metrics(request: Http) -> bytes:
    await _refresh_gauges(request)
    return metrics_text()


_GAUGE_SECONDS = 5.0
_refreshed = {"at": float("-inf")}


async def _refresh_gauges(connection: Connection) -> None:
    """Reads the gauges at most every few seconds, however often they are scraped."""
    if time.monotonic() - _refreshed["at"] < _GAUGE_SECONDS:
        return
    _refreshed["at"] = time.monotonic()
    tasks = tasks_of(connection)
    for name in settings_of(connection).queues:
        view = await queue_view(tasks.queue, name)
        QUEUE_DEPTH.labels(queue=name).set(view.depth)
        QUEUE_IN_FLIGHT.labels(queue=name).set(view.in_flight)
        QUEUE_OLDEST.labels(queue=name).set(view.oldest_age_seconds or 0)
        QUEUE_DEAD.labels(queue=name).set(view.dead_letters)
    in_flight, owed = await tasks.reads.gauges()
    IN_FLIGHT.clear()
    for row in in_flight:
        IN_FLIGHT.labels(operator=row["operator"], runtime=row["runtime"]).set(row["n"])
    OUTBOX_ROWS.set(owed)
    for level, jobs in (await dags_of(connection).pauses.levels()).items():
        JOBS_HELD_BACK.labels(level=level).set(jobs)


HANDLERS = [
    *worker_routes.HANDLERS,
    *datasets.DISPATCHER_HANDLERS,
    *access.DISPATCHER_HANDLERS,
    health,
    metrics,
]
