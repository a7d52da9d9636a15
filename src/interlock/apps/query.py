"""The query process. A separate module, because the other processes do not load DuckDB and Arrow."""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import structlog
from litestar import Litestar
from litestar.openapi.spec import Components, SecurityScheme

from interlock.apps.app import App, open_app
from interlock.apps.http_application import application, health
from interlock.apps.process import listener_of, serve, stop_on_signals
from interlock.dags.partitioning import RANGES
from interlock.http.listener import url_of
from interlock.query.catalogue import Catalogue
from interlock.query.engine import Engine
from interlock.query.engine.files import OpenStore
from interlock.query.records import BatchQueries
from interlock.query.relations import QueryRelations
from interlock.query.routes import HANDLERS
from interlock.query.service import QueryService
from interlock.settings import Settings
from interlock.stores.objects import open_store
from interlock.tasks.dataset_changes import Inputs

log = structlog.get_logger()


async def run_query(settings: Settings, *, descriptor: int | None = None) -> None:
    listener = listener_of(settings, settings.query, "query", descriptor)
    stop = stop_on_signals()
    async with (
        open_app(settings, process="query", signs=False, commands=False, seals=False) as app,
        query_service(app) as service,
    ):
        log.info("listening", at=url_of(listener, settings))
        await serve(query(app, service), listener, settings, stop=stop, on_stop=app.stores.wakeups.close)


@asynccontextmanager
async def query_service(app: App) -> AsyncIterator[QueryService]:
    """Starts the query service with a warm engine. On exit, stops the engine first, with all running queries."""
    settings = app.settings
    with _folder(settings.dir.absolute() / "query") as folder:
        engine = Engine(
            folder,
            store=_stores(settings),
            data_url=_data_url(settings),
            most_processes=settings.query_processes,
        )
        service = QueryService(
            settings,
            app.query.records,
            QueryRelations(
                app.stores.database,
                Inputs(settings.objects_root, RANGES),
                app.datasets.registry.find,
                range_operators=RANGES,
            ),
            Catalogue(app.stores.database),
            BatchQueries(app.stores.database, app.jobs.closed_runs),
            engine,
            app.access.objects,
        )
        await engine.start()
        try:
            yield service
        finally:
            await engine.stop()
            await service.drain()


@contextmanager
def _folder(root: Path) -> Iterator[Path]:
    """Locks and yields the first free folder. The next owner deletes the files that a killed process left there."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number in count():
        handle = os.open(root / f"{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                yield root / str(number)
            finally:
                os.close(handle)
            return
        os.close(handle)


def _stores(settings: Settings) -> OpenStore:
    return partial(open_store, endpoint=settings.objects_endpoint, region=settings.objects_region)


def _data_url(settings: Settings) -> str | None:
    return None if settings.query_data_url is None else settings.query_data_url.get_secret_value()


def query(app: App, service: QueryService | None = None) -> Litestar:
    """Builds the listener. Without a service it can be described, but answers no query."""
    schemes: dict[str, Any] = {
        "apiKey": SecurityScheme(type="http", scheme="bearer", description="An API key: `ilk_…`."),
        "capability": SecurityScheme(
            type="apiKey",
            name="X-Trace-Task-Capability",
            security_scheme_in="header",
            description="The capability token of one attempt.",
        ),
    }
    listening = application(
        app,
        "query",
        [*HANDLERS, health],
        title="Interlock query service",
        components=Components(security_schemes=schemes),
    )
    listening.state.queries = service
    return listening
