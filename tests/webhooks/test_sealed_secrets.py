"""Secrets of webhooks in the database: always sealed, also those that an older version stored in clear."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

from interlock.access.secrets import Seal
from interlock.apps.app import open_app
from interlock.dags.webhook_sources import signature
from interlock.settings import Settings
from tests.support.source_dags import deploy, source_job
from tests.support.system import System, running
from tests.support.webhook_receiver import receiving

SECRET = "/v1/dags/feeds/jobs/src/secret"
WEBHOOK = {"name": "w", "url": "http://127.0.0.1:9/", "job": "none"}


async def stored(system: System) -> str:
    """Returns all rows of the tables that handle secrets of webhooks."""
    texts = [
        await system.value(f"select coalesce(string_agg(t::text, e'\\n'), '') from interlock.{table} t")
        for table in ("webhooks", "hooks", "idempotency_keys", "webhook_deliveries", "outbox")
    ]
    return "\n".join(texts)


async def call(system: System, path: str, secret: str) -> int:
    """Calls a hook with a signature by `secret`. Returns the status."""
    body = b'{"n": 1}'
    moment = int(system.kernel.stores.clock.now().timestamp())
    headers = {"X-Interlock-Signature": signature(secret, body, moment)}
    return (await system.http.post(system.gateway_url + path, content=body, headers=headers)).status_code


async def post(system: System, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    reply = await system.user("POST", path, json=body, headers=headers)
    assert reply.status_code == 201, reply.text
    made: dict[str, Any] = reply.json()
    return made


async def test_secrets_of_webhooks_are_stored_sealed_only(state_url: str, tmp_path: Path) -> None:
    async with running(state_url, tmp_path, outbound_allow=["127.0.0.1"], outbound_ports=[9, 443]) as system:
        key = {"Idempotency-Key": str(uuid4())}
        made = await post(system, "/v1/webhooks", WEBHOOK, **key)
        assert await post(system, "/v1/webhooks", WEBHOOK, **key) == made
        rotated = await post(system, "/v1/webhooks/w/rotate", {}, **{"Idempotency-Key": str(uuid4())})
        await deploy(system, source_job(kind="webhook"))
        hook = await post(system, SECRET, {})
        hooks = [hook["secret"], (await post(system, SECRET, {"rotate": True}))["secret"]]
        assert [await call(system, hook["path"], secret) for secret in hooks] == [200, 200]
        rows = await stored(system)
        assert [each for each in (made["secret"], rotated["secret"], *hooks) if each in rows] == []


async def store_in_clear(system: System, secret: str) -> None:
    """Leaves secrets as a version before the sealing wrote them."""
    await system.value(
        "with w as (update interlock.webhooks set secret = $1, previous_secret = null, sealed = null)"
        " update interlock.hooks set secret = $1, previous_secret = $1 || 'p', sealed = null,"
        " previous_until = interlock.clock() + interval '1 hour'",
        secret,
    )


async def test_secrets_that_were_stored_in_clear_are_sealed_at_the_start(state_url: str, tmp_path: Path) -> None:
    async with (
        receiving() as receiver,
        running(state_url, tmp_path, outbound_allow=["127.0.0.1"]) as system,
    ):
        await post(system, "/v1/webhooks", WEBHOOK | {"url": receiver.url + "/old"})
        await deploy(system, source_job(kind="webhook"))
        hook = await post(system, SECRET, {})
        await store_in_clear(system, "an old secret")
        async with open_app(Settings(dir=tmp_path, state_url=state_url), process="test"):
            assert "an old secret" not in await stored(system)
        assert await call(system, hook["path"], "an old secret") == 200
        assert await call(system, hook["path"], "an old secretp") == 200
        await post(system, "/v1/webhooks/w/test", {})
        await system.pass_of("webhooks")
        (got,) = receiver.at("/old")
        got.verified("an old secret", system.kernel.stores.clock.now().timestamp())


async def test_webhook_whose_secret_does_not_open_stops_no_other(state_url: str, tmp_path: Path) -> None:
    async with (
        receiving() as receiver,
        running(state_url, tmp_path, outbound_allow=["127.0.0.1"]) as system,
    ):
        for name in ("broken", "whole"):
            await post(system, "/v1/webhooks", {"name": name, "url": f"{receiver.url}/{name}", "job": "none"})
        foreign = Seal(tmp_path / "elsewhere").seal(b"x", "other")
        await system.value("update interlock.webhooks set sealed = $1 where name = 'broken'", foreign)
        for name in ("broken", "whole"):
            await post(system, f"/v1/webhooks/{name}/test", {})
        await system.pass_of("webhooks")
        assert (len(receiver.at("/whole")), receiver.at("/broken")) == (1, [])
        (one,) = (await system.user("GET", "/v1/webhooks/broken/deliveries")).json()["deliveries"]
        assert (one["status"], one["reason"]) == (
            "Pending",
            "The webhook's secret cannot be opened: rotate it, then redrive the delivery.",
        )
