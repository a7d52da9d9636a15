"""Deployed DAGs without workers: the test reports for sources and completes tasks at will."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

from tests.support.dags import deploy
from tests.support.dataset_files import marked
from tests.support.system import System, fence

Name = tuple[str, str]
"""Names of a DAG and a job."""


@dataclass
class Flow:
    system: System
    producers: dict[Name, dict[str, Any]] = field(default_factory=dict)

    async def deploy(self, text: str) -> None:
        await deploy(self.system, text)
        await self.run("cutover", "router", "scopes")

    async def run(self, *services: str) -> int:
        done = 0
        for name in services:
            done += await self.system.pass_of(name)
        return done

    async def job_id(self, dag: str, job: str) -> UUID:
        found = await self.system.value(
            "select job_id from interlock.jobs where dag_name = $1 and name = $2 and current", dag, job
        )
        assert isinstance(found, UUID), (dag, job)
        return found

    async def version(self, dag: str, job: str) -> UUID:
        """Returns the dataset version of the job's first output."""
        found = await self.system.value(
            "select dataset_version from interlock.dataset_versions where job_id = $1 and output_index = 0",
            await self.job_id(dag, job),
        )
        assert isinstance(found, UUID)
        return found

    async def producing(self, dag: str, job: str) -> dict[str, Any]:
        """Returns a running attempt of the job, with which the test reports."""
        if (dag, job) not in self.producers:
            task_id = uuid4()
            await self.system.value(
                "insert into interlock.tasks (task_id, org_id, job_id, max_attempts, priority, payload)"
                " values ($1, $2, $3, 3, 0, '{}')",
                task_id,
                self.system.org_id,
                await self.job_id(dag, job),
            )
            self.producers[dag, job] = await self.system.claim(str(task_id))
        return self.producers[dag, job]

    async def report(self, dag: str, job: str, *scopes: tuple[int, int] | int, sequence: int | None = None) -> None:
        """Reports partitions by their bounds, or the cursor of a stream; then runs the router."""
        claim = await self.producing(dag, job)
        output = {name: claim["task"]["outputs"][0][name] for name in ("dataset_uuid", "dataset_version")}
        events: list[dict[str, Any]] = [
            output | ({"cursor": scope} if isinstance(scope, int) else {"start": scope[0], "end": scope[1]})
            for scope in scopes
        ]
        if sequence is not None:
            events = [event | {"sequence": sequence} for event in events]
        reply = await self.system.attempt(
            "/v1/task/events", claim["capability_token"], fence(claim) | {"events": events}
        )
        assert reply.status_code == 200, reply.text
        await self.run("router")

    async def waiting(self, dag: str, job: str) -> list[str]:
        """Returns queued tasks, without held ones."""
        async with self.system.kernel.stores.database.connection() as connection:
            rows = await connection.fetch(
                "select t.task_id from interlock.tasks t left join interlock.runs r on r.run_id = t.run_id"
                " where t.job_id = $1 and t.status = 'Queued' and (r.held_from is null or t.task_index < r.held_from)"
                " order by t.run_id nulls first, t.task_index, t.task_id",
                await self.job_id(dag, job),
            )
        return [str(row["task_id"]) for row in rows]

    async def finish(self, task_id: str) -> tuple[int, int]:
        """Completes a task, which commits its scope to the job's output; then runs the router."""
        claim = await self.system.claim(task_id)
        payload = claim["task"]["payload"]
        scope = {"start": payload["start"], "end": payload["end"]}
        outputs = [
            {name: output[name] for name in ("output_index", "dataset_uuid", "dataset_version")}
            | scope
            | marked(output["write_prefix"])
            for output in claim["task"]["outputs"]
        ]
        events = [{name: o[name] for name in ("dataset_uuid", "dataset_version", "start", "end")} for o in outputs]
        reply = await self.system.complete(claim, outputs=outputs, events=events)
        assert reply.status_code == 200, reply.text
        await self.run("router")
        return payload["start"], payload["end"]

    async def finish_all(self, dag: str, job: str) -> list[tuple[int, int]]:
        return [await self.finish(task_id) for task_id in await self.waiting(dag, job)]

    async def partitions(self, dag: str, job: str) -> list[tuple[int, int]]:
        """Returns the ranges of the job's first output."""
        async with self.system.kernel.stores.database.connection() as connection:
            rows = await connection.fetch(
                "select range_start, range_end from interlock.partitions where dataset_version = $1"
                " order by range_start",
                await self.version(dag, job),
            )
        return [(row["range_start"], row["range_end"]) for row in rows]

    async def pauses(self) -> list[dict[str, Any]]:
        reply = await self.system.user("GET", "/v1/pauses")
        assert reply.status_code == 200, reply.text
        found: list[dict[str, Any]] = reply.json()["pauses"]
        return found
