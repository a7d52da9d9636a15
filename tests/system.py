"""A whole Interlock in this process for a test: real Postgres, both listeners on real sockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import msgspec
from litestar import Litestar

from interlock.api.dispatcher import dispatcher
from interlock.api.gateway import gateway
from interlock.api.listener import bind, url_of
from interlock.api.server import serve
from interlock.clock import Clock
from interlock.settings import Settings
from interlock.wire import JobRequest, KeyRequest, Role, WorkerTokenRequest
from interlock.wiring import Kernel, kernel
from interlock.workers.catalogue import sources
from interlock.workers.operators import catalogue_of
from tests.patience import PATIENCE, answered

_TRUST = ssl.create_default_context()
"""One for all clients: making it takes longer than most requests."""


def http_client(*, connections: int, seconds: float = 30) -> httpx.AsyncClient:
    return httpx.AsyncClient(verify=_TRUST, timeout=seconds, limits=httpx.Limits(max_connections=connections))


@dataclass
class System:
    kernel: Kernel
    org_id: UUID
    admin_key: str
    worker_token: str
    gateway_url: str
    internal_url: str
    http: httpx.AsyncClient

    async def user(self, method: str, path: str, *, key: str | None = None, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key or self.admin_key}"} | more.pop("headers", {})
        return await self.http.request(method, self.gateway_url + path, headers=headers, **more)

    async def worker(self, method: str, path: str, *, token: str | None = None, **more: Any) -> httpx.Response:
        headers = {"X-Trace-Worker-Token": token or self.worker_token} | more.pop("headers", {})
        return await self.http.request(method, self.internal_url + path, headers=headers, **more)

    async def attempt(self, path: str, token: str, body: Any) -> httpx.Response:
        headers = {"X-Trace-Task-Capability": token}
        return await self.http.post(self.internal_url + path, headers=headers, json=body)

    async def submit(self, tasks: list[Any], **job: Any) -> dict[str, Any]:
        reply = await self.user("POST", "/v1/jobs", json={"operator": "echo", "tasks": tasks} | job)
        assert reply.status_code == 201, reply.text
        accepted: dict[str, Any] = reply.json()
        return accepted

    async def declare(self, *names: str, queue: str = "platform") -> None:
        """Reports operators as a worker does that can run them."""
        body = {"queue": queue, "worker_id": "test", "operators": list(names)}
        reply = await self.worker("POST", "/internal/operators", json=body)
        assert reply.status_code == 200, reply.text

    async def declare_all(self, folder: Path, *, spark: bool = False) -> None:
        """Reports the operators of a folder, as a worker that is given it does when it starts."""
        names = catalogue_of(sources([str(folder)]), spark=spark).names()
        await self.declare(*names, queue="spark" if spark else "platform")

    async def task_ids(self, run_id: str) -> list[str]:
        reply = await self.user("GET", f"/v1/tasks?run={run_id}&limit=1000")
        return [task["task_id"] for task in reply.json()["tasks"]]

    async def made_up(self, operator: str) -> str:
        """Writes a task of an operator that no request may name, as the platform itself does; returns its id."""
        request = JobRequest(tasks=[msgspec.Raw(b"1")], operator=operator, runtime="spark")
        accepted = await self.kernel.database.run(lambda c: self.kernel.submissions.within(c, request, self.org_id))
        return (await self.task_ids(str(accepted.run_id)))[0]

    async def one(self, **job: Any) -> str:
        """A job of one task; its id."""
        accepted = await self.submit([{"n": 1}], **job)
        return (await self.task_ids(accepted["run_id"]))[0]

    async def claim(self, task_id: str, worker_id: str = "test") -> dict[str, Any]:
        reply = await self.worker("POST", "/internal/task-claim", json={"task_id": task_id, "worker_id": worker_id})
        assert reply.status_code == 200, reply.text
        claimed: dict[str, Any] = reply.json()
        return claimed

    async def complete(self, claim: dict[str, Any], status: str = "Completed", **more: Any) -> httpx.Response:
        return await self.attempt(
            "/v1/task/complete", claim["capability_token"], fence(claim) | {"status": status} | more
        )

    async def task(self, task_id: str) -> dict[str, Any]:
        reply = await self.user("GET", f"/v1/tasks/{task_id}")
        assert reply.status_code == 200, reply.text
        task: dict[str, Any] = reply.json()
        return task

    async def claim_many(self, **what: Any) -> dict[str, Any]:
        """A list of tasks or a range of a run; the whole reply."""
        reply = await self.worker("POST", "/internal/task-claim", json={"worker_id": "test"} | what)
        assert reply.status_code == 200, reply.text
        batch: dict[str, Any] = reply.json()
        return batch

    async def receive(self, queue: str = "platform", **more: Any) -> list[dict[str, Any]]:
        body = {"queue": queue, "worker_id": "test", "wait_seconds": 0} | more
        reply = await self.worker("POST", "/internal/queue/receive", json=body)
        assert reply.status_code == 200, reply.text
        messages: list[dict[str, Any]] = reply.json()["messages"]
        return messages

    async def run(self, run_id: str) -> dict[str, Any]:
        reply = await self.user("GET", f"/v1/runs/{run_id}")
        assert reply.status_code == 200, reply.text
        run: dict[str, Any] = reply.json()
        return run

    async def value(self, sql: str, *arguments: Any) -> Any:
        """Straight from the state database: for what must hold there, whatever the API says."""
        async with self.kernel.database.connection() as connection:
            return await connection.fetchval(sql, *arguments)

    async def settle(self) -> None:
        """One pass of every loop but the reconciler and retention, until none has work."""
        services = [s for s in self.kernel.services() if s.name not in ("reconciler", "retention")]
        while sum([await service.run_once() for service in services]):
            continue

    async def pass_of(self, name: str) -> int:
        service = next(s for s in self.kernel.services() if s.name == name)
        return await service.run_once()


async def until(check: Callable[[], Awaitable[Any]], *, seconds: float = PATIENCE) -> Any:
    """Asks again and again until the answer is something; for what another process or connection is about to do."""
    return await answered(check, seconds)


async def valkey_is_back(system: System) -> None:
    """Returns once the application asks Valkey again: it does not for a second after a failure."""
    coordination = system.kernel.coordination
    assert coordination is not None
    await until(lambda: coordination.count("probe", window_seconds=1))


def fence(claim: dict[str, Any]) -> dict[str, Any]:
    return {"task_id": claim["task_id"], "attempt": claim["attempt"], "lease_token": claim["lease_token"]}


@asynccontextmanager
async def running(
    state_url: str, directory: Path, clock: Clock | None = None, **overrides: Any
) -> AsyncIterator[System]:
    # Tests forge credentials by the hundred, all from one address.
    overrides = {"auth_failures_per_second": 0.0} | overrides
    settings = Settings(dir=directory, state_url=state_url, gateway="127.0.0.1:0", internal="127.0.0.1:0", **overrides)
    with (
        bind(settings.gateway, setting="gateway") as door,
        bind(settings.internal, setting="internal") as inner,
    ):
        async with _running(settings, [door, inner], clock) as system:
            yield system


_spare: defaultdict[tuple[Callable[[Kernel], Litestar], int], list[Litestar]] = defaultdict(list)
"""By what an application is built from, but for its kernel: those that no system uses now."""


@contextmanager
def _application(build: Callable[[Kernel], Litestar], kernel: Kernel) -> Iterator[Litestar]:
    """Building one takes longer than most tests, so that the next system gets it with its own kernel in it."""
    spare = _spare[build, kernel.settings.body_limit_bytes]
    app = spare.pop() if spare else build(kernel)
    app.state.kernel = kernel
    yield app
    del app.state.kernel
    spare.append(app)


@asynccontextmanager
async def _running(settings: Settings, listeners: list[socket.socket], clock: Clock | None) -> AsyncIterator[System]:
    # Signed URLs of objects name the gateway, and invocations the dispatcher, which have got their ports just now.
    named = {"objects_public_url": url_of(listeners[0], settings), "internal_url": url_of(listeners[1], settings)}
    settings = settings.model_copy(update=named)
    async with kernel(settings, process="test", clock=clock) as parts:
        with _application(gateway, parts) as public, _application(dispatcher, parts) as internal:
            async with _served(parts, [public, internal], listeners) as system:
                yield system


@asynccontextmanager
async def _served(parts: Kernel, apps: list[Litestar], listeners: list[socket.socket]) -> AsyncIterator[System]:
    stop, settings = asyncio.Event(), parts.settings
    servers = [
        asyncio.create_task(serve(app, listener, settings, stop=stop, on_stop=parts.wakeups.close))
        for app, listener in zip(apps, listeners, strict=True)
    ]
    org = await parts.principals.create_org("test")
    key = await parts.principals.create_key(KeyRequest(user="root", role=Role.ADMIN), org.org_id, granted_by=None)
    token = await parts.principals.create_worker_token(WorkerTokenRequest(name="test"))
    urls = [url_of(listener, settings) for listener in listeners]
    try:
        async with http_client(connections=200) as http:
            yield System(parts, org.org_id, key.key, token.token, urls[0], urls[1], http)
    finally:  # of a test that fails, too: a listener that is gone while the loop still asks it breaks every later test
        stop.set()
        await asyncio.gather(*servers)
