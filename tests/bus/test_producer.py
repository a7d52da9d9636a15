"""The producer of the SDK with the real bus: signatures, batches, retry hints and key rotation."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from msgspec import Raw

from interlock.bus.path.delivery import target_queue
from interlock.client.bus import Command, CommandVerdict, Producer
from interlock.errors import BadRequest, CommandRefused
from tests.client.test_client import Scripted, problem, reply
from tests.support.bus_tenants import Tenant, tenant
from tests.support.documentation import read
from tests.support.system import System


async def owner_and_key(system: System) -> tuple[Tenant, str]:
    """Returns an org, and the API key of a producer that may send one command."""
    owner = await tenant(system)
    await owner.services("billing", "discord-bot")
    await owner.put("routes", target="discord-bot", name="post-message", queue="posts", dlq="posts-dlq")
    await owner.put("acls", source="billing", target="discord-bot", name="post-message", sensitivity="low")
    return owner, await owner.service_key("billing")


async def delivered(owner: Tenant) -> list[str]:
    async with owner.system.kernel.stores.database.connection() as connection:
        rows = await connection.fetch(
            "select body::json #>> '{command,payload}' as payload from interlock.queue_messages where queue = $1"
            " order by message_id",
            target_queue(owner.org_id, "posts"),
        )
    return [row["payload"] for row in rows]


async def test_example_of_the_documentation_sends_a_command(shared: System) -> None:
    owner, key = await owner_and_key(shared)
    (block,) = re.findall(r"```python\n(.*?)```", read("docs/bus.md"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "docs/bus.md", "exec"), names)  # noqa: S102 - our own page
    await names["main"](shared.gateway_url, key)
    assert await delivered(owner) == ['{"channel":"general","text":"paid"}']


async def test_batch_results_are_in_the_order_of_the_commands(shared: System) -> None:
    owner, key = await owner_and_key(shared)
    commands = [Command(target="discord-bot", name="post-message", payload=number) for number in range(250)]
    commands[7] = Command(target="discord-bot", name="shout", payload=7)
    commands[8] = Command(target="Discord", name="shout")
    async with Producer(shared.gateway_url, key, patience=0) as producer:
        verdicts = await producer.send_many(commands)
    assert [verdict.command_id for verdict in verdicts if verdict.command_id] == [
        command.command_id for place, command in enumerate(commands) if place != 8
    ]
    outcomes = {place: verdict.outcome for place, verdict in enumerate(verdicts) if verdict.outcome != "delivered"}
    assert outcomes.keys() == {7, 8}
    assert outcomes[8] == "invalid"
    assert len(await delivered(owner)) == 248


async def test_producer_replaces_a_rotated_or_revoked_key(shared: System) -> None:
    owner, key = await owner_and_key(shared)
    async with Producer(shared.gateway_url, key) as producer:
        await producer.send("discord-bot", "post-message", 1)
        assert (await producer.config()).active.version_id == "hmac-v1"
        reply = await owner.ask("DELETE", "/v1/service-keys/billing/hmac-v1")
        assert reply.status_code == 200
        # The gateway accepts the old key until its next refresh: refresh now.
        caches = shared.kernel.bus.ingress._caches
        await caches.refresh(caches.tenant(owner.org_id))
        await producer.send("discord-bot", "post-message", 2)
        assert (await producer.config()).active.version_id == "hmac-v2"
    assert await delivered(owner) == ["1", "2"]


async def test_refused_command_raises_with_the_verdict(shared: System) -> None:
    _owner, key = await owner_and_key(shared)
    async with Producer(shared.gateway_url, key, patience=0) as producer:
        with pytest.raises(CommandRefused) as refused:
            await producer.send("discord-bot", "post message")
        assert (refused.value.verdict.outcome, refused.value.verdict.reason) == ("invalid", "malformed")
        with pytest.raises(BadRequest, match="same key twice"):
            await producer.send("discord-bot", "post-message", Raw(b'{"a":1,"a":2}'))


# A server whose replies the test controls

CONFIG = {
    "tenant": "acme",
    "service": "billing",
    "source": "acme/billing",
    "active": {"version_id": "hmac-v1", "secret": "00" * 32, "expires_at": None},
    "previous": None,
    "rotates_at": None,
    "poll_seconds": 100.0,
    "replay_window_seconds": 60.0,
}


def verdicts(*outcomes: tuple[str, str | None, int | None]) -> bytes:
    results = [
        {"command_id": None, "outcome": outcome, "reason": reason, "retry_after_ms": wait}
        for outcome, reason, wait in outcomes
    ]
    return reply({"results": results}, 202)


@pytest.fixture
async def scripted() -> Any:
    server = Scripted()
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()
    server.url = f"http://{host}:{port}"
    yield server
    listener.close()


class Time:
    """A clock that only sleeping advances."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.waits: list[float] = []

    async def pause(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


def producing(server: Scripted, time: Time, **more: Any) -> Producer:
    return Producer(server.url, "key", now=lambda: time.now, pause=time.pause, rng=lambda: 0.0, **more)


async def test_throttled_command_is_retried_after_the_hint(scripted: Scripted) -> None:
    time = Time()
    scripted.script = [
        reply(CONFIG),
        verdicts(
            ("delivered", None, None), ("failed", "rate-limit-exceeded", 1500), ("failed", "fairness-violation", 3000)
        ),
        verdicts(("delivered", None, None), ("failed", "rate-limit-exceeded", None)),
        verdicts(("pending", "token_required", None)),
        verdicts(("pending", "token_required", None)),
        verdicts(("delivered", None, None)),
    ]
    async with producing(scripted, time) as producer:
        found = await producer.send_many([Command(target="bot", name="say", payload=n) for n in range(3)])
    assert [verdict.outcome for verdict in found] == ["delivered"] * 3
    assert time.waits == [3.0, 1.0]
    bodies = [request.body for request in scripted.requests[1:4]]
    assert [request.target.partition("?")[0] for request in scripted.requests[4:]] == ["/v1/commands"] * 2
    ids = [re.findall(rb'"id":"([^"]+)"', body) for body in bodies]
    assert ids[0][1:] == ids[1]
    assert ids[1][1:] == ids[2]
    # A message is valid for a minute, so that each attempt signs it again.
    assert len({stamp for body in bodies for stamp in re.findall(rb'"timestamp":"([^"]+)"', body)}) == 3


async def test_retries_end_and_permanent_refusals_are_not_retried(scripted: Scripted) -> None:
    time = Time()
    throttled = ("failed", "rate-limit-exceeded", 4000)
    scripted.script = [reply(CONFIG), verdicts(throttled, ("failed", "acl-deny", None)), *[verdicts(throttled)] * 2]
    async with producing(scripted, time, patience=10) as producer:
        found = await producer.send_many([Command(target="bot", name="say") for _ in range(2)])
    assert [verdict.reason for verdict in found] == ["rate-limit-exceeded", "acl-deny"]
    assert time.waits == [4.0, 4.0]


async def test_configuration_is_polled_when_due_and_may_be_missed(scripted: Scripted) -> None:
    time = Time()
    done = verdicts(("delivered", None, None))
    newer = CONFIG | {"active": {"version_id": "hmac-v2", "secret": "11" * 32, "expires_at": None}}
    scripted.script = [reply(CONFIG), done, done, problem(503), done, done, reply(newer), done]
    async with producing(scripted, time, patience=0) as producer:
        for wait in (0, 50, 51, 30, 31):
            time.now += wait
            await producer.send("bot", "say")
    told = [request.target.partition("?")[0] for request in scripted.requests]
    assert told == [
        "/v1/tenant-config",
        *["/v1/commands"] * 2,
        "/v1/tenant-config",
        *["/v1/commands"] * 2,
        "/v1/tenant-config",
        "/v1/commands",
    ]
    assert b'"version_id":"hmac-v2"' in scripted.requests[-1].body


async def test_refused_key_is_fetched_once_and_commands_are_resent(scripted: Scripted) -> None:
    newer = CONFIG | {"active": {"version_id": "hmac-v2", "secret": "11" * 32, "expires_at": None}}
    scripted.script = [
        reply(CONFIG),
        verdicts(("invalid", "expired_key", None), ("delivered", None, None)),
        reply(newer),
        verdicts(("delivered", None, None)),
        verdicts(("invalid", "invalid_hmac", None)),
        reply(newer),
    ]
    async with producing(scripted, Time()) as producer:
        commands = [Command(target="bot", name="say", payload=n) for n in range(2)]
        assert [verdict.outcome for verdict in await producer.send_many(commands)] == ["delivered", "delivered"]
        with pytest.raises(CommandRefused) as refused:
            await producer.send("bot", "say")
    assert isinstance(refused.value.verdict, CommandVerdict)
    assert scripted.script == []
