"""Side effects of an attempt: events, outputs, published batches. Each happens once, and only under a valid lease."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from interlock import failpoints
from interlock.clock import ManualClock
from tests.support.dataset_files import marked
from tests.support.system import System, fence, running


def dataset() -> dict[str, str]:
    return {"dataset_uuid": str(uuid4()), "dataset_version": str(uuid4())}


async def held(system: System, *outputs: dict[str, str], **job: Any) -> dict[str, Any]:
    """Claims a task of a job with these outputs."""
    return await system.claim(await system.one(outputs=list(outputs), **job))


async def emit(system: System, claim: dict[str, Any], *events: dict[str, Any]) -> Any:
    body = fence(claim) | {"events": list(events)}
    return await system.attempt("/v1/task/events", claim["capability_token"], body)


async def stored_events(system: System) -> list[dict[str, Any]]:
    async with system.kernel.stores.database.connection() as connection:
        rows = await connection.fetch("select * from interlock.dataset_events order by event_id")
    return [dict(row) for row in rows]


# Events


async def test_cursor_event_is_stored_with_its_producer(still: System) -> None:
    output = dataset()
    claim = await held(still, output)
    reply = await emit(still, claim, output | {"cursor": 12345})
    assert (reply.status_code, reply.json()) == (200, {"accepted": 1})
    (event,) = await stored_events(still)
    assert str(event["dataset_uuid"]) == output["dataset_uuid"]
    assert str(event["dataset_version"]) == output["dataset_version"]
    assert (str(event["org_id"]), str(event["task_id"])) == (str(still.org_id), claim["task_id"])
    assert (event["cursor"], event["partition_key"], event["attempt"]) == (12345, None, 1)


async def test_partition_event_keeps_its_inclusive_range(still: System) -> None:
    output = dataset()
    claim = await held(still, output)
    whole = {"partition_key": "1000000-1010000", "start": 1000000, "end": 1010000}
    assert (await emit(still, claim, output | whole)).json() == {"accepted": 1}
    unnamed = {"start": -5, "end": -5}
    assert (await emit(still, claim, output | unnamed)).json() == {"accepted": 1}
    stored = [(e["partition_key"], e["range_start"], e["range_end"]) for e in await stored_events(still)]
    assert stored == [("1000000-1010000", 1000000, 1010000), ("-5--5", -5, -5)]


async def test_batch_of_events_is_accepted_whole_and_its_repeats_are_counted(still: System) -> None:
    first, second = dataset(), dataset()
    claim = await held(still, first, second)
    events = [first | {"cursor": 1}, second | {"cursor": 1}, first | {"cursor": 2}, first | {"cursor": 1}]
    assert (await emit(still, claim, *events)).json() == {"accepted": 3, "duplicates": 1}
    assert (await emit(still, claim, *events)).json() == {"accepted": 0, "duplicates": 4}
    assert len(await stored_events(still)) == 3


async def test_same_event_from_a_later_attempt_is_the_same_event(still: System, clock: ManualClock) -> None:
    output = dataset()
    first = await held(still, output, policy={"lease_seconds": 30, "backoff_seconds": 0, "jitter": 0})
    await emit(still, first, output | {"cursor": 1})
    clock.advance(31)
    await still.settle()
    second = await still.claim(first["task_id"])
    reply = await emit(still, second, output | {"cursor": 1}, output | {"cursor": 2})
    assert reply.json() == {"accepted": 1, "duplicates": 1}
    assert [(e["cursor"], e["attempt"]) for e in await stored_events(still)] == [(1, 1), (2, 2)]
    other = await held(still, output)
    assert (await emit(still, other, output | {"cursor": 1})).json() == {"accepted": 1}


BAD_SCOPES: list[dict[str, Any]] = [
    {},
    {"cursor": 1, "start": 1, "end": 2},
    {"cursor": 1, "partition_key": "1-2"},
    {"start": 1},
    {"end": 1},
    {"partition_key": "1-2"},
    {"start": 2, "end": 1},
    {"start": 1, "end": 2, "partition_key": "1-3"},
    {"start": 1, "end": 2, "partition_key": "1_2"},
]


@pytest.mark.parametrize("scope", BAD_SCOPES, ids=json.dumps)
async def test_event_without_one_clear_scope_is_refused_with_its_batch(shared: System, scope: dict[str, Any]) -> None:
    output = dataset()
    claim = await held(shared, output)
    reply = await emit(shared, claim, output | {"cursor": 7}, output | scope)
    assert reply.status_code == 400, reply.text
    assert reply.json()["code"] in ("bad_event_scope", "bad_partition")
    count = "select count(*) from interlock.dataset_events where dataset_uuid = $1"
    assert await shared.value(count, output["dataset_uuid"]) == 0


@pytest.mark.parametrize("cursor", [2**62 + 1, -1, 2**63, 1.5, "1", None])
async def test_invalid_cursor_of_an_event_is_refused(shared: System, cursor: Any) -> None:
    output = dataset()
    claim = await held(shared, output)
    assert (await emit(shared, claim, output | {"cursor": cursor})).status_code == 400


async def test_smallest_and_largest_cursor_are_accepted(still: System) -> None:
    output = dataset()
    claim = await held(still, output)
    reply = await emit(still, claim, output | {"cursor": 0}, output | {"cursor": 2**62})
    assert reply.json() == {"accepted": 2}


async def test_events_of_a_dataset_that_is_no_output_of_the_job_are_refused(still: System) -> None:
    output = dataset()
    claim = await held(still, output)
    for foreign in (dataset(), output | {"dataset_version": str(uuid4())}):
        reply = await emit(still, claim, output | {"cursor": 1}, foreign | {"cursor": 1})
        assert (reply.status_code, reply.json()["code"]) == (403, "dataset_not_granted")
    assert await stored_events(still) == []


async def test_events_after_the_lease_was_lost_are_fenced(still: System, clock: ManualClock) -> None:
    output = dataset()
    claim = await held(still, output, policy={"lease_seconds": 30, "backoff_seconds": 600})
    clock.advance(31)
    await still.settle()
    reply = await emit(still, claim, output | {"cursor": 1})
    assert (reply.status_code, reply.json()["code"], reply.json()["stale"]) == (409, "fenced", "status")
    assert await stored_events(still) == []


async def test_same_event_in_concurrent_calls_is_accepted_once(still: System) -> None:
    output = dataset()
    claim = await held(still, output)
    replies = await asyncio.gather(*(emit(still, claim, output | {"cursor": 1}) for _ in range(20)))
    assert {reply.status_code for reply in replies} == {200}
    assert sum(reply.json()["accepted"] for reply in replies) == 1


# Outputs and final events


def place(claim: dict[str, Any]) -> str:
    prefix: str = claim["task"]["outputs"][0]["write_prefix"]
    return f"{prefix}part"


async def test_completion_commits_its_outputs_and_events_together(still: System) -> None:
    first, second = dataset(), dataset()
    claim = await held(still, first, second)
    outputs = [
        first | {"output_index": 0, "location": place(claim), "cursor": 5, "row_count": 1000},
        second | {"output_index": 1, "start": 1, "end": 9} | marked(claim["task"]["outputs"][1]["write_prefix"]),
    ]
    reply = await still.complete(claim, outputs=outputs, events=[first | {"cursor": 5}], error_message=None)
    assert (reply.status_code, reply.json()) == (200, {"task_id": claim["task_id"], "status": "Completed"})
    async with still.kernel.stores.database.connection() as connection:
        rows = await connection.fetch("select * from interlock.output_commits order by output_index")
    assert [json.loads(row["body"]) for row in rows] == [
        {name: value for name, value in output.items() if name != "output_index" or value} for output in outputs
    ]
    assert {(str(row["org_id"]), row["attempt"]) for row in rows} == {(str(still.org_id), 1)}
    assert len(await stored_events(still)) == 1


@pytest.mark.parametrize("status", ["Failed", "Canceled"])
async def test_failed_or_canceled_attempt_commits_nothing(still: System, status: str) -> None:
    output = dataset()
    claim = await held(still, output)
    more: dict[str, Any] = {"outputs": [output | {"location": place(claim)}], "events": [output | {"cursor": 1}]}
    assert (await still.complete(claim, status, **more)).status_code == 200
    assert await stored_events(still) == []
    assert await still.value("select count(*) from interlock.output_commits") == 0


async def test_completion_with_an_invalid_output_does_not_end_the_attempt(still: System) -> None:
    output = dataset()
    claim = await held(still, output)
    good = output | {"location": place(claim)}
    for wrong, status, code in (
        ({"outputs": [good, dataset() | {"location": "s3://b/x"}]}, 403, "dataset_not_granted"),
        ({"outputs": [good, good]}, 400, "duplicate_output"),
        ({"outputs": [good | {"start": 2, "end": 1}]}, 400, "bad_partition"),
        ({"outputs": [good], "events": [output]}, 400, "bad_event_scope"),
        ({"outputs": [output]}, 400, "invalid_request"),
        ({"outputs": [good | {"row_count": -1}]}, 400, "invalid_request"),
    ):
        reply = await still.complete(claim, **wrong)
        assert (reply.status_code, reply.json()["code"]) == (status, code), reply.text
    assert (await still.task(claim["task_id"]))["status"] == "Running"
    assert await still.value("select count(*) from interlock.output_commits") == 0
    assert (await still.complete(claim, outputs=[good])).status_code == 200


async def test_completion_that_fails_before_its_commit_leaves_nothing(still: System) -> None:
    output = dataset()
    claim = await held(still, output)
    more: dict[str, Any] = {"outputs": [output | {"location": place(claim)}], "events": [output | {"cursor": 1}]}

    async def fail() -> None:
        failpoints.disarm("complete.before_commit")
        raise failpoints.FailpointError("complete.before_commit")

    failpoints.arm("complete.before_commit", fail)
    assert (await still.complete(claim, **more)).status_code == 500
    assert (await still.task(claim["task_id"]))["status"] == "Running"
    assert await stored_events(still) == []
    assert (await still.complete(claim, **more)).status_code == 200
    assert len(await stored_events(still)) == 1


async def test_events_sent_before_and_with_the_completion_are_one(still: System) -> None:
    output = dataset()
    claim = await held(still, output)
    await emit(still, claim, output | {"cursor": 1})
    assert (await still.complete(claim, events=[output | {"cursor": 1}, output | {"cursor": 2}])).status_code == 200
    assert [event["cursor"] for event in await stored_events(still)] == [1, 2]


async def test_in_a_batch_each_completion_has_its_own_outputs(still: System) -> None:
    output = dataset()
    accepted = await still.submit([0, 1], outputs=[output])
    claims = (await still.claim_many(run_id=accepted["run_id"], start=0, end=1))["claims"]
    items = [
        fence(claim) | {"status": "Completed", "outputs": [output | {"location": place(claim)}]} for claim in claims
    ]
    reply = await still.worker("POST", "/internal/task-complete", json={"items": items})
    assert reply.json() == {"accepted": 2}
    owners = "select count(distinct task_id) from interlock.output_commits"
    assert await still.value(owners) == 2


# Published batches


def batch(claim: dict[str, Any], name: str = "batch.jsonl", index: int = 0) -> dict[str, Any]:
    grant = claim["task"]["outputs"][index]
    return {
        "dataset_uuid": grant["dataset_uuid"],
        "dataset_version": grant["dataset_version"],
        "batch_uri": grant["buffer_prefix"] + name,
        "record_count": 1000,
    }


async def publish(system: System, claim: dict[str, Any], **body: Any) -> Any:
    return await system.attempt("/v1/task/buffer-publish", claim["capability_token"], fence(claim) | body)


async def test_published_batch_is_a_pointer_in_the_buffer_queue(still: System) -> None:
    claim = await held(still, dataset())
    grant = claim["task"]["outputs"][0]
    root = still.kernel.settings.objects_root
    assert grant["buffer_prefix"] == f"{root}/buffers/{grant['dataset_uuid']}/{claim['task_id']}/1/"
    reply = await publish(still, claim, **batch(claim))
    assert (reply.status_code, set(reply.json())) == (200, {"publish_id"})
    (message,) = await still.receive("buffer")
    assert message["body"] == {
        "kind": "buffer_batch",
        "org_id": str(still.org_id),
        **batch(claim),
        "producer": {"task_id": claim["task_id"], "attempt": 1},
    }


async def test_publishing_a_batch_again_is_the_same_publish_and_one_message(still: System) -> None:
    claim = await held(still, dataset())
    replies = await asyncio.gather(*(publish(still, claim, **batch(claim)) for _ in range(10)))
    assert {reply.status_code for reply in replies} == {200}
    assert len({reply.json()["publish_id"] for reply in replies}) == 1
    assert [reply.json().get("duplicate", False) for reply in replies].count(False) == 1
    other = await publish(still, claim, **batch(claim, "second.jsonl"))
    assert other.json()["publish_id"] != replies[0].json()["publish_id"]
    assert len(await still.receive("buffer")) == 2


async def test_retried_attempt_publishes_under_its_own_prefix(still: System, clock: ManualClock) -> None:
    first = await held(still, dataset(), policy={"lease_seconds": 30, "backoff_seconds": 0, "jitter": 0})
    await publish(still, first, **batch(first))
    clock.advance(31)
    await still.settle()
    second = await still.claim(first["task_id"])
    assert (await publish(still, second, **batch(first))).json()["code"] == "batch_outside_prefix"
    assert (await publish(still, second, **batch(second))).status_code == 200
    late = await publish(still, first, **batch(first, "late.jsonl"))
    assert (late.status_code, late.json()["stale"]) == (409, "attempt")
    assert len(await still.receive("buffer")) == 2


ESCAPES = [
    "../batch.jsonl",
    "a/../../batch.jsonl",
    "..",
    ".",
    "",
    "/batch.jsonl",
    "a//b",
    "./a",
    "a/.",
    "%2e%2e/batch.jsonl",
    "..%2fbatch.jsonl",
    "%252e%252e/x",
    "..\\batch.jsonl",
    "a\\..\\b",
    "*.jsonl",
    "batch?.jsonl",
    "batch.jsonl?versionId=1",
    "a\x00b",
    "a\nb",
    "a\u2028b",
    "a\u200bb",
]


@pytest.mark.parametrize("name", ESCAPES, ids=ascii)
async def test_batch_outside_the_attempts_prefix_is_refused(shared: System, name: str) -> None:
    claim = await held(shared, dataset())
    reply = await publish(shared, claim, **batch(claim, name))
    assert (reply.status_code, reply.json()["code"]) == (403, "batch_outside_prefix"), reply.text


async def test_batch_under_a_foreign_prefix_is_refused(still: System) -> None:
    claim, other = await held(still, dataset(), dataset()), await held(still, dataset())
    own = batch(claim)
    prefix = claim["task"]["outputs"][0]["buffer_prefix"]
    for uri in (
        batch(other)["batch_uri"],
        batch(claim, index=1)["batch_uri"],
        claim["task"]["outputs"][0]["write_prefix"] + "batch.jsonl",
        prefix[:-1] + "0/batch.jsonl",
        prefix[:-1],
        prefix.replace("file://", "s3://") + "batch.jsonl",
        prefix.upper() + "batch.jsonl",
        "batch.jsonl",
        "s3://trace-scratch/buffers/batch.jsonl",
    ):
        reply = await publish(still, claim, **own | {"batch_uri": uri})
        assert (reply.status_code, reply.json()["code"]) == (403, "batch_outside_prefix"), uri
    for wrong in (dataset(), {"dataset_version": str(uuid4())}):
        reply = await publish(still, claim, **own | wrong)
        assert (reply.status_code, reply.json()["code"]) == (403, "dataset_not_granted")
    assert await still.receive("buffer") == []
    assert await still.value("select count(*) from interlock.buffer_publishes") == 0


@pytest.mark.parametrize("wrong", [{"record_count": -1}, {"batch_uri": ""}, {"batch_uri": "x" * 2001}])
async def test_invalid_publish_is_a_bad_request(shared: System, wrong: dict[str, Any]) -> None:
    claim = await held(shared, dataset())
    assert (await publish(shared, claim, **batch(claim) | wrong)).status_code == 400


@pytest.mark.parametrize("direct", [True, False], ids=["queue", "outbox"])
async def test_publish_that_fails_before_its_commit_leaves_nothing(
    state_url: str, tmp_path: Path, direct: bool
) -> None:
    async def fail() -> None:
        failpoints.disarm("publish.before_commit")
        raise failpoints.FailpointError("publish.before_commit")

    async with running(state_url, tmp_path, queue_direct=direct) as system:
        claim = await held(system, dataset())
        failpoints.arm("publish.before_commit", fail)
        assert (await publish(system, claim, **batch(claim))).status_code == 500
        await system.pass_of("relay")
        assert await system.receive("buffer") == []
        assert await system.value("select count(*) from interlock.buffer_publishes") == 0
        assert "duplicate" not in (await publish(system, claim, **batch(claim))).json()
        await system.pass_of("relay")
        assert len(await system.receive("buffer")) == 1
