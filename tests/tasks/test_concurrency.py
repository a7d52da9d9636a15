"""Caps are exact under concurrent claims, every freed slot wakes a waiting task, and batches isolate their items."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from interlock.clock import ManualClock
from tests.support.system import System, fence, http_client, running


def receipt(message: dict[str, Any], queue: str = "platform") -> dict[str, Any]:
    return {"queue": queue, "message_id": message["message_id"], "receipt": message["receipt"]}


def claimed(reply: dict[str, Any]) -> list[dict[str, Any]]:
    return [claim for claim in reply["claims"] if claim["status"] == "Claimed"]


async def statuses(system: System, run_id: str) -> Counter[str]:
    reply = await system.user("GET", f"/v1/tasks?run={run_id}&limit=1000")
    return Counter(task["status"] for task in reply.json()["tasks"])


async def slots(system: System) -> int:
    return int(await system.value("select count(*) from interlock.slots"))


async def parked(system: System) -> int:
    return int(await system.value("select count(*) from interlock.tasks where parked"))


async def take(system: System, **more: Any) -> list[dict[str, Any]]:
    """Claims with every message, as a worker does: the claim also acks the message."""
    taken: list[dict[str, Any]] = []
    for message in await system.receive(max=100):
        what = message["body"] | more
        taken += claimed(await as_batch(system, what | {"message": receipt(message)}))
    return taken


async def as_batch(system: System, what: dict[str, Any]) -> dict[str, Any]:
    reply = await system.claim_many(**what)
    return reply if "claims" in reply else {"claims": [reply]}


# Caps


async def test_parallel_claims_never_exceed_max_concurrency(still: System) -> None:
    accepted = await still.submit(list(range(40)), scaling={"max_concurrency": 5})
    ids = await still.task_ids(accepted["run_id"])
    ranges = [{"run_id": accepted["run_id"], "start": i, "end": i + 9} for i in range(0, 40, 10)]
    replies = await asyncio.gather(
        *(still.claim(task_id) for task_id in ids),
        *(still.claim_many(**one) for one in ranges),
    )
    won = [reply for reply in replies if reply.get("status") == "Claimed"]
    won += [claim for reply in replies if "claims" in reply for claim in claimed(reply)]
    assert len(won) == len({claim["task_id"] for claim in won}) == 5
    assert await slots(still) == 5
    assert await statuses(still, accepted["run_id"]) == {"Running": 5, "Queued": 35}
    assert {reply["reason"] for reply in replies if reply.get("status") == "NotClaimed"} <= {
        "LimitReached",
        "AlreadyRunning",
    }


async def test_parallel_claims_never_exceed_the_cap_per_key(still: System) -> None:
    tasks = [{"host": f"h{n % 3}", "n": n} for n in range(30)]
    accepted = await still.submit(tasks, scaling={"key": "/host", "max_concurrency_per_key": 2})
    ids = await still.task_ids(accepted["run_id"])
    replies = await asyncio.gather(*(still.claim(task_id) for task_id in ids))
    hosts = Counter(reply["task"]["payload"]["host"] for reply in replies if reply["status"] == "Claimed")
    assert hosts == {"h0": 2, "h1": 2, "h2": 2}
    assert await slots(still) == 6


async def test_both_caps_hold_together_and_keyless_tasks_have_only_the_first(still: System) -> None:
    tasks: list[Any] = [{"host": "a"}] * 6 + [{"other": 1}] * 6
    scaling = {"key": "/host", "max_concurrency_per_key": 2, "max_concurrency": 5}
    accepted = await still.submit(tasks, scaling=scaling)
    reply = await still.claim_many(run_id=accepted["run_id"], start=0, end=11)
    kinds = Counter("host" in claim["task"]["payload"] for claim in claimed(reply))
    assert kinds == {True: 2, False: 3}


Freeing = Callable[[System, ManualClock, dict[str, Any]], Awaitable[None]]


async def by_completing(system: System, clock: ManualClock, claim: dict[str, Any]) -> None:
    assert (await system.complete(claim)).status_code == 200


async def by_failing(system: System, clock: ManualClock, claim: dict[str, Any]) -> None:
    assert (await system.complete(claim, "Failed")).status_code == 200


async def by_reaping(system: System, clock: ManualClock, claim: dict[str, Any]) -> None:
    clock.advance(61)
    assert await system.pass_of("reaper") == 1


async def by_canceling(system: System, clock: ManualClock, claim: dict[str, Any]) -> None:
    await system.user("POST", f"/v1/tasks/{claim['task_id']}/cancel")
    assert (await system.complete(claim, "Canceled")).status_code == 200


async def by_releasing_a_canceled_one(system: System, clock: ManualClock, claim: dict[str, Any]) -> None:
    await system.user("POST", f"/v1/tasks/{claim['task_id']}/cancel")
    assert await released(system, claim) == 1


FREEINGS: list[Freeing] = [by_completing, by_failing, by_reaping, by_canceling, by_releasing_a_canceled_one]


@pytest.mark.parametrize("free", FREEINGS, ids=lambda f: f.__name__)
async def test_freed_slot_wakes_exactly_one_parked_task(still: System, clock: ManualClock, free: Freeing) -> None:
    await still.submit([0, 1, 2], scaling={"max_concurrency": 1}, policy={"backoff_seconds": 600, "lease_seconds": 60})
    (first,) = await take(still)
    assert (await parked(still), await still.receive()) == (2, [])
    await free(still, clock, first)
    assert await slots(still) == 0
    (message,) = await still.receive(visibility_seconds=1)
    assert await parked(still) == 1
    reply = await still.claim_many(task_id=message["body"]["task_id"], message=receipt(message))
    assert reply["status"] == "Claimed"
    assert await slots(still) == 1


async def released(system: System, *claims: dict[str, Any]) -> int:
    reply = await system.worker("POST", "/internal/task-release", json={"items": [fence(c) for c in claims]})
    assert reply.status_code == 200, reply.text
    return int(reply.json()["released"])


async def test_released_task_and_a_parked_one_share_the_freed_slot(still: System) -> None:
    accepted = await still.submit([0, 1], scaling={"max_concurrency": 1})
    (first,) = await take(still)
    assert await released(still, first) == 1
    assert len(await take(still)) == 1
    assert await slots(still) == 1
    assert await statuses(still, accepted["run_id"]) == {"Running": 1, "Queued": 1}


async def test_parked_task_that_is_canceled_is_not_woken(still: System) -> None:
    accepted = await still.submit([0, 1, 2], scaling={"max_concurrency": 1})
    (first,) = await take(still)
    ids = await still.task_ids(accepted["run_id"])
    await still.user("POST", f"/v1/tasks/{ids[1]}/cancel")
    await still.complete(first)
    (second,) = await take(still)
    assert second["task_id"] == ids[2]
    await still.complete(second)
    await still.settle()
    assert (await still.run(accepted["run_id"]))["state"] == "CompletedWithFailures"


async def test_slot_freed_for_one_key_wakes_a_task_of_that_key(still: System) -> None:
    tasks = [{"host": "a"}, {"host": "b"}, {"host": "a"}, {"host": "b"}]
    await still.submit(tasks, scaling={"key": "/host", "max_concurrency_per_key": 1})
    first = await take(still)
    of_b = next(claim for claim in first if claim["task"]["payload"] == {"host": "b"})
    await still.complete(of_b)
    (woken,) = await take(still)
    assert (woken["task"]["payload"], woken["task"]["index"]) == ({"host": "b"}, 3)


async def test_free_key_does_not_wait_behind_a_thousand_tasks_of_a_busy_key(still: System) -> None:
    job: dict[str, Any] = {"name": "hosts", "scaling": {"key": "/host", "max_concurrency_per_key": 1}}
    await still.submit([{"host": "busy"}] * 1000, **job)
    await still.submit([{"host": "busy"}] * 5, **job)
    await still.submit([{"host": "calm"}] * 3, **job)
    first = [claim for _ in range(2) for claim in await take(still)]
    calm = [claim for claim in first if claim["task"]["payload"] == {"host": "calm"}]
    assert (len(first), len(calm), await parked(still)) == (2, 1, 1006)
    await still.complete(calm[0])
    (second,) = await take(still)
    assert second["task"]["payload"] == {"host": "calm"}
    await still.value("delete from interlock.slots where slot_key = 'calm'")
    assert await still.pass_of("reconciler") == 1
    assert [claim["task"]["payload"] for claim in await take(still)] == [{"host": "calm"}]


@pytest.mark.parametrize("scaling", [{"max_concurrency": 3}, {}], ids=["raised", "taken away"])
async def test_raised_cap_wakes_parked_tasks(still: System, scaling: dict[str, Any]) -> None:
    await still.submit([0, 1, 2], name="capped", scaling={"max_concurrency": 1})
    (first,) = await take(still)
    await still.submit([], name="capped", scaling=scaling, update=True)
    assert await still.pass_of("reconciler") == 2
    assert len(await take(still)) == 2
    assert (await still.complete(first)).status_code == 200


async def test_many_workers_respect_the_cap_until_all_tasks_end(system: System) -> None:
    """The test itself counts concurrent attempts, from the first reply to just before the report."""
    accepted = await system.submit(
        [{"host": f"h{n % 4}"} for n in range(60)],
        scaling={"max_concurrency": 5, "key": "/host", "max_concurrency_per_key": 2},
    )
    running_now: Counter[str] = Counter()
    peak: Counter[str] = Counter()
    done: list[str] = []

    async def work(claim: dict[str, Any]) -> None:
        host = claim["task"]["payload"]["host"]
        for key in (host, "all"):
            running_now[key] += 1
            peak[key] = max(peak[key], running_now[key])
        await system.attempt("/v1/task/heartbeat", claim["capability_token"], fence(claim))
        running_now[host] -= 1
        running_now["all"] -= 1
        assert (await system.complete(claim)).status_code == 200
        done.append(claim["task_id"])

    async def worker() -> None:
        while len(done) < 60:
            for message in await system.receive(max=1, wait_seconds=0.2):
                reply = await as_batch(system, message["body"] | {"message": receipt(message), "limit": 3})
                await asyncio.gather(*(work(claim) for claim in claimed(reply)))

    await asyncio.gather(*(worker() for _ in range(6)))
    assert len(set(done)) == len(done) == 60
    assert peak["all"] <= 5
    assert max(peak[f"h{n}"] for n in range(4)) <= 2
    assert (await slots(system), await parked(system)) == (0, 0)
    await system.settle()
    run = await system.run(accepted["run_id"])
    assert (run["state"], run["counts"]["Completed"], run["counts"]["Queued"]) == ("Completed", 60, 0)


# Priorities


async def test_normal_comes_before_bulk(state_url: str, tmp_path: Path, clock: ManualClock) -> None:
    async with running(state_url, tmp_path, clock, bulk_share=0.0) as still:
        bulk = await still.submit([1], priority="bulk")
        normal = await still.submit([1])
        order = [message["body"]["run_id"] for message in await still.receive(max=1) + await still.receive(max=1)]
        assert order == [normal["run_id"], bulk["run_id"]]


async def test_bulk_gets_its_share_despite_a_backlog_of_normal_work(still: System) -> None:
    bulk = {(await still.submit([n], priority="bulk"))["run_id"] for n in range(3)}
    normal = {(await still.submit([n]))["run_id"] for n in range(27)}
    batches = [{m["body"]["run_id"] for m in await still.receive(max=10)} for _ in range(3)]
    assert [len(batch & bulk) for batch in batches] == [1, 1, 1]
    assert set().union(*batches) == bulk | normal


# Messages, lists and ranges


async def test_claim_acks_its_message(still: System) -> None:
    task_id = await still.one(policy={"backoff_seconds": 0, "jitter": 0})
    (message,) = await still.receive()
    claim = (await still.claim_many(**message["body"], message=receipt(message)))["claims"][0]
    await still.complete(claim, "Failed")
    await still.settle()
    (again,) = await still.receive()
    assert again["body"] == {"task_id": task_id}
    assert (await still.claim_many(task_id=task_id, message=receipt(again)))["status"] == "Claimed"
    assert await still.value("select count(*) from interlock.queue_messages") == 0


async def test_range_claim_takes_its_limit_and_leaves_a_message_for_the_rest(still: System) -> None:
    accepted = await still.submit(list(range(10)))
    (message,) = await still.receive()
    span = {"run_id": accepted["run_id"], "start": 0, "end": 9}
    assert message["body"] == {"job_id": accepted["job_id"]} | span
    reply = await still.claim_many(**span, limit=4, message=receipt(message))
    assert [claim["task"]["index"] for claim in reply["claims"]] == [0, 1, 2, 3]
    assert reply["remaining"] > 0
    (rest,) = await still.receive()
    assert rest["body"] == {"job_id": accepted["job_id"], "run_id": accepted["run_id"], "start": 4, "end": 9}
    assert rest["receives"] == 1
    reply = await still.claim_many(**rest["body"], limit=6, message=receipt(rest))
    assert [claim["task"]["index"] for claim in reply["claims"]] == [4, 5, 6, 7, 8, 9]
    assert reply.get("remaining", 0) == 0
    assert await still.value("select count(*) from interlock.queue_messages") == 0


async def test_range_claim_skips_held_and_ended_tasks(still: System) -> None:
    accepted = await still.submit(list(range(6)))
    ids = await still.task_ids(accepted["run_id"])
    await still.claim(ids[1])
    await still.user("POST", f"/v1/tasks/{ids[2]}/cancel")
    await still.complete(await still.claim(ids[4]))
    (message,) = await still.receive()
    reply = await still.claim_many(**message["body"], message=receipt(message))
    assert [claim["task"]["index"] for claim in reply["claims"]] == [0, 3, 5]
    assert await still.value("select count(*) from interlock.queue_messages") == 0


async def test_run_of_many_tasks_has_one_message_per_range(still: System) -> None:
    accepted = await still.submit(list(range(250)))
    bodies = [message["body"] for message in await still.receive(max=10)]
    assert {(body["job_id"], body["run_id"]) for body in bodies} == {(accepted["job_id"], accepted["run_id"])}
    assert [(body["start"], body["end"]) for body in bodies] == [(0, 99), (100, 199), (200, 249)]


async def test_range_claim_of_a_capped_job_takes_no_more_than_its_limit(still: System) -> None:
    await still.submit(list(range(10)), scaling={"max_concurrency": 6})
    (message,) = await still.receive()
    reply = await still.claim_many(**message["body"], limit=2, message=receipt(message))
    assert [claim["task"]["index"] for claim in reply["claims"]] == [0, 1]
    assert len(await take(still)) == 4
    assert (await slots(still), await parked(still)) == (6, 4)


async def test_list_claim_gives_no_verdict_for_tasks_beyond_its_limit(still: System) -> None:
    ids = await still.task_ids((await still.submit([0, 1, 2]))["run_id"])
    reply = await still.claim_many(task_ids=ids, limit=1)
    assert len(claimed(reply)) == 1
    assert [claim["reason"] for claim in reply["claims"] if claim["status"] == "NotClaimed"] == []
    reply = await still.claim_many(task_ids=ids)
    assert sorted(claim["status"] for claim in reply["claims"]) == ["Claimed", "Claimed", "NotClaimed"]


async def test_claim_reports_why_a_task_was_not_claimed(still: System) -> None:
    ids = await still.task_ids((await still.submit(list(range(6)), policy={"backoff_seconds": 60}))["run_id"])
    await still.claim(ids[0])
    await still.complete(await still.claim(ids[1]))
    await still.user("POST", f"/v1/tasks/{ids[2]}/cancel")
    await still.complete(await still.claim(ids[3]), "Failed")
    dead = await still.one(policy={"max_attempts": 1})
    await still.complete(await still.claim(dead), "Failed")
    nobody = str(uuid4())
    asked = [*ids[:4], dead, nobody]
    reply = await still.claim_many(task_ids=asked)
    reasons = {claim["task_id"]: claim["reason"] for claim in reply["claims"]}
    expected = ["AlreadyRunning", "Completed", "Canceled", "NotDue", "Failed", "NotFound"]
    assert [reasons[task_id] for task_id in asked] == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"run_id": str(uuid4())},
        {"run_id": str(uuid4()), "start": 5, "end": 4},
        {"run_id": str(uuid4()), "start": 0, "end": 10_000},
        {"run_id": str(uuid4()), "start": -1, "end": 4},
        {"task_id": str(uuid4()), "limit": 0},
        {"task_id": "x"},
        {"task_ids": []},
    ],
    ids=["nothing", "no range", "backwards", "too wide", "negative", "limit", "id", "empty list"],
)
async def test_invalid_claim_is_a_bad_request(shared: System, wrong: dict[str, Any]) -> None:
    reply = await shared.worker("POST", "/internal/task-claim", json={"worker_id": "w"} | wrong)
    assert reply.status_code == 400, reply.text
    assert reply.json()["detail"]


@pytest.mark.parametrize("message_id", ["x", "", "-1", "9" * 30, "1"])
async def test_claim_with_a_foreign_message_still_claims(shared: System, message_id: str) -> None:
    task_id = await shared.one()
    for wrong in (str(uuid4()), "x"):
        message = {"queue": "platform", "message_id": message_id, "receipt": wrong}
        reply = await shared.claim_many(task_id=task_id, message=message)
        assert reply["task_id"] == task_id
    assert (await shared.task(task_id))["status"] == "Running"


# Batches


async def test_invalid_heartbeat_does_not_affect_others_of_its_batch(still: System, clock: ManualClock) -> None:
    ids = await still.task_ids((await still.submit([0, 1, 2, 3]))["run_id"])
    claims = claimed(await still.claim_many(task_ids=ids))
    clock.advance(5)
    items = [fence(claim) for claim in claims] + [fence(claims[0])]
    items[1] |= {"lease_token": str(uuid4())}
    items[2] |= {"attempt": 7}
    items.append({"task_id": str(uuid4()), "attempt": 1, "lease_token": str(uuid4())})
    reply = (await still.worker("POST", "/internal/task-heartbeat", json={"items": items})).json()
    assert {item["task_id"] for item in reply["items"]} == {claims[0]["task_id"], claims[3]["task_id"]}
    refused = {item["task_id"]: (item["code"], item["stale"]) for item in reply["refused"]}
    assert refused == {
        claims[1]["task_id"]: ("fenced", "lease_token"),
        claims[2]["task_id"]: ("fenced", "attempt"),
        items[-1]["task_id"]: ("fenced", "task"),
    }


async def test_invalid_completion_does_not_affect_others_of_its_batch(still: System) -> None:
    accepted = await still.submit(list(range(7)))
    claims = claimed(await still.claim_many(run_id=accepted["run_id"], start=0, end=6))
    items: list[dict[str, Any]] = [fence(claim) | {"status": "Completed", "result": 1} for claim in claims]
    items[1] |= {"lease_token": str(uuid4())}
    items[2] |= {"result": "x" * 1_100_000}
    items[3] |= {"events": [{"dataset_uuid": str(uuid4()), "dataset_version": str(uuid4()), "cursor": 1}]}
    items[4] |= {"result": "\x00 \uffff"}
    items[5] |= {"error_message": "\x00", "error_class": "a\x00b", "status": "Failed"}
    items.append({"task_id": str(uuid4()), "attempt": 1, "lease_token": str(uuid4()), "status": "Completed"})
    reply = (await still.worker("POST", "/internal/task-complete", json={"items": items})).json()
    refused = {item["task_id"]: item["code"] for item in reply["refused"]}
    assert refused == {
        claims[1]["task_id"]: "fenced",
        claims[2]["task_id"]: "result_too_large",
        claims[3]["task_id"]: "dataset_not_granted",
        items[-1]["task_id"]: "fenced",
    }
    assert reply["accepted"] == 4
    assert await statuses(still, accepted["run_id"]) == {"Completed": 3, "Failed": 1, "Running": 3}


async def test_result_that_is_not_utf_8_is_refused_alone(still: System) -> None:
    accepted = await still.submit([0, 1])
    claims = claimed(await still.claim_many(run_id=accepted["run_id"], start=0, end=1))
    good, bad = (str(fence(claim)).replace("'", '"')[:-1] + ', "status": "Completed"' for claim in claims)
    body = f'{{"items": [{good}}}, {bad}, "result": "'.encode() + b"\xff\xfe" + b'"}]}'
    reply = await still.worker(
        "POST", "/internal/task-complete", content=body, headers={"Content-Type": "application/json"}
    )
    assert reply.status_code == 200, reply.text
    assert reply.json()["accepted"] == 1
    assert [item["task_id"] for item in reply.json()["refused"]] == [claims[1]["task_id"]]


async def at_once(system: System, times: int, claim: dict[str, Any], body: dict[str, Any]) -> list[httpx.Response]:
    """Uses many clients: the time of a single client's pool grows with the square of its waiting requests."""
    headers = {"X-Trace-Task-Capability": claim["capability_token"]}
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(http_client(connections=4, seconds=60)) for _ in range(50)]
        url = f"{system.internal_url}/v1/task/complete"
        return await asyncio.gather(
            *(clients[n % 50].post(url, headers=headers, json=body) for n in range(times)),
        )


async def test_thousand_concurrent_duplicate_completions_count_once(system: System) -> None:
    accepted = await system.submit([0])
    claim = await system.claim((await system.task_ids(accepted["run_id"]))[0])
    replies = await at_once(system, 1000, claim, fence(claim) | {"status": "Completed", "result": {"n": 1}})
    assert Counter(reply.status_code for reply in replies) == {200: 1000}
    assert Counter(reply.json().get("duplicate", False) for reply in replies) == {False: 1, True: 999}
    await system.settle()
    run = await system.run(accepted["run_id"])
    assert (run["state"], run["counts"]["Completed"], run["counts"]["Running"]) == ("Completed", 1, 0)


async def test_concurrent_duplicate_completions_commit_outputs_and_events_once(system: System) -> None:
    output = {"dataset_uuid": str(uuid4()), "dataset_version": str(uuid4())}
    claim = await system.claim(await system.one(outputs=[output]))
    place = claim["task"]["outputs"][0]["write_prefix"] + "part"
    more = {"events": [output | {"cursor": 7}], "outputs": [output | {"location": place}]}
    replies = await at_once(system, 100, claim, fence(claim) | {"status": "Completed"} | more)
    assert Counter(reply.json().get("duplicate", False) for reply in replies) == {False: 1, True: 99}
    assert await system.value("select count(*) from interlock.output_commits") == 1
    assert await system.value("select count(*) from interlock.dataset_events") == 1


async def test_concurrent_completions_and_failures_of_an_attempt_have_one_outcome(still: System) -> None:
    claim = await still.claim(await still.one(policy={"max_attempts": 1}))
    words = ["Completed", "Failed", "Canceled"] * 10
    replies = await asyncio.gather(*(still.complete(claim, status) for status in words))
    accepted = [status for status, reply in zip(words, replies, strict=True) if reply.status_code == 200]
    assert len(set(accepted)) == 1
    assert len(accepted) == 10
    assert {reply.status_code for reply in replies} == {200, 409}
    assert (await still.task(claim["task_id"]))["status"] == accepted[0]


async def test_overlapping_batches_in_any_order_end_every_task_once(still: System) -> None:
    accepted = await still.submit(list(range(50)))
    claims = claimed(await still.claim_many(run_id=accepted["run_id"], start=0, end=49))
    items = [fence(claim) | {"status": "Completed"} for claim in claims]
    batches = [items[start:] + items[:start] for start in range(0, 50, 5)] + [list(reversed(items))]
    replies = await asyncio.gather(
        *(still.worker("POST", "/internal/task-complete", json={"items": batch}) for batch in batches)
    )
    assert {reply.status_code for reply in replies} == {200}
    assert {reply.json()["accepted"] for reply in replies} == {50}
    await still.settle()
    assert (await still.run(accepted["run_id"]))["counts"]["Completed"] == 50


async def test_more_readers_than_connections_all_get_their_page(state_url: str, tmp_path: Path) -> None:
    async with running(state_url, tmp_path, database_connections=2) as system:
        await system.submit([0, 1], name="read-me")
        async with asyncio.timeout(20):
            replies = await asyncio.gather(*(system.user("GET", "/v1/jobs/read-me/tasks") for _ in range(20)))
        assert {reply.status_code for reply in replies} == {200}
        assert {len(reply.json()["tasks"]) for reply in replies} == {2}
