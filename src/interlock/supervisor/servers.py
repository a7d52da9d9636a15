"""The stores: embedded servers under the folder, or whatever the given URLs name."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from interlock.adapters.embedded import EmbeddedPostgres, EmbeddedServer, EmbeddedValkey
from interlock.settings import Settings
from interlock.supervisor.folder import Folder

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
        """Starts or adopts all of them at once; fails when one cannot be had."""
        started = await asyncio.gather(*(self._start(name) for name in self._embedded), return_exceptions=True)
        for outcome in started:
            if isinstance(outcome, BaseException):
                raise outcome
        return self.urls

    async def _start(self, name: str) -> None:
        self._urls[name] = await self._embedded[name].start()

    async def revive(self) -> bool:
        """Brings back servers that have died. True when one of them came up under another URL."""
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
