"""A complete Interlock in the test process: real Postgres, both listeners on real sockets."""

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
from uuid import UUID, uuid4

import httpx
import msgspec
from litestar import Litestar

from interlock.apps.app import App, open_app
from interlock.apps.dispatcher import dispatcher
from interlock.apps.dispatcher import services as dispatcher_services
from interlock.apps.gateway import gateway
from interlock.apps.http_application import capabilities
from interlock.apps.process import serve
from interlock.clock import Clock
from interlock.http.listener import bind, url_of
from interlock.settings import Settings
from interlock.wire.access import KeyRequest, Role, WorkerTokenRequest
from interlock.wire.jobs import JobRequest
from interlock.workers.catalogue import sources
from interlock.workers.operators import catalogue_of
from tests.support.polls import PATIENCE, answered

_TRUST = ssl.create_default_context()
"""Shared by all clients: creating one takes longer than most requests."""


def http_client(*, connections: int, seconds: float = 30) -> httpx.AsyncClient:
    return httpx.AsyncClient(verify=_TRUST, timeout=seconds, limits=httpx.Limits(max_connections=connections))


@dataclass
class System:
    kernel: App
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
        """Reports operators, as a worker that can run them does."""
        body = {"queue": queue, "worker_id": "test", "operators": list(names)}
        reply = await self.worker("POST", "/internal/operators", json=body)
        assert reply.status_code == 200, reply.text

    async def declare_all(self, folder: Path, *, spark: bool = False) -> None:
        """Reports the operators of a folder, as a worker does when it starts with that folder."""
        names = catalogue_of(sources([str(folder)]), spark=spark).names()
        await self.declare(*names, queue="spark" if spark else "platform")

    async def task_ids(self, run_id: str) -> list[str]:
        reply = await self.user("GET", f"/v1/tasks?run={run_id}&limit=1000")
        return [task["task_id"] for task in reply.json()["tasks"]]

    async def made_up(self, operator: str) -> str:
        """Creates a task of an operator that requests may not name, as the platform itself does.

        Returns the task's id.
        """
        request = JobRequest(tasks=[msgspec.Raw(b"1")], operator=operator, runtime="spark")
        accepted = await self.kernel.stores.database.run(
            lambda c: self.kernel.jobs.closed_runs.within(c, request, self.org_id)
        )
        return (await self.task_ids(str(accepted.run_id)))[0]

    async def one(self, **job: Any) -> str:
        """Submits a job with one task and returns the task's id."""
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
        """Claims a list of tasks or a range of a run and returns the whole reply."""
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
        """Reads directly from the state database, for invariants that must hold there regardless of the API."""
        async with self.kernel.stores.database.connection() as connection:
            return await connection.fetchval(sql, *arguments)

    async def settle(self) -> None:
        """Runs every loop except the reconciler and retention until none has work."""
        services = [s for s in dispatcher_services(self.kernel) if s.name not in ("reconciler", "retention")]
        while sum([await service.run_once() for service in services]):
            continue

    async def pass_of(self, name: str) -> int:
        service = next(s for s in dispatcher_services(self.kernel) if s.name == name)
        return await service.run_once()


async def until(check: Callable[[], Awaitable[Any]], *, seconds: float = PATIENCE) -> Any:
    """Polls until `check` returns something true, for events in another process or connection."""
    return await answered(check, seconds)


async def valkey_is_back(system: System) -> None:
    """Waits until the application uses Valkey again, which it does not for one second after a failure."""
    coordination = system.kernel.stores.coordination
    assert coordination is not None
    await until(lambda: coordination.count("probe", window_seconds=1))


async def other_org(system: System) -> str:
    """Creates another org and returns an admin key of it."""
    name = f"other-{uuid4().hex[:8]}"
    assert (await system.user("POST", "/v1/orgs", json={"name": name})).status_code == 201
    reply = await system.user("POST", "/v1/keys", json={"user": "stranger", "role": "admin", "org": name})
    assert reply.status_code == 201, reply.text
    secret: str = reply.json()["key"]
    return secret


def fence(claim: dict[str, Any]) -> dict[str, Any]:
    return {"task_id": claim["task_id"], "attempt": claim["attempt"], "lease_token": claim["lease_token"]}


@asynccontextmanager
async def running(
    state_url: str, directory: Path, clock: Clock | None = None, **overrides: Any
) -> AsyncIterator[System]:
    # Tests send hundreds of forged credentials, all from one address.
    overrides = {"auth_failures_per_second": 0.0} | overrides
    settings = Settings(dir=directory, state_url=state_url, gateway="127.0.0.1:0", internal="127.0.0.1:0", **overrides)
    with (
        bind(settings.gateway, setting="gateway") as door,
        bind(settings.internal, setting="internal") as inner,
    ):
        async with _running(settings, [door, inner], clock) as system:
            yield system


_spare: defaultdict[tuple[Callable[[App], Litestar], int], list[Litestar]] = defaultdict(list)
"""Applications that no system uses now, by everything that they are built from except their kernel."""


@contextmanager
def _application(build: Callable[[App], Litestar], kernel: App) -> Iterator[Litestar]:
    """Reuses an application with another kernel: building one takes longer than most tests."""
    spare = _spare[build, kernel.settings.body_limit_bytes]
    # The middleware holds the lockout of the first kernel. With a rate of 0 it keeps no state.
    reusable = not kernel.settings.auth_failures_per_second
    app = spare.pop() if spare and reusable else build(kernel)
    app.state.update(capabilities(kernel))
    yield app
    if reusable:
        spare.append(app)


@asynccontextmanager
async def _running(settings: Settings, listeners: list[socket.socket], clock: Clock | None) -> AsyncIterator[System]:
    # Signed object URLs contain the gateway's port, and invocations the dispatcher's, which are known only now.
    named = {"objects_public_url": url_of(listeners[0], settings), "internal_url": url_of(listeners[1], settings)}
    settings = settings.model_copy(update=named)
    async with open_app(settings, process="test", clock=clock) as parts:
        with _application(gateway, parts) as public, _application(dispatcher, parts) as internal:
            async with _served(parts, [public, internal], listeners) as system:
                yield system


@asynccontextmanager
async def _served(parts: App, apps: list[Litestar], listeners: list[socket.socket]) -> AsyncIterator[System]:
    stop, settings = asyncio.Event(), parts.settings
    servers = [
        asyncio.create_task(serve(app, listener, settings, stop=stop, on_stop=parts.stores.wakeups.close))
        for app, listener in zip(apps, listeners, strict=True)
    ]
    org = await parts.access.principals.create_org("test")
    key = await parts.access.principals.create_key(
        KeyRequest(user="root", role=Role.ADMIN), org.org_id, granted_by=None
    )
    token = await parts.access.principals.create_worker_token(WorkerTokenRequest(name="test"))
    urls = [url_of(listener, settings) for listener in listeners]
    try:
        async with http_client(connections=200) as http:
            yield System(parts, org.org_id, key.key, token.token, urls[0], urls[1], http)
    finally:  # also if the test fails: a listener that vanishes under a running loop breaks every later test
        stop.set()
        await asyncio.gather(*servers)
