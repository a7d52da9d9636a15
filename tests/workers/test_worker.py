"""The worker against a real dispatcher, with operators that signal their start and wait for permission to end."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import msgspec
import pytest

from interlock.errors import ConfigurationError, Unauthenticated
from interlock.wire.base import Outcome, RunState, TaskStatus
from interlock.wire.jobs import DatasetRef, Policy
from interlock.wire.tasks import Crash, TaskView
from interlock.workers import Worker
from tests.support.system import System, until
from tests.support.worker_bench import Bench, benched

OPERATORS = """
import os, socket, time
from interlock.wire.attempts import Event, Output
from interlock.workers import TaskCanceled, operator

@operator
def gate(payload, ctx):
    if not isinstance(payload, dict) or "gate" not in payload:
        return "through"
    ctx.progress(payload.get("progress", 0), "at the gate")
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(payload["gate"])
        door.sendall(f"{ctx.index} {ctx.attempt} {os.getppid()}\\n".encode())
        door.recv(1)
    return {"attempt": ctx.attempt}

@operator
def deaf(payload, ctx):
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(payload["gate"])
        door.sendall(f"{ctx.index} {ctx.attempt} {os.getppid()}\\n".encode())
        while True:
            try:
                time.sleep(60)
            except TaskCanceled:
                continue

@operator
def announce(payload, ctx):
    grant = ctx.outputs[0]
    dataset = {"dataset_uuid": grant.dataset_uuid, "dataset_version": grant.dataset_version}
    first = ctx.emit([Event(**dataset, cursor=1)])
    again = ctx.emit([Event(**dataset, cursor=1), Event(**dataset, cursor=2)])
    ctx.commit([Output(**dataset, location=grant.write_prefix + "part", row_count=3)], [Event(**dataset, cursor=3)])
    return [first, again]

@operator
def large(payload, ctx):
    return "x" * payload
"""


class Line:
    """A TCP proxy between worker and dispatcher, which a test can cut."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._host, self._port = str(parts.hostname), parts.port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.url = ""

    async def mend(self) -> None:
        port = urlsplit(self.url).port or 0 if self.url else 0
        self._server = await asyncio.start_server(self._joined, "127.0.0.1", port)
        self.url = "http://{}:{}".format(*self._server.sockets[0].getsockname())

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        for writer in self._writers:
            writer.transport.abort()

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, there_writer}
        await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))
        self._writers -= {writer, there_writer}


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
    except OSError:
        writer.transport.abort()
    finally:
        writer.close()


@pytest.fixture
async def bench(system: System, tmp_path: Path) -> AsyncIterator[Bench]:
    async with benched(system, tmp_path, OPERATORS) as found:
        yield found


def result(task: TaskView) -> Any:
    return msgspec.json.decode(task.result)


QUICK = Policy(lease_seconds=0.6, backoff_seconds=0, jitter=0)
"""A policy with a lease so short that the next heartbeat is always near."""


async def test_every_task_of_a_run_ends_with_the_result_of_its_operator(bench: Bench) -> None:
    await bench.worker(concurrency=2)
    run_id = await bench.run("echo", [{"n": n} for n in range(1000)])
    tasks = await bench.ended(run_id)
    assert [result(task) for task in tasks] == [{"n": n} for n in range(1000)]
    assert {(task.status, task.attempt) for task in tasks} == {(TaskStatus.COMPLETED, 1)}


async def test_failed_attempt_is_followed_by_one_that_may_succeed(bench: Bench) -> None:
    await bench.worker()
    run_id = await bench.run("fail", [{"error_class": "Flaky", "message": "not yet", "times": 1}])
    (task,) = await bench.ended(run_id)
    assert (task.status, task.attempt, result(task)) == (TaskStatus.COMPLETED, 2, {"attempt": 2})
    attempts = (await bench.client.attempts(task.task_id)).attempts
    assert (attempts[0].error_class, attempts[0].error_message) == ("Flaky", "not yet")


async def test_operator_missing_on_this_worker_fails_with_a_message(bench: Bench) -> None:
    await bench.system.declare("own_operators:nobody")
    await bench.worker()
    run_id = await bench.run("nobody", [1], policy=Policy(max_attempts=1))
    (task,) = await bench.ended(run_id)
    assert task.error_class == "OperatorNotFound"
    assert "own_operators:nobody" in (task.error_message or "")


@pytest.mark.parametrize(
    ("payload", "crash"),
    [({"exit_code": 3}, Crash(exit_code=3)), ({"signal": "SIGKILL"}, Crash(signal="SIGKILL"))],
)
async def test_crash_costs_the_task_that_ran_and_no_other(bench: Bench, payload: dict[str, Any], crash: Crash) -> None:
    await bench.worker()
    harmless = {"times": 0}
    run_id = await bench.run("fail", [*[harmless] * 20, payload, *[harmless] * 20], policy=Policy(max_attempts=1))
    tasks = await bench.ended(run_id)
    crashed = tasks.pop(20)
    assert {(task.status, task.attempt) for task in tasks} == {(TaskStatus.COMPLETED, 1)}
    assert (crashed.status, crashed.error_class) == (TaskStatus.FAILED, "WorkerCrashed")
    assert (await bench.client.attempts(crashed.task_id)).attempts[0].crash == crash


async def test_canceled_task_is_stopped_where_it_runs(bench: Bench) -> None:
    await bench.worker()
    task, visitor = await bench.at_the_gate(policy=QUICK)
    await bench.client.cancel_task(task.task_id)
    await visitor.gone()
    (task,) = await bench.ended(task.run_id or uuid4())
    assert task.status is TaskStatus.CANCELED
    assert await bench.outcomes(task.task_id) == [Outcome.CANCELED]
    assert [result(task) for task in await bench.ended(await bench.run("echo", ["next"]))] == ["next"]


async def test_operator_that_ignores_a_cancel_is_killed_after_the_grace(bench: Bench) -> None:
    await bench.worker(cancel_grace=0.1)
    run_id = await bench.run("deaf", [{"gate": bench.gate.path}], policy=QUICK)
    visitor = await bench.gate.arrival()
    await bench.client.cancel_run(run_id)
    await visitor.gone()
    (task,) = await bench.ended(run_id)
    assert task.status is TaskStatus.CANCELED


async def test_attempt_that_was_fenced_off_is_stopped_and_reports_nothing(bench: Bench, state_url: str) -> None:
    await bench.worker()
    task, visitor = await bench.at_the_gate(policy=QUICK)
    connection = await asyncpg.connect(state_url)
    await connection.execute(
        "update interlock.tasks set lease_token = gen_random_uuid(), lease_expires_at = now() + interval '1 hour' "
        "where task_id = $1",
        task.task_id,
    )
    await visitor.gone()
    assert [result(task) for task in await bench.ended(await bench.run("echo", ["next"]))] == ["next"]
    row = await connection.fetchrow("select attempt, result from interlock.tasks where task_id = $1", task.task_id)
    assert row is not None
    assert (row["attempt"], row["result"]) == (1, None)
    await connection.close()


async def test_task_past_its_hard_timeout_is_killed_and_reaped(bench: Bench) -> None:
    await bench.worker()
    task, visitor = await bench.at_the_gate(policy=Policy(max_attempts=1, lease_seconds=30, timeout_seconds=0.5))
    await visitor.gone()
    (task,) = await bench.ended(task.run_id or uuid4())
    assert (task.status, task.dead) == (TaskStatus.FAILED, True)
    assert await bench.outcomes(task.task_id) == [Outcome.TIMED_OUT]


async def test_heartbeats_keep_a_lease_far_shorter_than_the_task(bench: Bench) -> None:
    await bench.worker()
    task, visitor = await bench.at_the_gate(policy=QUICK)
    first = task.lease_expires_at
    assert first is not None
    while (task.lease_expires_at or first) < first + (first - (task.started_at or first)) * 2:
        task = await bench.client.task(task.task_id)
    visitor.let_go()
    (task,) = await bench.ended(task.run_id or uuid4())
    assert (task.status, task.attempt) == (TaskStatus.COMPLETED, 1)


async def test_progress_is_seen_while_the_task_runs(bench: Bench) -> None:
    await bench.worker()
    run_id = await bench.run("gate", [{"gate": bench.gate.path, "progress": 0.25}])
    visitor = await bench.gate.arrival()
    (task,) = await bench.tasks(run_id)
    while task.progress is None:
        task = await bench.client.task(task.task_id)
    assert (task.progress, task.progress_text) == (0.25, "at the gate")
    visitor.let_go()
    await bench.ended(run_id)


async def test_events_and_outputs_travel_through_the_wrapper(bench: Bench, state_url: str) -> None:
    await bench.worker()
    output = DatasetRef(dataset_uuid=uuid4(), dataset_version=uuid4())
    run_id = await bench.run("announce", [None], outputs=[output])
    (task,) = await bench.ended(run_id)
    assert (task.status, task.error_message, result(task)) == (TaskStatus.COMPLETED, None, [1, 1])


async def test_drain_finishes_running_tasks_and_releases_waiting_ones(bench: Bench) -> None:
    worker = Worker(bench.settings(), concurrency=1)
    running = asyncio.create_task(worker.run())
    task, visitor = await bench.at_the_gate()
    waiting = await bench.run("gate", [{"gate": bench.gate.path}] * 3)
    worker.request_drain()
    visitor.let_go()
    await running
    (task,) = await bench.ended(task.run_id or uuid4())
    assert (task.status, task.attempt) == (TaskStatus.COMPLETED, 1)
    assert {(task.status, task.attempt) for task in await bench.tasks(waiting)} == {(TaskStatus.QUEUED, 1)}


async def test_expired_drain_releases_the_running_attempt(bench: Bench) -> None:
    worker = Worker(bench.settings(drain_seconds=0.1), concurrency=1)
    running = asyncio.create_task(worker.run())
    task, visitor = await bench.at_the_gate()
    worker.request_drain()
    await running
    await visitor.gone()
    task = await bench.client.task(task.task_id)
    assert (task.status, task.attempt) == (TaskStatus.QUEUED, 1)
    assert await bench.outcomes(task.task_id) == [Outcome.RELEASED]
    await bench.worker()
    again = await bench.gate.arrival()
    assert again.attempt == 1
    again.let_go()
    await bench.ended(task.run_id or uuid4())


async def test_result_survives_an_outage_of_the_dispatcher(bench: Bench) -> None:
    line = Line(bench.system.internal_url)
    await line.mend()
    await bench.worker(internal_url=line.url)
    task, visitor = await bench.at_the_gate()
    await line.cut()
    visitor.let_go()
    await visitor.gone()
    await line.mend()
    (task,) = await bench.ended(task.run_id or uuid4())
    assert (task.status, task.attempt) == (TaskStatus.COMPLETED, 1)
    assert [result(task) for task in await bench.ended(await bench.run("echo", ["next"]))] == ["next"]
    await line.cut()


async def test_slow_tasks_are_spread_over_the_workers(bench: Bench) -> None:
    workers = [await bench.process() for _ in range(2)]
    run_id = await bench.run("gate", [{"gate": bench.gate.path}] * 6)
    visitors = [await bench.gate.arrival() for _ in range(2)]
    assert {visitor.worker for visitor in visitors} == {worker.pid for worker in workers}
    for _ in range(4):
        visitors[0].let_go()
        visitors = [*visitors[1:], await bench.gate.arrival()]
    for visitor in visitors:
        visitor.let_go()
    assert {task.attempt for task in await bench.ended(run_id)} == {1}
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
    assert [await worker.wait() for worker in workers] == [0, 0]


async def test_tasks_do_not_wait_behind_a_slow_one_while_a_child_is_free(bench: Bench) -> None:
    await bench.worker(concurrency=2)
    quick = [{"pass": True}] * 200
    await bench.ended(await bench.run("gate", quick))
    run_id = await bench.run("gate", [{"gate": bench.gate.path}, *quick])
    visitor = await bench.gate.arrival()
    while (await bench.client.run(run_id)).counts.Completed < len(quick):
        continue
    visitor.let_go()
    assert {task.attempt for task in await bench.ended(run_id)} == {1}


async def test_worker_with_all_children_stuck_releases_waiting_tasks(bench: Bench) -> None:
    quick = [{"pass": True}] * 200
    first = await bench.worker(concurrency=1)
    await bench.ended(await bench.run("gate", quick))
    run_id = await bench.run("gate", [{"gate": bench.gate.path}, *quick])
    visitor = await bench.gate.arrival()
    second = await bench.worker(concurrency=1)
    assert first.worker_id != second.worker_id
    while (await bench.client.run(run_id)).counts.Completed < len(quick):
        continue
    visitor.let_go()
    tasks = await bench.ended(run_id)
    assert {task.attempt for task in tasks} == {1}
    assert {task.worker_id for task in tasks[1:]} >= {second.worker_id}


async def test_result_that_the_dispatcher_refuses_fails_its_task_and_no_other(bench: Bench) -> None:
    await bench.worker(result_limit_bytes=3_000_000)
    run_id = await bench.run("large", [10, 2_000_000, 20], policy=Policy(max_attempts=1))
    small, refused, other = await bench.ended(run_id)
    assert (len(result(small)), len(result(other))) == (10, 20)
    assert (refused.status, refused.error_class) == (TaskStatus.FAILED, "ReportRefused")


async def test_wrong_token_ends_the_worker(bench: Bench) -> None:
    worker = Worker(bench.settings(worker_token="ilw_0000000000000000_" + "x" * 43), concurrency=1)
    with pytest.raises(Unauthenticated):
        await worker.run()


async def test_children_that_never_start_end_the_worker_with_a_message(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path(bench.folder) / "broken_at_import.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(bench.folder)
    worker = Worker(bench.settings(), concurrency=1, modules=["broken_at_import"])
    with pytest.raises(ConfigurationError, match="before they were ready"):
        await worker.run()


@pytest.mark.parametrize(("runtime", "why"), [("nowhere", "choose one of"), ("dispatcher", "no queue")])
async def test_runtime_without_a_queue_is_refused(bench: Bench, runtime: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        Worker(bench.settings(), runtime)


async def test_killed_worker_uses_up_an_attempt_of_its_running_tasks(bench: Bench) -> None:
    process = await bench.process()
    task, visitor = await bench.at_the_gate(policy=QUICK)
    process.kill()
    await visitor.gone()
    await process.wait()
    await bench.worker()
    again = await bench.gate.arrival()
    assert again.attempt == 2
    again.let_go()
    (task,) = await bench.ended(task.run_id or uuid4())
    assert (task.status, task.attempt) == (TaskStatus.COMPLETED, 2)
    run = await bench.client.run(task.run_id or uuid4())
    assert run.state is RunState.COMPLETED


async def test_message_is_not_given_to_a_worker_that_died_waiting_for_it(system: System) -> None:
    body = json.dumps({"queue": "platform", "worker_id": "doomed", "wait_seconds": 20}).encode()
    host, port = system.internal_url.removeprefix("http://").split(":")
    _, line = await asyncio.open_connection(host, int(port))
    head = f"POST /internal/queue/receive HTTP/1.1\r\nHost: x\r\nX-Trace-Worker-Token: {system.worker_token}\r\n"
    line.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await line.drain()
    await until(lambda: seen(system, "doomed"))
    line.transport.abort()
    await system.submit([1])
    reply = await system.worker(
        "POST", "/internal/queue/receive", json={"queue": "platform", "worker_id": "alive", "wait_seconds": 5}
    )
    assert len(reply.json()["messages"]) == 1


async def seen(system: System, worker_id: str) -> bool:
    workers = (await system.user("GET", "/v1/workers")).json()["workers"]
    return worker_id in {worker["worker_id"] for worker in workers}
