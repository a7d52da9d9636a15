"""The stores that a process opens, and how it runs its background loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import msgspec

from interlock.clock import Clock, SystemClock
from interlock.errors import ConfigurationError
from interlock.settings import Settings
from interlock.stores.notifications import Listener, Wakeups
from interlock.stores.objects import Objects, open_objects
from interlock.stores.postgres import Database, migrate, require_schema
from interlock.stores.valkey import Coordination


@dataclass(frozen=True)
class Stores:
    database: Database
    coordination: Coordination | None
    wakeups: Wakeups
    listener: Listener

    @property
    def clock(self) -> Clock:
        return self.database.clock


@asynccontextmanager
async def state_database(settings: Settings, process: str, clock: Clock | None) -> AsyncIterator[Database]:
    url = state_url(settings)
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


@asynccontextmanager
async def listening(settings: Settings, *, commands: bool = False) -> AsyncIterator[Wakeups]:
    """Notifications of the state database, while the block runs."""
    wakeups = Wakeups()
    task = asyncio.create_task(Listener(state_url(settings), wakeups, commands=commands).run(), name="listener")
    try:
        yield wakeups
    finally:
        await close_task(task)


def process_objects(settings: Settings) -> Objects:
    """The objects for a process that signs no URLs."""
    return open_objects(settings.objects_root, endpoint=settings.objects_endpoint, region=settings.objects_region)


def state_url(settings: Settings) -> str:
    if settings.state_url is None:
        raise ConfigurationError(
            "state_url is not set. `interlock up` starts an embedded database and sets it for its processes; "
            "set INTERLOCK_STATE_URL for a process that you start separately."
        )
    return settings.state_url.get_secret_value()


async def close_task(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def migrate_state(url: str) -> list[str]:
    """Brings the schema of the state database forward. Returns the names of the migrations that it applied."""
    return await migrate(url)


STORES: Final = ("state", "data", "valkey")


def store_urls(settings: Settings) -> dict[str, str]:
    """Returns URLs by store, without embedded stores that are not running."""
    given = {name: getattr(settings, f"{name}_url") for name in STORES}
    running = endpoints(settings)
    urls = {name: url.get_secret_value() if url else running.get(f"{name}_url") for name, url in given.items()}
    return {name: url for name, url in urls.items() if url}


def endpoints(settings: Settings) -> dict[str, str]:
    """Returns the endpoints that the `interlock up` of this folder has recorded; empty if none is running."""
    file = settings.dir / "endpoints.json"
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, str])
    except msgspec.MsgspecError:
        return {}
