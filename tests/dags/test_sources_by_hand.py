"""Events sent to manual sources: scopes of datasets, and payloads that become tasks."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from interlock.dags.sources import Triggers
from interlock.wire.access import Role
from tests.support.source_dags import active_job, deploy, hold_back, let_go, make_tasks, other_key, payloads, source_job
from tests.support.system import System

MANUAL: dict[str, Any] = {"kind": "manual"}


async def send(system: System, *events: dict[str, Any], job: str = "src", **more: Any) -> httpx.Response:
    return await system.user("POST", f"/v1/dags/feeds/jobs/{job}/events", json={"events": list(events)}, **more)


async def test_payloads_become_tasks_in_order_with_their_messages(still: System) -> None:
    await deploy(still, source_job(**MANUAL))
    reply = await send(still, *({"payload": {"n": n}} for n in range(5)))
    assert reply.json() == {"events": 0, "triggers": 5}
    await still.settle()
    job_id = await active_job(still)
    assert await payloads(still, job_id) == [f'{{"n":{n}}}' for n in range(5)]
    messages = await still.receive(max=10)
    claims = [await still.claim(message["body"]["task_id"]) for message in messages]
    assert [claim["task"]["payload"]["n"] for claim in claims] == list(range(5))
    assert await still.value("select count(*) from interlock.triggers") == 0


async def test_scopes_become_events_of_the_named_output(still: System) -> None:
    await deploy(still, source_job(outputs=("blocks", "days"), **MANUAL))
    reply = await send(
        still,
        {"output": "blocks", "cursor": 9},
        {"output": "days", "start": 0, "end": 4},
        {"output": "days", "start": 5, "end": 9},
    )
    assert reply.json() == {"events": 3, "triggers": 0}
    (source,) = (await still.user("GET", "/v1/dags/feeds/sources")).json()["sources"]
    assert [(one["output"], one["cursor"], one["last_scope"]) for one in source["outputs"]] == [
        ("blocks", 9, "9"),
        ("days", None, "5-9"),
    ]


async def test_scope_and_each_correction_of_it_reach_its_readers(still: System) -> None:
    reader = {"name": "reader", "operator": "echo", "inputs": [{"from": {"job": "src", "output": "out"}}]}
    await deploy(still, source_job(**MANUAL), reader)
    job_id = await active_job(still, "reader")
    for count in (1, 2, 3):
        assert (await send(still, {"start": 0, "end": 9})).status_code == 200
        await still.settle()
        (message,) = await still.receive()
        await still.complete(await still.claim(message["body"]["task_id"]))
        assert len(await payloads(still, job_id)) == count
    assert await still.value("select count(distinct task_id) from interlock.dataset_events") == 1


@pytest.mark.parametrize(
    ("events", "status", "code"),
    [
        ([{}], 400, "bad_event_scope"),
        ([{"payload": 1, "cursor": 2}], 400, "bad_event_scope"),
        ([{"cursor": 1, "start": 1, "end": 2}], 400, "bad_event_scope"),
        ([{"start": 5}], 400, "bad_partition"),
        ([{"start": 5, "end": 4}], 400, "bad_partition"),
        ([{"cursor": -1}], 400, "bad_event_scope"),
        ([{"output": "other", "cursor": 1}], 400, "unknown_output"),
        ([{"payload": "\x00"}], 400, "bad_payload"),
        ([{"cursor": 5}, {"start": 0, "end": 9}], 409, "scope_kind"),
        ([{"start": 0, "end": 5}, {"start": 5, "end": 9}], 409, "partition_overlap"),
        ([], 400, "invalid_request"),
        ([{"payload": 1, "more": 2}], 400, "invalid_request"),
        ([{"payload": "x" * 300_000}], 413, "payload_too_large"),
    ],
)
async def test_batch_with_an_invalid_event_is_refused_completely(
    still: System, events: list[Any], status: int, code: str
) -> None:
    await deploy(still, source_job(**MANUAL))
    reply = await send(still, *events, *([{"payload": 1}] if events else []))
    assert (reply.status_code, reply.json()["code"]) == (status, code), reply.text
    assert await still.value("select count(*) from interlock.triggers") == 0
    assert await still.value("select count(*) from interlock.dataset_events") == 0


async def test_payload_that_the_database_cannot_store_is_refused(still: System) -> None:
    await deploy(still, source_job(**MANUAL))
    body = b'{"events": [{"payload": 1e999999}]}'
    reply = await still.user("POST", "/v1/dags/feeds/jobs/src/events", content=body)
    assert (reply.status_code, reply.json()["code"]) == (400, "bad_payload")


async def test_same_idempotency_key_sends_events_once(still: System) -> None:
    await deploy(still, source_job(**MANUAL))
    headers = {"Idempotency-Key": "k"}
    replies = await asyncio.gather(*(send(still, {"payload": 1}, headers=headers) for _ in range(5)))
    assert [reply.json() for reply in replies] == [{"events": 0, "triggers": 1}] * 5
    assert (await send(still, {"payload": 2}, headers=headers)).json()["code"] == "idempotency_key_reused"
    await still.settle()
    assert await payloads(still, await active_job(still)) == ["1"]


@pytest.mark.parametrize("kind", ["always_on", "webhook", "command"])
async def test_other_kinds_of_sources_refuse_events_with_advice(still: System, kind: str) -> None:
    await deploy(still, source_job(kind=kind))
    reply = await send(still, {"payload": 1})
    assert (reply.status_code, reply.json()["code"]) == (409, "not_manual")
    assert "manual" in reply.json()["detail"]


async def test_reactive_or_unknown_job_refuses_events(still: System) -> None:
    reader = {"name": "reader", "operator": "echo", "inputs": [{"from": {"job": "src", "output": "out"}}]}
    await deploy(still, source_job(**MANUAL), reader)
    assert (await send(still, {"payload": 1}, job="reader")).json()["code"] == "not_manual"
    assert (await send(still, {"payload": 1}, job="nobody")).status_code == 404


async def test_readers_and_other_orgs_send_nothing(still: System) -> None:
    await deploy(still, source_job(**MANUAL))
    reader = await other_key(still, Role.READER)
    assert (await send(still, {"payload": 1}, key=reader)).status_code == 403
    stranger = await other_key(still, Role.ADMIN, "strangers")
    assert (await send(still, {"payload": 1}, key=stranger)).status_code == 404
    writer = await other_key(still, Role.WRITER)
    assert (await send(still, {"payload": 1}, key=writer)).status_code == 200


# Triggers while a job is paused by backpressure


async def test_triggers_of_a_paused_job_wait_and_arrive_in_parts(still: System) -> None:
    await deploy(still, source_job(**MANUAL), source_job("free", **MANUAL))
    job_id, free = await active_job(still), await active_job(still, "free")
    await hold_back(still, job_id)
    for at in range(0, 500, 250):
        await send(still, *({"payload": n} for n in range(at, at + 250)))
    await send(still, {"payload": "free"}, job="free")
    await make_tasks(still)
    assert await payloads(still, job_id) == []
    assert await payloads(still, free) == ['"free"']
    shown = (await still.user("GET", "/v1/dags/feeds/sources")).json()["sources"]
    assert {one["job"]: (one["state"], one["waiting"]) for one in shown} == {
        "src": ("paused", 500),
        "free": ("ready", 0),
    }
    await let_go(still, job_id)
    assert await still.pass_of("triggers") == 200  # one pass of a new loop: at most 200 tasks per job
    await make_tasks(still)
    assert await payloads(still, job_id) == [str(n) for n in range(500)]


@pytest.mark.parametrize(("priority", "made"), [("normal", 1), ("bulk", 0)])
async def test_bulk_pause_does_not_stop_normal_work(still: System, priority: str, made: int) -> None:
    await deploy(still, source_job(**MANUAL) | {"priority": priority})
    job_id = await active_job(still)
    await hold_back(still, job_id, bulk=True)
    await send(still, {"payload": 1})
    await make_tasks(still)
    assert len(await payloads(still, job_id)) == made


async def test_concurrent_dispatchers_create_one_task_per_trigger_in_order(still: System) -> None:
    await deploy(still, source_job(**MANUAL))
    await send(still, *({"payload": n} for n in range(300)))
    kernel = still.kernel
    loops = [Triggers(kernel.stores.database, kernel.settings, kernel.stores.wakeups) for _ in range(4)]
    while any(await asyncio.gather(*(loop.run_once() for loop in loops))):
        continue
    assert await payloads(still, await active_job(still)) == [str(n) for n in range(300)]


async def test_unstarted_triggers_go_to_the_next_generation_of_the_job(still: System) -> None:
    await deploy(still, source_job(**MANUAL))
    old = await active_job(still)
    await hold_back(still, old)
    await send(still, {"payload": "early"})
    await deploy(still, source_job(**MANUAL) | {"config": {"changed": True}})
    # The active generation receives it: the new one immediately, or once it has taken over.
    await send(still, {"payload": "late"})
    await still.value("update interlock.jobs set active = false, current = false where job_id = $1", old)
    await still.value("update interlock.jobs set current = true where dag_name = 'feeds' and active")
    await make_tasks(still)
    new = await active_job(still)
    assert new != old
    assert sorted(await payloads(still, new)) == ['"early"', '"late"']
    assert await payloads(still, old) == []
    assert await still.value("select count(*) from interlock.triggers") == 0


async def test_concurrency_key_is_read_from_the_payload(still: System) -> None:
    scaling = {"max_concurrency_per_key": 1, "key": "/host"}
    await deploy(still, source_job(**MANUAL) | {"scaling": scaling})
    await send(still, {"payload": {"host": "a"}}, {"payload": {"host": "a"}}, {"payload": [1]})
    await make_tasks(still)
    ids = [message["body"]["task_id"] for message in await still.receive(max=10)]
    claims = (await still.claim_many(task_ids=ids))["claims"]
    assert sum(claim["status"] == "Claimed" for claim in claims) == 2
