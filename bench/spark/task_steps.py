"""Runs small tasks one after the other with a worker inside the benchmark, and times each step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch
from uuid import UUID

import msgspec
from pyspark.sql import SparkSession

from bench.spark.source import release_of
from interlock.client import WorkerClient
from interlock.spark import objects, writer
from interlock.spark.attempt import call, finish
from interlock.spark.context import TaskContext
from interlock.spark.operators import resolve
from interlock.wire.attempts import ClaimReply, ClaimRequest, Completion, CompletionBatch, DataRequest, Event, TaskData
from interlock.workers.protocol import Assignment, Work

STEPS: Final = ("claim", "task-data", "plan", "check", "Spark job with the file", "marker", "completion")


class Silent:
    """The channel through which an operator reports to its worker; this one discards everything."""

    def progress(self, slot: int, fraction: float, text: str | None) -> None: ...

    def emit(self, slot: int, events: list[Event]) -> int:
        raise RuntimeError(f"slot {slot} emitted {len(events)} events, but none were expected")

    def canceled(self, slot: int) -> bool:  # noqa: ARG002
        return False

    def paused(self, slot: int) -> bool:  # noqa: ARG002
        return False


class Stopwatch:
    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name].append(time.perf_counter() - began)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            with self.step(name):
                return function(*arguments)

        return timed


async def steps(worker: WorkerClient, spark: SparkSession, task_ids: Sequence[UUID]) -> dict[str, list[float]]:
    """Returns seconds of each step, for each task."""
    watch = Stopwatch()
    with (
        patch.object(writer, "_run", watch.around("Spark job with the file", writer._run)),
        patch.object(objects, "write", watch.around("marker", objects.write)),
    ):
        for task_id in task_ids:
            await _one(worker, spark, task_id, watch)
    inside = zip(watch.seconds["Spark job with the file"], watch.seconds["marker"], strict=True)
    watch.seconds["check"] = [
        whole - job - marker for whole, (job, marker) in zip(watch.seconds.pop("finish"), inside, strict=True)
    ]
    return dict(watch.seconds)


async def _one(worker: WorkerClient, spark: SparkSession, task_id: UUID, watch: Stopwatch) -> None:
    with watch.step("claim"):
        request = ClaimRequest(worker_id="bench", task_ids=[task_id], tokens=False)
        (claim,) = (await worker.claim(request)).claims
    fence = release_of(claim)
    with watch.step("task-data"):
        (data,) = (await worker.task_data(DataRequest(items=[fence]))).items
    context = _context(claim, spark, data)
    operator = resolve(context.operator)
    with watch.step("plan"):
        returned = call(operator, spark, context, data)
    with watch.step("finish"):
        result, outputs, events = finish(operator, returned, context, data)
    with watch.step("completion"):
        done = Completion(
            task_id=fence.task_id,
            attempt=fence.attempt,
            lease_token=fence.lease_token,
            status="Completed",
            outputs=outputs,
            events=events,
            result=msgspec.Raw(msgspec.json.encode(result)),
        )
        reply = await worker.complete(CompletionBatch(items=[done]))
    assert not reply.refused, reply.refused[0]


def _context(claim: ClaimReply, spark: SparkSession, data: TaskData) -> TaskContext:
    task = claim.task
    assert task is not None
    job = (task.job.dag_name, task.job.name)
    work = Work(task.operator, job, task.run_id, task.attempt, bytes(task.config), [], task.outputs)
    assignment = Assignment(0, task.task_id, task.index, bytes(task.payload))
    return TaskContext(work, assignment, Silent(), spark, data)
