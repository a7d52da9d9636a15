"""Deployed DAGs without workers: the test reports changes for the sources and executes the resulting tasks.

The location that a task reports contains its dataset version and the change that caused it, so a test can check
that each version contains only the output of its own generation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import httpx

from tests.support.dags import deploy
from tests.support.dataset_files import marked
from tests.support.system import System, fence


@dataclass
class DeployedDags:
    """A job is addressed by its DAG and its name, and one generation of it by its id."""

    system: System
    producers: dict[UUID, dict[str, Any]] = field(default_factory=dict)
    """The claimed task that reports, by source job."""
    sequence: int = 0

    async def deploy(self, text: str) -> dict[str, Any]:
        """Deploys a file. Returns the plan; no loop has run yet."""
        return await deploy(self.system, text)

    async def start(self, text: str) -> None:
        """Deploys a file and runs the loops that make it current and create its first tasks."""
        await self.deploy(text)
        await self.run("cutover", "router", "scopes")

    async def run(self, *services: str) -> int:
        done = 0
        for name in services:
            done += await self.system.pass_of(name)
        return done

    async def view(self, dag: str) -> dict[str, Any]:
        reply = await self.system.user("GET", f"/v1/dags/{dag}")
        assert reply.status_code == 200, reply.text
        shown: dict[str, Any] = reply.json()
        return shown

    async def act(self, dag: str, action: str, body: dict[str, Any] | None = None, status: int = 200) -> dict[str, Any]:
        reply = await self.system.user("POST", f"/v1/dags/{dag}/{action}", json=body or {})
        assert reply.status_code == status, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    async def pauses(self) -> list[dict[str, Any]]:
        reply = await self.system.user("GET", "/v1/pauses")
        assert reply.status_code == 200, reply.text
        found: list[dict[str, Any]] = reply.json()["pauses"]
        return found

    # Generations and versions

    async def generations(self, dag: str, job: str) -> list[UUID]:
        """Returns all generations of a job, oldest first."""
        found: list[UUID] = await self.system.value(
            "select array_agg(job_id order by job_id) from interlock.jobs where dag_name = $1 and name = $2", dag, job
        )
        return found

    async def job_id(self, dag: str, job: str) -> UUID:
        """Returns the current generation of a job."""
        found = await self.system.value(
            "select job_id from interlock.jobs where dag_name = $1 and name = $2 and current", dag, job
        )
        assert isinstance(found, UUID), (dag, job)
        return found

    async def version(self, dag: str, job: str) -> UUID:
        return await self.version_of(await self.job_id(dag, job))

    async def version_of(self, job_id: UUID) -> UUID:
        """Returns the dataset version of the first output of a generation."""
        found = await self.system.value(
            "select dataset_version from interlock.dataset_versions where job_id = $1 and output_index = 0", job_id
        )
        assert isinstance(found, UUID), job_id
        return found

    # Sources

    async def report(self, dag: str, job: str, *scopes: tuple[int, int] | int) -> None:
        """Reports partitions by their bounds, or the cursor of a stream; then runs the router."""
        await self.emit(dag, job, *scopes)
        await self.run("router")

    async def emit(self, dag: str, job: str, *scopes: tuple[int, int] | int, job_id: UUID | None = None) -> None:
        """Reports like `report`, without running the router."""
        claim = await self.producer(job_id or await self.job_id(dag, job))
        output = {name: claim["task"]["outputs"][0][name] for name in ("dataset_uuid", "dataset_version")}
        self.sequence += 1
        events = [
            output
            | (
                {"cursor": scope}
                if isinstance(scope, int)
                else {"start": scope[0], "end": scope[1], "sequence": self.sequence}
            )
            for scope in scopes
        ]
        reply = await self.system.attempt(
            "/v1/task/events", claim["capability_token"], fence(claim) | {"events": events}
        )
        assert reply.status_code == 200, reply.text

    async def producer(self, job_id: UUID) -> dict[str, Any]:
        """Returns a running attempt of a source, with which the test reports."""
        if job_id not in self.producers:
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
        while await self.run("router", "scopes"):
            continue

    async def waiting(self, dag: str, job: str) -> list[str]:
        return await self.waiting_of(await self.job_id(dag, job))

    async def waiting_of(self, *job_ids: UUID) -> list[str]:
        """Returns queued tasks of these generations, without held ones."""
        async with self.system.kernel.stores.database.connection() as connection:
            rows = await connection.fetch(
                "select t.task_id from interlock.tasks t left join interlock.runs r on r.run_id = t.run_id"
                " where t.job_id = any($1) and t.status = 'Queued'"
                " and (r.held_from is null or t.task_index < r.held_from)"
                " order by t.run_id nulls first, t.task_index, t.task_id",
                list(job_ids),
            )
        return [str(row["task_id"]) for row in rows]

    async def work(self, dag: str, *jobs: str) -> int:
        """Executes all waiting tasks of all generations of these jobs, and tasks that follow from them."""
        done = 0
        while True:
            await self.route()
            job_ids = [job_id for job in jobs for job_id in await self.generations(dag, job)]
            tasks = await self.waiting_of(*job_ids)
            if not tasks:
                return done
            for task_id in tasks:
                reply = await self.complete(await self.system.claim(task_id))
                assert reply.status_code == 200, reply.text
            done += len(tasks)

    async def finish_all(self, dag: str, job: str) -> list[tuple[int, int]]:
        return [await self.finish(task_id) for task_id in await self.waiting(dag, job)]

    async def finish(self, task_id: str) -> tuple[int, int]:
        """Executes a task and runs the router. Returns the bounds of its scope."""
        claim = await self.system.claim(task_id)
        reply = await self.complete(claim)
        assert reply.status_code == 200, reply.text
        await self.run("router")
        return claim["task"]["payload"]["start"], claim["task"]["payload"]["end"]

    async def complete(self, claim: dict[str, Any]) -> httpx.Response:
        """Completes an attempt, which commits its scope to each output of the job."""
        payload, granted = claim["task"]["payload"], claim["task"]["outputs"]
        scope = {name: payload[name] for name in ("start", "end", "partition_key")}
        refs = [{name: output[name] for name in ("dataset_uuid", "dataset_version")} for output in granted]
        outputs = [
            ref
            | scope
            | {"output_index": output["output_index"]}
            | marked(output["write_prefix"], f"{ref['dataset_version']}@{payload.get('commit')}")
            for ref, output in zip(refs, granted, strict=True)
        ]
        return await self.system.complete(claim, outputs=outputs, events=[ref | scope for ref in refs])

    async def partitions(self, dag: str, job: str) -> list[tuple[int, int]]:
        """Returns the ranges of the job's first output."""
        return sorted(await self.locations(await self.version(dag, job)))

    async def locations(self, version: UUID) -> dict[tuple[int, int], str]:
        """Returns the file name of each partition of a dataset version, by its range."""
        async with self.system.kernel.stores.database.connection() as connection:
            rows = await connection.fetch(
                "select range_start, range_end, location from interlock.partitions where dataset_version = $1", version
            )
        return {
            (row["range_start"], row["range_end"]): row["location"] and row["location"].rpartition("/")[2]
            for row in rows
        }
