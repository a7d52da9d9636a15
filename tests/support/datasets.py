"""DAGs whose tasks a test executes itself: it reports for sources and acts as the worker of the other jobs."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from interlock.wire.access import KeyRequest, Role
from tests.support.dags import valid
from tests.support.dataset_files import marked
from tests.support.system import System

CHAIN = """
name: chain
jobs:
  - name: feed
    activation: source
    source: { kind: manual }
    operator: echo
    outputs: [blocks]
  - name: double
    operator: echo
    inputs: [{ from: { job: feed, output: blocks }, where: "height > 0" }]
    outputs: [doubled]
  - name: total
    operator: echo
    inputs: [{ from: { job: double, output: doubled } }]
    outputs: [totals]
publish:
  doubled: { from: { job: double, output: doubled } }
"""

READER = """
name: reader
jobs:
  - name: report
    operator: echo
    inputs: [{ from: { dataset: doubled } }]
    outputs: [reports]
"""


async def deploy(system: System, text: str, org_id: UUID | None = None) -> None:
    await system.kernel.dags.deployments.deploy(valid(text), org_id or system.org_id, "root")


async def key_of(system: System, role: Role, org_id: UUID | None = None) -> str:
    """Creates an API key."""
    request = KeyRequest(user=f"some-{role}", role=role)
    return (await system.kernel.access.principals.create_key(request, org_id or system.org_id, granted_by=None)).key


async def stranger(system: System) -> str:
    """Creates an admin key of another org."""
    org = await system.kernel.access.principals.create_org("elsewhere")
    return await key_of(system, Role.ADMIN, org.org_id)


async def job_id(system: System, dag: str, job: str) -> UUID:
    found: UUID = await system.value(
        "select job_id from interlock.jobs where dag_name = $1 and name = $2 and current", dag, job
    )
    return found


async def claim_of(system: System, dag: str, job: str) -> dict[str, Any]:
    """Returns a running attempt of a source's task, as its trigger would have created it."""
    task_id = await system.value(
        "insert into interlock.tasks (task_id, org_id, job_id, max_attempts, priority, payload)"
        " select uuidv7(), org_id, job_id, max_attempts, priority, '{}' from interlock.jobs where job_id = $1"
        " returning task_id",
        await job_id(system, dag, job),
    )
    return await system.claim(str(task_id))


def scope(start: int, end: int) -> dict[str, Any]:
    return {"partition_key": f"{start}-{end}", "start": start, "end": end}


async def finish(system: System, claim: dict[str, Any], *scopes: dict[str, Any]) -> None:
    """Completes an attempt, with each of its outputs changed in each of these scopes."""
    grants = claim["task"]["outputs"]
    refs = [{name: grant[name] for name in ("dataset_uuid", "dataset_version")} for grant in grants]
    events = [ref | where for ref in refs for where in scopes]
    outputs = [
        ref | scopes[0] | {"output_index": n} | marked(grants[n]["write_prefix"], "part.parquet", rows=3)
        for n, ref in enumerate(refs)
        if scopes and "start" in scopes[0]
    ]
    reply = await system.complete(claim, events=events, outputs=outputs)
    assert reply.status_code == 200, reply.text


async def bring(system: System, *scopes: dict[str, Any], dag: str = "chain", job: str = "feed") -> None:
    """Reports these scopes from a source and runs the router. No other loop runs, so that pauses of the test remain."""
    await finish(system, await claim_of(system, dag, job), *scopes)
    while await system.pass_of("router"):
        continue


async def waiting(system: System, dag: str, job: str) -> list[str]:
    async with system.kernel.stores.database.connection() as connection:
        rows = await connection.fetch(
            "select task_id from interlock.tasks where job_id = $1 and status = 'Queued' order by task_id",
            await job_id(system, dag, job),
        )
    return [str(row["task_id"]) for row in rows]


async def work(system: System, dag: str, job: str) -> list[str]:
    """Executes waiting tasks, each in its own scope. Returns their partition keys, sorted."""
    done = []
    for task_id in await waiting(system, dag, job):
        claim = await system.claim(task_id)
        payload = claim["task"]["payload"]
        await finish(system, claim, scope(payload["start"], payload["end"]))
        done.append(payload["partition_key"])
    await system.settle()
    return sorted(done)


async def rebuild(system: System, *jobs: str) -> None:
    """Executes the tasks of new generations of these jobs, until they are current."""
    await _reconciled(system)
    for job in jobs:
        async with system.kernel.stores.database.connection() as connection:
            rows = await connection.fetch(
                "select t.task_id from interlock.tasks t join interlock.jobs j on j.job_id = t.job_id"
                " where j.name = $1 and t.status = 'Queued' order by t.task_id",
                job,
            )
        for row in rows:
            claim = await system.claim(str(row["task_id"]))
            payload = claim["task"]["payload"]
            await finish(system, claim, scope(payload["start"], payload["end"]))
        await _reconciled(system)


async def _reconciled(system: System) -> None:
    await system.settle()
    while await system.pass_of("scopes"):
        continue
    await system.settle()


async def built(system: System, *ranges: tuple[int, int]) -> None:
    """Deploys the chain and processes these partitions through all its jobs."""
    await deploy(system, CHAIN)
    for start, end in ranges:
        await bring(system, scope(start, end))
    expected = sorted(f"{start}-{end}" for start, end in ranges)
    for job in ("double", "total"):
        assert await work(system, "chain", job) == expected


async def got(system: System, path: str, key: str | None = None) -> dict[str, Any]:
    reply = await system.user("GET", path, key=key)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body
