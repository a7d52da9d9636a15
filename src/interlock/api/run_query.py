"""The query process. Apart from the others, which do without DuckDB and Arrow."""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path

import structlog

from interlock.access.query import Engine
from interlock.access.query.files import OpenStore
from interlock.adapters.objects import open_store
from interlock.api.listener import url_of
from interlock.api.query import query
from interlock.api.run import listener_of
from interlock.api.server import serve, stop_on_signals
from interlock.dags.operators import RANGES
from interlock.kernel.batch_queries import BatchQueries
from interlock.kernel.inputs import Inputs
from interlock.kernel.query_relations import QueryRelations
from interlock.kernel.query_service import QueryService
from interlock.settings import Settings
from interlock.wiring import Kernel, kernel

log = structlog.get_logger()


async def run_query(settings: Settings, *, descriptor: int | None = None) -> None:
    listener = listener_of(settings, settings.query, "query", descriptor)
    stop = stop_on_signals()
    async with (
        kernel(settings, process="query", signs=False, commands=False, seals=False) as parts,
        query_service(parts) as service,
    ):
        log.info("listening", at=url_of(listener, settings))
        await serve(query(parts, service), listener, settings, stop=stop, on_stop=parts.wakeups.close)


@asynccontextmanager
async def query_service(parts: Kernel) -> AsyncIterator[QueryService]:
    """With its engine, warmed; which is ended first, and whatever runs with it."""
    settings = parts.settings
    with _folder(settings.dir.absolute() / "query") as folder:
        engine = Engine(
            folder,
            store=_stores(settings),
            data_url=_data_url(settings),
            most_processes=settings.query_processes,
        )
        service = QueryService(
            settings,
            parts.queries,
            QueryRelations(
                parts.database, Inputs(settings.objects_root, RANGES), parts.registry.find, range_operators=RANGES
            ),
            BatchQueries(parts.database, parts.submissions),
            engine,
            parts.objects,
        )
        await engine.start()
        try:
            yield service
        finally:
            await engine.stop()
            await service.drain()


@contextmanager
def _folder(root: Path) -> Iterator[Path]:
    """The first one that no other process has: what one that was killed has left there is deleted by the next."""
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
