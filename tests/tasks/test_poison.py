"""Unreadable payloads, keys and reports: each is refused or fails alone, without effect on other tasks."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from valkey.asyncio import Valkey

from interlock.apps.doctor_checks import Result, stores
from interlock.clock import ManualClock
from interlock.stores.embedded import EmbeddedValkey
from interlock.stores.valkey import Coordination
from interlock.tasks.limits import Rates
from interlock.tasks.shards import Rate
from interlock.telemetry import SET_ASIDE
from tests.support.source_dags import active_job, deploy, make_tasks, source_job
from tests.support.staged_lists import Intake, intake
from tests.support.system import System, fence, running

RATE = {"rate": {"key": "/h", "per_second": 5}}
LONG_KEY = "".join(chr(0x10000 + secrets.randbelow(0x10000)) for _ in range(1000))
"""A key of 4,000 incompressible bytes, more than an index entry can hold."""


@pytest.fixture
async def paced(state_url: str, tmp_path: Path, clock: ManualClock, valkey: EmbeddedValkey) -> AsyncIterator[System]:
    url = await valkey.start()
    async with Valkey.from_url(url) as client:
        await client.flushall()
    async with running(state_url, tmp_path, clock, valkey_url=url) as system:
        yield system


@pytest.fixture
async def door(state_url: str, tmp_path: Path) -> AsyncIterator[Intake]:
    async with intake(state_url, tmp_path, shard_threshold=50, range_size=10) as started:
        yield started


def aside(loop: str) -> float:
    return float(SET_ASIDE.labels(loop=loop)._value.get())


# Submission

UNREADABLE: dict[str, tuple[str, str]] = {
    "beyond a double": ('{"h": 1e400}', "1e400"),
    "beyond numeric": ('{"h": 1e-99999}', "too many digits"),
    "an endless integer": ('{"h": ' + "9" * 5000 + "}", "too many digits"),
    "NUL": (r'{"h": "\u0000"}', "NUL"),
    "half a pair": (r'{"h": "\ud800"}', ""),
    "repeated key": ('{"h": {"a": 1, "a": 2}}', "'a' twice"),
    "too deep": ('{"h": ' + "[" * 600 + "]" * 600 + "}", "deep"),
}


@pytest.mark.parametrize("name", UNREADABLE)
async def test_payload_that_a_later_reader_refuses_is_refused_on_every_way_in(shared: System, name: str) -> None:
    payload, reason = UNREADABLE[name]
    opened = await shared.user("POST", "/v1/jobs", json={"operator": "echo", "open": True})
    ways = {
        "/v1/jobs": f'{{"operator": "echo", "tasks": [{{"h": 1}}, {payload}]}}',
        "/v1/jobs?": f'{{"operator": "echo", "async": true, "tasks": [{{"h": 1}}, {payload}]}}',
        f"/v1/jobs/{opened.json()['job_id']}/tasks": f'{{"tasks": [{{"h": 1}}, {payload}]}}',
    }
    before = await shared.value("select count(*) from interlock.tasks")
    for path, body in ways.items():
        reply = await shared.user("POST", path, content=body.encode())
        assert reply.status_code == 400, (path, reply.text)
        assert reason in reply.json()["detail"], path
    assert await shared.value("select count(*) from interlock.tasks") == before


@pytest.mark.parametrize("form", ["jsonl", "csv", "lines"])
async def test_line_that_a_later_reader_refuses_fails_its_list_by_number(door: Intake, form: str) -> None:
    lines = {
        "jsonl": [b'{"h": 1}\n\n{"h": 1e400}\n', b'{"h": 1}\n\n{"h": "\\u0000"}\n', b'1\n2\n{"a": 1, "a": 2}\n',
                  b"1\n2\n" + b"[" * 600 + b"]" * 600 + b"\n"],
        "csv": [b"a,b\n1,2\n3,4\n5,\x006\n"],
        "lines": [b"a\nb\nc\x00d\n"],
    }[form]  # fmt: skip
    for text in lines:
        accepted = await door.submit(text, form=form)
        await door.drain()
        run = await door.system.run(accepted["run_id"])
        assert run["state"] == "Failed", text
        assert "Line 3 cannot be stored" in run["reason"]


@pytest.mark.parametrize(
    ("task", "wrong"),
    [({"h": {"a": 1}}, "is a list or an object"), ({"h": [1]}, "is a list or an object"), ({"h": "x" * 1001}, "more"),
     ({"h": LONG_KEY}, "more than 1000 characters or 2000 bytes")],
    ids=["object", "list", "long", "many bytes"],
)  # fmt: skip
async def test_rate_key_that_is_no_key_is_refused(shared: System, task: Any, wrong: str) -> None:
    body = {"operator": "echo", "tasks": [{"h": 1}, {}, task], "limits": RATE}
    reply = await shared.user("POST", "/v1/jobs", json=body)
    assert (reply.status_code, reply.json()["code"]) == (400, "bad_pointer")
    assert "tasks[2]" in reply.json()["detail"]
    assert wrong in reply.json()["detail"]


async def test_concurrency_key_too_long_for_an_index_is_refused(shared: System) -> None:
    body = {"operator": "echo", "tasks": [{"k": LONG_KEY}], "scaling": {"key": "/k", "max_concurrency_per_key": 1}}
    reply = await shared.user("POST", "/v1/jobs", json=body)
    assert (reply.status_code, reply.json()["code"]) == (400, "bad_pointer")


@pytest.mark.parametrize(
    "body",
    [
        '{"operator": "echo", "operator": "fail", "tasks": [1]}',
        '{"operator": "echo", "config": {"a": [{"b": 1, "b": 2}]}, "tasks": [1]}',
        '{"operator": "echo", "tasks": [1], "limits": {"deadline_seconds": 1, "deadline_seconds": 2}}',
        r'{"operator": "echo", "tasks": [{"\u0061": 1, "a": "\u003a"}]}',
        '{"operator": "echo", "tasks": [{"n": 1e400, "n": 1}]}',
    ],
)
async def test_repeated_key_anywhere_in_a_submission_is_refused(shared: System, body: str) -> None:
    reply = await shared.user("POST", "/v1/jobs", content=body.encode())
    assert (reply.status_code, reply.json()["code"]) == (400, "invalid_request"), reply.text
    assert "twice" in reply.json()["detail"]


async def test_repeated_key_in_a_report_is_refused(shared: System) -> None:
    claim = await shared.claim(await shared.one())
    report = f'{{"task_id": "{claim["task_id"]}", "attempt": 1, "lease_token": "{claim["lease_token"]}", '
    for rest in ('"status": "Failed", "status": "Completed"}', '"status": "Completed", "result": {"a": 1, "a": 2}}'):
        headers = {"X-Trace-Task-Capability": claim["capability_token"]}
        url = shared.internal_url + "/v1/task/complete"
        reply = await shared.http.post(url, headers=headers, content=report + rest)
        assert (reply.status_code, reply.json()["code"]) == (400, "invalid_request"), reply.text


# Claims


async def test_stored_payload_that_cannot_be_read_holds_up_no_claim(paced: System) -> None:
    """Earlier releases accepted such payloads without a check."""
    bad = await paced.submit([{"h": 1}] * 8, limits=RATE)
    good = await paced.submit([1, 2], limits={"max_concurrency": 5})
    plain = await paced.submit([3])
    await paced.value("""update interlock.tasks set payload = '{"h": 1e400}' where run_id = $1""", bad["run_id"])
    messages = await paced.receive(max_messages=10)
    ranges = [
        {name: message["body"][name] for name in ("run_id", "start", "end")}
        | {"message": {"queue": "platform", "message_id": message["message_id"], "receipt": message["receipt"]}}
        for message in messages
    ]
    assert {span["run_id"] for span in ranges} == {bad["run_id"], good["run_id"], plain["run_id"]}
    reply = await paced.claim_many(ranges=ranges)
    begun = [claim["task"]["run_id"] for claim in reply["claims"]]
    assert begun.count(good["run_id"]) == 2
    assert begun.count(plain["run_id"]) == 1
    # All unreadable payloads share one key, so the rate limit applies to them, too.
    assert begun.count(bad["run_id"]) == 5


async def test_claim_of_very_many_keys_is_held_to_its_rate(valkey: EmbeddedValkey, clock: ManualClock) -> None:
    """A script error would count as a Valkey outage and lift the limits for all orgs."""
    coordination = Coordination(await valkey.start())
    rates, run_id = Rates(coordination, clock), uuid4()
    payloads = [f'{{"h": {n}}}' for n in range(9_000)]
    assert len((await rates.admit(run_id, Rate("/h", 1.0), payloads)).places) == 9_000
    assert not (await rates.admit(run_id, Rate("/h", 1.0), payloads)).places
    await coordination.close()


async def test_task_that_no_claim_can_take_fails_alone(still: System) -> None:
    """The concurrency key is too long for an index. It was accepted before keys had a limit in bytes."""
    scaling = {"key": "/k", "max_concurrency_per_key": 1}
    bad = await still.submit([{"k": "a"}, {"k": "b"}, {"k": "c"}], scaling=scaling)
    good = await still.one(scaling={"max_concurrency": 1})
    set_key = "update interlock.tasks set slot_key = $2 where run_id = $1 and task_index = 1"
    await still.value(set_key, bad["run_id"], LONG_KEY)
    ids = await still.task_ids(bad["run_id"])
    before = aside("claim")
    claims = {c["task_id"]: c for c in (await still.claim_many(task_ids=[*ids, good], limit=10))["claims"]}
    unfit = [task_id for task_id, claim in claims.items() if claim["status"] != "Claimed"]
    assert len(unfit) == 1
    assert good not in unfit
    task = await still.task(unfit[0])
    assert (task["status"], task["dead"], task["error_class"]) == ("Failed", True, "Unclaimable")
    assert aside("claim") == before + 1
    await still.settle()
    counts = (await still.run(bad["run_id"]))["counts"]
    assert (counts["Running"], counts["Failed"], counts["dead"], counts["Queued"]) == (2, 1, 1, 0)


async def test_trigger_with_a_long_key_stops_no_other_trigger(still: System) -> None:
    capped = source_job(kind="manual") | {"scaling": {"key": "/k", "max_concurrency_per_key": 1}}
    await deploy(still, capped)
    await deploy(still, source_job(kind="manual"), dag="others")
    for dag, payload in (("feeds", {"k": LONG_KEY}), ("others", {"n": 1})):
        path = f"/v1/dags/{dag}/jobs/src/events"
        assert (await still.user("POST", path, json={"events": [{"payload": payload}]})).status_code == 200
    await make_tasks(still)
    claims = [await still.claim(m["body"]["task_id"]) for m in await still.receive(max_messages=10)]
    assert [claim["status"] for claim in claims] == ["Claimed", "Claimed"]


# Reports


async def test_trigger_that_has_a_commit_of_its_own_is_completed_like_others(still: System) -> None:
    """`commit` is a number of the platform in a payload from the router; in an external payload it can be any value."""
    await deploy(still, source_job(kind="manual"))
    job_id = await active_job(still)
    body = {"events": [{"payload": {"commit": commit}} for commit in ("9fceb02", 10**30, 7)]}
    assert (await still.user("POST", "/v1/dags/feeds/jobs/src/events", json=body)).status_code == 200
    await make_tasks(still)
    items = []
    for n, message in enumerate(await still.receive(max_messages=10)):
        claim = await still.claim(message["body"]["task_id"])
        (output,) = claim["task"]["outputs"]
        event = {name: output[name] for name in ("dataset_uuid", "dataset_version")} | {"start": n, "end": n}
        items.append(fence(claim) | {"status": "Completed", "events": [event]})
    reply = await still.worker("POST", "/internal/task-complete", json={"items": items})
    assert (reply.status_code, reply.json()["accepted"]) == (200, 3), reply.text
    commits = "select array_agg(distinct input_commit) from interlock.partitions"
    assert await still.value(commits) == [0]
    assert await still.value("select count(*) from interlock.tasks where job_id = $1 and dead", job_id) == 0


async def test_report_that_postgres_refuses_fails_alone(still: System) -> None:
    """Adds a trigger that rejects the report, since earlier checks stop every report that Postgres would reject."""
    run = await still.submit(list(range(5)))
    claims = (await still.claim_many(run_id=run["run_id"], start=0, end=4))["claims"]
    async with still.kernel.stores.database.connection() as connection:
        await connection.execute("""create function refuse() returns trigger language plpgsql as $$
            begin perform new.result::text::jsonb; return new; end $$""")
        await connection.execute("""create trigger refuse before update on interlock.tasks_0 for each row
            execute function refuse()""")
    items: list[dict[str, Any]] = [
        fence(claim) | {"status": "Completed", "result": n} for n, claim in enumerate(claims)
    ]
    items[3] |= {"result": "\x00"}
    before = aside("complete")
    answer = await still.worker("POST", "/internal/task-complete", json={"items": items})
    assert answer.status_code == 200, answer.text
    reply = answer.json()
    assert (reply["accepted"], [r["task_id"] for r in reply["refused"]]) == (4, [claims[3]["task_id"]])
    assert reply["refused"][0]["code"] == "bad_result"
    assert aside("complete") == before + 1
    group = {name: claims[3][name] for name in ("attempt", "lease_token")} | {"run_id": run["run_id"]}
    grouped = [group | {"indexes": [3], "results": ["\x00"]}]
    reply = (await still.worker("POST", "/internal/task-complete", json={"items": [], "groups": grouped})).json()
    assert [r["code"] for r in reply["refused"]] == ["bad_result"]
    beats = [fence(claims[3])]
    assert (await still.worker("POST", "/internal/task-heartbeat", json={"items": beats})).json()["items"]


# Dead letters


async def test_reconciler_revives_a_queued_task_whose_message_died(still: System, clock: ManualClock) -> None:
    run = await still.submit(list(range(4)))
    alone = await still.submit([1], runtime="spark")
    await deploy(still, source_job(kind="manual"))
    assert (await still.user("POST", "/v1/dags/feeds/jobs/src/events", json={"events": [{"payload": 1}]})).is_success
    await make_tasks(still)
    assert (
        await still.value(
            "with d as (update interlock.queue_messages set dead_at = interlock.clock() returning 1) "
            "select count(*) from d"
        )
        == 3
    )
    (task_id,) = await still.task_ids(alone["run_id"])
    await still.receive("spark")
    explained = (await still.user("GET", f"/v1/tasks/{task_id}/explain")).json()
    assert "reconciler" in explained["detail"]
    assert await still.receive(max_messages=10) == []
    clock.advance(120)
    assert await still.pass_of("reconciler") == 6
    claimed = 0
    for queue in ("platform", "spark"):
        for message in await still.receive(queue, max_messages=10):
            claimed += (await still.claim(message["body"]["task_id"]))["status"] == "Claimed"
    assert claimed == 6
    assert await still.pass_of("reconciler") == 0
    await still.settle()
    assert (await still.run(run["run_id"]))["counts"]["Running"] == 4


async def test_doctor_shows_dead_letters(still: System) -> None:
    async def found() -> tuple[Result, str, str | None]:
        (finding,) = [f for f in await stores(still.kernel.settings) if f.check == "dead letters"]
        return finding.result, finding.detail, finding.advice

    assert await found() == (Result.OK, "none in the task queues", None)
    await still.submit([1])
    await still.value("update interlock.queue_messages set dead_at = interlock.clock()")
    result, detail, advice = await found()
    assert (result, detail) == (Result.WARN, "1 in 'platform'")
    assert advice is not None
    assert "interlock queue dead-letters platform" in advice
