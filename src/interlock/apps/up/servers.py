"""The embedded servers of `interlock up`, or the stores that its settings name; the role of the query service."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from importlib import resources
from typing import Final
from urllib.parse import quote, urlsplit, urlunsplit

import asyncpg
import structlog

from interlock.apps.up.folder import Folder
from interlock.settings import Settings
from interlock.stores.embedded import EmbeddedPostgres, EmbeddedServer, EmbeddedValkey
from interlock.stores.postgres import queries

ROLE: Final = "interlock_query"
_SCHEMAS: Final = ("workers/block_follower/schema.sql", "datasets/buffers/schema.sql")
"""Schemas with tables of other components. They are created first, so that the role gets no access to them."""

_sql = queries("apps/up", "query_role")


async def make_query_role(data_url: str) -> str:
    """Creates the role and returns its password, which is new each time and stored nowhere."""
    password = secrets.token_urlsafe(32)
    connection = await asyncpg.connect(data_url, timeout=10)
    try:
        async with connection.transaction():
            await _sql.lock_schema(connection)
            for name in _SCHEMAS:
                await connection.execute((resources.files("interlock") / name).read_text())
            await _sql.keep_password(connection, password=password)
            await _sql.make_role(connection)
    finally:
        await connection.close()
    return password


def as_role(url: str, password: str) -> str:
    """Returns the URL of the same database with the role and its password."""
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{ROLE}:{quote(password, safe='')}@{place}"))


log = structlog.get_logger()


@dataclass(frozen=True)
class Urls:
    state: str
    data: str
    valkey: str


class Servers:
    def __init__(self, folder: Folder, settings: Settings) -> None:
        given = {"state": settings.state_url, "data": settings.data_url, "valkey": settings.valkey_url}
        self._urls = {name: url.get_secret_value() for name, url in given.items() if url is not None}
        self._embedded = {name: _embedded(name, folder) for name, url in given.items() if url is None}

    @property
    def urls(self) -> Urls:
        return Urls(**self._urls)

    async def start(self) -> Urls:
        """Starts or adopts all embedded servers concurrently. Raises if one cannot start."""
        started = await asyncio.gather(*(self._start(name) for name in self._embedded), return_exceptions=True)
        for outcome in started:
            if isinstance(outcome, BaseException):
                raise outcome
        return self.urls

    async def _start(self, name: str) -> None:
        self._urls[name] = await self._embedded[name].start()

    async def revive(self) -> bool:
        """Restarts servers that have died. Returns True if one of them got a new URL."""
        before = self.urls
        for name, server in self._embedded.items():
            if not server.running():
                log.warning("server.died", server=name, pid=server.pid)
                await self._start(name)
        return self.urls != before

    def trim_logs(self) -> None:
        for server in self._embedded.values():
            server.trim_log()

    async def stop(self) -> None:
        ended = await asyncio.gather(*(server.stop() for server in self._embedded.values()), return_exceptions=True)
        for name, outcome in zip(self._embedded, ended, strict=True):
            if isinstance(outcome, BaseException):
                log.error("server.not_stopped", server=name, exc_info=outcome)


def _embedded(name: str, folder: Folder) -> EmbeddedServer:
    if name == "valkey":
        return EmbeddedValkey(folder.path / name, name=name, log=folder.log_of(name))
    return EmbeddedPostgres(folder.path / name, name=name, log=folder.log_of(f"postgres-{name}"))
