"""DAGs with sources, for tests: deployed through the gateway."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from interlock.wire.access import KeyRequest, Role
from tests.support.dags import block
from tests.support.system import System


def source_job(name: str = "src", outputs: tuple[str, ...] = ("out",), **source: Any) -> dict[str, Any]:
    """Returns a source job. Any: it is a document."""
    return {
        "name": name,
        "operator": "echo",
        "activation": "source",
        "source": source,
        "outputs": list(outputs),
        "max_attempts": 1,
        "backoff_seconds": 1,
        "jitter": 0,
    }


async def deploy(system: System, *jobs: dict[str, Any], dag: str = "feeds", key: str | None = None) -> None:
    document = block({"name": dag, "jobs": list(jobs)})
    headers = {"Content-Type": "application/yaml"}
    reply = await system.user("POST", "/v1/dags", content=document, headers=headers, key=key)
    assert reply.status_code == 200, reply.text


async def active_job(system: System, name: str = "src", dag: str = "feeds") -> UUID:
    found: UUID = await system.value(
        "select job_id from interlock.jobs where dag_name = $1 and name = $2 and active order by current desc",
        dag,
        name,
    )
    return found


async def hold_back(system: System, job_id: UUID, *, bulk: bool = False) -> None:
    await system.value(
        "insert into interlock.pauses (job_id, cause_id, bulk, path, reason) values ($1, $1, $2, '{}', 'a full queue')",
        job_id,
        bulk,
    )


async def make_tasks(system: System) -> None:
    """Turns triggers into tasks. Skips the loop that maintains pauses, because pauses of a test have no queue."""
    while await system.pass_of("triggers"):
        continue


async def let_go(system: System, job_id: UUID) -> None:
    await system.value("delete from interlock.pauses where job_id = $1", job_id)


async def other_key(system: System, role: Role, org: str | None = None) -> str:
    """Creates a key of another role and, if `org` is given, of another org."""
    principals = system.kernel.access.principals
    org_id = system.org_id if org is None else (await principals.create_org(org)).org_id
    made = await principals.create_key(KeyRequest(user="other", role=role), org_id, granted_by=None)
    return made.key


async def payloads(system: System, job_id: UUID) -> list[str]:
    """Returns the payloads of the job's tasks, in order of creation."""
    async with system.kernel.stores.database.connection() as connection:
        rows = await connection.fetch("select payload from interlock.tasks where job_id = $1 order by task_id", job_id)
    return [row["payload"] for row in rows]
