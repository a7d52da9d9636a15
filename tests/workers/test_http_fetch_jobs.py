"""http_fetch in a real worker: which failures are retried, how it is canceled, and which addresses it may reach."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from pydantic import SecretStr

from interlock.apps.dispatcher import services as dispatcher_services
from interlock.client import Client
from interlock.processes.loop import forever
from interlock.settings import Settings
from interlock.wire.base import TaskStatus
from interlock.wire.jobs import DatasetRef, Policy
from interlock.wire.tasks import TaskView
from interlock.workers import Worker
from tests.support.polls import eventually
from tests.support.system import System
from tests.support.third_party_servers import SILENCE, Stranger, answer, stranger

AT_ONCE = Policy(backoff_seconds=0, jitter=0)
HEARD_SOON = Policy(backoff_seconds=0, jitter=0, lease_seconds=3)
"""A short lease: a cancel reaches a worker with its next heartbeat, and a lease has three heartbeats."""


@dataclass
class FetchWorker:
    client: Client
    there: Stranger

    async def fetched(self, *payloads: Any, **options: Any) -> list[TaskView]:
        """Submits the payloads, waits until the run has ended, and returns its tasks in order."""
        accepted = await self.client.submit(payloads, operator="http_fetch", **{"policy": AT_ONCE} | options)
        async with asyncio.timeout(60):
            await self.client.wait(accepted.run_id, poll_seconds=0.02)
        tasks = [task async for task in self.client.tasks(run=accepted.run_id)]
        return sorted(tasks, key=lambda task: task.index or 0)


@pytest.fixture(scope="module")
async def site(shared: System, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FetchWorker]:
    loops = [asyncio.create_task(forever(service)) for service in dispatcher_services(shared.kernel)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TMPDIR", str(tmp_path_factory.mktemp("politeness")))
        async with stranger() as there, Client(shared.gateway_url, shared.admin_key) as client, _worker(shared):
            yield FetchWorker(client, there)
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)


@asynccontextmanager
async def _worker(system: System) -> AsyncIterator[None]:
    settings = Settings(
        internal_url=system.internal_url,
        worker_token=SecretStr(system.worker_token),
        outbound_allow=["127.0.0.1"],
        result_limit_bytes=400_000,
    )
    worker = Worker(settings, concurrency=2)
    running = asyncio.create_task(worker.run())
    yield
    worker.request_drain()
    worker.request_drain()
    await running


def result(task: TaskView) -> Any:
    return msgspec.json.decode(task.result)


async def test_transient_failures_are_retried_and_permanent_ones_are_not(site: FetchWorker) -> None:
    site.there.says("/page", answer(b"hello"))
    site.there.says("/flaky", answer(status=503), answer(b"at last"))
    urls = [site.there.url(path) for path in ("/page", "/flaky", "/missing")]
    tasks = await site.fetched(*urls, {"url": "http://10.255.255.1/"}, {})
    assert [(task.status, task.attempt, task.error_class) for task in tasks] == [
        (TaskStatus.COMPLETED, 1, None),
        (TaskStatus.COMPLETED, 2, None),
        (TaskStatus.FAILED, 1, "HttpRefused"),
        (TaskStatus.FAILED, 1, "AddressRefused"),
        (TaskStatus.FAILED, 1, "BadPayload"),
    ]
    assert [result(task)["body"] for task in tasks[:2]] == ["hello", "at last"]


async def test_body_is_in_the_result_up_to_the_result_limit(site: FetchWorker) -> None:
    site.there.says("/long", answer(b"x" * 300_000))
    (task,) = await site.fetched(site.there.url("/long"))
    assert task.run_id is not None
    kept = msgspec.json.decode(await site.client.results.result(task.run_id, task.index or 0))
    assert (task.status, kept["body"]) == (TaskStatus.COMPLETED, "x" * 300_000)
    site.there.says("/longer", answer(b"x" * 500_000))
    (task,) = await site.fetched(site.there.url("/longer"))
    assert (task.status, task.error_class) == (TaskStatus.FAILED, "BodyTooLarge")
    assert "result_limit_bytes, which is 400000" in (task.error_message or "")


async def test_task_with_outputs_also_gets_what_may_be_reached(site: FetchWorker) -> None:
    site.there.says("/page", answer(b"hello"))
    dataset = DatasetRef(dataset_uuid=uuid4(), dataset_version=uuid4())
    (task,) = await site.fetched(site.there.url("/page"), outputs=[dataset], config={"keep_body": "none"})
    assert (task.status, "body" in result(task)) == (TaskStatus.COMPLETED, False)


async def test_fetch_that_waits_for_its_server_can_be_canceled(site: FetchWorker) -> None:
    site.there.says("/slow", SILENCE)
    accepted = await site.client.submit([site.there.url("/slow")], operator="http_fetch", policy=HEARD_SOON)
    await eventually(lambda: "/slow" in site.there.targets())
    await site.client.cancel_run(accepted.run_id)
    async with asyncio.timeout(30):
        await site.client.wait(accepted.run_id, poll_seconds=0.02)
    (task,) = [task async for task in site.client.tasks(run=accepted.run_id)]
    assert task.status is TaskStatus.CANCELED
    assert [task.status for task in await site.fetched(site.there.url("/page"))] == [TaskStatus.COMPLETED]


async def test_job_policy_lists_the_non_retryable_failures(site: FetchWorker) -> None:
    policy = Policy(non_retryable=["TooSlow", "BadUrl"])
    accepted = await site.client.submit([], operator="http_fetch", name="asked", policy=policy)
    job = await site.client.job(accepted.job_id)
    assert job.policy.non_retryable[:2] == ["TooSlow", "BadUrl"]
    assert job.policy.non_retryable.count("BadUrl") == 1
    assert "HttpRefused" in job.policy.non_retryable
