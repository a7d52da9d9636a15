"""Stores that die, hang or recover during requests: replies are 503, no data is lost, no request is half applied."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import httpx
import pytest

from interlock.apps.dispatcher import services as dispatcher_services
from interlock.errors import Unavailable
from interlock.processes.loop import forever
from interlock.stores.embedded import EmbeddedPostgres, EmbeddedValkey
from interlock.stores.postgres import migrate
from tests.support.system import System, running, until


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedPostgres]:
    """A separate Postgres to kill, with the durability of a real one."""
    with tempfile.TemporaryDirectory(prefix="interlock-test-") as folder:
        made = EmbeddedPostgres(Path(folder) / "postgres", name="mortal", log=Path(folder) / "postgres.log")
        yield made
        await made.stop()


async def killed(server: EmbeddedPostgres) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)

    async def gone() -> bool:
        await asyncio.to_thread(lambda: None)
        return not server.running()

    await until(gone)


def assert_honest(reply: httpx.Response) -> None:
    """Checks that the request was done, or that the reply says it was not."""
    if reply.status_code >= 300:
        assert reply.status_code == 503, reply.text
        assert reply.headers["content-type"] == "application/problem+json"
        assert reply.headers["retry-after"] == "1"
        assert (reply.json()["code"], reply.json()["request_id"]) == ("unavailable", reply.headers["x-request-id"])


@dataclass
class Stream:
    """Clients that submit, claim and complete without pause, and record the replies."""

    system: System
    accepted: dict[str, str] = field(default_factory=dict)
    """Run by idempotency key, according to the replies."""
    keys: list[str] = field(default_factory=list)
    completed: set[str] = field(default_factory=set)
    answers: Counter[int] = field(default_factory=Counter)
    stopped: bool = False

    async def submit_forever(self) -> None:
        while not self.stopped:
            key = uuid4().hex
            self.keys.append(key)
            while key not in self.accepted and not self.stopped:
                await self.submit(key)

    async def submit(self, key: str) -> None:
        body = {"operator": "echo", "tasks": [1, 2], "policy": {"lease_seconds": 600}}
        reply = await self.system.user("POST", "/v1/jobs", json=body, headers={"Idempotency-Key": key})
        self.answers[reply.status_code] += 1
        assert_honest(reply)
        if reply.status_code == 201:
            run_id = reply.json()["run_id"]
            assert self.accepted.setdefault(key, run_id) == run_id
            await self.work(run_id)

    async def work(self, run_id: str) -> None:
        what = {"worker_id": "w", "run_id": run_id, "start": 0, "end": 1}
        reply = await self.system.worker("POST", "/internal/task-claim", json=what)
        self.answers[reply.status_code] += 1
        assert_honest(reply)
        for claim in reply.json().get("claims", []):
            done = await self.system.complete(claim)
            self.answers[done.status_code] += 1
            assert_honest(done)
            if done.status_code == 200:
                self.completed.add(claim["task_id"])


async def test_postgres_killed_under_a_stream_of_requests_loses_nothing(
    server: EmbeddedPostgres, tmp_path: Path
) -> None:
    url = await server.start()
    await migrate(url)
    async with running(url, tmp_path) as system:
        stream = Stream(system)
        clients = [asyncio.create_task(stream.submit_forever()) for _ in range(8)]

        async def well_under_way() -> bool:
            return (await system.http.get(system.gateway_url + "/healthz")).is_success and len(stream.completed) > 40

        await until(well_under_way)
        await killed(server)

        async def noticed() -> bool:
            reply = await system.http.get(system.gateway_url + "/healthz")
            return reply.status_code == 503 and stream.answers[503] > 10

        await until(noticed)
        assert await server.start() == url
        before = len(stream.accepted)

        async def working_again() -> bool:
            health = await system.http.get(system.gateway_url + "/healthz")
            return health.is_success and len(stream.accepted) > before + 10

        await until(working_again)
        stream.stopped = True
        await asyncio.gather(*clients)
        assert set(stream.answers) == {200, 201, 503}
        for key in stream.keys:
            await stream.submit(key)
        await check(system, stream)


async def check(system: System, stream: Stream) -> None:
    """Checks that every key has one run, every run is complete, and every confirmed completion is stored."""
    assert set(stream.accepted) == set(stream.keys)
    assert await system.value("select count(*) from interlock.runs") == len(stream.keys)
    partial = "select count(*) from (select 1 from interlock.tasks group by run_id having count(*) <> 2) x"
    assert await system.value(partial) == 0
    done = "select count(*) from interlock.tasks where status = 'Completed' and task_id = any($1::uuid[])"
    assert await system.value(done, sorted(stream.completed)) == len(stream.completed)
    await system.settle()
    counted = "select coalesce(sum(queued), 0)::int, coalesce(sum(running), 0)::int, sum(completed)::int"
    truth = [f"count(*) filter (where status = '{status}')::int" for status in ("Queued", "Running", "Completed")]
    async with system.kernel.stores.database.connection() as connection:
        runs = await connection.fetchrow(f"{counted} from interlock.runs")
        tasks = await connection.fetchrow(f"select {', '.join(truth)} from interlock.tasks")
    assert tuple(runs or ()) == tuple(tasks or ())


async def test_loops_and_waiting_workers_recover_without_help(server: EmbeddedPostgres, tmp_path: Path) -> None:
    url = await server.start()
    await migrate(url)
    async with running(url, tmp_path) as system:
        loops = [asyncio.create_task(forever(service)) for service in dispatcher_services(system.kernel)]
        try:
            task_id = await system.one(policy={"backoff_seconds": 0.05, "jitter": 0})
            claim = await system.claim(task_id)
            await killed(server)
            refused = await system.user("GET", "/v1/jobs")
            assert_honest(refused)
            assert refused.status_code == 503
            await server.start()
            await system.kernel.stores.listener.connected.wait()

            async def failed() -> bool:
                return (await system.complete(claim, "Failed")).status_code == 200

            await until(failed)

            async def retried() -> list[Any]:
                reply = await system.worker(
                    "POST", "/internal/queue/receive", json={"queue": "platform", "worker_id": "w", "wait_seconds": 5}
                )
                messages: list[Any] = reply.json().get("messages", [])
                return [m for m in messages if m["body"].get("task_id") == task_id]

            assert await until(retried, seconds=30)
            assert (await system.claim(task_id))["attempt"] == 2
        finally:
            for loop in loops:
                loop.cancel()
            ended = await asyncio.gather(*loops, return_exceptions=True)
        assert {type(end) for end in ended} == {asyncio.CancelledError}


async def locked(url: str, task_id: str) -> asyncpg.Connection[Any]:
    connection = await asyncpg.connect(url)
    await connection.execute("begin")
    await connection.execute(f"select 1 from interlock.tasks where task_id = '{task_id}' for update")
    return connection


async def test_statement_past_its_timeout_is_aborted_and_changes_nothing(state_url: str, tmp_path: Path) -> None:
    async with running(state_url, tmp_path, database_timeout_seconds=0.5) as system:
        claim = await system.claim(await system.one())
        holder = await locked(state_url, claim["task_id"])
        reply = await system.complete(claim)
        assert reply.status_code == 503
        assert_honest(reply)
        await holder.execute("rollback")
        await holder.close()
        assert (await system.task(claim["task_id"]))["status"] == "Running"
        assert (await system.complete(claim)).json() == {"task_id": claim["task_id"], "status": "Completed"}


async def test_connection_that_breaks_mid_statement_is_not_reused(state_url: str, tmp_path: Path) -> None:
    async with running(state_url, tmp_path, database_connections=2) as system:
        claim = await system.claim(await system.one())
        holder = await locked(state_url, claim["task_id"])
        reports = [asyncio.create_task(system.complete(claim)) for _ in range(2)]
        watcher = await asyncpg.connect(state_url)
        waiting = "from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"

        async def both_wait() -> bool:
            return bool(await watcher.fetchval(f"select count(*) {waiting}") == 2)

        await until(both_wait)
        assert await watcher.fetchval(f"select count(pg_terminate_backend(pid)) {waiting}") == 2
        await watcher.close()
        for reply in await asyncio.gather(*reports):
            assert reply.status_code == 503
            assert_honest(reply)
        await holder.execute("rollback")
        await holder.close()
        replies = await asyncio.gather(*(system.complete(claim) for _ in range(6)))
        assert {reply.status_code for reply in replies} == {200}
        assert sorted(reply.json().get("duplicate", False) for reply in replies) == [False] + [True] * 5


async def test_clients_that_disconnect_leave_no_database_connection_behind(state_url: str, tmp_path: Path) -> None:
    async with running(state_url, tmp_path, database_connections=2) as system:
        claim = await system.claim(await system.one())
        holder = await locked(state_url, claim["task_id"])
        headers = {"X-Trace-Task-Capability": claim["capability_token"]}
        url, body = f"{system.internal_url}/v1/task/complete", {"status": "Completed"}
        body |= {name: claim[name] for name in ("task_id", "attempt", "lease_token")}
        for _ in range(4):
            async with httpx.AsyncClient(timeout=0.1) as impatient:
                with pytest.raises(httpx.ReadTimeout):
                    await impatient.post(url, headers=headers, json=body)
        await holder.execute("rollback")
        await holder.close()
        async with asyncio.timeout(20):
            assert (await system.complete(claim)).status_code == 200
            replies = await asyncio.gather(*(system.user("GET", "/v1/jobs") for _ in range(8)))
        assert {reply.status_code for reply in replies} == {200}


async def test_hanging_valkey_delays_one_request_and_not_every_one(
    state_url: str, tmp_path: Path, valkey: EmbeddedValkey
) -> None:
    url = await valkey.start()
    async with running(state_url, tmp_path, valkey_url=url, requests_per_second=1000) as system:
        assert (await system.user("GET", "/v1/jobs")).status_code == 200
        assert valkey.pid is not None
        os.kill(valkey.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            replies = [await system.user("GET", "/v1/jobs") for _ in range(20)]
            took = time.monotonic() - began
            health = await system.http.get(system.gateway_url + "/healthz")
        finally:
            os.kill(valkey.pid, signal.SIGCONT)
        assert {reply.status_code for reply in replies} == {200}
        assert took < 5, "each of 20 requests waited half a second for Valkey"
        assert health.json()["status"] == "degraded"


async def test_process_does_not_start_without_its_database(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="does not respond"):
        async with running("postgresql://u:p@127.0.0.1:1/x", tmp_path):
            pytest.fail("it started")
