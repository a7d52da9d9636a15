"""The background loops, pass by pass: they do pending work, recover lost work, and can run concurrently."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from interlock import failpoints
from interlock.apps.app import App, open_app
from interlock.apps.dispatcher import services as dispatcher_services
from interlock.clock import ManualClock
from interlock.dags.partitioning import RANGES
from interlock.errors import Unavailable
from interlock.jobs.definitions import INLINE_OPERATORS
from interlock.tasks import actions, reaper, retention
from interlock.tasks.inline_runtime import OPERATORS, Call, InlineLimits, InlineOperator, InlineRunner, Reaction
from interlock.tasks.outbox_relay import Relay, TaskRef
from interlock.telemetry import SET_ASIDE
from interlock.wire.access import KeyRequest, Role
from tests.support.system import System, fence, running, until


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    for name in ("relay.sent", "heartbeat.before_commit"):
        failpoints.disarm(name)


def breaking(name: str, error: Exception | None = None) -> None:
    """Makes the next pass of a failpoint raise an error; later passes do not."""

    async def act() -> None:
        failpoints.disarm(name)
        raise error or failpoints.FailpointError(name)

    failpoints.arm(name, act)


@pytest.fixture
async def relayed(state_url: str, tmp_path: Path, clock: ManualClock) -> AsyncIterator[System]:
    """A system that sends every message through the outbox, as with a queue outside Postgres."""
    async with running(state_url, tmp_path, clock, queue_direct=False) as started:
        yield started


@asynccontextmanager
async def second(system: System) -> AsyncIterator[App]:
    """Another dispatcher on the same stores."""
    async with open_app(system.kernel.settings, process="second", clock=system.kernel.stores.clock) as other:
        yield other


async def both(system: System, other: App, name: str) -> list[int]:
    """Runs a pass of a loop in two dispatchers concurrently."""
    mine, theirs = (
        next(service for service in dispatcher_services(parts) if service.name == name)
        for parts in (system.kernel, other)
    )
    return list(await asyncio.gather(mine.run_once(), theirs.run_once()))


# Relay


async def test_without_direct_sends_tasks_are_sent_by_the_outbox(relayed: System, clock: ManualClock) -> None:
    accepted = await relayed.submit([0, 1], policy={"backoff_seconds": 0, "jitter": 0})
    assert await relayed.receive() == []
    assert await relayed.pass_of("relay") == 1
    assert await relayed.value("select count(*) from interlock.outbox") == 0
    (message,) = await relayed.receive()
    receipt = {"queue": "platform", "message_id": message["message_id"], "receipt": message["receipt"]}
    (first,) = (await relayed.claim_many(**message["body"], limit=1, message=receipt))["claims"]
    (rest,) = await relayed.receive()
    assert (rest["body"]["start"], rest["body"]["end"]) == (1, 1)
    await relayed.complete(first, "Failed")
    assert await relayed.pass_of("retries") == 1
    assert await relayed.receive() == []
    assert await relayed.pass_of("relay") == 1
    (again,) = await relayed.receive()
    assert again["body"]["task_id"] == first["task_id"]
    for task_id in await relayed.task_ids(accepted["run_id"]):
        await relayed.complete(await relayed.claim(task_id))
    await relayed.settle()
    assert (await relayed.run(accepted["run_id"]))["state"] == "Completed"


async def test_relay_that_dies_after_sending_sends_again_and_one_message_remains(
    relayed: System, clock: ManualClock
) -> None:
    await relayed.one()
    breaking("relay.sent")
    with pytest.raises(failpoints.FailpointError):
        await relayed.pass_of("relay")
    assert await relayed.pass_of("relay") == 0
    clock.advance(5)
    assert await relayed.pass_of("relay") == 1
    assert len(await relayed.receive(max=10)) == 1


async def test_two_relays_at_once_send_every_message_once(relayed: System) -> None:
    runs = {(await relayed.submit([0]))["run_id"] for _ in range(30)}
    async with second(relayed) as other:
        assert sum(await both(relayed, other, "relay")) == 30
    received = [message["body"]["run_id"] for message in await relayed.receive(max=100)]
    assert Counter(received) == dict.fromkeys(runs, 1)


async def test_invalid_outbox_rows_block_no_others(still: System, clock: ManualClock) -> None:
    """The rows: a message whose key fits the outbox index but not the queue index, and an invocation without a task."""
    before = SET_ASIDE.labels(loop="relay")._value.get()
    owe = "insert into interlock.outbox (kind, target, body, dedupe_key) values ($1, $2, $3, $4) returning 1"
    await still.value(owe, "send", "platform", '{"n": 1}', "".join(uuid4().hex for _ in range(85))[:2690])
    await still.value(owe, "invoke", "dispatcher", '"no task"', None)
    await still.value(owe, "send", "platform", '{"n": 2}', "good")
    good = await still.submit([{"n": 3}], operator="echo", runtime="dispatcher")
    assert await still.pass_of("relay") == 2
    assert [message["body"] for message in await still.receive()] == [{"n": 2}]
    await still.kernel.tasks.inline.drain(20)
    assert (await still.task((await still.task_ids(good["run_id"]))[0]))["status"] == "Completed"
    assert SET_ASIDE.labels(loop="relay")._value.get() == before + 2
    assert await still.value("select count(*) from interlock.outbox") == 2


# The dispatcher runtime


async def inline(system: System, operator: str, payload: Any = None, **job: Any) -> dict[str, Any]:
    """Relays a task of the dispatcher runtime, waits for it and returns it."""
    accepted = await system.submit([payload], operator=operator, runtime="dispatcher", **job)
    assert await system.pass_of("relay") == 1
    await system.kernel.tasks.inline.drain(20)
    return await system.task((await system.task_ids(accepted["run_id"]))[0])


async def test_inline_echo_answers_with_its_payload(still: System) -> None:
    task = await inline(still, "echo", {"n": 1})
    assert (task["status"], task["result"]) == ("Completed", {"n": 1})
    assert task["worker_id"].startswith("dispatcher:")


@pytest.mark.parametrize(
    ("operator", "payload", "error_class"),
    [
        ("fail", {"error_class": "Boom", "message": "as told"}, "Boom"),
        ("fail", None, "Failed"),
        ("fail", {"message": "no class"}, "Failed"),
    ],
)
async def test_inline_operator_that_fails_is_a_failed_attempt(
    still: System, operator: str, payload: Any, error_class: str
) -> None:
    task = await inline(still, operator, payload, policy={"max_attempts": 1})
    assert (task["status"], task["dead"], task["error_class"]) == ("Failed", True, error_class)
    assert task["error_message"]


async def test_unparsable_inline_payload_is_refused(still: System) -> None:
    body = b'{"operator": "echo", "runtime": "dispatcher", "policy": {"max_attempts": 1}, "tasks": [1e999]}'
    reply = await still.user("POST", "/v1/jobs", content=body)
    assert (reply.status_code, reply.json()["code"]) == (400, "bad_payload")


async def test_inline_result_beyond_the_limit_is_a_failed_attempt(
    state_url: str, tmp_path: Path, clock: ManualClock
) -> None:
    async with running(state_url, tmp_path, clock, result_limit_bytes=65_536) as system:
        task = await inline(system, "echo", "x" * 70_000, policy={"max_attempts": 1})
    assert (task["status"], task["error_class"]) == ("Failed", "ResultTooLarge")


async def test_inline_task_is_retried_like_any_other(still: System) -> None:
    task = await inline(still, "fail", policy={"max_attempts": 2, "backoff_seconds": 0, "jitter": 0})
    assert (task["status"], task["dead"]) == ("Failed", False)
    await still.settle()
    await still.kernel.tasks.inline.drain(20)
    task = await still.task(task["task_id"])
    assert (task["attempt"], task["dead"]) == (2, True)


@dataclass
class Held:
    """A runner in this process whose `echo` runs until `go` is set."""

    runner: InlineRunner
    go: asyncio.Event

    async def begin(self, system: System, key: str | None = None, **policy: Any) -> str | None:
        """Starts a task and returns its id; returns None if no slot was free."""
        body = {"operator": "echo", "runtime": "dispatcher", "policy": {"max_attempts": 1} | policy, "tasks": [1]}
        accepted = (await system.user("POST", "/v1/jobs", json=body, key=key)).json()
        tasks = (await system.user("GET", f"/v1/tasks?run={accepted['run_id']}", key=key)).json()["tasks"]
        task_id: str = tasks[0]["task_id"]
        org_id = await system.value("select org_id from interlock.tasks where task_id = $1", UUID(task_id))
        taken = await self.runner.invoke("dispatcher", TaskRef(UUID(task_id), org_id=org_id))
        return task_id if taken else None


def held(system: System, limits: InlineLimits | None = None) -> Held:
    go = asyncio.Event()

    async def wait(call: Call) -> Reaction:
        await go.wait()
        return Reaction(call.payload)

    parts, operators = system.kernel, {"echo": InlineOperator(wait)}
    stores = (
        parts.stores.database,
        parts.tasks.claims,
        parts.tasks.attempts,
        parts.tasks.effects,
        parts.stores.wakeups,
    )
    runner = InlineRunner(*stores, operators, limits=limits)
    return Held(runner, go)


async def test_inline_task_that_is_canceled_stops(system: System) -> None:
    running = held(system)
    task_id = await running.begin(system, lease_seconds=0.3)
    assert task_id
    await system.user("POST", f"/v1/tasks/{task_id}/cancel")
    await running.runner.drain(20)
    assert (await system.task(task_id))["status"] == "Canceled"


async def test_inline_task_outlives_a_heartbeat_that_the_database_missed(system: System) -> None:
    breaking("heartbeat.before_commit", Unavailable("gone for a moment"))
    running = held(system)
    task_id = await running.begin(system, lease_seconds=1.2)
    assert task_id
    asyncio.get_running_loop().call_later(0.8, running.go.set)
    await running.runner.drain(20)
    assert (await system.task(task_id))["status"] == "Completed"


@pytest.mark.parametrize("operator", ["sleep", "python", "http_fetch", "none_such", "module:function"])
async def test_long_running_operator_is_refused_in_the_dispatcher_runtime(still: System, operator: str) -> None:
    body = {"operator": operator, "runtime": "dispatcher", "tasks": [{"seconds": 60}]}
    reply = await still.user("POST", "/v1/jobs", json=body)
    assert (reply.status_code, reply.json()["code"]) == (400, "operator_not_inline"), reply.text
    job = f"name: a, operator: '{operator}', runtime: dispatcher, activation: source, source: {{kind: manual}}"
    dag = f"name: slow\njobs: [{{{job}}}]"
    reply = await still.user("POST", "/v1/dags", json={"yaml": dag})
    assert reply.status_code == 400
    assert ("does not run inside the dispatcher" in reply.text) == (operator != "none_such")


async def test_task_of_an_operator_that_is_not_inline_never_runs_there(still: System) -> None:
    """An earlier release may have accepted such a task."""
    accepted = await still.submit([{"seconds": 60}], runtime="dispatcher", policy={"max_attempts": 1})
    await still.value("update interlock.jobs set operator = 'sleep' where job_id = $1", UUID(accepted["job_id"]))
    await still.settle()
    await still.kernel.tasks.inline.drain(20)
    task = await still.task((await still.task_ids(accepted["run_id"]))[0])
    assert (task["status"], task["error_class"]) == ("Failed", "OperatorNotFound")


async def test_one_org_cannot_use_all_inline_slots(system: System) -> None:
    other = await system.kernel.access.principals.create_org("other")
    request = KeyRequest(user="root", role=Role.ADMIN)
    key = (await system.kernel.access.principals.create_key(request, other.org_id, granted_by=None)).key
    running = held(system, InlineLimits(limit=8, of_an_operator=6, of_an_org=4))
    taken = [await running.begin(system) is not None for _ in range(10)]
    assert taken == [True] * 4 + [False] * 6
    taken = [await running.begin(system, key) is not None for _ in range(4)]
    assert taken == [True] * 2 + [False] * 2  # the limit of the operator
    running.go.set()
    await running.runner.drain(20)
    assert await running.begin(system) is not None
    await running.runner.drain(20)


async def test_freed_inline_slot_is_used_immediately(system: System) -> None:
    """Tasks without a slot would wait for a day here, unless a freed slot wakes them."""
    other = await system.kernel.access.principals.create_org("other")
    request = KeyRequest(user="root", role=Role.ADMIN)
    key = (await system.kernel.access.principals.create_key(request, other.org_id, granted_by=None)).key
    running, parts = held(system, InlineLimits(limit=3, of_an_operator=3, of_an_org=2)), system.kernel
    relay = Relay(parts.stores.database, parts.settings, parts.tasks.queue, running.runner.invoke, parts.stores.wakeups)
    body = {"operator": "echo", "runtime": "dispatcher", "tasks": [1, 2, 3, 4, 5]}
    for each in (None, key):
        assert (await system.user("POST", "/v1/jobs", json=body, key=each)).status_code in (201, 202)
    assert await relay.run_once() == 3
    await system.value("update interlock.outbox set due_at = due_at + interval '1 day' returning 1")
    running.go.set()

    async def all_completed() -> bool:
        await relay.run_once()
        done = "select count(*) = 10 from interlock.tasks where status = 'Completed'"
        return bool(await system.value(done))

    await until(all_completed)
    await running.runner.drain(20)


async def test_listed_inline_operators_match_the_wired_ones(shared: System) -> None:
    assert set(OPERATORS) | RANGES == INLINE_OPERATORS


async def test_drained_inline_task_is_released(system: System) -> None:
    running = held(system)
    task_id = await running.begin(system)
    assert task_id
    await running.runner.drain(0)
    task = await system.task(task_id)
    assert (task["status"], task["attempt"]) == ("Queued", 1)
    attempts = (await system.user("GET", f"/v1/tasks/{task_id}/attempts")).json()["attempts"]
    assert [(a["attempt"], a["outcome"]) for a in attempts] == [(1, "Released")]


# Reconciler


async def test_queued_task_whose_message_was_lost_gets_another(still: System, clock: ManualClock) -> None:
    accepted = await still.submit([0, 1])
    ids = await still.task_ids(accepted["run_id"])
    await still.claim(ids[0])
    await still.value("delete from interlock.queue_messages")
    assert await still.pass_of("reconciler") == 0
    clock.advance(61)
    assert await still.pass_of("reconciler") == 1
    (message,) = await still.receive()
    assert message["body"]["task_id"] == ids[1]
    assert await still.pass_of("reconciler") == 0


async def test_retry_whose_message_was_lost_gets_another(still: System, clock: ManualClock) -> None:
    task_id = await still.one(policy={"backoff_seconds": 0, "jitter": 0})
    await still.complete(await still.claim(task_id), "Failed")
    await still.settle()
    await still.value("delete from interlock.queue_messages")
    clock.advance(61)
    assert await still.pass_of("reconciler") == 1
    assert (await still.receive())[0]["body"]["task_id"] == task_id


async def test_rest_of_a_partly_released_range_is_not_treated_as_lost(still: System, clock: ManualClock) -> None:
    accepted = await still.submit([0, 1, 2])
    (message,) = await still.receive()
    receipt = {"queue": "platform", "message_id": message["message_id"], "receipt": message["receipt"]}
    (first,) = (await still.claim_many(**message["body"], limit=1, message=receipt))["claims"]
    await still.worker("POST", "/internal/task-release", json={"items": [fence(first)]})
    clock.advance(61)
    assert await still.pass_of("reconciler") == 0
    await still.value("delete from interlock.queue_messages where dedupe_key = $1", first["task_id"])
    assert await still.pass_of("reconciler") == 1
    assert (await still.task(first["task_id"]))["status"] == "Queued"
    assert accepted["total"] == 3


async def test_inline_task_whose_invocation_was_lost_gets_another(still: System, clock: ManualClock) -> None:
    accepted = await still.submit([1], runtime="dispatcher")
    await still.value("delete from interlock.outbox")
    clock.advance(61)
    assert await still.pass_of("reconciler") == 1
    await still.settle()
    await still.kernel.tasks.inline.drain(20)
    await still.settle()
    assert (await still.run(accepted["run_id"]))["state"] == "Completed"


async def test_parked_task_whose_wake_up_was_lost_is_woken(still: System) -> None:
    accepted = await still.submit([0, 1], scaling={"max_concurrency": 1})
    ids = await still.task_ids(accepted["run_id"])
    claims = [await still.claim(task_id) for task_id in ids]
    assert [claim["status"] for claim in claims] == ["Claimed", "NotClaimed"]
    await still.complete(claims[0])
    await still.value("delete from interlock.queue_messages")
    await still.value("update interlock.tasks set parked = true where status = 'Queued'")
    assert await still.pass_of("reconciler") == 1
    assert (await still.receive())[0]["body"]["task_id"] == ids[1]


async def test_reconciler_visits_all_tasks_in_steps(
    still: System, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper, "_WALKED", 2)
    monkeypatch.setattr(reaper, "_RUNS", 3)
    tasks = {await still.one() for _ in range(5)}
    tasks |= set(await still.task_ids((await still.submit([1, 2, 3, 4, 5]))["run_id"]))
    await still.value("delete from interlock.queue_messages")
    clock.advance(61)
    assert [await still.pass_of("reconciler") for _ in range(5)] == [2] * 5
    assert {message["body"]["task_id"] for message in await still.receive(max=100)} == tasks


async def test_reconciler_walks_tasks_of_no_run_in_steps(
    still: System, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper, "_LOST_BATCH", 2)
    tasks = {await still.one() for _ in range(5)}
    await still.value("update interlock.tasks set run_id = null, task_index = null")
    await still.value("delete from interlock.queue_messages")
    clock.advance(61)
    assert [await still.pass_of("reconciler") for _ in range(4)] == [2, 2, 1, 0]
    assert {message["body"]["task_id"] for message in await still.receive(max=100)} == tasks


async def test_two_reconcilers_at_once_find_each_lost_task_once(still: System, clock: ManualClock) -> None:
    for _ in range(5):
        await still.one()
    await still.value("delete from interlock.queue_messages")
    clock.advance(61)
    async with second(still) as other:
        assert sorted(await both(still, other, "reconciler")) in ([0, 5], [5, 5])
    assert len(await still.receive(max=100)) == 5


# Retention

TRACES = ("tasks", "attempts", "output_commits", "dataset_events", "buffer_publishes", "runs", "jobs")


async def left(system: System, *tables: str) -> dict[str, int]:
    return {table: await system.value(f"select count(*) from interlock.{table}") for table in tables}


async def ended(system: System, **job: Any) -> dict[str, Any]:
    """Returns an ended run that has left every kind of record."""
    output = {"dataset_uuid": str(uuid4()), "dataset_version": str(uuid4())}
    accepted = await system.submit(
        [0, 1, 2, 3, 4], outputs=[output], policy={"max_attempts": 1, "backoff_seconds": 0}, **job
    )
    claims = (await system.claim_many(run_id=accepted["run_id"], start=0, end=4))["claims"]
    uri = claims[0]["task"]["outputs"][0]["buffer_prefix"] + "batch"
    await system.attempt(
        "/v1/task/buffer-publish",
        claims[0]["capability_token"],
        fence(claims[0]) | output | {"batch_uri": uri, "record_count": 1},
    )
    place = claims[0]["task"]["outputs"][0]["write_prefix"] + "part"
    more: dict[str, Any] = {"events": [output | {"cursor": 1}], "outputs": [output | {"location": place}]}
    await system.complete(claims[0], **more)
    for claim in claims[1:]:
        await system.complete(claim, "Failed")
    await system.settle()
    return accepted


async def sweep(system: System) -> None:
    while await system.pass_of("retention"):
        continue


async def test_expired_run_is_deleted_with_all_its_rows(still: System, clock: ManualClock) -> None:
    accepted = await ended(still)
    clock.advance(14 * 86_400)
    await sweep(still)
    assert (await left(still, "runs"))["runs"] == 1
    clock.advance(1)
    await sweep(still)
    assert await left(still, *TRACES) == dict.fromkeys(TRACES, 0)
    assert (await still.user("GET", f"/v1/runs/{accepted['run_id']}")).status_code == 404


async def test_named_jobs_and_unfinished_runs_are_kept(still: System, clock: ManualClock) -> None:
    await ended(still, name="kept")
    live = await still.submit([0])
    clock.advance(15 * 86_400)
    await sweep(still)
    assert await left(still, "tasks", "runs", "jobs") == {"tasks": 1, "runs": 1, "jobs": 2}
    assert (await still.user("GET", "/v1/jobs/kept")).json()["run"] is None
    assert (await still.claim((await still.task_ids(live["run_id"]))[0]))["status"] == "Claimed"


async def test_run_larger_than_a_batch_is_deleted_in_several_passes(
    still: System, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_BATCH", 2)
    await ended(still)
    clock.advance(15 * 86_400)
    passes = 0
    while await still.pass_of("retention"):
        passes += 1
    assert passes >= 3
    assert await left(still, *TRACES) == dict.fromkeys(TRACES, 0)


async def test_two_retentions_at_once_delete_everything_once(still: System, clock: ManualClock) -> None:
    for _ in range(4):
        await ended(still)
    clock.advance(15 * 86_400)
    async with second(still) as other:
        while sum(await both(still, other, "retention")):
            continue
    assert await left(still, *TRACES) == dict.fromkeys(TRACES, 0)


async def test_old_request_and_worker_records_are_deleted(still: System, clock: ManualClock) -> None:
    body = {"operator": "echo", "tasks": [1]}
    await still.user("POST", "/v1/jobs", json=body, headers={"Idempotency-Key": "k"})
    await still.receive()
    assert await left(still, "idempotency_keys", "workers") == {"idempotency_keys": 1, "workers": 1}
    clock.advance(86_401)
    await sweep(still)
    assert await left(still, "idempotency_keys", "workers") == {"idempotency_keys": 0, "workers": 0}


# Two dispatchers


async def test_two_reapers_at_once_end_each_attempt_once(still: System, clock: ManualClock) -> None:
    accepted = await still.submit(list(range(50)), policy={"lease_seconds": 30, "backoff_seconds": 600})
    await still.claim_many(run_id=accepted["run_id"], start=0, end=49)
    clock.advance(31)
    async with second(still) as other:
        assert sum(await both(still, other, "reaper")) == 50
    await still.settle()
    assert (await still.run(accepted["run_id"]))["counts"] == {
        "Queued": 0, "Running": 0, "Completed": 0, "Failed": 50, "Canceled": 0, "dead": 0
    }  # fmt: skip
    assert (await left(still, "attempts"))["attempts"] == 50


async def test_two_retry_schedulers_at_once_queue_each_task_once(still: System, clock: ManualClock) -> None:
    accepted = await still.submit(list(range(50)), policy={"backoff_seconds": 10, "jitter": 0})
    for claim in (await still.claim_many(run_id=accepted["run_id"], start=0, end=49))["claims"]:
        await still.complete(claim, "Failed")
    clock.advance(10)
    await still.value("delete from interlock.queue_messages")
    async with second(still) as other:
        assert sum(await both(still, other, "retries")) == 50
    tasks = (await still.user("GET", f"/v1/tasks?run={accepted['run_id']}&limit=100")).json()["tasks"]
    assert {(task["status"], task["attempt"]) for task in tasks} == {("Queued", 2)}
    assert (await left(still, "queue_messages"))["queue_messages"] == 50


async def test_reaper_and_completion_at_once_have_one_outcome(still: System, clock: ManualClock) -> None:
    accepted = await still.submit(list(range(30)), policy={"lease_seconds": 30, "backoff_seconds": 600})
    claims = (await still.claim_many(run_id=accepted["run_id"], start=0, end=29))["claims"]
    clock.advance(31)
    replies, _ = await asyncio.gather(
        asyncio.gather(*(still.complete(claim) for claim in claims)), still.pass_of("reaper")
    )
    assert {reply.status_code for reply in replies} == {200}
    await still.settle()
    assert (await still.run(accepted["run_id"]))["state"] == "Completed"
    assert (await left(still, "attempts"))["attempts"] == 0


async def test_two_counters_at_once_count_everything_once(still: System) -> None:
    accepted = await still.submit(list(range(40)))
    claims = (await still.claim_many(run_id=accepted["run_id"], start=0, end=39))["claims"]
    async with second(still) as other:
        for claim in claims:
            await still.complete(claim)
            await both(still, other, "run-counters")
    await still.settle()
    run = await still.run(accepted["run_id"])
    assert (run["state"], run["counts"]["Completed"]) == ("Completed", 40)


async def test_two_cancel_loops_at_once_cancel_each_task_once(still: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "_STRETCH", 7)
    accepted = await still.submit(list(range(40)))
    await still.value("update interlock.runs set cancel_requested = true")
    async with second(still) as other:
        while sum(await both(still, other, "run-cancels")):
            pass
    await still.settle()
    run = await still.run(accepted["run_id"])
    assert (run["state"], run["counts"]["Canceled"]) == ("Canceled", 40)


# Explain


async def explained(system: System, task_id: str) -> tuple[str, str]:
    reply = await system.user("GET", f"/v1/tasks/{task_id}/explain")
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert body["task_id"] == task_id
    assert body["facts"]["max_attempts"] >= 1
    return body["reason"], body["detail"]


async def test_explain_shows_what_a_queued_task_waits_for(still: System, clock: ManualClock) -> None:
    task_id = await still.one()
    reason, detail = await explained(still, task_id)
    assert (reason, "interlock serve worker --runtime platform" in detail) == ("no_worker", True)
    assert await still.receive("platform", max=1, visibility_seconds=30)
    reason, detail = await explained(still, task_id)
    assert (reason, "delivered again at" in detail) == ("message_in_flight", True)
    clock.advance(30)
    assert (await explained(still, task_id))[0] == "waiting_for_worker"
    await still.value("update interlock.queue_messages set dead_at = interlock.clock(), receives = 20")
    reason, detail = await explained(still, task_id)
    assert (reason, "the reconciler sends a new one" in detail) == ("message_dead", True)
    await still.value("delete from interlock.queue_messages")
    reason, detail = await explained(still, task_id)
    assert (reason, "reconciler" in detail) == ("message_missing", True)


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"max_concurrency": 1}, "scaling.max_concurrency = 1"),
        ({"key": "/host", "max_concurrency_per_key": 1}, "scaling.max_concurrency_per_key = 1 for key 'a'"),
    ],
)
async def test_explain_names_the_limit_that_a_task_waits_for(still: System, scaling: dict[str, Any], said: str) -> None:
    accepted = await still.submit([{"host": "a"}, {"host": "a"}], scaling=scaling)
    first, second_id = await still.task_ids(accepted["run_id"])
    await still.claim(first)
    assert (await still.claim(second_id))["reason"] == "LimitReached"
    reason, detail = await explained(still, second_id)
    assert (reason, said in detail, "1 in flight" in detail) == ("limit_reached", True, True)


async def test_explain_shows_holder_and_lease_of_a_running_task(still: System, clock: ManualClock) -> None:
    task_id = await still.one(policy={"lease_seconds": 30, "timeout_seconds": 300})
    await still.claim(task_id, "worker-7")
    reason, detail = await explained(still, task_id)
    assert (reason, "worker-7" in detail, "hard timeout" in detail) == ("running", True, True)
    clock.advance(31)
    assert (await explained(still, task_id))[0] == "lease_expired"
    await still.user("POST", f"/v1/tasks/{task_id}/cancel")
    assert (await explained(still, task_id))[0] == "cancel_requested"


async def test_explain_shows_the_failure_and_the_next_retry(still: System, clock: ManualClock) -> None:
    policy = {"max_attempts": 2, "backoff_seconds": 60, "jitter": 0, "non_retryable": ["Fatal"]}
    task_id, fatal = await still.one(policy=policy), await still.one(policy=policy)
    await still.complete(await still.claim(task_id), "Failed", error_class="Boom", error_message="first")
    reason, detail = await explained(still, task_id)
    assert (reason, "Attempt 1 of 2" in detail, "Boom: first" in detail) == ("waiting_for_retry", True, True)
    clock.advance(60)
    await still.settle()
    await still.receive(max=2)
    reason, detail = await explained(still, task_id)
    assert (reason, "for attempt 2 of 2" in detail) == ("waiting_for_worker", True)
    await still.complete(await still.claim(task_id), "Failed", error_class="Boom", error_message="last")
    reason, detail = await explained(still, task_id)
    assert (reason, "All 2 attempts" in detail, "Boom: last" in detail) == ("dead_letter", True, True)
    await still.complete(await still.claim(fatal), "Failed", error_class="Fatal")
    reason, detail = await explained(still, fatal)
    assert (reason, "not retryable" in detail) == ("dead_letter", True)


async def test_explain_shows_the_outcome_of_an_ended_task(still: System) -> None:
    done, gone = await still.one(), await still.one()
    await still.complete(await still.claim(done, "worker-7"))
    await still.user("POST", f"/v1/tasks/{gone}/cancel")
    reason, detail = await explained(still, done)
    assert (reason, "worker-7" in detail) == ("completed", True)
    assert (await explained(still, gone))[0] == "canceled"


async def test_explain_expects_no_worker_in_the_dispatcher_runtime(still: System) -> None:
    task_id = await still.one(runtime="dispatcher")
    assert (await explained(still, task_id))[0] == "waiting_for_worker"


async def test_recently_active_worker_is_listed(still: System, clock: ManualClock) -> None:
    await still.receive("platform", worker_id="worker-7")

    async def listed() -> list[Any]:
        workers: list[Any] = (await still.user("GET", "/v1/workers")).json()["workers"]
        return workers

    assert [(w["worker_id"], w["queue"]) for w in await until(listed)] == [("worker-7", "platform")]
    clock.advance(61)
    assert await listed() == []
