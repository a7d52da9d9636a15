"""Replays: selection, new signatures, all checks, and the record of each."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from interlock.access.secrets import Seal
from interlock.bus.path.delivery import target_queue
from interlock.bus.registry.loader import RegistryReads
from interlock.bus.replay.archive import Archive
from interlock.bus.replay.requests import ArchiveSelection, selection
from interlock.bus.replay.sender import ReplaySender, _Taken
from interlock.clock import ManualClock
from interlock.wire.bus_messages import ReplayFilters
from tests.conftest import copied
from tests.support.bus_services import NAME, PRODUCER, TARGET, Bus, fresh, opened
from tests.support.system import fence, running


@pytest.fixture(scope="module")
async def clock_of_bus() -> ManualClock:
    return ManualClock()


@pytest.fixture(scope="module")
async def bus(
    postgres_url: str, template: str, clock_of_bus: ManualClock, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Bus]:
    folder: Path = tmp_path_factory.mktemp("bus")
    async with copied(postgres_url, template) as url, running(url, folder, clock_of_bus) as system:
        yield await opened(system)


def _sender(bus: Bus) -> ReplaySender:
    kernel = bus.system.kernel
    archive = Archive(kernel.stores.database, kernel.settings, kernel.access.objects)
    picked = ArchiveSelection(kernel.stores.database, kernel.settings, kernel.access.objects, archive)
    registry = RegistryReads(kernel.stores.database, Seal(kernel.settings.signing_keys_dir))
    return ReplaySender(kernel.stores.database, kernel.settings, picked, registry, kernel.bus.ingress)


async def _ask(bus: Bus, **request: Any) -> dict[str, Any]:
    reply = await bus.system.user("POST", "/v1/replays", json={"reason": "the mailer was down"} | request)
    assert reply.status_code == 201, reply.text
    asked: dict[str, Any] = reply.json()
    return asked


async def _state(bus: Bus, replay_id: str) -> dict[str, Any]:
    found: dict[str, Any] = (await bus.system.user("GET", f"/v1/replays/{replay_id}")).json()
    return found


async def _until_ended(bus: Bus, clock: ManualClock, replay_id: str) -> dict[str, Any]:
    replaying = _sender(bus)
    while True:
        await replaying.run_once()
        found = await _state(bus, replay_id)
        if found["ended_at"] is not None:
            return found
        clock.advance(5)


async def _dead(bus: Bus, name: str, payloads: list[Any], **columns: Any) -> tuple[str, list[str]]:
    """Creates a lane whose delivered commands became dead letters."""
    queue = await bus.lane(name, **columns)
    ids = [fresh() for _ in payloads]
    messages = [bus.message(name, command_id=id_, payload=payload) for id_, payload in zip(ids, payloads, strict=True)]
    await bus.batch(messages)
    await bus.settle()
    await bus.execute(
        "update interlock.queue_messages set dead_at = interlock.clock() where queue = $1",
        target_queue(bus.system.org_id, queue),
    )
    return queue, ids


async def test_dead_letters_are_replayed_and_removed(bus: Bus, clock_of_bus: ManualClock) -> None:
    queue, ids = await _dead(bus, "lost", [{"n": n} for n in range(3)])
    clock_of_bus.advance(600)
    asked = await _ask(bus, origin="dead-letters", filters={"queue": queue})
    ended = await _until_ended(bus, clock_of_bus, asked["replay_id"])
    assert (ended["state"], ended["selected"], ended["sent"], ended["failed"]) == ("Completed", 3, 3, 0)
    assert ended["operator"]
    found = await bus.queue(queue)
    assert [message["metadata"]["id"] for message in found] == ids
    assert [message["command"]["payload"] for message in found] == [{"n": 0}, {"n": 1}, {"n": 2}]
    marks = {key: found[0]["metadata"][key] for key in ("replayed", "replay_id", "replay_reason")}
    assert marks == {
        "replayed": True,
        "replay_id": asked["replay_id"],
        "replay_reason": "the mailer was down",
    }
    first, again = await bus.events(ids[0])
    assert "replay" not in first
    assert (again["replay"], again["replay_id"], again["replay_reason"]) == (
        True,
        asked["replay_id"],
        "the mailer was down",
    )


async def test_dead_letters_with_a_nul_are_replayed_and_unreadable_ones_stay(
    bus: Bus, clock_of_bus: ManualClock
) -> None:
    payloads = [{"a": "x\x00y", "\x00": 1}, {"n": 1}, {"n": 2}]
    queue, ids = await _dead(bus, "nul", payloads)
    broken = """update interlock.queue_messages set body = '{"metadata": {"id": "\\u0000"}}'
                where queue = $1 and body::text like '%"n":1%'"""
    await bus.execute(broken, target_queue(bus.system.org_id, queue))
    clock_of_bus.advance(600)
    since = (clock_of_bus.now() - timedelta(days=1)).isoformat()
    filters = {"queue": queue, "since": since, "name": "nul", "command_ids": ids}
    asked = await _ask(bus, origin="dead-letters", filters=filters)
    ended = await _until_ended(bus, clock_of_bus, asked["replay_id"])
    assert (ended["state"], ended["selected"], ended["sent"], ended["failed"]) == ("Completed", 2, 2, 0)
    found = [message for message in await bus.queue(queue) if "command" in message]
    assert [message["command"]["payload"] for message in found] == [payloads[0], payloads[2]]
    left = "select count(*) from interlock.queue_messages where queue = $1 and dead_at is not null"
    assert await bus.system.value(left, target_queue(bus.system.org_id, queue)) == 1


async def test_dry_run_counts_commands_and_sends_nothing(bus: Bus, clock_of_bus: ManualClock) -> None:
    queue, ids = await _dead(bus, "counted", list(range(4)))
    filters = {"queue": queue, "command_ids": ids[:3], "source": PRODUCER, "target": TARGET, "name": "counted"}
    asked = await _ask(bus, origin="dead-letters", filters=filters, dry_run=True)
    ended = await _until_ended(bus, clock_of_bus, asked["replay_id"])
    assert (ended["state"], ended["selected"], ended["sent"]) == ("Completed", 3, 0)
    none = await _ask(bus, origin="dead-letters", filters={"queue": queue, "source": "nobody"}, dry_run=True)
    assert (await _until_ended(bus, clock_of_bus, none["replay_id"]))["selected"] == 0
    assert len(await bus.queue(queue)) == 4


async def test_replay_keeps_its_rate(bus: Bus, clock_of_bus: ManualClock) -> None:
    queue, _ = await _dead(bus, "slowly", list(range(5)))
    asked = await _ask(bus, origin="dead-letters", filters={"queue": queue}, rate=2)
    replaying, sent = _sender(bus), []
    assert await replaying.run_once() == 1  # the first pass only selects
    for _ in range(4):
        while await replaying.run_once():
            continue
        sent.append((await _state(bus, asked["replay_id"]))["sent"])
        clock_of_bus.advance(1)
    assert sent == [2, 4, 5, 5]
    assert (await _state(bus, asked["replay_id"]))["state"] == "Completed"


async def test_replay_passes_every_check_and_refused_letters_stay(bus: Bus, clock_of_bus: ManualClock) -> None:
    queue, ids = await _dead(bus, "forbidden", ["a"])
    await bus.execute("delete from interlock.bus_routes where name = 'forbidden'")
    await bus.changed("routes")
    await bus.refreshed()
    asked = await _ask(bus, origin="dead-letters", filters={"queue": queue})
    replaying = _sender(bus)
    while await replaying.run_once():
        continue  # a missing entry is looked up again only after a moment, and the clock does not advance
    ended = await _until_ended(bus, clock_of_bus, asked["replay_id"])
    assert (ended["state"], ended["sent"], ended["failed"]) == ("Completed", 0, 1)
    failure = (await bus.events(ids[0]))[-1]
    assert (failure["event"], failure["reason"], failure["replay_id"]) == (
        "snavio.command.failed",
        "route-missing",
        asked["replay_id"],
    )
    assert len(await bus.queue(queue)) == 1


async def test_strict_route_gets_a_replayed_command_once(bus: Bus, clock_of_bus: ManualClock) -> None:
    queue, ids = await _dead(bus, "strictly", ["a"], dedupe_mode="strict")
    asked = await _ask(bus, origin="dead-letters", filters={"queue": queue})
    await _until_ended(bus, clock_of_bus, asked["replay_id"])
    await bus.settle()
    assert await bus.outcomes(ids[0]) == ["delivered", "duplicate"]
    again = (await bus.events(ids[0]))[-1]
    assert (again["replay"], again["replay_id"]) == (True, asked["replay_id"])


async def test_canceled_replay_sends_no_more(bus: Bus, clock_of_bus: ManualClock) -> None:
    queue, _ = await _dead(bus, "stopped", list(range(3)))
    asked = await _ask(bus, origin="dead-letters", filters={"queue": queue}, rate=1)
    replaying = _sender(bus)
    await replaying.run_once()
    await replaying.run_once()
    path = f"/v1/replays/{asked['replay_id']}/cancel"
    assert (await bus.system.user("POST", path)).json()["state"] == "Canceled"
    again = await bus.system.user("POST", path)
    assert (again.status_code, again.json()["code"]) == (409, "replay_ended")
    clock_of_bus.advance(60)
    assert await replaying.run_once() == 0
    assert len(await bus.queue(queue)) == 3
    assert await bus.system.value("select count(*) from interlock.bus_replay_items") == 0


async def test_inconsistent_replay_request_is_refused(bus: Bus) -> None:
    for wrong in (
        {"origin": "archive", "filters": {"queue": "mail"}},
        {"origin": "dead-letters"},
        {"origin": "archive", "filters": {"since": "2026-01-31T12:00:00"}},
        {"origin": "archive", "reason": "two\nlines"},
    ):
        reply = await bus.system.user("POST", "/v1/replays", json={"reason": "why"} | wrong)
        assert (reply.status_code, reply.json()["code"]) == (400, "bad_replay")


async def test_replay_of_the_archive_sends_the_selection_of_spark(bus: Bus, clock_of_bus: ManualClock) -> None:
    """The test completes the task itself; tests/spark runs the real operator."""
    queue = await bus.lane("archived")
    ids = [fresh(), fresh()]
    await bus.batch([bus.message("archived", command_id=each) for each in ids])
    clock_of_bus.advance(600)
    asked = await _ask(bus, origin="archive", filters={"name": "archived", "command_ids": ids[:1]})
    await _sender(bus).run_once()
    task_id = (await _state(bus, asked["replay_id"]))["task_id"]
    claim = await bus.system.claim(task_id)
    payload = (await bus.system.task(task_id))["payload"]
    assert payload["sql"] == selection(ReplayFilters(name="archived", command_ids=[UUID(ids[0])]), None, 100_000)
    assert payload["relations"] == ["bus_commands"]
    data = (await bus.system.worker("POST", "/internal/task-data", json={"items": [fence(claim)]})).json()["items"][0]
    (read,) = data["inputs"]
    assert len(read["files"]) > 0
    row = {"command_id": ids[0], "source": f"test/{PRODUCER}", "target": TARGET, "name": "archived", "payload": "[1]"}
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([row]), sink)
    uri = data["export"]["prefix"] + "part-00000.parquet"
    await bus.system.kernel.access.objects.put(uri, sink.getvalue())
    result = {"prefix": data["export"]["prefix"], "files": [{"uri": uri, "bytes": 1}], "row_count": 1}
    assert (await bus.system.complete(claim, result=result)).status_code == 200
    ended = await _until_ended(bus, clock_of_bus, asked["replay_id"])
    assert (ended["state"], ended["selected"], ended["sent"]) == ("Completed", 1, 1)
    assert [json.dumps(message["command"]["payload"]) for message in await bus.queue(queue)][-1] == "[1]"


async def test_replay_reports_an_unreadable_archive(bus: Bus, clock_of_bus: ManualClock) -> None:
    asked = await _ask(bus, origin="archive", filters={"name": NAME})
    await _sender(bus).run_once()
    task_id = (await _state(bus, asked["replay_id"]))["task_id"]
    assert (await bus.system.user("POST", f"/v1/tasks/{task_id}/cancel")).status_code == 200
    ended = await _until_ended(bus, clock_of_bus, asked["replay_id"])
    assert ended["state"] == "Failed"
    assert "Canceled" in ended["detail"]


async def test_admin_of_another_org_sees_and_cancels_no_replay(bus: Bus) -> None:
    asked = await _ask(bus, origin="archive", dry_run=True)
    name = f"rival-{uuid4().hex[:8]}"
    await bus.system.user("POST", "/v1/orgs", json={"name": name})
    made = await bus.system.user("POST", "/v1/keys", json={"user": "eve", "role": "admin", "org": name})
    stranger = made.json()["key"]
    assert (await bus.system.user("GET", "/v1/replays", key=stranger)).json()["replays"] == []
    for method, path in (("GET", ""), ("POST", "/cancel")):
        reply = await bus.system.user(method, f"/v1/replays/{asked['replay_id']}{path}", key=stranger)
        assert reply.status_code == 404
    await bus.system.user("POST", f"/v1/replays/{asked['replay_id']}/cancel")


async def test_replay_waits_for_commands_being_archived(bus: Bus, clock_of_bus: ManualClock) -> None:
    await bus.send(bus.message())
    await Archive(
        bus.system.kernel.stores.database, bus.system.kernel.settings, bus.system.kernel.access.objects
    ).flush(bus.system.org_id)
    await bus.send(bus.message())
    await bus.execute("update interlock.bus_archives set taken_until = interlock.clock() + interval '1 minute'")
    asked = await _ask(bus, origin="archive", dry_run=True)
    replaying = _sender(bus)
    for _ in range(2):
        assert await replaying.run_once() == 1
        found = await _state(bus, asked["replay_id"])
        assert (found["state"], found["task_id"]) == ("Selecting", None)
        clock_of_bus.advance(5)
    clock_of_bus.advance(60)
    assert await replaying.run_once() == 1
    assert (await _state(bus, asked["replay_id"]))["task_id"] is not None
    assert await bus.system.value("select count(*) from interlock.bus_archive") == 0
    await bus.system.user("POST", f"/v1/replays/{asked['replay_id']}/cancel")


async def test_concurrent_senders_send_each_command_once(bus: Bus, clock_of_bus: ManualClock) -> None:
    queue, ids = await _dead(bus, "contested", list(range(6)))
    asked = await _ask(bus, origin="dead-letters", filters={"queue": queue}, rate=6)
    await _sender(bus).run_once()  # the first pass only selects
    async with bus.system.kernel.stores.database.connection() as connection:
        row = await connection.fetchrow(
            "select * from interlock.bus_replays where replay_id = $1", UUID(asked["replay_id"])
        )
        assert row is not None
    await asyncio.gather(*(_sender(bus)._send(row) for _ in range(4)))
    assert sorted(message["metadata"]["id"] for message in await bus.queue(queue)) == sorted(ids)
    clock_of_bus.advance(5)
    ended = await _until_ended(bus, clock_of_bus, asked["replay_id"])
    assert (ended["sent"], ended["failed"]) == (6, 0)


async def test_cancel_during_a_send_rolls_it_back(bus: Bus) -> None:
    queue, _ = await _dead(bus, "withdrawn", list(range(3)))
    asked = await _ask(bus, origin="dead-letters", filters={"queue": queue}, rate=3)
    await _sender(bus).run_once()
    async with bus.system.kernel.stores.database.connection() as connection:
        row = await connection.fetchrow(
            "select * from interlock.bus_replays where replay_id = $1", UUID(asked["replay_id"])
        )
        assert row is not None
        items = await connection.fetch(
            "select * from interlock.bus_replay_items where replay_id = $1", row["replay_id"]
        )
    await bus.system.user("POST", f"/v1/replays/{asked['replay_id']}/cancel")
    with pytest.raises(_Taken):
        await _sender(bus)._send_again(row, items)
    assert (
        await bus.system.value(
            "select count(*) from interlock.queue_messages where dead_at is null and queue = $1",
            target_queue(bus.system.org_id, queue),
        )
        == 0
    )
