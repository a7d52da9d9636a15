"""Runs of staged lists: accepted lists, the tasks created from them, and refusals that name the bad line."""

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

from interlock.wire.access import KeyRequest, Role
from tests.conftest import copied
from tests.support.staged_lists import Intake, intake


@pytest.fixture(scope="module")
async def site(postgres_url: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Intake]:
    """An intake where runs of 50 tasks have their own shard."""
    async with (
        copied(postgres_url, template) as url,
        intake(url, tmp_path_factory.mktemp("ingest"), shard_threshold=50, range_size=10) as started,
    ):
        yield started


def lines(count: int) -> bytes:
    return b"".join(b'{"n": %d}\n' % n for n in range(count))


@pytest.mark.parametrize("count", [1, 49, 50, 1234])
async def test_every_line_becomes_a_task_that_can_be_claimed(site: Intake, count: int) -> None:
    run = await site.ingested(lines(count))
    assert (run["state"], run["total"], run["counts"]["Queued"]) == ("Running", count, count)
    assert await site.payloads(run["run_id"]) == {n: {"n": n} for n in range(count)}
    assert await site.indexes_of_messages(run["run_id"]) == list(range(count))
    assert (await site.shard(run["run_id"]) == 0) == (count < 50)


TEXTS = ["https://example.com/1", 'a "quoted" one', "back\\slash", "tab\there", "é ☃ 𝄞", "0", "null"]


async def test_each_line_of_plain_text_is_a_payload(site: Intake) -> None:
    run = await site.ingested("\n".join(TEXTS).encode(), form="lines")
    assert await site.payloads(run["run_id"]) == dict(enumerate(TEXTS))


async def test_each_csv_record_is_an_object_with_header_names(site: Intake) -> None:
    table = b'id,"a ""name""",note\r\n1,x,"two\nlines, and a comma"\r\n2,"",\r\n'
    run = await site.ingested(table, form="csv")
    assert await site.payloads(run["run_id"]) == {
        0: {"id": "1", 'a "name"': "x", "note": "two\nlines, and a comma"},
        1: {"id": "2", 'a "name"': "", "note": ""},
    }


@pytest.mark.parametrize("packed", ["gzip", "zstd"])
async def test_compressed_list_is_decompressed(site: Intake, packed: str) -> None:
    content = pa.Codec(packed).compress(lines(300), asbytes=True) if packed == "zstd" else gzip.compress(lines(300))
    run = await site.ingested(content)
    assert await site.payloads(run["run_id"]) == {n: {"n": n} for n in range(300)}


async def test_parts_form_one_list_with_continuous_line_numbers(site: Intake) -> None:
    run = await site.ingested(lines(60), gzip.compress(lines(70)), b"", b"1\n2")
    payloads = await site.payloads(run["run_id"])
    expected = [{"n": n} for n in range(60)] + [{"n": n} for n in range(70)] + [1, 2]
    assert [payloads[index] for index in sorted(payloads)] == expected
    assert sorted(payloads) == list(range(132))


async def test_byte_order_mark_mixed_line_ends_and_blank_lines_make_no_tasks(site: Intake) -> None:
    run = await site.ingested(b'\xef\xbb\xbf{"a": 1}\r\n\n\r\n[2]\n3\r\n\n')
    assert await site.payloads(run["run_id"]) == {0: {"a": 1}, 3: [2], 4: 3}
    assert run["total"] == 3


async def test_empty_list_is_a_completed_run(site: Intake) -> None:
    run = await site.ingested(b"")
    assert (run["state"], run["total"], run["ended_at"] is not None) == ("Completed", 0, True)


BAD = {
    "line 3 is no JSON": (b'1\n2\n{"a":\n4\n', "jsonl", "Line 3 cannot be stored: it is not JSON"),
    "line 2 is nested too deep": (b"1\n" + b"[" * 90_000 + b"]" * 90_000 + b"\n", "jsonl", "is not JSON|nested"),
    "a line is too long": (b"1\n" + b"2" * 300_000 + b"\n3\n", "jsonl", "Line 2 has more than 262144 bytes"),
    "one line has no end": (b"1\n" + b"2" * 9_000_000, "jsonl", "Line 2 has more than 262144 bytes"),
    "a line is not UTF-8": (b"one\ntwo\n\xff\xfe\nfour", "lines", "Line 3 is not UTF-8"),
    "all of it is UTF-16": ("one\ntwo".encode("utf-16"), "lines", "UTF-16"),
    "gzip is cut off": (gzip.compress(lines(5000))[:-9], "jsonl", "is not a complete gzip file"),
    "gzip is spoilt": (b"\x1f\x8b" + b"x" * 100, "jsonl", "is not a complete gzip file"),
    "a record has too few values": (b"a,b\n1,2\n3\n", "csv", "Record 2 has 1 values"),
    "a column is named twice": (b"a,a\n1,2\n", "csv", "must name every column once"),
    "CSV has no names": (b"", "csv", "must name every column"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
async def test_bad_list_fails_its_run_with_the_line(site: Intake, bad: str, *, large: bool) -> None:
    content, form, reason = BAD[bad]
    if large and form == "jsonl" and not bad.startswith("gzip"):
        content = lines(60) + content
        reason = reason.replace("Line 2", "Line 62").replace("Line 3", "Line 63")
    dead = await site.system.kernel.tasks.queue.dead_letter_count("ingest")
    run = await site.ingested(content, form=form)
    assert run["state"] == "Failed"
    assert re.search(reason, run["reason"]), run["reason"]
    assert await site.payloads(run["run_id"]) == {}
    assert await site.system.kernel.tasks.queue.dead_letter_count("ingest") == dead + 1
    shard = await site.shard(run["run_id"])
    assert shard == 0 or await site.system.value(f"select to_regclass('interlock.tasks_{shard}')") is None


async def test_list_with_a_wrong_checksum_fails(site: Intake) -> None:
    source = {"upload_id": await site.upload(lines(60)), "sha256": "0" * 64}
    reply = await site.system.user("POST", "/v1/jobs", json={"operator": "echo", "source": source})
    await site.drain()
    run = await site.system.run(reply.json()["run_id"])
    assert (run["state"], "sha256" in run["reason"]) == ("Failed", True)
    assert await site.payloads(run["run_id"]) == {}


@pytest.mark.parametrize("change", ["replaced", "truncated", "removed"])
async def test_list_that_is_changed_after_the_submission_fails(site: Intake, change: str) -> None:
    accepted = await site.submit(lines(60))
    prefix = await site.system.value(
        "select source ->> 'prefix' from interlock.ingests where run_id = $1::text::uuid", accepted["run_id"]
    )
    objects = site.system.kernel.access.objects
    if change == "removed":
        await objects.delete(f"{prefix}00001")
    else:
        await objects.put(f"{prefix}00001", lines(60 if change == "replaced" else 59).replace(b"0", b"1"))
    await site.drain()
    run = await site.system.run(accepted["run_id"])
    assert (run["state"], run["reason"].startswith("Part 1")) == ("Failed", True)


# Accepted requests


async def test_long_list_in_the_request_is_ingested(site: Intake) -> None:
    tasks = [{"n": n, "text": "two\nlines"} for n in range(1500)]
    body = json.dumps({"operator": "echo", "tasks": tasks}, indent=1).encode()
    reply = await site.system.user(
        "POST", "/v1/jobs", content=body, headers={"Content-Type": "application/json", "Idempotency-Key": "long"}
    )
    assert (reply.status_code, reply.json()["state"], reply.json()["total"]) == (202, "Ingesting", None)
    await site.drain()
    again = await site.system.user(
        "POST", "/v1/jobs", content=body, headers={"Content-Type": "application/json", "Idempotency-Key": "long"}
    )
    assert (again.status_code, again.json()) == (202, reply.json())
    assert await site.payloads(reply.json()["run_id"]) == dict(enumerate(tasks))


async def test_short_list_is_ingested_in_the_background_on_request(site: Intake) -> None:
    reply = await site.system.user("POST", "/v1/jobs", json={"operator": "echo", "tasks": [1], "async": True})
    assert (reply.status_code, reply.json()["status_url"]) == (202, f"/v1/jobs/{reply.json()['job_id']}")
    await site.drain()
    assert await site.payloads(reply.json()["run_id"]) == {0: 1}


async def test_tasks_of_a_large_run_are_claimed_and_the_run_ends(site: Intake) -> None:
    run = await site.ingested(lines(60), scaling={"key": "/n", "max_concurrency_per_key": 1})
    for first in range(0, 60, 10):
        batch = await site.system.claim_many(run_id=run["run_id"], start=first, end=first + 9)
        for claim in batch["claims"]:
            assert (await site.system.complete(claim)).status_code == 200
    await site.system.settle()
    ended = await site.system.run(run["run_id"])
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
async def test_invalid_submission_is_refused(site: Intake, what: str) -> None:
    body, status, code = REFUSED[what]
    reply = await site.system.user("POST", "/v1/jobs", json={"operator": "echo"} | body)
    assert (reply.status_code, reply.json()["code"]) == (status, code)


async def test_upload_with_a_missing_part_is_refused(site: Intake) -> None:
    upload = (await site.system.user("POST", "/v1/uploads", json={"parts": 2})).json()
    await site.system.http.put(upload["parts"][0]["url"], content=b"1\n")
    body = {"operator": "echo", "source": {"upload_id": upload["upload_id"]}}
    reply = await site.system.user("POST", "/v1/jobs", json=body)
    assert (reply.status_code, reply.json()["code"]) == (409, "upload_incomplete")
    await site.system.http.put(upload["parts"][1]["url"], content=b"2\n")
    assert (await site.system.user("POST", "/v1/jobs", json=body)).status_code == 202
    await site.drain()


async def test_other_org_reaches_neither_upload_nor_open_run(site: Intake) -> None:
    org = await site.system.kernel.access.principals.create_org("strangers")
    key = (
        await site.system.kernel.access.principals.create_key(
            KeyRequest(user="them", role=Role.ADMIN), org.org_id, granted_by=None
        )
    ).key
    source = {"upload_id": await site.upload(lines(3))}
    reply = await site.system.user("POST", "/v1/jobs", key=key, json={"operator": "echo", "source": source})
    assert reply.status_code == 404
    opened = (await site.system.user("POST", "/v1/jobs", json={"operator": "echo", "open": True})).json()
    for path, body in (("tasks", {"tasks": [1]}), ("close", None)):
        reply = await site.system.user("POST", f"/v1/jobs/{opened['job_id']}/{path}", key=key, json=body)
        assert reply.status_code == 404


# Open runs


async def test_open_run_accepts_tasks_until_closed_and_ends_with_the_last(site: Intake) -> None:
    opened = await site.system.user("POST", "/v1/jobs", json={"operator": "echo", "open": True, "tasks": [0, 1, 2]})
    assert (opened.status_code, opened.json()["state"]) == (202, "Ingesting")
    job, run_id = opened.json()["job_id"], opened.json()["run_id"]
    added = await site.system.user("POST", f"/v1/jobs/{job}/tasks", json={"tasks": list(range(3, 25))})
    assert (added.status_code, added.json()["first_index"], added.json()["added"]) == (201, 3, 22)
    assert await site.indexes_of_messages(run_id) == list(range(25))
    for first in range(0, 25, 10):
        batch = await site.system.claim_many(run_id=run_id, start=first, end=first + 9)
        for claim in batch["claims"]:
            assert (await site.system.complete(claim)).status_code == 200
    await site.system.settle()
    run = await site.system.run(run_id)
    assert (run["state"], run["total"], run["counts"]["Completed"]) == ("Ingesting", None, 25)
    closed = await site.system.user("POST", f"/v1/jobs/{job}/close")
    assert (closed.status_code, closed.json()["state"], closed.json()["total"]) == (200, "Completed", 25)
    assert (await site.system.user("POST", f"/v1/jobs/{job}/close")).json()["state"] == "Completed"
    late = await site.system.user("POST", f"/v1/jobs/{job}/tasks", json={"tasks": [1]})
    assert (late.status_code, late.json()["code"]) == (409, "run_closed")


async def test_concurrent_calls_add_each_task_once_with_its_own_index(site: Intake) -> None:
    opened = (await site.system.user("POST", "/v1/jobs", json={"operator": "echo", "open": True})).json()
    target = f"/v1/jobs/{opened['job_id']}/tasks"

    async def add(number: int) -> None:
        body = {"tasks": [[number % 10, n] for n in range(7)]}
        reply = await site.system.user("POST", target, json=body, headers={"Idempotency-Key": f"add {number % 10}"})
        assert reply.status_code == 201, reply.text

    await asyncio.gather(*(add(number) for number in range(20)))
    payloads = await site.payloads(opened["run_id"])
    assert sorted(payloads) == list(range(70))
    assert sorted(payloads.values()) == [[number, n] for number in range(10) for n in range(7)]
    assert set(await site.indexes_of_messages(opened["run_id"])) == set(range(70))


async def test_open_run_may_be_closed_without_a_task(site: Intake) -> None:
    opened = (await site.system.user("POST", "/v1/jobs", json={"operator": "echo", "open": True})).json()
    closed = await site.system.user("POST", f"/v1/jobs/{opened['job_id']}/close")
    assert (closed.json()["state"], closed.json()["total"]) == ("Completed", 0)
