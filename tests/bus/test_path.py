"""The path of a command through the real gateway and database: what is delivered, what is told, what is kept."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from interlock.bus.packed import unpacked
from interlock.clock import ManualClock
from interlock.errors import Unavailable
from interlock.failpoints import arm, disarm
from tests.bus.producing import signed
from tests.bus.site import NAME, PRODUCER, TARGET, Bus, fresh, opened
from tests.conftest import copied
from tests.sources import deploy
from tests.system import System, running


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


async def test_a_command_is_in_its_targets_queue_once_it_is_answered(bus: Bus) -> None:
    command_id = fresh()
    verdict = await bus.send(bus.message(command_id=command_id, payload={"to": "someone", "é": [1, 2.5]}))
    assert verdict["outcome"] == "delivered"
    (message,) = [m for m in await bus.queue(NAME) if m["metadata"]["id"] == command_id]
    assert message["command"] == {
        "source": f"test/{PRODUCER}",
        "target": TARGET,
        "name": NAME,
        "payload": {"to": "someone", "é": [1, 2.5]},
    }
    (event,) = await bus.events(command_id)
    assert (event["event"], event["path"], event["source"]) == ("snavio.command.delivered", "fast", f"test/{PRODUCER}")
    kept = await bus.system.value("select accepted from interlock.bus_archive order by archive_id desc limit 1")
    assert [each.metadata.id for each in unpacked(kept)] == [command_id]


async def test_each_command_of_a_batch_is_answered_by_itself(bus: Bus) -> None:
    good, bad, unknown = bus.message(), bus.message().replace(b'"n":1', b'"n":2'), bus.message(name="no-such")
    results = await bus.batch([good, bad, b'{"nonsense":true}', unknown])
    assert [result["outcome"] for result in results] == ["delivered", "invalid", "invalid", "failed"]
    assert [result["reason"] for result in results] == [None, "invalid_hmac", "malformed", "route-missing"]


async def test_a_strict_command_is_delivered_once_however_often_it_is_sent(bus: Bus) -> None:
    queue = await bus.lane("strict", dedupe_mode="strict")
    message = bus.message("strict", command_id=(command_id := fresh()))
    assert [r["outcome"] for r in await bus.batch([message, message])] == ["escalated", "escalated"]
    await bus.settle()
    assert (await bus.send(message))["reason"] == "dedupe_required"
    await bus.settle()
    assert len(await bus.queue(queue)) == 1
    assert sorted(await bus.outcomes(command_id)) == ["delivered", "duplicate", "duplicate"]


async def test_the_gateway_knows_a_duplicate_by_itself_once_it_was_delivered(
    bus: Bus, clock_of_bus: ManualClock
) -> None:
    await bus.lane("known", dedupe_mode="strict")
    message = bus.message("known")
    await bus.send(message)
    await bus.settle()
    clock_of_bus.advance(1.5)
    await bus.send(bus.message())
    await bus.looked_after()
    assert (await bus.send(message))["outcome"] == "duplicate"


async def test_an_id_is_free_again_after_its_time(bus: Bus, clock_of_bus: ManualClock) -> None:
    queue = await bus.lane("again", dedupe_mode="strict", dedupe_seconds=30.0)
    command_id = fresh()
    for _ in range(2):
        await bus.send(bus.message("again", command_id=command_id))
        await bus.settle()
        clock_of_bus.advance(31)
    assert len(await bus.queue(queue)) == 2
    assert await bus.outcomes(command_id) == ["delivered", "delivered"]


async def test_a_strict_command_that_was_refused_may_come_again_under_its_id(
    bus: Bus, clock_of_bus: ManualClock
) -> None:
    queue = await bus.lane("narrow", dedupe_mode="strict")
    await bus.limit("narrow", 1, 10.0)
    ids = [fresh(), fresh()]
    for command_id in ids:
        await bus.send(bus.message("narrow", command_id=command_id))
    await bus.settle()
    assert [await bus.outcomes(command_id) for command_id in ids] == [["delivered"], ["failed"]]
    clock_of_bus.advance(10)
    await bus.send(bus.message("narrow", command_id=ids[1]))
    await bus.settle()
    assert [m["metadata"]["id"] for m in await bus.queue(queue)] == ids


async def test_a_strict_limit_admits_its_rate_and_tells_the_others_when_to_come_again(bus: Bus) -> None:
    queue = await bus.lane("limited")
    await bus.limit("limited", 5)
    await bus.refreshed()
    ids = [fresh() for _ in range(8)]
    results = await bus.batch([bus.message("limited", command_id=command_id) for command_id in ids])
    assert {result["reason"] for result in results} == {"token_required"}
    await bus.settle()
    assert len(await bus.queue(queue)) == 5
    failures = [event for i in ids for event in await bus.events(i) if event["event"] == "snavio.command.failed"]
    assert len(failures) == 3
    assert all(f["reason"] == "rate-limit-exceeded" and f["retry_after_ms"] > 0 for f in failures)
    assert all("throttle_until" in failure for failure in failures)


async def test_prefetched_tokens_let_commands_through_at_once_and_count_against_the_limit(bus: Bus) -> None:
    queue = await bus.lane("warm")
    await bus.limit("warm", 60)
    await bus.refreshed()
    cold = await bus.batch([bus.message("warm") for _ in range(4)])
    await bus.looked_after()
    warm = await bus.batch([bus.message("warm") for _ in range(4)])
    assert [result["outcome"] for result in cold] == ["escalated"] * 4
    assert [result["outcome"] for result in warm] == ["delivered"] * 3 + ["escalated"]
    await bus.batch([bus.message("warm") for _ in range(100)])
    await bus.settle()
    assert 54 <= len(await bus.queue(queue)) <= 60


async def test_a_relaxed_limit_lets_through_first_and_refuses_after_it_was_passed(bus: Bus) -> None:
    await bus.lane("relaxed")
    await bus.limit("relaxed", 2, enforcement="relaxed")
    await bus.refreshed()
    first = await bus.batch([bus.message("relaxed") for _ in range(3)])
    await bus.looked_after()
    second = await bus.send(bus.message("relaxed"))
    assert [result["outcome"] for result in first] == ["delivered"] * 3
    assert (second["outcome"], second["reason"]) == ("failed", "rate-limit-exceeded")
    assert second["retry_after_ms"] > 0


async def test_a_shadow_limit_refuses_nobody(bus: Bus) -> None:
    await bus.lane("shadow")
    await bus.limit("shadow", 1, enforcement="shadow")
    await bus.refreshed()
    for _ in range(2):
        results = await bus.batch([bus.message("shadow") for _ in range(3)])
        await bus.looked_after()
        assert {result["outcome"] for result in results} == {"delivered"}


async def test_a_new_route_works_at_once_by_the_slow_stage(bus: Bus, clock_of_bus: ManualClock) -> None:
    clock_of_bus.advance(3)
    await bus.route("brand-new")
    await bus.acl("brand-new")
    verdict = await bus.send(bus.message("brand-new", command_id=(command_id := fresh())))
    assert (verdict["outcome"], verdict["reason"]) == ("escalated", "cache_miss")
    await bus.settle()
    assert await bus.outcomes(command_id) == ["delivered"]
    await bus.looked_after()
    assert (await bus.send(bus.message("brand-new")))["outcome"] == "delivered"


@pytest.mark.parametrize(
    ("age", "outcome"), [(1.0, "delivered"), (3.0, "delivered"), (5.0, "escalated")], ids=["fresh", "stale", "expired"]
)
async def test_a_revoked_acl_works_for_as_long_as_its_sensitivity_allows(
    bus: Bus, clock_of_bus: ManualClock, age: float, outcome: str
) -> None:
    name = f"revoked-{age:g}"
    await bus.lane(name, sensitivity="critical")
    await bus.revoke(name)
    clock_of_bus.advance(age)
    verdict = await bus.send(bus.message(name, command_id=(command_id := fresh())))
    assert verdict["outcome"] == outcome
    await bus.settle()
    await bus.looked_after()
    events = [e for e in await bus.events() if e["event"].endswith("acl_revoked") and e["command.name"] == name]
    assert len(events) == (1 if age == 3.0 else 0)
    if outcome == "escalated":
        assert [e["reason"] for e in await bus.events(command_id)] == ["acl-deny"]
    clock_of_bus.advance(5)
    assert (await bus.send(bus.message(name)))["outcome"] in ("failed", "escalated")


async def test_an_api_key_that_names_no_service_sends_nothing(bus: Bus) -> None:
    reply = await bus.system.user("POST", "/v1/commands", content=bus.message())
    assert reply.status_code == 403


async def test_a_command_cannot_be_sent_as_another_service(bus: Bus) -> None:
    """The secret is the same here, so that only the credential tells them apart."""
    other = await bus.service("audit")
    await bus.refreshed()
    verdict = await bus.send(bus.message(command_id=(command_id := fresh())), key=other)
    assert (verdict["outcome"], verdict["reason"]) == ("failed", "acl-deny")
    assert [event["source"] for event in await bus.events(command_id)] == ["test/audit"]


async def test_the_commands_of_another_org_reach_nothing_here(bus: Bus) -> None:
    rival = await bus.system.kernel.principals.create_org(f"rival-{uuid4().hex[:8]}")
    elsewhere = Bus(System(**{**vars(bus.system), "org_id": rival.org_id}), "")
    key = await elsewhere.service(PRODUCER)
    before = len(await bus.queue(NAME))
    verdict = await elsewhere.send(elsewhere.message(), key=key)
    assert (verdict["outcome"], verdict["reason"]) == ("failed", "route-missing")
    assert len(await bus.queue(NAME)) == before


async def test_a_new_version_of_a_key_is_known_at_its_first_use(bus: Bus, clock_of_bus: ManualClock) -> None:
    key = await bus.service("rotating")
    await bus.acl(NAME, source="rotating")
    clock_of_bus.advance(3)
    verdict = await bus.send(bus.message(), key=key)
    assert verdict["outcome"] in ("delivered", "escalated")


async def test_nothing_is_answered_when_nothing_could_be_written(bus: Bus) -> None:
    async def away() -> None:
        raise Unavailable("The state database is away.")

    before = len(await bus.queue(NAME))
    arm("command.before_commit", away)
    try:
        reply = await bus.system.user("POST", "/v1/commands", key=bus.key, content=bus.message())
    finally:
        disarm("command.before_commit")
    assert reply.status_code == 503
    assert len(await bus.queue(NAME)) == before


async def test_a_slow_stage_whose_store_goes_away_leaves_a_command_as_it_was(bus: Bus) -> None:
    queue = await bus.lane("kept", dedupe_mode="strict")
    await bus.limit("kept", 1)
    await bus.send(bus.message("kept", command_id=(command_id := fresh())))

    async def away() -> None:
        raise Unavailable("The state database is away.")

    arm("slow.before_commit", away)
    try:
        for _ in range(3):
            with pytest.raises(Unavailable):
                await bus.slow().run_once()
    finally:
        disarm("slow.before_commit")
    assert (await bus.queue(queue), await bus.outcomes(command_id)) == ([], [])
    await bus.settle()
    assert await bus.outcomes(command_id) == ["delivered"]


@pytest.mark.parametrize(("table", "reason"), [("bus_acls", "acl-deny"), ("bus_routes", "route-missing")])
async def test_the_slow_stage_takes_an_entry_whose_time_is_over_for_none(
    bus: Bus, clock_of_bus: ManualClock, table: str, reason: str
) -> None:
    name = f"ending-{table[4:]}"
    queue = await bus.lane(name, dedupe_mode="strict")
    await bus.execute(
        f"update interlock.{table} set expires_at = interlock.clock() + interval '1 second' where name = $1", name
    )
    await bus.refreshed()
    assert (await bus.send(bus.message(name, command_id=(command_id := fresh()))))["outcome"] == "escalated"
    clock_of_bus.advance(1)
    await bus.settle()
    assert await bus.queue(queue) == []
    assert [event["reason"] for event in await bus.events(command_id)] == [reason]


async def test_a_producer_that_goes_on_with_the_old_key_is_told_in_telemetry(bus: Bus) -> None:
    key = await bus.service("legacy")
    await bus.acl(NAME, source="legacy")
    await bus.execute(
        "update interlock.bus_keys set expires_at = interlock.clock() + interval '1 hour' where service = 'legacy'"
    )
    await bus.changed("keys")
    await bus.refreshed()
    assert (await bus.send(bus.message(), key=key))["outcome"] == "delivered"
    told = {e["event"]: e for e in await bus.events() if e.get("source") == "test/legacy" and "version_id" in e}
    assert set(told) == {"snavio.secret.legacy_key_used", "snavio.secret.key_expiry_imminent"}
    assert all(event["version_id"] == "hmac-v1" for event in told.values())


async def test_a_handoff_that_breaks_its_batch_holds_up_no_other(bus: Bus) -> None:
    queue = await bus.lane("sound", dedupe_mode="strict")
    await bus.execute(
        "insert into interlock.bus_handoffs (org_id, source, reason, body, facts, received_at)"
        " values ($1, 'test/billing', 'cache_miss', 'no message at all', '{}', interlock.clock())",
        bus.system.org_id,
    )
    await bus.send(bus.message("sound"))
    await bus.slow().run_once()
    assert len(await bus.queue(queue)) == 1
    assert await bus.system.value("select tries from interlock.bus_handoffs") == 1
    await bus.execute("delete from interlock.bus_handoffs")


async def test_a_command_for_a_job_that_is_gone_is_a_delivery_failure(bus: Bus) -> None:
    await bus.lane("orphan", queue=None, dlq=None, dag_name="gone", job_name="nothing")
    verdict = await bus.send(bus.message("orphan", command_id=(command_id := fresh())))
    assert (verdict["outcome"], verdict["reason"]) == ("failed", "delivery-failure")
    assert [event["reason"] for event in await bus.events(command_id)] == ["delivery-failure"]


async def test_a_command_for_a_job_becomes_one_task_of_it_whose_payload_is_the_message(bus: Bus) -> None:
    job = {"name": "by-command", "activation": "source", "source": {"kind": "command"}, "operator": "echo"}
    await deploy(bus.system, job | {"outputs": ["out"]}, dag="asked")
    for name, mode in (("job", "none"), ("strict-job", "strict")):
        await bus.lane(name, queue=None, dlq=None, dag_name="asked", job_name="by-command", dedupe_mode=mode)
        message = bus.message(name, command_id=(command_id := fresh()), payload={"range": [1, 9]})
        for _ in range(2):
            await bus.send(message)
            await bus.settle()
        await bus.system.pass_of("triggers")
        payloads = await _payloads(bus, command_id)
        assert [payload["command"]["payload"] for payload in payloads] == [{"range": [1, 9]}]
        assert payloads[0]["command"]["source"] == f"test/{PRODUCER}"
        assert (await bus.outcomes(command_id))[0] == "delivered"


async def _payloads(bus: Bus, command_id: str) -> list[Any]:
    async with bus.system.kernel.database.connection() as connection:
        rows = await connection.fetch(
            "select payload from interlock.tasks where dedupe_key = $1", f"command:test/{PRODUCER}:{command_id}"
        )
    return [msgspec.json.decode(row["payload"]) for row in rows]


async def test_a_payload_that_no_job_could_store_is_a_delivery_failure_and_spoils_no_other(bus: Bus) -> None:
    job = {"name": "picky", "activation": "source", "source": {"kind": "command"}, "operator": "echo"}
    await deploy(bus.system, job | {"outputs": ["out"]}, dag="picky")
    await bus.lane("picky", queue=None, dlq=None, dag_name="picky", job_name="picky")
    results = await bus.batch([bus.message("picky", payload={"nul": "\0"}), bus.message("picky"), bus.message()])
    assert [result["reason"] for result in results] == ["delivery-failure", None, None]


async def test_an_invalid_command_is_told_with_what_could_be_read_of_it(bus: Bus) -> None:
    now = bus.system.kernel.clock.now().timestamp()
    late = signed(now - 91.4, command_id=(command_id := fresh()))
    assert (await bus.send(late))["reason"] == "expired_timestamp"
    (event,) = await bus.events(command_id)
    assert event["skew_seconds"] == pytest.approx(91.4, abs=0.01)
    assert (event["target"], event["command.name"], event["source"]) == (TARGET, NAME, f"test/{PRODUCER}")


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"null", b"{}", b'{"commands":[]}', b'{"commands":{}}', b'{"metadata":{},"commands":[{}]}', b"\xff"],
)
async def test_a_body_that_is_neither_a_command_nor_a_batch_is_a_bad_request(bus: Bus, body: bytes) -> None:
    reply = await bus.system.user("POST", "/v1/commands", key=bus.key, content=body)
    assert (reply.status_code, reply.json()["code"]) == (400, "invalid_request")


async def test_a_batch_may_have_so_many_and_no_more(bus: Bus) -> None:
    most = bus.system.kernel.settings.command_batch_limit
    body = msgspec.json.encode({"commands": [{}] * (most + 1)})
    reply = await bus.system.user("POST", "/v1/commands", key=bus.key, content=body)
    assert (reply.status_code, reply.json()["code"]) == (413, "batch_too_large")


@pytest.mark.parametrize("odd", [rb"\ud800", rb"\uDFFF", rb"\ud800\ud800", b"\xff"])
async def test_half_a_character_in_one_command_refuses_that_one_alone(bus: Bus, odd: bytes) -> None:
    name = await bus.lane(f"odd-{odd.hex()}")
    good = [bus.message(name, command_id=fresh(), payload={"n": n, "s": "\U0001f682 \\ud800"}) for n in range(3)]
    bad = bus.message(name, command_id=fresh(), payload={"s": "MARK"}).replace(b"MARK", odd)
    results = await bus.batch([good[0], bad, *good[1:]])
    assert [result["outcome"] for result in results] == ["delivered", "invalid", "delivered", "delivered"]
    assert results[1]["reason"] == "malformed"
    await bus.settle()
    assert [message["command"]["payload"]["n"] for message in await bus.queue(name)] == [0, 1, 2]


async def test_half_a_character_in_a_single_command_is_a_verdict_like_any_other(bus: Bus) -> None:
    verdict = await bus.send(bus.message(payload={"s": "MARK"}).replace(b"MARK", rb"\ud800"))
    assert (verdict["outcome"], verdict["reason"]) == ("invalid", "malformed")


async def test_a_batch_that_is_there_twice_is_refused(bus: Bus) -> None:
    message = bus.message(payload={"commands": '"commands"'})
    assert [r["outcome"] for r in await bus.batch([message, message])] != []
    body = b'{"commands":[' + message + b'], "commands":[]}'
    headers = {"Content-Type": "application/json"}
    reply = await bus.system.user("POST", "/v1/commands", key=bus.key, content=body, headers=headers)
    assert (reply.status_code, reply.json()["code"]) == (400, "invalid_request")
    assert "twice" in reply.json()["detail"]
