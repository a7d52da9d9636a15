"""Metrics of a process, and a listener for the processes that have no other one: bus, sink and ingest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

import structlog
from litestar import Litestar, MediaType, get
from litestar.datastructures import State

from interlock.access.build import Access, build_access
from interlock.access.guards import user_guard
from interlock.access.principals import PLATFORM
from interlock.apps.process import connection_limits
from interlock.http.listener import bind, require_loopback
from interlock.http.middleware import observed
from interlock.http.problems import HANDLERS
from interlock.http.server import Server, config_of
from interlock.settings import Settings
from interlock.stores.postgres import Database
from interlock.telemetry import metrics_text

log = structlog.get_logger()

_CONNECTIONS: Final = 64
_GRACE_SECONDS: Final = 1


@get(
    "/metrics",
    guards=[user_guard],
    opt={"scope": PLATFORM},
    media_type=MediaType.TEXT,
    summary="Prometheus metrics of this process",
)
async def metrics() -> bytes:
    return metrics_text()


@asynccontextmanager
async def serving_metrics(settings: Settings, database: Database, setting: str) -> AsyncIterator[None]:
    """Serves metrics at the loopback address in `setting` while the block runs; without an address, serves nothing.

    Operators can connect to loopback addresses, and labels name commands of every org: see `user_guard`.
    """
    address: str | None = getattr(settings, setting)
    if address is None:
        yield
        return
    require_loopback(address, setting=setting)
    access = build_access(settings, database, None)
    config = config_of(_application(access), grace_seconds=_GRACE_SECONDS, lifespan="off")
    limits = replace(connection_limits(settings), connections=_CONNECTIONS, per_peer=_CONNECTIONS)
    server, listener = Server(config, limits), bind(address, setting=setting, is_option=False)
    log.info("metrics.listening", at=address)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="metrics")
    try:
        yield
    finally:
        server.should_exit = True
        await serving
        await access.keyring.signers.close()


def _application(access: Access) -> Litestar:
    made = Litestar(
        [metrics],
        state=State({"access": access}),
        exception_handlers=HANDLERS,
        openapi_config=None,
        logging_config=None,
        debug=False,
    )
    made.asgi_handler = observed("metrics", access.lockout)(made.asgi_handler)
    return made
