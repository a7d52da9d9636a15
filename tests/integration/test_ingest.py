"""Runs of staged lists: what is accepted, what tasks come of it, and what is refused with the line that is wrong."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

from interlock.wire import KeyRequest, Role
from tests.conftest import copied
from tests.ingests import Intake, intake


@pytest.fixture(scope="module")
async def door(postgres_url: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Intake]:
    """Runs of 50 tasks have a shard of their own here."""
    async with (
        copied(postgres_url, template) as url,
        intake(url, tmp_path_factory.mktemp("ingest"), shard_threshold=50, range_size=10) as started,
    ):
        yield started


def lines(count: int) -> bytes:
    return b"".join(b'{"n": %d}\n' % n for n in range(count))


@pytest.mark.parametrize("count", [1, 49, 50, 1234])
async def test_every_line_becomes_a_task_that_can_be_claimed(door: Intake, count: int) -> None:
    run = await door.ingested(lines(count))
    assert (run["state"], run["total"], run["counts"]["Queued"]) == ("Running", count, count)
    assert await door.payloads(run["run_id"]) == {n: {"n": n} for n in range(count)}
    assert await door.indexes_of_messages(run["run_id"]) == list(range(count))
    assert (await door.shard(run["run_id"]) == 0) == (count < 50)


TEXTS = ["https://example.com/1", 'a "quoted" one', "back\\slash", "tab\there", "é ☃ 𝄞", "0", "null"]


async def test_each_line_of_plain_text_is_a_payload_of_its_own(door: Intake) -> None:
    run = await door.ingested("\n".join(TEXTS).encode(), form="lines")
    assert await door.payloads(run["run_id"]) == dict(enumerate(TEXTS))


async def test_each_record_of_csv_is_an_object_by_the_names_of_the_first_line(door: Intake) -> None:
    table = b'id,"a ""name""",note\r\n1,x,"two\nlines, and a comma"\r\n2,"",\r\n'
    run = await door.ingested(table, form="csv")
    assert await door.payloads(run["run_id"]) == {
        0: {"id": "1", 'a "name"': "x", "note": "two\nlines, and a comma"},
        1: {"id": "2", 'a "name"': "", "note": ""},
    }


@pytest.mark.parametrize("packed", ["gzip", "zstd"])
async def test_a_packed_list_is_what_is_in_it(door: Intake, packed: str) -> None:
    content = pa.Codec(packed).compress(lines(300), asbytes=True) if packed == "zstd" else gzip.compress(lines(300))
    run = await door.ingested(content)
    assert await door.payloads(run["run_id"]) == {n: {"n": n} for n in range(300)}


async def test_parts_are_one_list_whose_lines_are_counted_on(door: Intake) -> None:
    run = await door.ingested(lines(60), gzip.compress(lines(70)), b"", b"1\n2")
    payloads = await door.payloads(run["run_id"])
    expected = [{"n": n} for n in range(60)] + [{"n": n} for n in range(70)] + [1, 2]
    assert [payloads[index] for index in sorted(payloads)] == expected
    assert sorted(payloads) == list(range(132))


async def test_a_byte_order_mark_mixed_line_ends_and_blank_lines_make_no_tasks(door: Intake) -> None:
    run = await door.ingested(b'\xef\xbb\xbf{"a": 1}\r\n\n\r\n[2]\n3\r\n\n')
    assert await door.payloads(run["run_id"]) == {0: {"a": 1}, 3: [2], 4: 3}
    assert run["total"] == 3


async def test_an_empty_list_is_a_run_that_has_completed(door: Intake) -> None:
    run = await door.ingested(b"")
    assert (run["state"], run["total"], run["ended_at"] is not None) == ("Completed", 0, True)


BAD = {
    "line 3 is no JSON": (b'1\n2\n{"a":\n4\n', "jsonl", "Line 3 cannot be stored: it is not JSON"),
    "line 2 is nested too deep": (b"1\n" + b"[" * 90_000 + b"]" * 90_000 + b"\n", "jsonl", "is not JSON|nested"),
    "a line is too long": (b"1\n" + b"2" * 300_000 + b"\n3\n", "jsonl", "Line 2 has more than 262144 bytes"),
    "one line has no end": (b"1\n" + b"2" * 9_000_000, "jsonl", "Line 2 has more than 262144 bytes"),
    "a line is not UTF-8": (b"one\ntwo\n\xff\xfe\nfour", "lines", "Line 3 is not UTF-8"),
    "all of it is UTF-16": ("one\ntwo".encode("utf-16"), "lines", "UTF-16"),
    "gzip is cut off": (gzip.compress(lines(5000))[:-9], "jsonl", "no whole gzip"),
    "gzip is spoilt": (b"\x1f\x8b" + b"x" * 100, "jsonl", "no whole gzip"),
    "a record has too few values": (b"a,b\n1,2\n3\n", "csv", "Record 2 has 1 values"),
    "a column is named twice": (b"a,a\n1,2\n", "csv", "name each column, once"),
    "CSV has no names": (b"", "csv", "name each column"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
async def test_a_bad_list_fails_its_run_and_says_where(door: Intake, bad: str, *, large: bool) -> None:
    content, form, reason = BAD[bad]
    if large and form == "jsonl" and not bad.startswith("gzip"):
        content = lines(60) + content
        reason = reason.replace("Line 2", "Line 62").replace("Line 3", "Line 63")
    dead = await door.system.kernel.queue.dead_letter_count("ingest")
    run = await door.ingested(content, form=form)
    assert run["state"] == "Failed"
    assert re.search(reason, run["reason"]), run["reason"]
    assert await door.payloads(run["run_id"]) == {}
    assert await door.system.kernel.queue.dead_letter_count("ingest") == dead + 1
    shard = await door.shard(run["run_id"])
    assert shard == 0 or await door.system.value(f"select to_regclass('interlock.tasks_{shard}')") is None


async def test_a_list_that_is_not_what_its_checksum_says_fails(door: Intake) -> None:
    source = {"upload_id": await door.upload(lines(60)), "sha256": "0" * 64}
    reply = await door.system.user("POST", "/v1/jobs", json={"operator": "echo", "source": source})
    await door.drain()
    run = await door.system.run(reply.json()["run_id"])
    assert (run["state"], "sha256" in run["reason"]) == ("Failed", True)
    assert await door.payloads(run["run_id"]) == {}


@pytest.mark.parametrize("change", ["replaced", "truncated", "removed"])
async def test_a_list_that_is_changed_after_the_submission_fails(door: Intake, change: str) -> None:
    accepted = await door.submit(lines(60))
    prefix = await door.system.value(
        "select source ->> 'prefix' from interlock.ingests where run_id = $1::text::uuid", accepted["run_id"]
    )
    objects = door.system.kernel.objects
    if change == "removed":
        await objects.delete(f"{prefix}00001")
    else:
        await objects.put(f"{prefix}00001", lines(60 if change == "replaced" else 59).replace(b"0", b"1"))
    await door.drain()
    run = await door.system.run(accepted["run_id"])
    assert (run["state"], run["reason"].startswith("Part 1")) == ("Failed", True)


# What is accepted


async def test_a_list_in_the_request_that_is_long_is_accepted_and_made_tasks(door: Intake) -> None:
    tasks = [{"n": n, "text": "two\nlines"} for n in range(1500)]
    body = json.dumps({"operator": "echo", "tasks": tasks}, indent=1).encode()
    reply = await door.system.user(
        "POST", "/v1/jobs", content=body, headers={"Content-Type": "application/json", "Idempotency-Key": "long"}
    )
    assert (reply.status_code, reply.json()["state"], reply.json()["total"]) == (202, "Ingesting", None)
    await door.drain()
    again = await door.system.user(
        "POST", "/v1/jobs", content=body, headers={"Content-Type": "application/json", "Idempotency-Key": "long"}
    )
    assert (again.status_code, again.json()) == (202, reply.json())
    assert await door.payloads(reply.json()["run_id"]) == dict(enumerate(tasks))


async def test_a_short_list_is_made_tasks_in_the_background_when_asked_to(door: Intake) -> None:
    reply = await door.system.user("POST", "/v1/jobs", json={"operator": "echo", "tasks": [1], "async": True})
    assert (reply.status_code, reply.json()["status_url"]) == (202, f"/v1/jobs/{reply.json()['job_id']}")
    await door.drain()
    assert await door.payloads(reply.json()["run_id"]) == {0: 1}


async def test_tasks_of_a_large_run_are_claimed_and_the_run_ends(door: Intake) -> None:
    run = await door.ingested(lines(60), scaling={"key": "/n", "max_concurrency_per_key": 1})
    for first in range(0, 60, 10):
        batch = await door.system.claim_many(run_id=run["run_id"], start=first, end=first + 9)
        for claim in batch["claims"]:
            assert (await door.system.complete(claim)).status_code == 200
    await door.system.settle()
    ended = await door.system.run(run["run_id"])
    assert (ended["state"], ended["counts"]["Completed"]) == ("Completed", 60)


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "no list at all": ({}, 400, "no_list"),
    "two lists": ({"tasks": [], "source": {"upload_id": str(UUID(int=1))}}, 400, "two_lists"),
    "an open run of a list": ({"open": True, "source": {"upload_id": str(UUID(int=1))}}, 400, "two_lists"),
    "an upload that is not there": ({"source": {"upload_id": str(UUID(int=1))}}, 404, "not_found"),
    "deduplication of a long list": ({"open": True, "dedupe_by": "/a"}, 400, "dedupe_of_large_list"),
    "a runtime without a queue": ({"open": True, "runtime": "dispatcher"}, 400, "runtime_without_queue"),
    "a payload that is too long": ({"tasks": ["x" * 300_000], "async": True}, 413, "payload_too_large"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_what_cannot_become_a_run_is_refused(door: Intake, what: str) -> None:
    body, status, code = REFUSED[what]
    reply = await door.system.user("POST", "/v1/jobs", json={"operator": "echo"} | body)
    assert (reply.status_code, reply.json()["code"]) == (status, code)


async def test_an_upload_lacks_a_part_until_it_was_put(door: Intake) -> None:
    upload = (await door.system.user("POST", "/v1/uploads", json={"parts": 2})).json()
    await door.system.http.put(upload["parts"][0]["url"], content=b"1\n")
    body = {"operator": "echo", "source": {"upload_id": upload["upload_id"]}}
    reply = await door.system.user("POST", "/v1/jobs", json=body)
    assert (reply.status_code, reply.json()["code"]) == (409, "upload_incomplete")
    await door.system.http.put(upload["parts"][1]["url"], content=b"2\n")
    assert (await door.system.user("POST", "/v1/jobs", json=body)).status_code == 202
    await door.drain()


async def test_another_org_reaches_neither_upload_nor_open_run(door: Intake) -> None:
    org = await door.system.kernel.principals.create_org("strangers")
    key = (
        await door.system.kernel.principals.create_key(
            KeyRequest(user="them", role=Role.ADMIN), org.org_id, granted_by=None
        )
    ).key
    source = {"upload_id": await door.upload(lines(3))}
    reply = await door.system.user("POST", "/v1/jobs", key=key, json={"operator": "echo", "source": source})
    assert reply.status_code == 404
    opened = (await door.system.user("POST", "/v1/jobs", json={"operator": "echo", "open": True})).json()
    for path, body in (("tasks", {"tasks": [1]}), ("close", None)):
        reply = await door.system.user("POST", f"/v1/jobs/{opened['job_id']}/{path}", key=key, json=body)
        assert reply.status_code == 404


# Open runs


async def test_an_open_run_takes_tasks_until_it_is_closed_and_ends_with_the_last(door: Intake) -> None:
    opened = await door.system.user("POST", "/v1/jobs", json={"operator": "echo", "open": True, "tasks": [0, 1, 2]})
    assert (opened.status_code, opened.json()["state"]) == (202, "Ingesting")
    job, run_id = opened.json()["job_id"], opened.json()["run_id"]
    added = await door.system.user("POST", f"/v1/jobs/{job}/tasks", json={"tasks": list(range(3, 25))})
    assert (added.status_code, added.json()["first_index"], added.json()["added"]) == (201, 3, 22)
    assert await door.indexes_of_messages(run_id) == list(range(25))
    for first in range(0, 25, 10):
        batch = await door.system.claim_many(run_id=run_id, start=first, end=first + 9)
        for claim in batch["claims"]:
            assert (await door.system.complete(claim)).status_code == 200
    await door.system.settle()
    run = await door.system.run(run_id)
    assert (run["state"], run["total"], run["counts"]["Completed"]) == ("Ingesting", None, 25)
    closed = await door.system.user("POST", f"/v1/jobs/{job}/close")
    assert (closed.status_code, closed.json()["state"], closed.json()["total"]) == (200, "Completed", 25)
    assert (await door.system.user("POST", f"/v1/jobs/{job}/close")).json()["state"] == "Completed"
    late = await door.system.user("POST", f"/v1/jobs/{job}/tasks", json={"tasks": [1]})
    assert (late.status_code, late.json()["code"]) == (409, "run_closed")


async def test_calls_at_once_add_each_task_once_under_an_index_of_its_own(door: Intake) -> None:
    opened = (await door.system.user("POST", "/v1/jobs", json={"operator": "echo", "open": True})).json()
    target = f"/v1/jobs/{opened['job_id']}/tasks"

    async def add(number: int) -> None:
        body = {"tasks": [[number % 10, n] for n in range(7)]}
        reply = await door.system.user("POST", target, json=body, headers={"Idempotency-Key": f"add {number % 10}"})
        assert reply.status_code == 201, reply.text

    await asyncio.gather(*(add(number) for number in range(20)))
    payloads = await door.payloads(opened["run_id"])
    assert sorted(payloads) == list(range(70))
    assert sorted(payloads.values()) == [[number, n] for number in range(10) for n in range(7)]
    assert set(await door.indexes_of_messages(opened["run_id"])) == set(range(70))


async def test_an_open_run_may_be_closed_without_a_task(door: Intake) -> None:
    opened = (await door.system.user("POST", "/v1/jobs", json={"operator": "echo", "open": True})).json()
    closed = await door.system.user("POST", f"/v1/jobs/{opened['job_id']}/close")
    assert (closed.json()["state"], closed.json()["total"]) == ("Completed", 0)
