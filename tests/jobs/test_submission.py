"""POST /v1/jobs: submissions are atomic and idempotent, for any content."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from interlock import failpoints
from interlock.clock import ManualClock
from interlock.tasks.shards import run_task_id
from interlock.wire.access import KeyRequest, Role
from tests.support.system import System, running, until

TABLES = ("jobs", "runs", "tasks", "queue_messages", "outbox", "idempotency_keys", "datasets")


async def post(system: System, key: str | None = None, api_key: str | None = None, **body: Any) -> Any:
    headers = {} if key is None else {"Idempotency-Key": key}
    body = {"operator": "echo", "tasks": [1]} | body
    body = {name: value for name, value in body.items() if value is not ...}
    return await system.user("POST", "/v1/jobs", json=body, headers=headers, key=api_key)


async def rows(system: System) -> dict[str, int]:
    return {table: await system.value(f"select count(*) from interlock.{table}") for table in TABLES}


async def other_org(system: System) -> str:
    org = await system.kernel.access.principals.create_org(f"other-{uuid4().hex[:8]}")
    request = KeyRequest(user="them", role=Role.ADMIN)
    return (await system.kernel.access.principals.create_key(request, org.org_id, granted_by=None)).key


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.disarm("submit.before_commit")


async def test_submission_reply_is_exact(still: System) -> None:
    reply = await post(still, tasks=[{"url": "a"}, {"url": "b"}], name="crawl")
    assert reply.status_code == 201
    body = reply.json()
    assert body == {
        "job_id": body["job_id"],
        "run_id": body["run_id"],
        "state": "Running",
        "total": 2,
        "deduplicated": 0,
        "tasks_url": f"/v1/jobs/{body['job_id']}/tasks",
        "status_url": f"/v1/jobs/{body['job_id']}",
    }
    page = (await still.user("GET", body["tasks_url"])).json()
    assert page["next_cursor"] is None
    assert [(t["index"], t["status"], t["attempt"], t["payload"]) for t in page["tasks"]] == [
        (0, "Queued", 1, {"url": "a"}),
        (1, "Queued", 1, {"url": "b"}),
    ]
    assert [t["task_id"] for t in page["tasks"]] == [str(run_task_id(body["run_id"], n)) for n in (0, 1)]
    assert (await still.run(body["run_id"]))["counts"]["Queued"] == 2


async def test_empty_list_is_a_run_that_has_completed(still: System) -> None:
    body = (await post(still, tasks=[])).json()
    assert (body["state"], body["total"]) == ("Completed", 0)
    run = await still.run(body["run_id"])
    assert (run["state"], run["ended_at"] is not None) == ("Completed", True)
    assert await still.receive() == []


async def test_job_shows_its_definition_as_it_was_given(still: System) -> None:
    given: dict[str, Any] = {
        "name": "whole",
        "operator": "pkg.module:function",
        "runtime": "ecs_platform",
        "config": {"b": 1, "a": [None, "é"]},
        "priority": "bulk",
        "policy": {"max_attempts": 5, "backoff_seconds": 2.5, "lease_seconds": 15, "non_retryable": ["Bad"]},
        "scaling": {"max_concurrency": 7, "key": "/host", "max_concurrency_per_key": 2},
    }
    await still.declare("pkg.module:function")
    accepted = (await post(still, **given)).json()
    for address in ("whole", accepted["job_id"]):
        job = (await still.user("GET", f"/v1/jobs/{address}")).json()
        assert {name: job[name] for name in ("name", "operator", "runtime", "config", "priority", "scaling")} == {
            name: given[name] for name in ("name", "operator", "runtime", "config", "priority", "scaling")
        }
        assert job["policy"] | given["policy"] == job["policy"]
        assert job["policy"]["timeout_seconds"] == 3600


# Idempotency


async def test_same_key_and_body_give_the_same_answer_and_one_job(still: System) -> None:
    first, second = await post(still, "k1"), await post(still, "k1")
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.content == second.content
    assert (await rows(still))["jobs"] == 1
    third = await post(still, "k2")
    assert third.json()["job_id"] != first.json()["job_id"]


async def test_same_key_with_another_body_is_a_conflict(still: System) -> None:
    await post(still, "k1")
    reply = await post(still, "k1", tasks=[2])
    assert (reply.status_code, reply.json()["code"]) == (409, "idempotency_key_reused")
    assert (await rows(still))["tasks"] == 1


async def test_key_belongs_to_its_org(still: System) -> None:
    theirs = await other_org(still)
    mine, other = await post(still, "k1"), await post(still, "k1", api_key=theirs, tasks=[2])
    assert (mine.status_code, other.status_code) == (201, 201)
    assert (await rows(still))["jobs"] == 2


async def test_concurrent_requests_with_one_key_create_one_job(still: System) -> None:
    replies = await asyncio.gather(*(post(still, "burst", tasks=[1, 2, 3]) for _ in range(20)))
    assert {reply.status_code for reply in replies} == {201}
    assert len({reply.content for reply in replies}) == 1
    assert (await rows(still))["tasks"] == 3


async def test_concurrent_bodies_with_one_key_have_one_winner(still: System) -> None:
    replies = await asyncio.gather(*(post(still, "burst", tasks=[n % 2]) for n in range(20)))
    assert Counter(reply.status_code for reply in replies) == {201: 10, 409: 10}
    assert (await rows(still))["jobs"] == 1


async def test_idempotency_key_expires(still: System, clock: ManualClock) -> None:
    first = await post(still, "k1")
    clock.advance(24 * 3600 - 1)
    assert (await post(still, "k1")).content == first.content
    clock.advance(2)
    again = await asyncio.gather(*(post(still, "k1", tasks=[5]) for _ in range(5)))
    assert {reply.status_code for reply in again} == {201}
    assert len({reply.json()["job_id"] for reply in again} - {first.json()["job_id"]}) == 1


async def test_refused_request_does_not_use_up_its_key(still: System) -> None:
    assert (await post(still, "k1", runtime="none-such")).status_code == 400
    assert (await post(still, "k1")).status_code == 201


@pytest.mark.parametrize("key", ["", "x" * 256])
async def test_idempotency_key_of_invalid_length_is_refused(shared: System, key: str) -> None:
    assert (await post(shared, key)).status_code == 400


# Named jobs


async def test_named_job_is_posted_to_again(still: System) -> None:
    first = (await post(still, name="crawl", config={"a": 1, "b": 2})).json()
    same = (await post(still, name="crawl", config={"b": 2, "a": 1})).json()
    short = (await post(still, name="crawl", operator=...)).json()
    assert {first["job_id"], same["job_id"], short["job_id"]} == {first["job_id"]}
    assert len({first["run_id"], same["run_id"], short["run_id"]}) == 3
    runs = (await still.user("GET", "/v1/jobs/crawl/runs")).json()["runs"]
    assert [run["run_id"] for run in runs] == [short["run_id"], same["run_id"], first["run_id"]]
    assert len((await still.user("GET", "/v1/tasks?job=crawl")).json()["tasks"]) == 3


async def test_changed_definition_of_a_named_job_must_be_requested(still: System) -> None:
    first = (await post(still, name="crawl", policy={"max_attempts": 3})).json()
    reply = await post(still, name="crawl", policy={"max_attempts": 4})
    assert (reply.status_code, reply.json()["code"]) == (409, "job_differs")
    assert "update" in reply.json()["detail"]
    assert (await rows(still))["runs"] == 1
    updated = (await post(still, name="crawl", policy={"max_attempts": 4}, update=True)).json()
    assert updated["job_id"] == first["job_id"]
    assert (await still.user("GET", "/v1/jobs/crawl")).json()["policy"]["max_attempts"] == 4


async def test_claim_uses_the_current_definition(still: System) -> None:
    old = (await post(still, name="crawl", config={"v": 1}, tasks=[1, 2])).json()
    ids = await still.task_ids(old["run_id"])
    assert (await still.claim(ids[0]))["task"]["config"] == {"v": 1}
    await post(still, name="crawl", config={"v": 2}, update=True)
    assert (await still.claim(ids[1]))["task"]["config"] == {"v": 2}


async def test_name_belongs_to_its_org(still: System) -> None:
    theirs = await other_org(still)
    await post(still, name="crawl")
    assert (await post(still, name="crawl", operator=..., api_key=theirs)).status_code == 404
    assert (await post(still, name="crawl", operator="sleep", api_key=theirs)).status_code == 201
    assert (await still.user("GET", "/v1/jobs/crawl")).json()["operator"] == "echo"


async def test_first_posts_to_one_name_at_once_make_one_job(still: System) -> None:
    replies = await asyncio.gather(*(post(still, name="race", tasks=[n]) for n in range(12)))
    assert {reply.status_code for reply in replies} == {201}
    assert len({reply.json()["job_id"] for reply in replies}) == 1
    assert (await rows(still))["tasks"] == 12


async def test_unknown_name_without_an_operator_reports_what_is_missing(shared: System) -> None:
    reply = await post(shared, name="never-posted", operator=...)
    assert reply.status_code == 404
    assert "operator" in reply.json()["detail"]
    reply = await post(shared, operator=...)
    assert (reply.status_code, reply.json()["code"]) == (400, "operator_missing")


# Dedupe


async def test_dedupe_by_skips_known_items(still: System) -> None:
    tasks = [{"url": "a"}, {"url": "b"}, {"url": "a"}]
    first = (await post(still, name="crawl", tasks=tasks, dedupe_by="/url")).json()
    assert (first["total"], first["deduplicated"]) == (2, 1)
    indexes = [task["index"] for task in (await still.user("GET", f"/v1/tasks?run={first['run_id']}")).json()["tasks"]]
    assert indexes == [0, 1]
    second = (await post(still, name="crawl", tasks=[{"url": "b"}, {"url": "c"}], dedupe_by="/url")).json()
    assert (second["total"], second["deduplicated"]) == (1, 1)
    third = (await post(still, name="crawl", tasks=[{"url": "b"}], dedupe_by="/url")).json()
    assert (third["total"], third["state"]) == (0, "Completed")
    other = (await post(still, name="other", tasks=tasks, dedupe_by="/url")).json()
    assert other["total"] == 2


async def test_gaps_left_by_duplicates_are_claimed_around(still: System) -> None:
    tasks = [{"k": n // 2} for n in range(10)]
    accepted = (await post(still, tasks=tasks, dedupe_by="/k")).json()
    (message,) = await still.receive()
    claims = (await still.claim_many(**message["body"]))["claims"]
    assert [claim["task"]["index"] for claim in claims] == [0, 2, 4, 6, 8]
    for claim in claims:
        await still.complete(claim)
    await still.settle()
    run = await still.run(accepted["run_id"])
    assert (run["state"], run["total"], run["counts"]["Completed"]) == ("Completed", 5, 5)


async def test_posts_at_once_with_the_same_keys_in_any_order_make_each_task_once(still: System) -> None:
    keys = list(range(40))
    orders = [keys[n:] + keys[:n] for n in range(0, 40, 4)] + [keys[::-1]]
    await post(still, name="dedupe", tasks=[], dedupe_by="/k")
    replies = await asyncio.gather(
        *(post(still, name="dedupe", tasks=[{"k": k} for k in order], dedupe_by="/k") for order in orders)
    )
    assert {reply.status_code for reply in replies} == {201}
    assert sum(reply.json()["total"] for reply in replies) == 40
    assert (await rows(still))["tasks"] == 40


@pytest.mark.parametrize(
    ("tasks", "pointer"),
    [
        ([{"url": None}], "/url"),
        ([{}], "/url"),
        ([{"url": {"a": 1}}], "/url"),
        ([{"url": ["a"]}], "/url"),
        ([7], "/url"),
        ([["a"]], "/1"),
        ([{"url": "x" * 1001}], "/url"),
    ],
    ids=["null", "missing", "object", "list", "no object", "beyond the list", "too long"],
)
async def test_payload_without_a_single_value_to_dedupe_by_is_refused(
    still: System, tasks: list[Any], pointer: str
) -> None:
    reply = await post(
        still, tasks=[{"url": "good", "1": 1}, *tasks] if pointer == "/url" else tasks, dedupe_by=pointer
    )
    assert (reply.status_code, reply.json()["code"]) == (400, "bad_pointer"), reply.text
    assert (await rows(still))["jobs"] == 0


@pytest.mark.parametrize(
    ("payload", "pointer", "key"),
    [
        ({"a/b": "x"}, "/a~1b", "x"),
        ({"m~n": 1}, "/m~0n", "1"),
        ({"a": [{"b": True}]}, "/a/0/b", "true"),
        ([["x", 2.5]], "/0/1", "2.5"),
        ({"": "empty"}, "/", "empty"),
    ],
)
async def test_pointer_follows_rfc_6901(still: System, payload: Any, pointer: str, key: str) -> None:
    assert (await post(still, tasks=[payload, payload], dedupe_by=pointer)).json()["deduplicated"] == 1
    assert await still.value("select dedupe_key from interlock.tasks") == key


# Limits and odd values


@pytest.mark.parametrize("limits", [{"sync_threshold": 3, "batch_limit": 3, "payload_limit_bytes": 1024}])
async def test_oversized_submission_gets_413_with_the_limit(
    state_url: str, tmp_path: Path, limits: dict[str, Any]
) -> None:
    async with running(state_url, tmp_path, **limits) as system:
        opened = (await post(system, open=True)).json()
        more = f"/v1/jobs/{opened['job_id']}/tasks"
        reply = await system.user("POST", more, json={"tasks": [1, 2, 3, 4]})
        assert (reply.status_code, reply.json()["code"]) == (413, "too_many_tasks")
        assert "the limit is 3" in reply.json()["detail"]
        assert (await post(system, tasks=[1, 2, 3, 4])).status_code == 202
        reply = await post(system, tasks=[1, "x" * 1023])
        assert (reply.status_code, reply.json()["code"]) == (413, "payload_too_large")
        assert "tasks[1]" in reply.json()["detail"]
        assert (await post(system, tasks=[1, 2, "x" * 1022])).status_code == 201
        assert (await rows(system))["jobs"] == 3


ODD_PAYLOADS: dict[str, str] = {
    "null": "null",
    "false": "false",
    "empty string": '""',
    "empty object": "{}",
    "emoji and astral": '"\U0001f682 \U0010ffff"',
    "escaped pair": r'"\ud83d\ude82"',
    "right to left": '"\u202e\u0627"',
    "huge integer": "9" * 4000,
    "tiny float": "1e-400",
    "exact decimal": "0.1000000000000000055511151231257827",
    "white space": ' {"a" :  [ 1 , 2 ] } ',
    "nested": "[" * 500 + "]" * 500,
}


@pytest.mark.parametrize("name", ODD_PAYLOADS)
async def test_odd_json_values_are_payloads_and_come_back_byte_for_byte(shared: System, name: str) -> None:
    body = '{"operator": "echo", "tasks": [' + ODD_PAYLOADS[name] + "]}"
    reply = await shared.user("POST", "/v1/jobs", content=body.encode())
    assert reply.status_code == 201, reply.text
    (task_id,) = (
        await shared.task_ids(reply.json()["run_id"])
        if name != "huge integer"
        else [str(run_task_id(reply.json()["run_id"], 0))]
    )
    stored = await shared.value("select payload::text from interlock.tasks where task_id = $1", task_id)
    assert stored == ODD_PAYLOADS[name].strip()
    assert f'"payload":{stored}'.encode() in (await shared.user("GET", f"/v1/tasks/{task_id}")).content


@pytest.mark.parametrize("text", [r'"\ud83d"', r'"\ude82\ud83d"', r'"\ud83dx"'])
async def test_half_a_surrogate_pair_is_refused_or_kept_but_never_breaks_a_read(shared: System, text: str) -> None:
    reply = await shared.user("POST", "/v1/jobs", content=f'{{"operator": "echo", "tasks": [{text}]}}'.encode())
    assert reply.status_code in (201, 400), reply.text
    if reply.status_code == 201:
        page = await shared.user("GET", f"/v1/tasks?run={reply.json()['run_id']}")
        assert text.encode() in page.content


async def test_payload_that_is_not_utf_8_is_refused_by_its_place(shared: System) -> None:
    reply = await shared.user("POST", "/v1/jobs", content=b'{"operator": "echo", "tasks": [1, "\xff"]}')
    assert (reply.status_code, reply.json()["code"]) == (400, "bad_payload")
    assert "tasks[1]" in reply.json()["detail"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"runtime": "none-such"}, "unknown_runtime"),
        ({"runtime": "lambda"}, "runtime_without_runner"),
        ({"scaling": {"max_concurrency_per_key": 2}}, "bad_request"),
        ({"policy": {"non_retryable": ["a\x00"]}}, "bad_request"),
        ({"scaling": {"key": "/\x00"}}, "bad_request"),
        ({"name": "line\nbreak"}, "invalid_request"),
        ({"operator": "echo\x00"}, "invalid_request"),
        ({"config": {"a": ["\x00"]}}, "bad_config"),
    ],
)
async def test_invalid_definition_is_refused(shared: System, body: dict[str, Any], code: str) -> None:
    reply = await post(shared, **body)
    assert (reply.status_code, reply.json()["code"]) == (400, code), reply.text


async def test_numbers_in_a_config_survive(shared: System) -> None:
    config = {"big": 2**200, "float": 0.1, "deep": {"a": [[[1]]]}}
    accepted = (await post(shared, config=config)).json()
    reply = await shared.user("GET", f"/v1/jobs/{accepted['job_id']}")
    assert json.loads(reply.content)["config"] == config


# Outputs and orgs


async def test_dataset_belongs_to_the_org_that_names_it_first(still: System) -> None:
    dataset = {"dataset_uuid": str(uuid4()), "dataset_version": str(uuid4())}
    theirs = await other_org(still)
    assert (await post(still, outputs=[dataset])).status_code == 201
    assert (await post(still, outputs=[dataset])).status_code == 201
    reply = await post(still, outputs=[dataset], api_key=theirs)
    assert (reply.status_code, reply.json()["code"]) == (404, "not_found")


async def test_two_orgs_that_name_a_dataset_at_once_have_one_owner(still: System) -> None:
    dataset = {"dataset_uuid": str(uuid4()), "dataset_version": str(uuid4())}
    theirs = await other_org(still)
    held, release = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        failpoints.disarm("submit.before_commit")
        held.set()
        await release.wait()

    async def waits_for_the_first() -> Any:
        return await still.value("select 1 from pg_stat_activity where wait_event_type = 'Lock'")

    failpoints.arm("submit.before_commit", hold)
    mine = asyncio.create_task(post(still, outputs=[dataset]))
    await held.wait()
    other = asyncio.create_task(post(still, outputs=[dataset], api_key=theirs))
    await until(waits_for_the_first)
    release.set()
    assert (await mine).status_code == 201
    assert (await other).status_code == 404
    assert await still.value("select count(*) from interlock.jobs") == 1


async def test_submissions_at_once_that_share_datasets_in_any_order_all_succeed(still: System) -> None:
    datasets = [{"dataset_uuid": str(uuid4()), "dataset_version": str(uuid4())} for _ in range(12)]
    orders = [datasets[n:] + datasets[:n] for n in range(12)]
    replies = await asyncio.gather(*(post(still, outputs=order) for order in orders))
    assert {reply.status_code for reply in replies} == {201}


# All or nothing


@pytest.mark.parametrize("direct", [True, False], ids=["queue", "outbox"])
async def test_submission_that_breaks_before_its_commit_leaves_nothing(
    state_url: str, tmp_path: Path, direct: bool
) -> None:
    async def fail() -> None:
        failpoints.disarm("submit.before_commit")
        raise failpoints.FailpointError("submit.before_commit")

    async with running(state_url, tmp_path, queue_direct=direct) as system:
        failpoints.arm("submit.before_commit", fail)
        output = {"dataset_uuid": str(uuid4()), "dataset_version": str(uuid4())}
        reply = await post(system, "k1", tasks=[1, 2], outputs=[output], name="crawl")
        assert (reply.status_code, reply.json()["code"]) == (500, "internal")
        assert set((await rows(system)).values()) == {0}
        again = await post(system, "k1", tasks=[1, 2], outputs=[output], name="crawl")
        assert again.status_code == 201
        assert (await rows(system))["tasks"] == 2
