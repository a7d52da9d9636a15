"""The path of a command through the real gateway and database: delivery, telemetry and stored state."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from interlock.bus.path.delivery import unpacked
from interlock.clock import ManualClock
from interlock.errors import Unavailable
from interlock.failpoints import arm, disarm
from tests.conftest import copied
from tests.support.bus_services import NAME, PRODUCER, TARGET, Bus, fresh, opened
from tests.support.signed_commands import signed
from tests.support.source_dags import deploy
from tests.support.system import System, running


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


async def test_command_is_in_the_target_queue_before_the_reply(bus: Bus) -> None:
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


async def test_each_command_of_a_batch_has_its_own_verdict(bus: Bus) -> None:
    good, bad, unknown = bus.message(), bus.message().replace(b'"n":1', b'"n":2'), bus.message(name="no-such")
    results = await bus.batch([good, bad, b'{"nonsense":true}', unknown])
    assert [result["outcome"] for result in results] == ["delivered", "invalid", "invalid", "failed"]
    assert [result["reason"] for result in results] == [None, "invalid_hmac", "malformed", "route-missing"]


async def test_strict_command_is_delivered_once(bus: Bus) -> None:
    queue = await bus.lane("strict", dedupe_mode="strict")
    message = bus.message("strict", command_id=(command_id := fresh()))
    assert [r["outcome"] for r in await bus.batch([message, message])] == ["pending", "pending"]
    await bus.settle()
    assert (await bus.send(message))["reason"] == "dedupe_required"
    await bus.settle()
    assert len(await bus.queue(queue)) == 1
    assert sorted(await bus.outcomes(command_id)) == ["delivered", "duplicate", "duplicate"]


async def test_gateway_detects_duplicates_of_delivered_commands(bus: Bus, clock_of_bus: ManualClock) -> None:
    await bus.lane("known", dedupe_mode="strict")
    message = bus.message("known")
    await bus.send(message)
    await bus.settle()
    clock_of_bus.advance(1.5)
    await bus.send(bus.message())
    await bus.looked_after()
    assert (await bus.send(message))["outcome"] == "duplicate"


async def test_id_can_be_used_again_after_the_dedupe_window(bus: Bus, clock_of_bus: ManualClock) -> None:
    queue = await bus.lane("again", dedupe_mode="strict", dedupe_seconds=30.0)
    command_id = fresh()
    for _ in range(2):
        await bus.send(bus.message("again", command_id=command_id))
        await bus.settle()
        clock_of_bus.advance(31)
    assert len(await bus.queue(queue)) == 2
    assert await bus.outcomes(command_id) == ["delivered", "delivered"]


async def test_refused_strict_command_may_be_sent_again(bus: Bus, clock_of_bus: ManualClock) -> None:
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


async def test_strict_limit_admits_its_rate_and_hints_when_to_retry(bus: Bus) -> None:
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


async def test_prefetched_tokens_admit_commands_within_the_limit(bus: Bus) -> None:
    queue = await bus.lane("warm")
    await bus.limit("warm", 60)
    await bus.refreshed()
    cold = await bus.batch([bus.message("warm") for _ in range(4)])
    await bus.looked_after()
    warm = await bus.batch([bus.message("warm") for _ in range(4)])
    assert [result["outcome"] for result in cold] == ["pending"] * 4
    assert [result["outcome"] for result in warm] == ["delivered"] * 3 + ["pending"]
    await bus.batch([bus.message("warm") for _ in range(100)])
    await bus.settle()
    assert 54 <= len(await bus.queue(queue)) <= 60


async def test_relaxed_limit_refuses_after_it_was_exceeded(bus: Bus) -> None:
    await bus.lane("relaxed")
    await bus.limit("relaxed", 2, enforcement="relaxed")
    await bus.refreshed()
    first = await bus.batch([bus.message("relaxed") for _ in range(3)])
    await bus.looked_after()
    second = await bus.send(bus.message("relaxed"))
    assert [result["outcome"] for result in first] == ["delivered"] * 3
    assert (second["outcome"], second["reason"]) == ("failed", "rate-limit-exceeded")
    assert second["retry_after_ms"] > 0


async def test_shadow_limit_refuses_nothing(bus: Bus) -> None:
    await bus.lane("shadow")
    await bus.limit("shadow", 1, enforcement="shadow")
    await bus.refreshed()
    for _ in range(2):
        results = await bus.batch([bus.message("shadow") for _ in range(3)])
        await bus.looked_after()
        assert {result["outcome"] for result in results} == {"delivered"}


async def test_new_route_works_and_a_missing_one_is_refused_at_first_use(bus: Bus, clock_of_bus: ManualClock) -> None:
    clock_of_bus.advance(3)
    await bus.route("brand-new")
    await bus.acl("brand-new")
    missing, new = await bus.batch([bus.message("no-such-command"), bus.message("brand-new")])
    assert new["outcome"] == "delivered"
    assert (missing["outcome"], missing["reason"]) == ("failed", "route-missing")
    assert "interlock route add mailer no-such-command" in missing["detail"]


@pytest.mark.parametrize(
    ("age", "outcome"), [(1.0, "delivered"), (3.0, "delivered"), (5.0, "pending")], ids=["fresh", "stale", "expired"]
)
async def test_revoked_acl_works_no_longer_than_its_sensitivity_allows(
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
    if outcome == "pending":
        assert [e["reason"] for e in await bus.events(command_id)] == ["acl-deny"]
    clock_of_bus.advance(5)
    assert (await bus.send(bus.message(name)))["outcome"] in ("failed", "pending")


async def test_api_key_without_a_service_sends_nothing(bus: Bus) -> None:
    reply = await bus.system.user("POST", "/v1/commands", content=bus.message())
    assert reply.status_code == 403


async def test_command_cannot_be_sent_as_another_service(bus: Bus) -> None:
    """Both services have the same secret, so that only the API key distinguishes them."""
    other = await bus.service("audit")
    await bus.refreshed()
    verdict = await bus.send(bus.message(command_id=(command_id := fresh())), key=other)
    assert (verdict["outcome"], verdict["reason"]) == ("failed", "acl-deny")
    assert [event["source"] for event in await bus.events(command_id)] == ["test/audit"]


async def test_commands_of_another_org_are_refused(bus: Bus) -> None:
    rival = await bus.system.kernel.access.principals.create_org(f"rival-{uuid4().hex[:8]}")
    elsewhere = Bus(System(**{**vars(bus.system), "org_id": rival.org_id}), "")
    key = await elsewhere.service(PRODUCER)
    before = len(await bus.queue(NAME))
    verdict = await elsewhere.send(elsewhere.message(), key=key)
    assert (verdict["outcome"], verdict["reason"]) == ("failed", "route-missing")
    assert len(await bus.queue(NAME)) == before


async def test_new_key_version_is_known_at_first_use(bus: Bus, clock_of_bus: ManualClock) -> None:
    key = await bus.service("rotating")
    await bus.acl(NAME, source="rotating")
    clock_of_bus.advance(3)
    verdict = await bus.send(bus.message(), key=key)
    assert verdict["outcome"] in ("delivered", "pending")


async def test_failed_write_gives_no_verdict(bus: Bus) -> None:
    async def away() -> None:
        raise Unavailable("The state database is unavailable.")

    before = len(await bus.queue(NAME))
    arm("command.before_commit", away)
    try:
        reply = await bus.system.user("POST", "/v1/commands", key=bus.key, content=bus.message())
    finally:
        disarm("command.before_commit")
    assert reply.status_code == 503
    assert len(await bus.queue(NAME)) == before


async def test_slow_stage_without_its_store_leaves_the_hand_off(bus: Bus) -> None:
    queue = await bus.lane("kept", dedupe_mode="strict")
    await bus.limit("kept", 1)
    await bus.send(bus.message("kept", command_id=(command_id := fresh())))

    async def away() -> None:
        raise Unavailable("The state database is unavailable.")

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
async def test_slow_stage_ignores_expired_entries(bus: Bus, clock_of_bus: ManualClock, table: str, reason: str) -> None:
    name = f"ending-{table[4:]}"
    queue = await bus.lane(name, dedupe_mode="strict")
    await bus.execute(
        f"update interlock.{table} set expires_at = interlock.clock() + interval '1 second' where name = $1", name
    )
    await bus.refreshed()
    assert (await bus.send(bus.message(name, command_id=(command_id := fresh()))))["outcome"] == "pending"
    clock_of_bus.advance(1)
    await bus.settle()
    assert await bus.queue(queue) == []
    assert [event["reason"] for event in await bus.events(command_id)] == [reason]


async def test_use_of_the_old_key_is_reported_in_telemetry(bus: Bus) -> None:
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


async def test_hand_off_that_breaks_its_batch_delays_no_other(bus: Bus) -> None:
    queue = await bus.lane("sound", dedupe_mode="strict")
    await bus.execute(
        "insert into interlock.bus_handoffs (org_id, source, command_id, reason, body, facts, received_at)"
        " values ($1, 'test/billing', gen_random_uuid(), 'cache_miss', 'no message at all', '{}', interlock.clock())",
        bus.system.org_id,
    )
    await bus.send(bus.message("sound"))
    await bus.slow().run_once()
    assert len(await bus.queue(queue)) == 1
    assert await bus.system.value("select tries from interlock.bus_handoffs") == 1
    await bus.execute("delete from interlock.bus_handoffs")


async def test_command_for_a_removed_job_is_a_delivery_failure(bus: Bus) -> None:
    await bus.lane("orphan", queue=None, dlq=None, dag_name="gone", job_name="nothing")
    verdict = await bus.send(bus.message("orphan", command_id=(command_id := fresh())))
    assert (verdict["outcome"], verdict["reason"]) == ("failed", "delivery-failure")
    assert [event["reason"] for event in await bus.events(command_id)] == ["delivery-failure"]


async def test_command_for_a_job_becomes_one_task_with_the_message(bus: Bus) -> None:
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
    async with bus.system.kernel.stores.database.connection() as connection:
        rows = await connection.fetch(
            "select payload from interlock.tasks where dedupe_key = $1", f"command:test/{PRODUCER}:{command_id}"
        )
    return [msgspec.json.decode(row["payload"]) for row in rows]


async def test_unstorable_payload_for_a_job_fails_alone(bus: Bus) -> None:
    job = {"name": "picky", "activation": "source", "source": {"kind": "command"}, "operator": "echo"}
    await deploy(bus.system, job | {"outputs": ["out"]}, dag="picky")
    await bus.lane("picky", queue=None, dlq=None, dag_name="picky", job_name="picky")
    results = await bus.batch([bus.message("picky", payload={"nul": "\0"}), bus.message("picky"), bus.message()])
    assert [result["reason"] for result in results] == ["delivery-failure", None, None]


async def test_invalid_command_is_reported_with_its_readable_fields(bus: Bus) -> None:
    now = bus.system.kernel.stores.clock.now().timestamp()
    late = signed(now - 91.4, command_id=(command_id := fresh()))
    assert (await bus.send(late))["reason"] == "expired_timestamp"
    (event,) = await bus.events(command_id)
    assert event["skew_seconds"] == pytest.approx(91.4, abs=0.01)
    assert (event["target"], event["command.name"], event["source"]) == (TARGET, NAME, f"test/{PRODUCER}")


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"null", b"{}", b'{"commands":[]}', b'{"commands":{}}', b'{"metadata":{},"commands":[{}]}', b"\xff"],
)
async def test_body_that_is_no_command_or_batch_is_a_bad_request(bus: Bus, body: bytes) -> None:
    reply = await bus.system.user("POST", "/v1/commands", key=bus.key, content=body)
    assert (reply.status_code, reply.json()["code"]) == (400, "invalid_request")


async def test_batch_size_is_limited(bus: Bus) -> None:
    limit = bus.system.kernel.settings.command_batch_limit
    body = msgspec.json.encode({"commands": [{}] * (limit + 1)})
    reply = await bus.system.user("POST", "/v1/commands", key=bus.key, content=body)
    assert (reply.status_code, reply.json()["code"]) == (413, "batch_too_large")


@pytest.mark.parametrize("odd", [rb"\ud800", rb"\uDFFF", rb"\ud800\ud800", b"\xff"])
async def test_lone_surrogate_refuses_only_its_command(bus: Bus, odd: bytes) -> None:
    name = await bus.lane(f"odd-{odd.hex()}")
    good = [bus.message(name, command_id=fresh(), payload={"n": n, "s": "\U0001f682 \\ud800"}) for n in range(3)]
    bad = bus.message(name, command_id=fresh(), payload={"s": "MARK"}).replace(b"MARK", odd)
    results = await bus.batch([good[0], bad, *good[1:]])
    assert [result["outcome"] for result in results] == ["delivered", "invalid", "delivered", "delivered"]
    assert results[1]["reason"] == "malformed"
    await bus.settle()
    assert [message["command"]["payload"]["n"] for message in await bus.queue(name)] == [0, 1, 2]


@pytest.mark.parametrize("odd", [rb"\ud800", b"\xff", b'",' + b'"a":[' * 2_000 + b"0" + b"]" * 2_000 + b',"b":"'])
async def test_single_command_that_cannot_be_read_gets_a_verdict(bus: Bus, odd: bytes) -> None:
    verdict = await bus.send(bus.message(payload={"s": "MARK"}).replace(b"MARK", odd))
    assert (verdict["outcome"], verdict["reason"]) == ("invalid", "malformed")


BAD_PAYLOADS: dict[str, bytes] = {
    "nested 5,000 levels": b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    "nested 2,000 levels, with a key of the batch": b'{"commands":' * 2_000 + b"[]" + b"}" * 2_000,
    "half of a surrogate pair": rb'{"s":"\ud800"}',
    "NUL as an escape in a name": rb'{"\u0000":"\u0000"}',
    "NUL as a byte": b'{"s":"\x00"}',
    "no UTF-8": b'{"s":"\xff"}',
    "the same key twice": b'{"a":1,"a":2}',
    "a number beyond a double": b'{"n":1e400}',
    "a number of 10,000 digits": b'{"n":' + b"9" * 10_000 + b"}",
    "no number": b'{"n":NaN}',
    "brackets in strings": rb'{"s":"]}]}\"]}","n":NaN}',
}


async def test_bad_commands_of_a_batch_are_refused_alone(bus: Bus) -> None:
    """Each kind between good commands, first one kind at a time, then all of them in one batch."""
    await bus.lane("alone")

    def good() -> bytes:
        return bus.message("alone", payload={"s": '[{, \\ "', "n": [[]]})

    def bad(payload: bytes) -> bytes:
        return bus.message("alone", payload="MARK").replace(b'"MARK"', payload)

    batches = [[payload] for payload in BAD_PAYLOADS.values()]
    for payloads in [*batches, [*BAD_PAYLOADS.values()]]:
        sent = [good(), *(each for payload in payloads for each in (bad(payload), good()))]
        outcomes = [result["outcome"] for result in await bus.batch(sent)]
        assert outcomes == ["delivered", *["invalid", "delivered"] * len(payloads)], payloads


@pytest.mark.parametrize(
    "body",
    [
        b'{"commands":[1,]}',
        b'{"commands":[,1]}',
        b'{"commands":[{]}',
        b'{"commands":[NaN] 5}',
        b'{"commands":[NaN]}}',
        b'{"commands":[NaN',
        b'{"commands":[NaN],"more":1}',
        b'{"commands":[' + b"{}[]" * 200_000 + b"]}",
        b'{"commands":[' + b"[1," * 1_000_000 + b"]" * 1_000_000 + b"]}",
    ],
)
async def test_batch_with_indistinguishable_commands_is_refused(bus: Bus, body: bytes) -> None:
    reply = await bus.system.user("POST", "/v1/commands", key=bus.key, content=body)
    assert (reply.status_code, reply.json()["code"]) == (400, "invalid_request")


async def test_repeated_commands_key_is_refused(bus: Bus) -> None:
    message = bus.message(payload={"commands": '"commands"'})
    assert [r["outcome"] for r in await bus.batch([message, message])] != []
    body = b'{"commands":[' + message + b'], "commands":[]}'
    headers = {"Content-Type": "application/json"}
    reply = await bus.system.user("POST", "/v1/commands", key=bus.key, content=body, headers=headers)
    assert (reply.status_code, reply.json()["code"]) == (400, "invalid_request")
    assert "twice" in reply.json()["detail"]
