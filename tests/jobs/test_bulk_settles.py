"""After any fault, the counts match the ledger, the receipt verifies, and no work is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from valkey.asyncio import Valkey

from interlock.access import jwt
from interlock.apps.ingest import ingest
from interlock.clock import ManualClock
from interlock.jobs.receipt_verification import digests
from interlock.settings import INGEST_QUEUE
from interlock.stores.embedded import EmbeddedValkey
from interlock.stores.signers import public_key
from tests.support.staged_lists import Intake, intake
from tests.support.system import valkey_is_back

pytestmark = pytest.mark.slow

COUNT = 2000
LINES = b"".join(b'{"n":%d}\n' % n for n in range(COUNT))
Fault = Callable[[Intake, dict[str, Any]], Awaitable[None]]


@pytest.fixture
async def site(state_url: str, tmp_path: Path, clock: ManualClock, valkey: EmbeddedValkey) -> AsyncIterator[Intake]:
    url = await valkey.start()
    async with Valkey.from_url(url) as client:
        await client.flushall()
    async with intake(state_url, tmp_path, clock, shard_threshold=1000, valkey_url=url) as opened:
        yield opened


async def step(site: Intake) -> list[dict[str, Any]]:
    """Returns the groups of tasks that a worker gets from the next messages."""
    return await received(site) or []


async def received(site: Intake) -> list[dict[str, Any]] | None:
    """Returns None if there was no message. A message may refer to tasks that cannot be claimed now."""
    messages = await site.system.receive(max=10)
    ranges = [
        {name: message["body"][name] for name in ("run_id", "start", "end")}
        | {"message": {"queue": "platform"} | {name: message[name] for name in ("message_id", "receipt")}}
        for message in messages
    ]
    if not ranges:
        return None
    reply = await site.system.claim_many(ranges=ranges, tokens=False, grouped=True)
    groups: list[dict[str, Any]] = reply.get("groups", [])
    return groups


async def report(site: Intake, group: dict[str, Any], indexes: list[int]) -> int:
    return await reported(site, [(group, indexes)])


async def report_all(site: Intake, groups: list[dict[str, Any]]) -> None:
    """Reports in one call, as a worker does: after a fault, a group may be a single task."""
    if groups:
        await reported(site, [(group, indexes_of(group)) for group in groups])


async def reported(site: Intake, ended: list[tuple[dict[str, Any], list[int]]]) -> int:
    fences = [{name: group[name] for name in ("run_id", "attempt", "lease_token")} for group, _ in ended]
    results = [{"indexes": indexes, "results": [{}] * len(indexes)} for _, indexes in ended]
    body = {"groups": [fence | result for fence, result in zip(fences, results, strict=True)]}
    reply = await site.system.worker("POST", "/internal/task-complete", json=body)
    accepted: int = reply.json()["accepted"]
    return accepted


def indexes_of(group: dict[str, Any]) -> list[int]:
    return [task[1] for task in group["tasks"]]


async def drained(site: Intake, clock: ManualClock) -> None:
    """Works off all messages. The loops find lost ones once they are old enough."""
    for _ in range(6):
        while (groups := await received(site)) is not None:
            await report_all(site, groups)
        await site.system.settle()
        clock.advance(61)
        await site.system.pass_of("reconciler")
        await site.system.settle()


async def require_complete(site: Intake, run_id: str) -> None:
    run = await site.system.run(run_id)
    ledger = await site.system.value(
        "select sum(rows)::bigint from interlock.ingest_chunks where run_id = $1::text::uuid", run_id
    )
    assert (run["state"], run["total"], run["counts"]["Completed"]) == ("Completed", ledger, ledger)
    assert sorted(await site.payloads(run_id)) == list(range(ledger))
    reply = (await site.system.user("GET", f"/v1/jobs/{run['job_id']}/receipt?run={run_id}")).json()
    signed, receipt = jwt.payload_of(reply["signed"], public_key(reply["key"])), reply["receipt"]
    assert signed is not None
    assert {name: signed[name] for name in receipt} == receipt
    ends = ((index, "Completed") for index in range(ledger))
    assert digests(UUID(run_id), ledger, ends) == (receipt["ids"], receipt["outcomes"])
    assert (receipt["complete"], receipt["completed"]) == (True, ledger)


async def nothing_left(site: Intake) -> None:
    for what in (
        "runs where ended_at is null or delete_requested",
        "ingests where settled_at is null",
        "queue_messages where dead_at is null",
        "outbox",
        "run_deltas",
        "tasks where status in ('Queued', 'Running')",
    ):
        assert not await site.system.value(f"select count(*) from interlock.{what}"), what


async def valkey_flushed(site: Intake, _run: dict[str, Any]) -> None:
    url = site.system.kernel.settings.valkey_url
    assert url is not None
    async with Valkey.from_url(url.get_secret_value()) as client:
        await client.flushall()


async def reported_oddly(site: Intake, _run: dict[str, Any]) -> None:
    """Reports twice, out of order, and beyond the claim."""
    group = (await step(site))[0]
    indexes = indexes_of(group)
    assert await report(site, group, indexes[::-1][:50]) == 50
    assert await report(site, group, indexes) == len(indexes)
    assert await report(site, group, [COUNT + 5, *indexes[:3]]) == 3


async def run_again(site: Intake, run: dict[str, Any]) -> None:
    reply = await site.system.user("POST", f"/v1/jobs/{run['job_id']}/rerun", json={"run": run["run_id"]})
    assert reply.status_code == 202, reply.text
    await site.system.settle()
    await site.drain()


async def paused_and_resumed(site: Intake, run: dict[str, Any]) -> None:
    for verb in ("pause", "resume"):
        assert (await site.system.user("POST", f"/v1/jobs/{run['job_id']}/{verb}")).status_code == 200
        await step(site)


async def a_worker_is_gone(site: Intake, _run: dict[str, Any]) -> None:
    assert await step(site)


@pytest.mark.parametrize("fault", [valkey_flushed, reported_oddly, run_again, paused_and_resumed, a_worker_is_gone])
@pytest.mark.parametrize("limits", [{}, {"max_concurrency": 150}], ids=["", "limited"])
async def test_large_run_ends_complete_after(
    site: Intake, clock: ManualClock, fault: Fault, limits: dict[str, Any]
) -> None:
    run = await site.ingested(LINES, limits=limits, policy={"lease_seconds": 60, "jitter": 0})
    for group in await step(site):
        await report(site, group, indexes_of(group)[:70])
    await fault(site, run)
    await drained(site, clock)
    for each in (await site.system.user("GET", f"/v1/jobs/{run['job_id']}/runs")).json()["runs"]:
        await require_complete(site, each["run_id"])
    await nothing_left(site)


async def test_large_run_ends_complete_after_valkey_is_killed(
    site: Intake, clock: ManualClock, valkey: EmbeddedValkey
) -> None:
    run = await site.ingested(LINES, limits={"max_concurrency": 150})
    held = await step(site)
    await valkey.stop()
    try:
        await report_all(site, held)
        await report_all(site, await step(site))
    finally:
        await valkey.start()
    await valkey_is_back(site.system)
    await drained(site, clock)
    await require_complete(site, run["run_id"])
    await nothing_left(site)


async def test_run_read_by_two_ingest_processes_ends_complete(site: Intake, clock: ManualClock) -> None:
    accepted = await site.submit(LINES)
    async with ingest(site.system.kernel.settings, clock=clock, wait_seconds=0) as others:
        await asyncio.gather(site.pass_of(), *(one.run_once() for one in others[:2]))
        await site.visible()
        await asyncio.gather(site.pass_of(), *(one.run_once() for one in others[:2]))
    assert not await site.system.value("select count(*) from interlock.queue_messages where queue = $1", INGEST_QUEUE)
    await drained(site, clock)
    await require_complete(site, accepted["run_id"])
    await nothing_left(site)


@pytest.mark.parametrize(
    ("content", "count"),
    [
        (b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n", 900), COUNT),
        (LINES.rstrip(b"\n"), COUNT),
        (b"", 0),
    ],
    ids=["BOM and mixed line ends", "no last line end", "empty"],
)
async def test_odd_list_ends_complete(site: Intake, clock: ManualClock, content: bytes, count: int) -> None:
    run = await site.ingested(content)
    await drained(site, clock)
    assert (await site.system.run(run["run_id"]))["total"] == count
    if count:
        await require_complete(site, run["run_id"])
    await nothing_left(site)


async def test_line_of_200_megabytes_fails_its_run_and_leaves_nothing(site: Intake, clock: ManualClock) -> None:
    run = await site.ingested(LINES + b'{"n": "' + b"2" * (200 << 20) + b'"}\n', checked=False)
    assert (run["state"], run["reason"]) == (
        "Failed",
        f"Line {COUNT + 1} has more than 262144 bytes (payload_limit_bytes).",
    )
    await drained(site, clock)
    assert await site.payloads(run["run_id"]) == {}
    await nothing_left(site)


async def test_run_deleted_during_its_ingest_leaves_nothing(site: Intake, clock: ManualClock) -> None:
    accepted = await site.submit(LINES)
    assert (await site.system.user("DELETE", f"/v1/jobs/{accepted['job_id']}")).status_code == 200
    await site.drain()
    await drained(site, clock)
    assert not await site.system.value("select count(*) from interlock.runs")
    await nothing_left(site)
