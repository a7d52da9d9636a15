"""What the processes stand on: listening sockets, stores with the right schema, credentials.

Loading this takes most of a second, so the supervisor does it while its children load theirs.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Final

import structlog

from interlock.adapters.postgres import migrate
from interlock.api.listener import bind, require_safe, url_of
from interlock.client import WorkerClient
from interlock.errors import ConfigurationError
from interlock.settings import Settings
from interlock.supervisor.credentials import Credentials, ensure_credentials
from interlock.supervisor.folder import Folder
from interlock.supervisor.servers import Servers

log = structlog.get_logger()

LISTENERS: Final = ("gateway", "internal")
READY_SECONDS: Final = 60.0
_BIND_SECONDS: Final = 2.0


class Foundation:
    def __init__(self, settings: Settings, folder: Folder) -> None:
        self._settings = settings
        self._folder = folder
        self.servers = Servers(folder, settings)
        self.listeners: dict[str, socket.socket] = {}
        self.credentials = Credentials("", "")

    async def lay(self) -> None:
        """Sockets first: a port that is taken or a missing certificate shall stop the start at once."""
        _require_certificate(self._settings)
        for setting in LISTENERS:
            require_safe(getattr(self._settings, setting), self._settings)
            self.listeners[setting] = await self._listen(setting)
        urls = await self.servers.start()
        if applied := await migrate(urls.state):
            log.info("schema.migrated", applied=applied)
        self.credentials = await ensure_credentials(urls.state, self._folder)

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
        return configured or url_of(self.listeners[listener], self._settings)

    async def answers(self, listener: str) -> None:
        """Returns once its process is healthy: the socket takes connections before anybody accepts them."""
        url = url_of(self.listeners[listener], self._settings)
        async with WorkerClient(url, "", verify=False, patience=READY_SECONDS) as client:
            await client.health()

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
