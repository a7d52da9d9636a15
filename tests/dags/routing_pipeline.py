"""A pipeline without workers: its jobs are rows, its data is a dictionary, and the test runs its tasks.

A cell is one position of a dataset; its value records what it was made of. So the final state can be compared with the
result of a naive reader of the sources, whatever happened in between.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

import asyncpg
import msgspec

from interlock.access.principals import WorkerIdentity
from interlock.apps.app import App, open_app
from interlock.apps.dispatcher import services as dispatcher_services
from interlock.processes.loop import Service
from interlock.settings import Settings
from interlock.wire.attempts import ClaimReply, ClaimRequest, Completion, Event, EventBatch, Output
from tests.support.dataset_files import marked

WIDTH: Final = 10
"""Number of cells in a partition that a source reports."""
_WORKER = WorkerIdentity("any", "any", None)
_EMPTY = """
    delete from interlock.queue_messages; delete from interlock.outbox; delete from interlock.tasks;
    delete from interlock.lease_alarms; delete from interlock.attempts; delete from interlock.output_commits;
    delete from interlock.dataset_events; delete from interlock.materialisations; delete from interlock.job_cursors;
    delete from interlock.partitions; delete from interlock.edges; delete from interlock.dataset_versions;
    delete from interlock.jobs; delete from interlock.datasets; delete from interlock.pauses"""


@dataclass(frozen=True)
class Node:
    """A job with one output. Sources have no inputs."""

    name: str
    inputs: tuple[str, ...] = ()
    wait_for_all: bool = True
    per_update: bool = False
    stream: bool = False
    """For a source: reports cursors and rewritten ranges instead of partitions."""


class Scope(msgspec.Struct):
    start: int
    end: int


@dataclass
class Held:
    """A running task: it has read its inputs, and has not written yet."""

    claim: ClaimReply
    node: Node
    scope: Scope
    read: dict[int, object]


@dataclass
class Pipeline:
    kernel: App
    rows: asyncpg.Connection[Any]
    org_id: UUID
    services: dict[str, Service]
    nodes: dict[str, Node] = field(default_factory=dict)
    jobs: dict[str, UUID] = field(default_factory=dict)
    versions: dict[str, tuple[UUID, UUID]] = field(default_factory=dict)
    """Dataset and version of each job's output."""
    producers: dict[str, ClaimReply] = field(default_factory=dict)
    data: defaultdict[str, dict[int, object]] = field(default_factory=lambda: defaultdict(dict))
    cursors: dict[str, int] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    async def lay(self, nodes: list[Node]) -> None:
        await self.rows.execute(_EMPTY)
        self.nodes = {node.name: node for node in nodes}
        for node in nodes:
            await self._job(node)
        for node in nodes:
            if not node.inputs:
                self.producers[node.name] = await self._producer(node)

    async def _job(self, node: Node) -> None:
        dataset, version, job_id = uuid4(), uuid4(), uuid4()
        self.jobs[node.name], self.versions[node.name] = job_id, (dataset, version)
        outputs = [{"dataset_uuid": str(dataset), "dataset_version": str(version)}]
        inputs = [
            dict(zip(("dataset_uuid", "dataset_version"), map(str, self.versions[i]), strict=True)) for i in node.inputs
        ]
        await self.rows.execute(
            "insert into interlock.datasets (dataset_uuid, org_id, current_version, dag_name, job_name, output_name)"
            " values ($1, $2, $3, 'dag', $4, 'out')",
            dataset,
            self.org_id,
            version,
            node.name,
        )
        await self.rows.execute(
            "insert into interlock.jobs (job_id, org_id, dag_name, name, operator, runtime, queue, config, priority,"
            " max_attempts, backoff_seconds, backoff_factor, backoff_cap_seconds, jitter, non_retryable, lease_seconds,"
            " timeout_seconds, outputs, definition_hash, inputs, wait_for_all, per_update)"
            " values ($1, $2, 'dag', $3, 'echo', 'platform', 'platform', '{}', 0, 3, 1, 2, 300, 0, '{}', 1e6, 1e6, $4,"
            " '', $5, $6, $7)",
            job_id,
            self.org_id,
            node.name,
            msgspec.json.encode(outputs).decode(),
            msgspec.json.encode(inputs).decode(),
            node.wait_for_all,
            node.per_update,
        )
        await self.rows.execute(
            "insert into interlock.dataset_versions (dataset_version, dataset_uuid, org_id, job_id)"
            " values ($1, $2, $3, $4)",
            version,
            dataset,
            self.org_id,
            job_id,
        )
        for index, name in enumerate(node.inputs):
            await self.rows.execute(
                "insert into interlock.edges (job_id, input_index, org_id, dataset_uuid, dataset_version, floating)"
                " values ($1, $2, $3, $4, $5, false)",
                job_id,
                index,
                self.org_id,
                *self.versions[name],
            )

    async def _producer(self, node: Node) -> ClaimReply:
        task_id = uuid4()
        await self.rows.execute(
            "insert into interlock.tasks (task_id, org_id, job_id, max_attempts, priority, payload)"
            " values ($1, $2, $3, 3, 0, '{}')",
            task_id,
            self.org_id,
            self.jobs[node.name],
        )
        return await self._claim(task_id)

    async def _claim(self, task_id: UUID) -> ClaimReply:
        request = ClaimRequest(worker_id="test", task_id=task_id, tokens=False)
        return (await self.kernel.tasks.claims.claim(request, _WORKER)).claims[0]

    # Actions of sources

    async def report(self, name: str, start: int, end: int, *, again: int | None = None) -> None:
        """Writes new values and emits their event; with `again`, repeats an event without new values."""
        if again is None:
            for cell in range(start, end + 1):
                self.data[name][cell] = (name, next(self.numbers))
        sequence = next(self.numbers) if again is None else again
        await self._emit(name, start=start, end=end, sequence=sequence)

    async def advance(self, name: str, cursor: int) -> None:
        for cell in range(self.cursors.get(name, -1) + 1, cursor + 1):
            self.data[name][cell] = (name, next(self.numbers))
        self.cursors[name] = max(cursor, self.cursors.get(name, -1))
        await self._emit(name, cursor=cursor)

    async def _emit(self, name: str, **scope: Any) -> None:
        dataset, version = self.versions[name]
        event = Event(dataset_uuid=dataset, dataset_version=version, **scope)
        batch = EventBatch(**fence(self.producers[name]), events=[event])
        assert await self.kernel.tasks.effects.emit(batch) is not None

    # Processing

    async def lose_events(self) -> None:
        await self.rows.execute("delete from interlock.outbox where kind = 'route' and body::jsonb ? 'events'")

    async def run(self, service: str) -> int:
        return await self.services[service].run_once()

    async def start(self, at: int) -> None:
        """Claims one of the waiting tasks, and reads its inputs."""
        rows = await self.rows.fetch(
            "select task_id from interlock.tasks where status = 'Queued' order by job_id, task_id"
        )
        if rows:
            await self._start(rows[at % len(rows)]["task_id"])

    async def _start(self, task_id: UUID) -> None:
        claim = await self._claim(task_id)
        assert claim.task is not None
        node = self.nodes[claim.task.job.name or ""]
        scope = msgspec.json.decode(claim.task.payload, type=Scope)
        read = {cell: self.value(node, cell) for cell in range(scope.start, scope.end + 1)}
        self.held.append(Held(claim, node, scope, read))

    def value(self, node: Node, cell: int) -> object:
        return (node.name, *(self.data[name].get(cell) for name in node.inputs))

    async def finish(self, at: int, *, emit: bool = True) -> None:
        """Writes the values that a running task has read. Without an event, only the registry records the change."""
        if not self.held:
            return
        held = self.held.pop(at % len(self.held))
        dataset, version = self.versions[held.node.name]
        scope: dict[str, Any] = {"start": held.scope.start, "end": held.scope.end}
        event = Event(dataset_uuid=dataset, dataset_version=version, **scope)
        assert held.claim.task is not None
        file = marked(held.claim.task.outputs[0].write_prefix)
        output = Output(dataset_uuid=dataset, dataset_version=version, **file, **scope)
        await self.kernel.tasks.attempts.complete_one(
            Completion(**fence(held.claim), status="Completed", outputs=[output], events=[event] if emit else [])
        )
        writer = await self.rows.fetchval(
            "select task_id from interlock.partitions where dataset_version = $1 and range_start = $2",
            version,
            held.scope.start,
        )
        if writer == held.claim.task_id:
            self.data[held.node.name] |= held.read

    async def settle(self) -> None:
        """Runs all loops and tasks until nothing is left to do."""
        while True:
            done = await self.run("router") + await self.run("scopes")
            waiting = await self.rows.fetch(
                "select task_id from interlock.tasks where status = 'Queued' order by task_id"
            )
            for row in waiting:
                await self._start(row["task_id"])
            while self.held:
                await self.finish(0)
                done += 1
            if not done and not waiting:
                return


def fence(claim: ClaimReply) -> dict[str, Any]:
    return {"task_id": claim.task_id, "attempt": claim.attempt, "lease_token": claim.lease_token}


@asynccontextmanager
async def pipeline(state_url: str, directory: Path) -> AsyncIterator[Pipeline]:
    settings = Settings(dir=directory, state_url=state_url)
    rows = await asyncpg.connect(state_url)
    async with open_app(settings, process="routing") as parts:
        org = await parts.access.principals.create_org("routing")
        services = {service.name: service for service in dispatcher_services(parts)}
        yield Pipeline(parts, rows, org.org_id, services)
    await rows.close()
