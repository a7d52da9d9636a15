"""Gateway, dispatcher and query service as separate processes, on sockets that the test holds."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import httpx

from interlock.apps.app import open_app
from interlock.bus.registry.entries import SERVICE, Registrar
from interlock.http.listener import bind, url_of
from interlock.settings import Settings
from interlock.wire.access import KeyRequest, Role, WorkerTokenRequest
from interlock.wire.bus_registry import ServiceRequest
from tests.support.dags import valid
from tests.support.datasets import CHAIN

ORG = "fuzzed"
RIVAL = "rival"
PRODUCER, TARGET = "fuzz-producer", "fuzz-target"


@dataclass
class FuzzedListeners:
    """Three listeners that are reachable only through their sockets."""

    state_url: str
    folder: Path
    admin_key: str
    rival_key: str
    worker_token: str
    urls: dict[str, str] = field(default_factory=dict)
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=30))
    _read: Counter[str] = field(default_factory=Counter)

    @property
    def gateway_url(self) -> str:
        return self.urls["gateway"]

    @property
    def internal_url(self) -> str:
        return self.urls["dispatcher"]

    @property
    def query_url(self) -> str:
        return self.urls["query"]

    def user(self, method: str, path: str, *, key: str | None = None, **more: Any) -> Any:
        headers = {"Authorization": f"Bearer {key or self.admin_key}"}
        reply = self.http.request(method, self.gateway_url + path, headers=headers, **more)
        return reply.raise_for_status().json()

    def worker(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"X-Trace-Worker-Token": self.worker_token}
        return self.http.post(self.internal_url + path, headers=headers, json=body).raise_for_status().json()

    def log(self, process: str) -> Path:
        return self.folder / f"{process}.log"

    def complaints(self) -> list[dict[str, Any]]:
        """Returns new log lines that show a defect: errors, and everything with a stack trace."""
        lines = [json.loads(line) for name in self.processes for line in self._new_lines(name)]
        return [line for line in lines if line["level"] in ("error", "critical") or "exception" in line]

    def _new_lines(self, process: str) -> list[str]:
        lines = self.log(process).read_text().splitlines()
        first, self._read[process] = self._read[process], len(lines)
        return lines[first:]

    async def rows(self, sql: str) -> list[asyncpg.Record]:
        """Reads directly from the state database, for invariants independent of the API."""
        connection = await asyncpg.connect(self.state_url)
        try:
            return await connection.fetch(sql)
        finally:
            await connection.close()


@asynccontextmanager
async def running_listeners(state_url: str, valkey_url: str, folder: Path) -> AsyncIterator[FuzzedListeners]:
    settings = Settings(
        dir=folder, state_url=state_url, valkey_url=valkey_url, gateway="127.0.0.1:0", internal="127.0.0.1:0"
    )
    site = await _founded(settings, state_url, folder)
    for process in ("dispatcher", "gateway", "query"):
        await _start(site, process, "127.0.0.1:0", settings)
    try:
        yield site
    finally:
        site.http.close()
        for child in site.processes.values():
            child.terminate()
        codes = [await asyncio.wait_for(child.wait(), 60) for child in site.processes.values()]
    assert codes == [0, 0, 0]


async def _founded(settings: Settings, state_url: str, folder: Path) -> FuzzedListeners:
    async with open_app(settings, process="founding") as parts:
        org, rival = await parts.access.principals.create_org(ORG), await parts.access.principals.create_org(RIVAL)
        by = Registrar(org.org_id, org.name, "root")
        for service in (PRODUCER, TARGET):
            await parts.bus.registry.put(SERVICE, ServiceRequest(name=service), by)
        root = KeyRequest(user="root", role=Role.ADMIN)
        speaking = KeyRequest(user="root", role=Role.ADMIN, service=PRODUCER)
        keys = [
            await parts.access.principals.create_key(request, o.org_id, granted_by=None)
            for request, o in ((speaking, org), (root, rival))
        ]
        token = await parts.access.principals.create_worker_token(WorkerTokenRequest(name="test"))
        await parts.dags.deployments.deploy(valid(CHAIN), org.org_id, "root")
    return FuzzedListeners(state_url, folder, keys[0].key, keys[1].key, token.token)


async def _start(site: FuzzedListeners, process: str, address: str, settings: Settings) -> None:
    listener = bind(address, setting=process)
    site.urls[process] = url_of(listener, settings)
    assert settings.valkey_url is not None
    environment = os.environ | {
        "INTERLOCK_DIR": str(site.folder),
        "INTERLOCK_STATE_URL": site.state_url,
        "INTERLOCK_VALKEY_URL": settings.valkey_url.get_secret_value(),
        "INTERLOCK_LOG_FORMAT": "json",
        "INTERLOCK_TOKEN_TTL_SECONDS": "3600",
        "INTERLOCK_AUTH_FAILURES_PER_SECOND": "0",  # the tests send thousands of forgeries from one address
        "INTERLOCK_RECONCILE_SECONDS": "1",
        "INTERLOCK_RECONCILE_GRACE_SECONDS": "2",
    }
    if process == "gateway":
        # The worst case of an identity provider: its keys also sign tokens of another kind.
        keys = f"{site.internal_url}/internal/jwks/task"
        environment |= {
            "INTERLOCK_OIDC_ISSUER": site.internal_url,
            "INTERLOCK_OIDC_AUDIENCE": "users",
            "INTERLOCK_OIDC_JWKS_URL": keys,
        }
    if process == "query":
        environment |= {"INTERLOCK_INTERNAL_URL": site.internal_url, "INTERLOCK_QUERY_TIMEOUT_SECONDS": "5"}
    with site.log(process).open("wb") as log, listener:
        site.processes[process] = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "interlock.cli", "serve", process, "--fd", str(listener.fileno()),
            env=environment, stderr=log, pass_fds=[listener.fileno()],
        )  # fmt: skip
