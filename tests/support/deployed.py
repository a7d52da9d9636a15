"""A deployed DAG without workers: the test reports changes for the sources and executes the resulting tasks.

The location that a task reports contains its dataset version and the change that caused it, so a test can check
that each version contains only the output of its own generation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

from tests.support.dags import deploy
from tests.support.dataset_files import marked
from tests.support.system import System, fence


@dataclass
class Deployed:
    system: System
    dag: str = "chain"
    producers: dict[UUID, dict[str, Any]] = field(default_factory=dict)
    """The claimed task that reports, by source job."""
    sequence: int = 0

    async def deploy(self, text: str) -> dict[str, Any]:
        return await deploy(self.system, text)

    async def view(self) -> dict[str, Any]:
        reply = await self.system.user("GET", f"/v1/dags/{self.dag}")
        assert reply.status_code == 200, reply.text
        shown: dict[str, Any] = reply.json()
        return shown

    async def act(self, action: str, body: dict[str, Any] | None = None, status: int = 200) -> dict[str, Any]:
        reply = await self.system.user("POST", f"/v1/dags/{self.dag}/{action}", json=body or {})
        assert reply.status_code == status, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    async def generations(self, name: str) -> list[UUID]:
        """Returns all generations of a job, oldest first."""
        found: list[UUID] = await self.system.value(
            "select array_agg(job_id order by job_id) from interlock.jobs where dag_name = $1 and name = $2",
            self.dag,
            name,
        )
        return found

    async def current(self, name: str) -> UUID:
        return UUID(next(job["job_id"] for job in (await self.view())["jobs"] if job["name"] == name))

    async def version_of(self, job_id: UUID) -> UUID:
        """Returns the dataset version of the job's first output."""
        found: UUID = await self.system.value(
            "select dataset_version from interlock.dataset_versions where job_id = $1 and output_index = 0", job_id
        )
        return found

    # Sources

    async def report(self, name: str, *scopes: tuple[int, int], job_id: UUID | None = None) -> None:
        await self._emit(job_id or await self.current(name), [{"start": a, "end": b} for a, b in scopes])

    async def advance(self, name: str, cursor: int, *, job_id: UUID | None = None) -> None:
        await self._emit(job_id or await self.current(name), [{"cursor": cursor}])

    async def _emit(self, job_id: UUID, scopes: list[dict[str, int]]) -> None:
        claim = self.producers.get(job_id) or await self._produce(job_id)
        output = claim["task"]["outputs"][0]
        ref = {name: output[name] for name in ("dataset_uuid", "dataset_version")}
        self.sequence += 1
        events = [ref | {"sequence": self.sequence} | scope for scope in scopes]
        if any("cursor" in scope for scope in scopes):
            events = [ref | scope for scope in scopes]
        reply = await self.system.attempt(
            "/v1/task/events", claim["capability_token"], fence(claim) | {"events": events}
        )
        assert reply.status_code == 200, reply.text

    async def _produce(self, job_id: UUID) -> dict[str, Any]:
        task_id = uuid4()
        await self.system.value(
            "insert into interlock.tasks (task_id, org_id, job_id, max_attempts, priority, payload)"
            " select $1, org_id, job_id, 3, 0, '{}' from interlock.jobs where job_id = $2 returning 1",
            task_id,
            job_id,
        )
        self.producers[job_id] = await self.system.claim(str(task_id))
        return self.producers[job_id]

    # Routing and work

    async def route(self) -> None:
        """Runs the router until there are no more tasks to create."""
        while await self.system.pass_of("router") + await self.system.pass_of("scopes"):
            continue

    async def waiting(self, *job_ids: UUID) -> list[UUID]:
        ids: list[UUID] = await self.system.value(
            "select coalesce(array_agg(task_id order by task_id), '{}') from interlock.tasks"
            " where status = 'Queued' and job_id = any($1)",
            list(job_ids),
        )
        return ids

    async def work(self, *names: str) -> int:
        """Executes all waiting tasks of all generations of these jobs, and tasks that follow from them."""
        done = 0
        while True:
            await self.route()
            job_ids = [job_id for name in names for job_id in await self.generations(name)]
            tasks = await self.waiting(*job_ids)
            if not tasks:
                return done
            for task_id in tasks:
                reply = await self.finish(await self.system.claim(str(task_id)))
                assert reply.status_code == 200, reply.text
            done += len(tasks)

    async def finish(self, claim: dict[str, Any]) -> Any:
        task = claim["task"]
        scope = {name: task["payload"][name] for name in ("start", "end", "partition_key")}
        made = [
            {"dataset_uuid": output["dataset_uuid"], "dataset_version": output["dataset_version"]}
            for output in task["outputs"]
        ]
        commit = task["payload"]["commit"]
        outputs = [
            ref | scope | {"output_index": index} | marked(grant["write_prefix"], f"{ref['dataset_version']}@{commit}")
            for index, (ref, grant) in enumerate(zip(made, task["outputs"], strict=True))
        ]
        return await self.system.complete(claim, outputs=outputs, events=[ref | scope for ref in made])

    async def partitions(self, version: UUID) -> dict[tuple[int, int], str]:
        async with self.system.kernel.stores.database.connection() as connection:
            rows = await connection.fetch(
                "select range_start, range_end, location from interlock.partitions where dataset_version = $1", version
            )
        return {
            (row["range_start"], row["range_end"]): row["location"] and row["location"].rpartition("/")[2]
            for row in rows
        }
