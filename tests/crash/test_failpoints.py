"""SIGKILL at every failpoint, in its process, one after the other on a system under load.

Each process is started armed, dies at its failpoint, and is restarted: armed for the next failpoint, or unarmed after
the last. A failpoint that a loop passes even without work is armed only when there is work.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import UUID, uuid4

import asyncpg
import httpx
import msgspec
import pytest
from msgspec import Raw

from interlock.client import Client, Fence, QueryClient, TaskClient
from interlock.errors import ServerUnreachable
from interlock.failpoints import NAMES
from interlock.tasks.shards import run_task_id
from interlock.wire.attempts import (
    ClaimRequest,
    Completion,
    CompletionBatch,
    DataRequest,
    Event,
    Output,
    Release,
    WriteGrant,
)
from interlock.wire.bulk_operations import BulkFilter, BulkKind, BulkRequest
from interlock.wire.bus_registry import RegistryAction, ServiceRequest
from interlock.wire.dags import DagState, SourceEvent
from interlock.wire.datasets import InvalidateRequest
from interlock.wire.jobs import ExportRequest, ExportView, JobAccepted, RerunRequest
from interlock.wire.queries import QueryMode
from interlock.wire.tasks import RedriveRequest
from interlock.wire.webhooks import WebhookRequest
from tests.crash import test_bus, test_bus_path, test_ingest, test_pipeline, test_sink
from tests.crash.ledger import Ledger
from tests.crash.load import KINDS, Kind, Load
from tests.crash.seed import ROUNDS, random_for
from tests.support.code_bundles import zipped
from tests.support.deployment import Deployment, Process, deployed
from tests.support.polls import PATIENCE
from tests.support.sharded_runs import into_shard
from tests.support.webhook_receiver import receiving

PLAIN, INLINE = KINDS["plain"], KINDS["inline"]
UNTAKEN = Kind(4, {}, {"runtime": "udf"})
"""Waits for a worker that is never started."""


@dataclass
class Scene:
    """A deployment under load, and the process that dies next."""

    deployment: Deployment
    load: Load
    ledger: Ledger
    rng: random.Random
    victim: Process

    async def arm(self, failpoint: str, *, skip: int = 0, **settings: str) -> None:
        """Starts the victim so that it dies at the failpoint, after up to `skip` passes."""
        await self.down()
        await self.victim.start(f"{failpoint}=kill*{self.rng.randint(0, skip)}", **settings)

    async def down(self) -> None:
        """Kills the victim, so that the following work waits for it."""
        if self.victim.alive:
            await self.victim.kill()
            self.ledger.blows += 1

    async def up(self) -> None:
        """Starts the victim, which the following work needs."""
        if not self.victim.alive:
            await self.victim.start()

    async def death(self) -> None:
        await self.victim.killed_itself()
        self.ledger.blows += 1


Case = Callable[[Scene], Awaitable[None]]
CASES: dict[tuple[str, str], Case] = {}


def dies(process: str, failpoint: str) -> Callable[[Case], Case]:
    def register(case: Case) -> Case:
        CASES[process, failpoint] = case
        return case

    return register


def _under_load(process: str, failpoint: str, skip: int) -> None:
    """Registers a failpoint that the process reaches under load."""

    async def case(scene: Scene) -> None:
        await scene.arm(failpoint, skip=skip)
        await scene.death()

    CASES[process, failpoint] = case


_under_load("gateway", "submit.before_commit", 4)
_under_load("gateway", "submit.committed", 4)
_under_load("dispatcher", "claim.before_commit", 6)
_under_load("dispatcher", "claim.committed", 6)
_under_load("dispatcher", "heartbeat.before_commit", 1)
_under_load("dispatcher", "complete.before_commit", 6)
_under_load("dispatcher", "complete.committed", 6)
_under_load("dispatcher", "wake.before_commit", 4)
_under_load("dispatcher", "events.before_commit", 4)
_under_load("dispatcher", "settle.before_commit", 6)
_under_load("dispatcher", "pressure.before_commit", 2)
_under_load("worker", "worker.received", 3)
_under_load("worker", "worker.claimed", 3)
_under_load("worker", "worker.before_complete", 3)
_under_load("worker", "worker.before_logs", 3)


def _with_work(failpoint: str, kind: Kind) -> None:
    """Registers a failpoint that the dispatcher reaches by itself as soon as there is work."""

    async def case(scene: Scene) -> None:
        await scene.down()
        await scene.load.submit(kind)
        await scene.arm(failpoint)
        await scene.death()

    CASES["dispatcher", failpoint] = case


_with_work("relay.taken", INLINE)
_with_work("pack.written", Kind(4, {"text": "long " * 500}, {"runtime": "dispatcher", "operator": "echo"}))
_with_work("relay.sent", INLINE)
_with_work("receive.before_commit", PLAIN)
_with_work("receive.committed", PLAIN)


# User actions


@dies("gateway", "cancel.before_commit")
async def _(scene: Scene) -> None:
    await scene.up()
    one = await scene.load.submit(UNTAKEN)
    one.canceled = True
    await scene.arm("cancel.before_commit")
    async with scene.deployment.client() as client:
        canceling = asyncio.create_task(client.cancel_run(one.run_id))
        await scene.death()
        await scene.victim.start()
        await canceling


@dies("dispatcher", "cancel.before_commit")
async def _(scene: Scene) -> None:
    """The gateway dies between the durable request and the tasks: the loop finds them."""
    await scene.down()
    one = await scene.load.submit(UNTAKEN)
    one.canceled = True
    gateway = scene.deployment["gateway"]
    await gateway.kill()
    await gateway.start("cancel.before_commit=kill")
    async with scene.deployment.client() as client:
        canceling = asyncio.create_task(client.cancel_run(one.run_id))
        await gateway.killed_itself()
        scene.ledger.blows += 2
        await scene.arm("cancel.before_commit")
        await scene.death()
        await gateway.start()
        await canceling


@dies("gateway", "redrive.before_commit")
async def _(scene: Scene) -> None:
    await scene.up()
    one = await scene.load.submit(Kind(2, {"failures": 1}), max_attempts=1)
    async with scene.deployment.client() as client:
        dead = [task.task_id async for task in client.tasks(run=(await client.wait(one.run_id)).run_id)]
        await scene.arm("redrive.before_commit")
        with suppress(ServerUnreachable):  # the reply is lost, and the call is not idempotent
            await client.retry_task(dead[0])
        await scene.death()
        await scene.victim.start()
        for task_id in dead:
            await client.retry_task(task_id)


@dies("dispatcher", "bulk_operation.before_commit")
async def _(scene: Scene) -> None:
    """The batch is rolled back with its place, so that the next process does it once."""
    await scene.up()
    one = await scene.load.submit(Kind(3, {"failures": 1}), max_attempts=1)
    async with scene.deployment.client() as client:
        await client.wait(one.run_id)
        await scene.arm("bulk_operation.before_commit")
        request = BulkRequest(kind=BulkKind.REDRIVE, filter=BulkFilter(run=one.run_id))
        begun = await client.bulk.start(request)
        await scene.death()
        await scene.victim.start()
        ended = "select state = 'Completed' from interlock.bulk_operations where operation_id = $1"
        await scene.deployment.until(ended, begun.operation_id)
        operation = await client.bulk.operation(begun.operation_id)
        assert (operation.matched, operation.changed) == (3, 3)
        # An attempt that lost its lease to the crash had no other: the audit wants every task completed.
        while (await client.wait(one.run_id)).counts.dead:
            await client.redrive_tasks(RedriveRequest(run=str(one.run_id)))


async def _unledgered(scene: Scene) -> JobAccepted:
    """Submits a job that will be deleted; the ledger does not include it."""
    async with scene.deployment.client() as client:
        return await client.submit([{}, {}], operator="crash.work", runtime="udf")


async def _is_gone(scene: Scene, run_id: UUID) -> None:
    gone = "select not exists (select from interlock.runs r full join interlock.tasks t on t.run_id = r.run_id"
    await scene.deployment.until(f"{gone} where r.run_id = $1 or t.run_id = $1)", run_id)


@dies("gateway", "delete.before_commit")
async def _(scene: Scene) -> None:
    await scene.up()
    one = await _unledgered(scene)
    await scene.arm("delete.before_commit")
    url, key = scene.deployment.gateway_url, scene.deployment.credentials.admin_key
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE) as http:
        with suppress(httpx.HTTPError):
            await http.delete(f"{url}/v1/jobs/{one.job_id}")
        await scene.death()
        await scene.victim.start()
        assert (await http.get(f"{url}/v1/jobs/{one.job_id}")).status_code == 200
        assert (await http.delete(f"{url}/v1/jobs/{one.job_id}")).status_code == 200
    await _is_gone(scene, one.run_id)


@dies("dispatcher", "deletion.before_commit")
async def _(scene: Scene) -> None:
    await scene.down()
    one = await _unledgered(scene)
    await scene.deployment.ask("update interlock.runs set delete_requested = true where run_id = $1", one.run_id)
    await scene.arm("deletion.before_commit")
    await scene.death()
    await scene.victim.start()
    await _is_gone(scene, one.run_id)


@dies("dispatcher", "deletion.dropped")
async def _(scene: Scene) -> None:
    await scene.down()
    one = await _unledgered(scene)
    connection = await asyncpg.connect(scene.deployment.state_url)
    async with connection.transaction():
        await into_shard(connection, one.run_id)
        await connection.execute("update interlock.runs set delete_requested = true where run_id = $1", one.run_id)
    await connection.close()
    await scene.arm("deletion.dropped")
    await scene.death()
    await scene.victim.start()
    await _is_gone(scene, one.run_id)


@dies("gateway", "receipt.before_commit")
async def _(scene: Scene) -> None:
    await scene.up()
    one = await scene.load.submit(PLAIN)
    async with scene.deployment.client() as client:
        job = (await client.wait(one.run_id)).job_id
        await scene.arm("receipt.before_commit")
        asking = asyncio.create_task(client.results.receipt(job))
        await scene.death()
        await scene.victim.start()
        reply = await asking
    assert reply.receipt is not None
    assert (reply.receipt.total, reply.receipt.complete) == (PLAIN.tasks, True)


@dies("gateway", "export.before_commit")
async def _(scene: Scene) -> None:
    await scene.up()
    one = await scene.load.submit(PLAIN)
    async with scene.deployment.client() as client:
        job = (await client.wait(one.run_id)).job_id
        await scene.arm("export.before_commit")
        starting = asyncio.create_task(client.results.start_export(job, ExportRequest()))
        await scene.death()
        await scene.victim.start()
        started = await starting
        assert started.of == PLAIN.tasks
        await _end_export(scene, client, started)


async def _end_export(scene: Scene, client: Client, started: ExportView) -> None:
    """Ends an export without a Spark worker: cancels its task, and records that in the ledger."""
    await scene.deployment.until("select not exists (select from interlock.exports where task_id is null)")
    view = await client.results.export(started.job_id, started.export_id)
    assert view.task_id is not None
    task = await client.cancel_task(view.task_id)
    assert task.run_id is not None
    one = await scene.ledger.note(f"export {started.export_id}", task.run_id, 1, blows=scene.ledger.blows)
    one.canceled = True


@dies("dispatcher", "export_staging.before_commit")
async def _(scene: Scene) -> None:
    """Rows are staged again, and one task writes the files."""
    await scene.up()
    one = await scene.load.submit(PLAIN)
    async with scene.deployment.client() as client:
        job = (await client.wait(one.run_id)).job_id
        await scene.arm("export_staging.before_commit")
        started = await client.results.start_export(job, ExportRequest())
        await scene.death()
        await scene.victim.start()
        await _end_export(scene, client, started)


@dies("gateway", "rerun.before_commit")
async def _(scene: Scene) -> None:
    await scene.up()
    one = await scene.load.submit(PLAIN)
    async with scene.deployment.client() as client:
        job = (await client.wait(one.run_id)).job_id
        await scene.arm("rerun.before_commit")
        again = asyncio.create_task(client.results.rerun(job, RerunRequest()))
        await scene.death()
        await scene.victim.start()
        accepted = await again
        await scene.ledger.note(f"rerun of {one.run_id}", accepted.run_id, PLAIN.tasks, blows=scene.ledger.blows)
        assert (await client.wait(accepted.run_id)).counts.Completed == PLAIN.tasks


_LARGE_RERUN = """
    with made as (
        insert into interlock.runs (org_id, job_id, last_index, range_size, latched, ingesting, state)
        select org_id, job_id, -1, range_size, false, true, 'Ingesting' from interlock.runs where run_id = $1
        returning run_id, org_id
    ), upload as (
        insert into interlock.uploads (org_id, parts, sweep_at) select org_id, 1, now() + interval '1 day' from made
        returning upload_id
    )
    insert into interlock.reruns (run_id, org_id, of_run, upload_id, next_index, last_index)
    select m.run_id, m.org_id, $1, u.upload_id, 0, 19 from made m, upload u
    returning run_id
"""
_HANDED_OVER = "select source -> 'parts' -> 0 ->> 'size' from interlock.ingests where run_id = $1"


@dies("dispatcher", "rerun_copies.before_commit")
async def _(scene: Scene) -> None:
    """Rows are copied again, to the same location, and handed over once. There is no ingest to continue with them."""
    await scene.up()
    one = await scene.load.submit(PLAIN)
    async with scene.deployment.client() as client:
        await client.wait(one.run_id)
    await scene.arm("rerun_copies.before_commit")
    connection = await asyncpg.connect(scene.deployment.state_url)
    run_id = await connection.fetchval(_LARGE_RERUN, one.run_id)
    await scene.death()
    await scene.victim.start()
    await scene.deployment.until("select not exists (select from interlock.reruns)")
    assert int(await connection.fetchval(_HANDED_OVER, run_id)) > 0
    await connection.execute("delete from interlock.runs where run_id = $1", run_id)
    await connection.close()


@dies("gateway", "rotate.before_commit")
async def _(scene: Scene) -> None:
    await scene.arm("rotate.before_commit")
    async with scene.deployment.client() as client:
        with suppress(ServerUnreachable):
            await client.rotate_signing_key()
        await scene.death()
        await scene.victim.start()
        await client.rotate_signing_key()


@dies("gateway", "registry.before_commit")
async def _(scene: Scene) -> None:
    """The entry, its record and its first key are created together, or not at all."""
    name = f"s{scene.rng.getrandbits(40)}"
    await scene.arm("registry.before_commit")
    async with scene.deployment.client() as client:
        making = asyncio.create_task(client.registry.put_service(ServiceRequest(name=name)))
        await scene.death()
        assert await scene.deployment.ask("select not exists (select from interlock.bus_keys where service = $1)", name)
        await scene.victim.start()
        assert (await making).action is RegistryAction.CREATE
        assert [key.version_id for key in (await client.registry.keys(name)).keys] == ["hmac-v1"]
        made = [each.subject for each in (await client.registry.changes()).changes if name in each.subject]
        assert made == [name, f"{name}/hmac-v1"]


@dies("gateway", "service_key.before_commit")
async def _(scene: Scene) -> None:
    name = f"s{scene.rng.getrandbits(40)}"
    async with scene.deployment.client() as client:
        await scene.up()
        await client.registry.put_service(ServiceRequest(name=name))
        await scene.arm("service_key.before_commit")
        with suppress(ServerUnreachable):
            await client.registry.rotate_key(name)
        await scene.death()
        await scene.victim.start()
        assert [key.state for key in (await client.registry.keys(name)).keys] == ["current"]
        assert (await client.registry.rotate_key(name)).version_id == "hmac-v2"


def _uploading(failpoint: str) -> None:
    async def case(scene: Scene) -> None:
        content = zipped({"crash.py": f"# {uuid4()}"})
        await scene.arm(failpoint)
        async with scene.deployment.client() as client:
            uploading = asyncio.create_task(client.bundles.upload(content))
            await scene.death()
            await scene.victim.start()
            assert (await client.bundles.bundle((await uploading).sha256)).files == 1

    CASES["gateway", failpoint] = case


_uploading("bundle.stored")
_uploading("bundle.before_commit")


def _telling(failpoint: str, *, calls: int) -> None:
    """The next dispatcher makes the call, with the same delivery id."""

    async def case(scene: Scene) -> None:
        name = f"w{scene.rng.getrandbits(40)}"
        await scene.down()
        async with receiving() as receiver, scene.deployment.client() as client:
            await client.webhooks.create(WebhookRequest(name=name, url=receiver.url, job="nobody"))
            delivery_id = (await client.webhooks.test(name)).delivery_id
            await scene.arm(failpoint)
            await scene.death()
            await scene.victim.start()
            delivered = "select status = 'Delivered' from interlock.webhook_deliveries where delivery_id = $1"
            await scene.deployment.until(delivered, delivery_id)
            assert [call.delivery for call in receiver.calls] == [str(delivery_id)] * calls
            await client.webhooks.delete(name)

    CASES["dispatcher", failpoint] = case


_telling("webhook.before_sent", calls=1)
_telling("webhook.sent", calls=2)


_PARTITION = """
with dataset as (
    insert into interlock.datasets (dataset_uuid, org_id, current_version)
    select gen_random_uuid(), org_id, gen_random_uuid() from interlock.api_keys limit 1
    returning *
), version as (
    insert into interlock.dataset_versions (dataset_version, dataset_uuid, org_id, progress)
    select current_version, dataset_uuid, org_id, 'partition' from dataset
), partition as (
    insert into interlock.partitions (dataset_version, range_start, range_end, commit_id, task_id, attempt)
    select current_version, 0, 9, nextval('interlock.commits'), gen_random_uuid(), 1 from dataset
)
select dataset_uuid from dataset
"""


@dies("gateway", "invalidate.before_commit")
async def _(scene: Scene) -> None:
    connection = await asyncpg.connect(scene.deployment.state_url)
    dataset = await connection.fetchval(_PARTITION)
    await scene.arm("invalidate.before_commit")
    async with scene.deployment.client() as client:
        request = InvalidateRequest(start=0, end=0, reason="a test")
        with suppress(ServerUnreachable):
            await client.datasets.invalidate(dataset, request)
        await scene.death()
        await scene.victim.start()
        assert (await client.datasets.invalidate(dataset, request)).scopes == 1
    kept = "select count(*) from interlock.invalidations where dataset_uuid = $1"
    assert await connection.fetchval(kept, dataset) == 1
    await connection.close()


_DAG = """
name: {name}
defaults: {{heartbeat_timeout_seconds: 4, max_attempts: 50, backoff_seconds: 0.05}}
jobs:
  - {{name: follow, operator: echo, activation: source, source: {{kind: manual}}, outputs: [blocks]}}
  - {{name: derive, operator: echo, inputs: [{{from: {{job: follow, output: blocks}}}}], config: {{n: {n}}}}}
"""
_REPORTED = """
with version as (
    update interlock.dataset_versions v set progress = 'partition', commit_id = nextval('interlock.commits')
    from interlock.datasets d where d.current_version = v.dataset_version and d.dag_name = $1
    returning v.dataset_version, v.commit_id
)
insert into interlock.partitions (dataset_version, range_start, range_end, commit_id, task_id, attempt)
select dataset_version, 0, 9, commit_id, gen_random_uuid(), 1 from version
returning true
"""


_QUEUED = """
insert into interlock.tasks (task_id, org_id, job_id, max_attempts, priority, payload)
select uuidv7(), org_id, job_id, 3, 0, '{}' from interlock.jobs where dag_name = $1 and name = 'follow'
returning true
"""


@dies("gateway", "deploy.before_commit")
async def _(scene: Scene) -> None:
    name = f"dag{scene.rng.getrandbits(40)}"
    await scene.arm("deploy.before_commit")
    async with scene.deployment.client() as client:
        deploying = asyncio.create_task(client.dags.deploy(_DAG.format(name=name, n=1)))
        await scene.death()
        await scene.victim.start()
        deployed = await deploying
        versions = (await client.dags.versions(name)).versions
    assert [version.dag_version for version in versions] == [deployed.dag_version]


@dies("gateway", "dag_control.before_commit")
async def _(scene: Scene) -> None:
    """The client repeats its request to pause. A deletion during the pause then ends both."""
    name = f"dag{scene.rng.getrandbits(40)}"
    async with scene.deployment.client() as client:
        await client.dags.deploy(_DAG.format(name=name, n=1))
        await scene.arm("dag_control.before_commit")
        pausing = asyncio.create_task(client.dags.pause(name))
        await scene.death()
        assert await scene.deployment.ask("select paused_at is null from interlock.dags where name = $1", name)
        await scene.victim.start()
        assert (await pausing).paused is not None
        await client.dags.delete(name, purge=True)
    left = "select not exists (select from interlock.jobs where dag_name = $1 and (paused or active))"
    await scene.deployment.until(left, name)


@dies("dispatcher", "job_wakes.before_commit")
async def _(scene: Scene) -> None:
    """A queued task has lost its message during a pause."""
    name = f"dag{scene.rng.getrandbits(40)}"
    await scene.down()
    async with scene.deployment.client() as client:
        await client.dags.deploy(_DAG.format(name=name, n=1))
        await client.dags.pause(name)
        assert await scene.deployment.ask(_QUEUED, name)
        await client.dags.resume(name)
    await scene.arm("job_wakes.before_commit")
    await scene.death()
    await scene.victim.start()
    woken = """select t.status <> 'Queued' or exists (
        select from interlock.queue_messages m where m.dedupe_key = t.task_id::text)
        from interlock.tasks t join interlock.jobs j on j.job_id = t.job_id where j.dag_name = $1"""
    await scene.deployment.until(woken, name)
    # The audit would miss the outputs that a task of this job commits in the product.
    ended = """select t.status = 'Completed' from interlock.tasks t join interlock.jobs j on j.job_id = t.job_id
        where j.dag_name = $1"""
    await scene.deployment.until(ended, name)
    gone = """delete from interlock.tasks where job_id in (select job_id from interlock.jobs where dag_name = $1)
        returning true"""
    assert await scene.deployment.ask(gone, name)


@dies("dispatcher", "cutover.before_commit")
async def _(scene: Scene) -> None:
    """A version that is being built is complete as soon as its only task is done."""
    name = f"dag{scene.rng.getrandbits(40)}"
    await scene.down()
    async with scene.deployment.client() as client:
        await client.dags.deploy(_DAG.format(name=name, n=1))
        assert await scene.deployment.ask(_REPORTED, name)
        deployed = await client.dags.deploy(_DAG.format(name=name, n=2))
        assert deployed.state is DagState.BUILDING
        await scene.arm("cutover.before_commit")
        await scene.death()
        assert (await client.dags.dag(name)).building is not None
        await scene.victim.start()
        current = "select state = 'Current' from interlock.dag_versions where dag_version = $1"
        await scene.deployment.until(current, deployed.dag_version)


@dies("dispatcher", "retirement.before_commit")
async def _(scene: Scene) -> None:
    """A version was abandoned: its data is dropped."""
    name = f"dag{scene.rng.getrandbits(40)}"
    await scene.down()
    async with scene.deployment.client() as client:
        await client.dags.deploy(_DAG.format(name=name, n=1))
        assert await scene.deployment.ask(_REPORTED, name)
        for number in (2, 3):
            await client.dags.deploy(_DAG.format(name=name, n=number))
    await scene.arm("retirement.before_commit")
    await scene.death()
    await scene.victim.start()
    left = """select not exists (
        select from interlock.dag_versions v join interlock.dags d on d.dag_id = v.dag_id and d.name = $1
        join interlock.dag_version_jobs m on m.dag_version = v.dag_version
        join interlock.edges e on e.job_id = m.job_id where v.state = 'Abandoned')"""
    await scene.deployment.until(left, name)


# Loops of the dispatcher: they have work before it starts


@dies("dispatcher", "reap.before_commit")
async def _(scene: Scene) -> None:
    """A worker has died, too: its leases expire."""
    await scene.up()
    one = await scene.load.submit(KINDS["slow"])
    held = "select exists (select from interlock.tasks where run_id = $1 and status = 'Running'{})"
    await scene.deployment.until(held.format(""), one.run_id)
    await scene.deployment["worker"].kill()
    await scene.down()
    scene.ledger.blows += 1
    await scene.deployment.until(held.format(" and lease_expires_at < now()"), one.run_id)
    await scene.deployment["worker"].start()
    await scene.arm("reap.before_commit")
    await scene.death()


@dies("dispatcher", "retry.before_commit")
async def _(scene: Scene) -> None:
    await scene.up()
    one = await scene.load.submit(Kind(2, {"failures": 1}), backoff_seconds=3, jitter=0)
    waiting = "select exists (select from interlock.tasks where run_id = $1 and retry_at is not null{})"
    await scene.deployment.until(waiting.format(""), one.run_id)
    await scene.down()
    await scene.deployment.until(waiting.format(" and retry_at < now()"), one.run_id)
    await scene.arm("retry.before_commit")
    await scene.death()


@dies("dispatcher", "fold.before_commit")
async def _(scene: Scene) -> None:
    await scene.down()
    one = await scene.load.submit(UNTAKEN)
    one.canceled = True
    async with scene.deployment.client() as client:
        await client.cancel_run(one.run_id)
    assert await scene.deployment.ask("select from interlock.run_deltas where run_id = $1", one.run_id)
    await scene.arm("fold.before_commit")
    await scene.death()


@dies("dispatcher", "reconcile.before_commit")
async def _(scene: Scene) -> None:
    """All wake-ups of the queue are lost."""
    await scene.down()
    one = await scene.load.submit(PLAIN)
    await scene.deployment.ask("delete from interlock.queue_messages where queue = 'platform'")
    old = "select bool_and(queued_at < now() - interval '1 second') from interlock.tasks where run_id = $1"
    await scene.deployment.until(old, one.run_id)
    await scene.arm("reconcile.before_commit")
    await scene.death()


@dies("dispatcher", "retention.before_commit")
async def _(scene: Scene) -> None:
    """Dies while deleting an old run; the audit finds the run complete."""
    await scene.up()
    await scene.deployment.until("select exists (select from interlock.runs where ended_at < now())")
    await scene.arm("retention.before_commit", retention_days="0.000001")
    await scene.death()


# Queues


@dies("dispatcher", "release.before_commit")
async def _(scene: Scene) -> None:
    """A worker drains while it runs longer tasks. It may have released some of them before."""
    await scene.down()
    one = await scene.load.submit(KINDS["slow"])
    await scene.arm("release.before_commit")
    holding = asyncio.create_task(scene.ledger.has(run_task_id(one.run_id, 0), "began"))
    dying = asyncio.create_task(scene.death())
    await asyncio.wait({holding, dying}, return_when=asyncio.FIRST_COMPLETED)
    holding.cancel()
    worker = scene.deployment["worker"]
    worker.drain()
    await dying
    await scene.victim.start()
    assert await worker.ended() == 0, worker.last_words()
    await worker.start()


@dies("dispatcher", "publish.before_commit")
async def _(scene: Scene) -> None:
    await scene.arm("publish.before_commit")
    kind = Kind(1, {}, {"operator": "publisher", "runtime": "udf"}, outputs=1)
    one = await scene.load.submit(kind, lease_seconds=600)
    async with scene.deployment.worker_client() as worker:
        claim = (await worker.claim(ClaimRequest(worker_id="here", run_id=one.run_id, start=0, end=0))).claims[0]
    assert claim.task
    assert claim.attempt
    assert claim.lease_token
    assert claim.capability_token
    fence, grant = Fence(claim.task.task_id, claim.attempt, claim.lease_token), claim.task.outputs[0]
    batch = (grant.dataset_uuid, grant.dataset_version, f"{grant.buffer_prefix}batch", 3)
    async with TaskClient(scene.victim.url, claim.capability_token, fence) as attempt:
        publishing = asyncio.create_task(attempt.publish(*batch))
        await scene.death()
        await scene.victim.start()
        first = await publishing
        again = await attempt.publish(*batch)
        assert (again.publish_id, again.duplicate) == (first.publish_id, True)
        output = Output(dataset_uuid=batch[0], dataset_version=batch[1], location=f"{grant.write_prefix}part")
        final = Event(dataset_uuid=batch[0], dataset_version=batch[1], cursor=1)
        await attempt.complete("Completed", outputs=[output], events=[final])


# Files


async def _claimed(scene: Scene, run_id: UUID) -> tuple[Release, WriteGrant]:
    """Claims the next attempt of the run's only task and returns its fence and its write grant."""
    await scene.deployment.until("select status = 'Queued' from interlock.tasks where run_id = $1", run_id)
    async with scene.deployment.worker_client() as worker:
        claim = (await worker.claim(ClaimRequest(worker_id="here", run_id=run_id, start=0, end=0))).claims[0]
    assert claim.task
    assert claim.lease_token
    return Release(
        task_id=claim.task.task_id, attempt=claim.task.attempt, lease_token=claim.lease_token
    ), claim.task.outputs[0]


async def _ended(scene: Scene, held: Release, status: Literal["Completed", "Failed"], **fields: Any) -> None:
    ended = Completion(**msgspec.structs.asdict(held), status=status, **fields)
    async with scene.deployment.worker_client() as worker:
        assert (await worker.complete(CompletionBatch(items=[ended]))).accepted == 1


async def _completed(scene: Scene, run_id: UUID) -> None:
    held, grant = await _claimed(scene, run_id)
    ref: dict[str, Any] = {"dataset_uuid": grant.dataset_uuid, "dataset_version": grant.dataset_version}
    output = Output(location=f"{grant.write_prefix}part", **ref)
    await _ended(scene, held, "Completed", outputs=[output], events=[Event(cursor=1, **ref)])


async def _told_of_data(scene: Scene, held: Release) -> None:
    async with scene.deployment.worker_client() as worker:
        assert len((await worker.task_data(DataRequest(items=[held]))).items) == 1


def _write(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "part").touch()


_WRITER = Kind(1, {}, {"operator": "writer", "runtime": "udf"}, outputs=1)


@dies("dispatcher", "files.before_commit")
async def _(scene: Scene) -> None:
    """The repeated request is answered, and the prefix is recorded."""
    await scene.up()
    one = await scene.load.submit(_WRITER, lease_seconds=600)
    held, _grant = await _claimed(scene, one.run_id)
    await scene.arm("files.before_commit")
    asking = asyncio.create_task(_told_of_data(scene, held))
    await scene.death()
    await scene.victim.start()
    await asking
    assert await scene.deployment.ask("select from interlock.file_sweeps where task_id = $1", held.task_id)
    await _ended(scene, held, "Failed")
    await _completed(scene, one.run_id)


@dies("dispatcher", "credentials.before_commit")
async def _(scene: Scene) -> None:
    """The repeated request returns credentials, and the prefixes are recorded."""
    await scene.up()
    one = await scene.load.submit(_WRITER, lease_seconds=600)
    async with scene.deployment.worker_client() as worker:
        claim = (await worker.claim(ClaimRequest(worker_id="here", run_id=one.run_id, start=0, end=0))).claims[0]
    assert claim.task
    assert claim.lease_token
    assert claim.capability_token
    fence = Fence(claim.task.task_id, claim.task.attempt, claim.lease_token)
    await scene.arm("credentials.before_commit")
    async with TaskClient(scene.victim.url, claim.capability_token, fence) as attempt:
        asking = asyncio.create_task(attempt.credentials())
        await scene.death()
        await scene.victim.start()
        assert (await asking).object_token
    known = await scene.deployment.ask("select place from interlock.file_sweeps where task_id = $1", fence.task_id)
    grant = claim.task.outputs[0]
    assert {row["place"] for row in known} == {grant.write_prefix, grant.buffer_prefix}
    await _ended(scene, Release(**fence._asdict()), "Failed")
    await _completed(scene, one.run_id)


def _sweeping(failpoint: str) -> None:
    async def case(scene: Scene) -> None:
        await scene.up()
        one = await scene.load.submit(_WRITER, lease_seconds=600)
        held, grant = await _claimed(scene, one.run_id)
        await _told_of_data(scene, held)
        folder = Path(grant.write_prefix.removeprefix("file://"))
        await asyncio.to_thread(_write, folder)
        await _ended(scene, held, "Failed")
        due = "update interlock.file_sweeps set due_at = now(), final_at = now() where task_id = $1"
        await scene.deployment.ask(due, held.task_id)
        await scene.arm(failpoint, sweep_seconds="0.1")
        await scene.death()
        await scene.deployment.ask(due, held.task_id)
        await scene.victim.start(sweep_seconds="0.1")
        gone = "select not exists (select from interlock.file_sweeps where task_id = $1)"
        await scene.deployment.until(gone, held.task_id)
        assert not await asyncio.to_thread(folder.exists)
        await _completed(scene, one.run_id)

    CASES["dispatcher", failpoint] = case


_sweeping("sweep.before_commit")
_sweeping("sweep.before_forgotten")


# Objects


@dataclass
class Holder:
    """An attempt that writes objects through the gateway."""

    run_id: UUID
    held: Release
    url: str
    http: httpx.AsyncClient

    async def ask(self, method: str, query: str = "", **more: Any) -> httpx.Response:
        return (await self.http.request(method, self.url + query, **more)).raise_for_status()


@asynccontextmanager
async def _holder(scene: Scene) -> AsyncIterator[Holder]:
    one = await scene.load.submit(_WRITER, lease_seconds=600)
    async with scene.deployment.worker_client() as worker, httpx.AsyncClient(timeout=30) as http:
        claim = (await worker.claim(ClaimRequest(worker_id="here", run_id=one.run_id, start=0, end=0))).claims[0]
        assert claim.task
        assert claim.lease_token
        assert claim.capability_token
        held = Release(task_id=claim.task.task_id, attempt=claim.task.attempt, lease_token=claim.lease_token)
        asked = f"{scene.deployment['dispatcher'].url}/v1/task/credentials"
        body, headers = msgspec.to_builtins(held), {"X-Trace-Task-Capability": claim.capability_token}
        minted = (await http.post(asked, json=body, headers=headers)).raise_for_status().json()
        key = minted["write_prefixes"][0].removeprefix(f"file://{scene.deployment.folder}/objects/") + "object"
        http.headers["Authorization"] = f"Bearer {minted['object_token']}"
        yield Holder(one.run_id, held, f"{scene.deployment.gateway_url}/v1/objects/{key}", http)
        await _ended(scene, held, "Failed")
        await _completed(scene, one.run_id)


@dies("gateway", "object.before_visible")
async def _(scene: Scene) -> None:
    """The whole object is on disk, but not visible."""
    await scene.up()
    async with _holder(scene) as holder:
        await scene.arm("object.before_visible")
        with suppress(httpx.TransportError):
            await holder.ask("PUT", content=b"x" * 3_000_000)
        await scene.death()
        await scene.victim.start()
        assert (await holder.http.get(holder.url)).status_code == 404
        await holder.ask("PUT", content=b"again")
        assert (await holder.ask("GET")).content == b"again"


@dies("gateway", "object.visible")
async def _(scene: Scene) -> None:
    """The client did not get a reply and completes its upload again."""
    await scene.up()
    async with _holder(scene) as holder:
        upload = (await holder.ask("POST", "?uploads")).json()["upload_id"]
        part = (await holder.ask("PUT", f"?uploadId={upload}&partNumber=1", content=b"part")).json()
        parts = {"parts": [{"part_number": 1, "etag": part["etag"]}]}
        await scene.arm("object.visible")
        with suppress(httpx.TransportError):
            await holder.ask("POST", f"?uploadId={upload}", json=parts)
        await scene.death()
        await scene.victim.start()
        assert (await holder.ask("GET")).content == b"part"
        await holder.ask("POST", f"?uploadId={upload}", json=parts)
        assert (await holder.ask("GET")).content == b"part"


# Sources


_SOURCE_DAG = """
name: {name}
defaults: {{heartbeat_timeout_seconds: 4, max_attempts: 50, backoff_seconds: 0.05}}
jobs:
  - {{name: source, operator: echo, runtime: {runtime}, activation: source, source: {{{source}}}}}
"""


async def _source(scene: Scene, source: str, runtime: str = "platform") -> str:
    """Deploys a DAG with one source and returns its name."""
    name = f"dag{scene.rng.getrandbits(40)}"
    async with scene.deployment.client() as client:
        await client.dags.deploy(_SOURCE_DAG.format(name=name, source=source, runtime=runtime))
    return name


async def _retire(scene: Scene, name: str) -> None:
    """Deactivates the source and waits until its tasks have ended."""
    await scene.deployment.ask("update interlock.jobs set active = false where dag_name = $1", name)
    ended = """select not exists (
        select from interlock.tasks t join interlock.jobs j on j.job_id = t.job_id
        where j.dag_name = $1 and t.status not in ('Completed', 'Canceled'))"""
    await scene.deployment.until(ended, name)


_TASKS = """select count(*) from interlock.tasks t join interlock.jobs j on j.job_id = t.job_id
            where j.dag_name = $1 and t.status = 'Completed'"""


@dies("gateway", "trigger.before_commit")
async def _(scene: Scene) -> None:
    await scene.up()
    name = await _source(scene, "kind: manual")
    await scene.arm("trigger.before_commit")
    async with scene.deployment.client() as client:
        sending = asyncio.create_task(client.sources.send(name, "source", [SourceEvent(payload=Raw(b"1"))]))
        await scene.death()
        await scene.victim.start()
        assert (await sending).triggers == 1
    await scene.deployment.until(f"select ({_TASKS}) = 1", name)
    await _retire(scene, name)


@dies("dispatcher", "triggers.before_commit")
async def _(scene: Scene) -> None:
    await scene.down()
    name = await _source(scene, "kind: manual")
    async with scene.deployment.client() as client:
        await client.sources.send(name, "source", [SourceEvent(payload=Raw(b"1")), SourceEvent(payload=Raw(b"2"))])
    await scene.arm("triggers.before_commit")
    await scene.death()
    await scene.victim.start()
    await scene.deployment.until(f"select ({_TASKS}) = 2", name)
    await _retire(scene, name)


@dies("dispatcher", "sources.before_commit")
async def _(scene: Scene) -> None:
    await scene.down()
    name = await _source(scene, "kind: always_on", runtime="udf")
    await scene.arm("sources.before_commit")
    await scene.death()
    await scene.victim.start()
    queued = """select count(*) = 1 from interlock.tasks t join interlock.jobs j on j.job_id = t.job_id
                join interlock.queue_messages m on m.dedupe_key = t.task_id::text where j.dag_name = $1"""
    await scene.deployment.until(queued, name)
    await _retire(scene, name)


@dies("scheduler", "schedule.before_commit")
async def _(scene: Scene) -> None:
    await scene.down()
    name = await _source(scene, "kind: cron, schedule: '* * * * *', catch_up: all")
    follow = """insert into interlock.cron_state (job_id, source, last_at, next_at)
                select job_id, source, date_trunc('minute', now()) - interval '10 minutes', now()
                from interlock.jobs where dag_name = $1"""
    await scene.deployment.ask(follow, name)
    await scene.arm("schedule.before_commit")
    await scene.death()
    await scene.victim.start()
    await scene.deployment.until(f"select ({_TASKS}) >= 10", name)
    twice = """select count(*) = count(distinct t.payload ->> 'scheduled_at') from interlock.tasks t
               join interlock.jobs j on j.job_id = t.job_id where j.dag_name = $1"""
    assert (await scene.deployment.ask(twice, name))[0][0]
    await _retire(scene, name)


@dies("gateway", "buffer_redrive.before_commit")
async def _(scene: Scene) -> None:
    await scene.up()
    refused = """insert into interlock.buffer_publishes
                     (org_id, task_id, attempt, dataset_uuid, dataset_version, batch_uri, record_count, status)
                 select org_id, uuidv7(), 1, uuidv7(), uuidv7(), 'file:///none', 1, 'Refused'
                 from interlock.orgs limit 1 returning publish_id"""
    publish_id = (await scene.deployment.ask(refused))[0]["publish_id"]
    await scene.arm("buffer_redrive.before_commit")
    async with scene.deployment.client() as client:
        with suppress(ServerUnreachable):
            await client.buffers.redrive(publish_id)
        await scene.death()
        await scene.victim.start()
        assert (await client.buffers.redrive(publish_id)).redrives == 1
    sent = "delete from interlock.queue_messages where dedupe_key = $1 returning message_id"
    assert len(await scene.deployment.ask(sent, str(publish_id))) == 1
    await scene.deployment.ask("delete from interlock.buffer_publishes where publish_id = $1", publish_id)


def _queries(scene: Scene, patience: float) -> QueryClient:
    return QueryClient(scene.deployment["query"].url, scene.deployment.credentials.admin_key, patience=patience)


@dies("query", "query.before_commit")
async def _(scene: Scene) -> None:
    """An unrecorded query was not answered; its open record is closed in time."""
    await scene.arm("query.before_commit")
    async with _queries(scene, 0) as queries:
        await scene.victim.ready()
        with pytest.raises(ServerUnreachable):
            await queries.ask("select 1")
    await scene.death()
    aged = """update interlock.query_audit set started_at = started_at - interval '1 day' where outcome = 'Running'
              returning query_id"""
    (record,) = await scene.deployment.ask(aged)
    lost = "select outcome = 'Lost' from interlock.query_audit where query_id = $1"
    await scene.deployment.until(lost, record["query_id"])
    await scene.victim.start()
    async with _queries(scene, PATIENCE) as queries:
        assert bytes((await queries.ask("select 1")).rows) == b"[[1]]"


@dies("query", "batch_query.before_commit")
async def _(scene: Scene) -> None:
    """Task and record are created together, or not at all."""
    made = "select count(*) from interlock.jobs where operator = 'batch_query'"
    before = (await scene.deployment.ask(made))[0][0]
    await scene.arm("batch_query.before_commit")
    await scene.victim.ready()
    async with _queries(scene, 0) as queries:
        with pytest.raises(ServerUnreachable):
            await queries.ask("select 1", mode=QueryMode.BATCH)
    await scene.death()
    assert (await scene.deployment.ask(made))[0][0] == before
    await scene.victim.start()
    await scene.victim.ready()
    async with _queries(scene, PATIENCE) as queries, scene.deployment.client() as client:
        reply = await queries.ask("select 1", mode=QueryMode.BATCH)
        assert reply.task_id is not None
        assert (await client.queries.show(reply.query_id)).batch_task_id == reply.task_id
        await client.cancel_task(reply.task_id)
    await scene.deployment.ask("delete from interlock.query_audit where outcome = 'Running'")


def test_every_failpoint_has_a_case() -> None:
    """Fails for a new failpoint without a crash test."""
    elsewhere = (*test_pipeline.CASES, *test_sink.CASES, *test_ingest.CASES, *test_bus.CASES, *test_bus_path.CASES)
    assert {failpoint for _, failpoint in (*CASES, *elsewhere)} == NAMES


@pytest.fixture(scope="module")
async def site() -> AsyncIterator[tuple[Deployment, Ledger]]:
    async with deployed() as deployment:
        deployment.add_scheduler("scheduler")
        deployment.add_listening("query", "query")
        await deployment.start()
        yield deployment, Ledger(deployment.journal)


@pytest.mark.parametrize("process", ["gateway", "worker", "dispatcher", "scheduler", "query"])
async def test_kill_at_every_failpoint_loses_nothing_and_commits_nothing_twice(
    site: tuple[Deployment, Ledger], process: str
) -> None:
    deployment, ledger = site
    chance = random_for(f"deaths of the {process}")
    load = Load(deployment.client, ledger, f"failpoints of the {process}")
    scene = Scene(deployment, load, ledger, chance, deployment[process])
    order = [failpoint for place, failpoint in sorted(CASES) if place == process] * ROUNDS
    chance.shuffle(order)
    async with load.running():
        for number, failpoint in enumerate(order):
            try:
                await CASES[process, failpoint](scene)
            except BaseException as error:
                error.add_note(f"at {failpoint}, after {order[:number]}")
                raise
        await deployment.start()
    await load.settle(deployment.state_url)
