"""What the processes stand on: listening sockets, stores with the right schema, credentials.

Loading this takes most of a second, so the supervisor does it while its children load theirs.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
from collections.abc import Sequence
from typing import Final

import structlog

from interlock.adapters.postgres import migrate
from interlock.api.listener import bind, require_loopback, require_public_urls, require_safe, url_of
from interlock.client import WorkerClient
from interlock.errors import ConfigurationError
from interlock.settings import Settings
from interlock.supervisor.credentials import Credentials, ensure_credentials
from interlock.supervisor.folder import Folder
from interlock.supervisor.query_role import as_role, make_query_role
from interlock.supervisor.servers import Servers
from interlock.wire import OperatorsReport
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
        """Known to the dispatcher and the runner of this start, and to nobody else."""
        self._query_password = ""

    async def lay(self) -> None:
        """Sockets first: a port that is taken or a missing certificate shall stop the start at once."""
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
        """In a database of somebody else's no role is made: there its owner says by which one it is read."""
        if self._settings.query_data_url is not None:
            return self._settings.query_data_url.get_secret_value()
        return as_role(self.servers.urls.data, self._query_password) if self._query_password else None

    async def _listen(self, setting: str) -> socket.socket:
        """After a crash the last gateway may take a moment to follow its supervisor."""
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
        """Where clients reach it: behind a proxy or a name in a certificate, the settings say."""
        configured: str | None = getattr(self._settings, f"{listener}_url")
        if listener == "gateway":
            configured = configured or self._settings.objects_public_url
        return configured or url_of(self.listeners[listener], self._settings)

    @property
    def runner(self) -> dict[str, str]:
        """What the dispatcher is told of the runner; nothing where the settings name another one."""
        if "runner" not in self.listeners:
            return {}
        host, port = self.listeners["runner"].getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        return {"INTERLOCK_RUNNER_URL": f"http://{shown}:{port}", "INTERLOCK_RUNNER_TOKEN": self.runner_token}

    async def answers(self, listener: str) -> None:
        """Returns once its process is healthy: the socket takes connections before anybody accepts them."""
        url = url_of(self.listeners[listener], self._settings)
        async with WorkerClient(url, "", verify=False, patience=READY_SECONDS) as client:
            await client.health()

    async def report_operators(self, runtimes: Sequence[str], given: Sequence[str]) -> None:
        """Makes the operators of this start known before its workers have loaded: jobs may name them at once."""
        url, found = url_of(self.listeners["internal"], self._settings), sources(given)
        async with WorkerClient(url, self.credentials.worker_token, verify=False, patience=READY_SECONDS) as client:
            for name in runtimes:
                runtime = self._settings.runtime(name)
                names = await asyncio.to_thread(catalogue_of(found, spark=runtime.spark).names)
                await client.report_operators(
                    OperatorsReport(queue=runtime.queue, worker_id="interlock up", operators=names)
                )

    async def clear(self) -> None:
        for listener in self.listeners.values():
            listener.close()
        await self.servers.stop()


def _require_certificate(settings: Settings) -> None:
    if settings.tls_cert is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:
        raise ConfigurationError(f"tls_cert and tls_key cannot be used ({error}): check both files.") from error
