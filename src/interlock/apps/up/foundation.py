"""The prerequisites of all processes: listening sockets, stores with the current schema, credentials.

Importing this module takes most of a second, so the supervisor does it while its children load their modules.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Final
from urllib.parse import quote, urlsplit, urlunsplit

import asyncpg
import structlog

from interlock.apps.up.folder import Credentials, Folder, ensure_credentials
from interlock.client import Client, WorkerClient
from interlock.errors import ConfigurationError
from interlock.http.listener import bind, require_loopback, require_public_urls, require_safe, url_of
from interlock.settings import Settings
from interlock.stores.embedded import EmbeddedPostgres, EmbeddedServer, EmbeddedValkey
from interlock.stores.postgres import migrate, queries
from interlock.wire.tasks import OperatorsReport
from interlock.workers.catalogue import sources
from interlock.workers.operators import catalogue_of

log = structlog.get_logger()

LISTENERS: Final = ("gateway", "internal", "query")
READY_SECONDS: Final = 60.0
_BIND_SECONDS: Final = 2.0


class Foundation:
    def __init__(self, settings: Settings, folder: Folder) -> None:
        self._settings = settings
        self._folder = folder
        self.servers = Servers(folder, settings)
        self.listeners: dict[str, socket.socket] = {}
        self.credentials = Credentials("", "")
        self.runner_token = secrets.token_urlsafe(32)
        """A secret shared by the dispatcher and the runner of this start only."""
        self._query_password = ""

    async def prepare(self) -> None:
        """Starts everything. Sockets come first, so that a port in use or a missing certificate fails fast."""
        _require_certificate(self._settings)
        for setting in LISTENERS:
            require_safe(getattr(self._settings, setting), self._settings)
        require_public_urls(self._settings)
        for setting in LISTENERS:
            self.listeners[setting] = await self._listen(setting)
        if not self._settings.has_runner:
            require_loopback(self._settings.runner, setting="runner")
            self.listeners["runner"] = await self._listen("runner")
        urls = await self.servers.start()
        if applied := await migrate(urls.state):
            log.info("schema.migrated", applied=applied)
        self.credentials = await ensure_credentials(urls.state, self._folder)
        if self._settings.data_url is None and self._settings.query_data_url is None:
            self._query_password = await make_query_role(urls.data)

    @property
    def query_data_url(self) -> str | None:
        """The URL for the query service.

        No role is created in an external database, so its operator must configure one.
        """
        if self._settings.query_data_url is not None:
            return self._settings.query_data_url.get_secret_value()
        return as_role(self.servers.urls.data, self._query_password) if self._query_password else None

    async def _listen(self, setting: str) -> socket.socket:
        """Binds the socket of a listener. After a crash, retries until the old gateway has followed its supervisor."""
        address: str = getattr(self._settings, setting)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (_BIND_SECONDS if self._folder.left_by_a_crash else 0)
        while True:
            try:
                return bind(address, setting=setting)
            except ConfigurationError:
                if loop.time() >= deadline:
                    raise
            await asyncio.sleep(0.05)

    def url(self, listener: str) -> str:
        """Returns the URL for clients: the configured one, for example of a proxy or certificate name, or the bound
        one.
        """
        configured: str | None = getattr(self._settings, f"{listener}_url")
        if listener == "gateway":
            configured = configured or self._settings.objects_public_url
        return configured or url_of(self.listeners[listener], self._settings)

    @property
    def runner(self) -> dict[str, str]:
        """Variables that point the dispatcher to the runner; empty if the settings name another runner."""
        if "runner" not in self.listeners:
            return {}
        host, port = self.listeners["runner"].getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        return {"INTERLOCK_RUNNER_URL": f"http://{shown}:{port}", "INTERLOCK_RUNNER_TOKEN": self.runner_token}

    async def wait_until_healthy(self, listener: str) -> None:
        """Waits until the process is healthy. The socket alone accepts connections before the process handles them."""
        url = url_of(self.listeners[listener], self._settings)
        async with WorkerClient(url, "", verify=False, patience=READY_SECONDS) as client:
            await client.health()

    async def sign_in_url(self) -> str:
        """Returns a link to the dashboard that signs its first visitor in with the admin key."""
        url = url_of(self.listeners["gateway"], self._settings)
        async with Client(url, self.credentials.admin_key, verify=False, patience=READY_SECONDS) as client:
            link = await client.sign_in_link()
        return f"{self.url('gateway')}/ui/#sign-in={link.token}"

    async def report_operators(self, runtimes: Sequence[str], given: Sequence[str]) -> None:
        """Registers the operators before the workers have loaded, so that jobs may use them immediately."""
        url, found = url_of(self.listeners["internal"], self._settings), sources(given)
        async with WorkerClient(url, self.credentials.worker_token, verify=False, patience=READY_SECONDS) as client:
            for name in runtimes:
                runtime = self._settings.runtime(name)
                names = await asyncio.to_thread(catalogue_of(found, spark=runtime.spark).names)
                await client.report_operators(
                    OperatorsReport(queue=runtime.queue, worker_id="interlock up", operators=names)
                )

    async def close(self) -> None:
        for listener in self.listeners.values():
            listener.close()
        await self.servers.stop()


def _require_certificate(settings: Settings) -> None:
    if settings.tls_cert is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:
        raise ConfigurationError(f"tls_cert and tls_key cannot be loaded ({error}); check both files.") from error


ROLE: Final = "interlock_query"
_SCHEMAS: Final = ("workers/block_follower/schema.sql", "datasets/buffers/schema.sql")
"""Schemas with tables of other components. They are created first, so that the role gets no access to them."""

_sql = queries(__name__, "query_role")


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
