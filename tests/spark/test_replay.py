"""A replay end to end: commands over HTTP, the archive, a Spark worker that reads it, and the bus that sends them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from interlock.cli.app import execute
from tests.spark.spark_workers import LITTLE_JAVA, Bench, opened, working
from tests.support.bus_services import PRODUCER, TARGET, Bus, fresh
from tests.support.bus_services import opened as bus_of
from tests.support.deployment import Process
from tests.support.system import System, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("spark-worker")]

RATE = 4
PAID, MAILED, OTHER = "pay", "mail", "ping"


@pytest.fixture(scope="module")
async def bench(shared: System, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    async with opened(shared, tmp_path_factory.mktemp("operators")) as bench:
        yield bench


@pytest.fixture(scope="module")
async def site(bench: Bench) -> AsyncIterator[Bus]:
    """Lanes with archived commands, and a Spark worker that can read the archive."""
    bus = await bus_of(bench.system)
    await bus.lane(PAID, dedupe_mode="strict")
    for name in (MAILED, OTHER):
        await bus.lane(name)
    async with working(bench.worker(spark_conf=LITTLE_JAVA)):
        yield bus


@pytest.fixture
def process(site: Bus, tmp_path: Path) -> Process:
    settings = site.system.kernel.settings
    assert settings.state_url is not None
    environment = {
        "state_url": settings.state_url.get_secret_value(),
        "objects_url": settings.objects_root,
        "keys_dir": str(settings.signing_keys_dir),
        "relay_seconds": "0.05",
        "archive_seconds": "0.2",
    }
    return Process("bus", ["bus", "--dir", str(tmp_path / "bus")], environment, tmp_path / "bus.stderr")


async def sent(bus: Bus, name: str, count: int) -> list[str]:
    ids = [fresh() for _ in range(count)]
    results = await bus.batch([bus.message(name, command_id=each, payload={"for": each}) for each in ids])
    assert {result["outcome"] for result in results} <= {"delivered", "pending"}
    return ids


async def replay(bus: Bus, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Runs the command like an operator, in a thread, since it has its own event loop."""
    monkeypatch.setenv("INTERLOCK_GATEWAY_URL", bus.system.gateway_url)
    monkeypatch.setenv("INTERLOCK_API_KEY", bus.system.admin_key)
    code = await asyncio.to_thread(execute, ["replay", *words, "-o", "json"])
    printed = capsys.readouterr()
    assert code == 0, printed.out + printed.err
    # Other processes of the test log to the same stream.
    return json.loads(printed.out[printed.out.index("{\n") :])


async def ended(bus: Bus, replay_id: str) -> dict[str, Any]:
    async def state() -> dict[str, Any] | None:
        found: dict[str, Any] = (await bus.system.user("GET", f"/v1/replays/{replay_id}")).json()
        return found if found["ended_at"] is not None else None

    found: dict[str, Any] = await until(state, seconds=200)
    return found


async def decided(bus: Bus) -> bool:
    return bool(await bus.system.value("select not exists (select 1 from interlock.bus_handoffs)"))


async def of(bus: Bus, name: str) -> dict[str, list[dict[str, Any]]]:
    """Returns the messages in the queue of a lane, by command."""
    found: dict[str, list[dict[str, Any]]] = {}
    for message in await bus.queue(name):
        found.setdefault(message["metadata"]["id"], []).append(message)
    return found


async def forgotten(bus: Bus) -> None:
    """Expires the ids of all strict commands."""
    await bus.system.value("update interlock.bus_dedupe set expires_at = interlock.clock() - interval '1 second'")


async def test_replay_counts_and_sends_archived_commands_despite_a_crash(
    site: Bus, process: Process, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    early = await sent(site, PAID, 3)
    since = (await site.system.value("select interlock.clock()")).isoformat()
    paid, mailed, other = await sent(site, PAID, 10), await sent(site, MAILED, 3), await sent(site, OTHER, 2)
    until_ = (await site.system.value("select interlock.clock()")).isoformat()
    late = await sent(site, PAID, 2)
    await site.execute("delete from interlock.bus_acls where name = $1", MAILED)
    await site.changed("acls")
    filters = ["--target", TARGET, "--source", PRODUCER, "--since", since, "--until", until_]
    try:
        await process.start()
        await until(lambda: decided(site))
        tried = await replay(site, monkeypatch, capsys, "start", "--reason", "a look", *filters, "--dry-run", "--wait")
        assert (tried["state"], tried["selected"], tried["sent"]) == ("Completed", 15, 0)
        assert all(len(messages) == 1 for messages in (await of(site, PAID)).values())
        assert await process.stop() == 0

        await forgotten(site)
        rotated = await site.system.user("POST", "/v1/service-keys", json={"service": PRODUCER})
        assert rotated.json()["version_id"] == "hmac-v2"
        words = ["--reason", "the till was down", "--name", PAID, *filters, "--rate", str(RATE)]
        asked = await replay(site, monkeypatch, capsys, "start", *words)
        await process.start("replay.sent=kill*1")
        await process.killed_itself()
        halfway = (await site.system.user("GET", f"/v1/replays/{asked['replay_id']}")).json()
        assert (halfway["state"], halfway["selected"], halfway["sent"]) == ("Sending", 10, RATE)
        # Two minutes later.
        await site.system.value("update interlock.bus_replays set due_at = interlock.clock()")
        await process.start()
        done = await ended(site, asked["replay_id"])
        assert (done["state"], done["selected"], done["sent"], done["failed"]) == ("Completed", 10, 10, 0)
        assert (done["operator"], done["reason"]) == ("root", "the till was down")
        await until(lambda: decided(site))
        await _sent_once_more(site, paid, set(early + late), asked["replay_id"])
        assert (len(await of(site, OTHER)), len(await of(site, MAILED))) == (len(other), len(mailed))
        assert await process.stop() == 0
    finally:
        await process.give_up()


async def _sent_once_more(site: Bus, replayed: list[str], others: set[str], replay_id: str) -> None:
    found = await of(site, PAID)
    assert {command_id for command_id, messages in found.items() if len(messages) == 1} == others
    for command_id in replayed:
        first, again = found[command_id]
        assert again["command"] == first["command"]
        marks = {"replayed": True, "replay_id": replay_id, "replay_reason": "the till was down"}
        assert marks.items() <= again["metadata"].items()
        assert (first["metadata"]["version_id"], again["metadata"]["version_id"]) == ("hmac-v1", "hmac-v2")
        assert again["metadata"]["hmac"] != first["metadata"]["hmac"]
        moments = [datetime.fromisoformat(each["metadata"]["timestamp"]) for each in (first, again)]
        assert moments[0] < moments[1]
        events = await site.events(command_id)
        assert [(e["event"], e.get("replay"), e.get("replay_id"), e.get("replay_reason")) for e in events] == [
            ("snavio.command.delivered", None, None, None),
            ("snavio.command.delivered", True, replay_id, "the till was down"),
        ]
    # Sent as signed, in batches, and within the requested rate, including the batch that was killed.
    seconds = sorted({found[each][1]["metadata"]["timestamp"] for each in replayed})
    batches = Counter(found[each][1]["metadata"]["timestamp"] for each in replayed)
    assert max(batches.values()) <= RATE
    spans = [datetime.fromisoformat(each) for each in seconds]
    assert (spans[-1] - spans[0]).total_seconds() >= len(seconds) - 1.2


async def test_replay_respects_strict_idempotency_and_revoked_acls(
    site: Bus, process: Process, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    await site.lane("once", dedupe_mode="strict")
    await site.lane("revoked")
    paid, refused = await sent(site, "once", 4), await sent(site, "revoked", 3)
    await site.revoke("revoked")
    try:
        await process.start()
        await until(lambda: decided(site))
        ids = [word for each in paid + refused for word in ("--command-id", each)]
        words = ["--reason", "again", *ids, "--rate", "100", "--wait"]
        done = await replay(site, monkeypatch, capsys, "start", *words)
        assert (done["state"], done["selected"]) == ("Completed", 7)
        assert (done["sent"], done["failed"]) == (4, 3)
        await until(lambda: decided(site))
        assert [len(messages) for messages in (await of(site, "once")).values()] == [1] * 4
        for command_id in paid:
            again = (await site.events(command_id))[-1]
            assert (again["event"], again["dedupe_mode"]) == ("snavio.command.duplicate", "strict")
            assert (again["replay"], again["replay_id"], again["replay_reason"]) == (True, done["replay_id"], "again")
        for command_id in refused:
            again = (await site.events(command_id))[-1]
            assert (again["event"], again["reason"]) == ("snavio.command.failed", "acl-deny")
            assert (again["replay"], again["replay_id"], again["replay_reason"]) == (True, done["replay_id"], "again")
        assert await process.stop() == 0
    finally:
        await process.give_up()
