"""Webhooks: permission to call, the tasks that calls create, and the replies to strangers."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from interlock.clock import ManualClock
from interlock.dags.webhook_sources import OVERLAP_SECONDS, WINDOW_SECONDS, signature
from interlock.wire.access import Role
from tests.support.source_dags import active_job, deploy, hold_back, make_tasks, other_key, payloads, source_job
from tests.support.system import System

SECRET = "/v1/dags/feeds/jobs/src/secret"
HMAC: dict[str, Any] = {"kind": "webhook"}
TOKEN: dict[str, Any] = {"kind": "webhook", "auth": "token"}


async def secret_of(system: System, *, rotate: bool = False) -> dict[str, Any]:
    reply = await system.user("POST", SECRET, json={"rotate": rotate})
    assert reply.status_code == 201, reply.text
    made: dict[str, Any] = reply.json()
    return made


async def call(system: System, path: str, body: bytes = b'{"n": 1}', **headers: str) -> httpx.Response:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return await system.http.post(system.gateway_url + path, content=body, headers=sent)


async def signed(
    system: System, made: dict[str, Any], body: bytes = b'{"n": 1}', *, ago: float = 0, **headers: str
) -> httpx.Response:
    moment = int(system.kernel.stores.clock.now().timestamp() - ago)
    return await call(
        system, made["path"], body, X_Interlock_Signature=signature(made["secret"], body, moment), **headers
    )


async def test_signed_call_becomes_a_task(still: System) -> None:
    await deploy(still, source_job(**HMAC))
    made = await secret_of(still)
    reply = await signed(still, made, b'{"order": 7}')
    assert (reply.status_code, reply.json()) == (200, {"accepted": True, "duplicate": False})
    await make_tasks(still)
    assert await payloads(still, await active_job(still)) == ['{"order": 7}']
    (message,) = await still.receive()
    assert (await still.claim(message["body"]["task_id"]))["task"]["payload"] == {"order": 7}


async def test_call_with_its_token_becomes_a_task_without_storing_the_token(still: System) -> None:
    await deploy(still, source_job(**TOKEN))
    made = await secret_of(still)
    assert (await call(still, made["path"], X_Interlock_Token=made["secret"])).status_code == 200
    assert await still.value("select sealed is null from interlock.hooks")
    assert not await still.value("select position($1 in h::text) > 0 from interlock.hooks h", made["secret"])


REFUSED = (
    401,
    "unauthenticated",
    "The hook does not exist, or the signature or token of the call is not valid for it.",
)


def told(reply: httpx.Response) -> tuple[int, str, str]:
    return reply.status_code, reply.json()["code"], reply.json()["detail"]


async def test_unknown_hook_and_bad_signature_get_the_same_reply(still: System, clock: ManualClock) -> None:
    await deploy(still, source_job(**HMAC))
    made = await secret_of(still)
    now = int(clock.now().timestamp())
    right = signature(made["secret"], b'{"n": 1}', now)
    wrong = [
        "",
        "t=1",
        right.replace("v1=", "v2="),
        right[:-1],
        signature("another", b'{"n": 1}', now),
        signature(made["secret"], b'{"n": 2}', now),
        right.replace(f"t={now}", f"t={now + 1}"),
        signature(made["secret"], b'{"n": 1}', now - WINDOW_SECONDS - 1),
        signature(made["secret"], b'{"n": 1}', now + WINDOW_SECONDS + 1),
        "t=99999999999999999999," + right.partition(",")[2],
        right + "," + right,
    ]
    assert told(await call(still, made["path"])) == REFUSED
    assert told(await call(still, "/v1/hooks/nobody", X_Interlock_Signature=right)) == REFUSED
    assert told(await call(still, made["path"], X_Interlock_Token=made["secret"])) == REFUSED
    for one in wrong:
        assert told(await call(still, made["path"], X_Interlock_Signature=one)) == REFUSED, one
    assert told(await call(still, made["path"], b"no json", X_Interlock_Signature=right)) == REFUSED
    assert await still.value("select count(*) from interlock.triggers") == 0
    # A single valid signature among several is sufficient: a sender may be rotating its secret.
    both = f"t={now},v1={'0' * 64}," + right.partition(",")[2]
    assert (await call(still, made["path"], X_Interlock_Signature=both)).status_code == 200


async def test_token_must_match_completely_and_no_signature_replaces_it(still: System) -> None:
    await deploy(still, source_job(**TOKEN))
    made = await secret_of(still)
    assert told(await call(still, made["path"], X_Interlock_Token=made["secret"][:-1])) == REFUSED
    assert told(await call(still, made["path"], X_Interlock_Token="")) == REFUSED
    assert told(await signed(still, made)) == REFUSED
    several = [("X-Interlock-Token", made["secret"]), ("X-Interlock-Token", "x")]
    reply = await still.http.post(still.gateway_url + made["path"], content=b"1", headers=several)
    assert reply.status_code == 401


async def test_clock_skew_within_the_window_is_accepted(still: System) -> None:
    await deploy(still, source_job(**HMAC))
    made = await secret_of(still)
    assert (await signed(still, made, ago=WINDOW_SECONDS - 1)).status_code == 200
    assert (await signed(still, made, ago=1 - WINDOW_SECONDS)).status_code == 200


@pytest.mark.parametrize("header", ["Idempotency_Key", "X_Request_Id"])
async def test_repeated_call_creates_one_task(still: System, header: str) -> None:
    await deploy(still, source_job(**HMAC))
    made = await secret_of(still)
    body = b'{"n": 1}'
    a: dict[str, Any] = {header: "a"}
    b: dict[str, Any] = {header: "b"}
    replies = await asyncio.gather(*(signed(still, made, body, ago=n, **a) for n in range(4)))
    assert sorted(reply.json()["duplicate"] for reply in replies) == [False, True, True, True]
    await make_tasks(still)
    assert (await signed(still, made, body, **a)).json()["duplicate"]
    assert not (await signed(still, made, body, **b)).json()["duplicate"]
    await make_tasks(still)
    assert len(await payloads(still, await active_job(still))) == 2


async def test_replayed_call_creates_no_second_task(still: System) -> None:
    await deploy(still, source_job(**HMAC))
    made = await secret_of(still)
    assert not (await signed(still, made)).json()["duplicate"]
    assert (await signed(still, made)).json()["duplicate"]
    assert not (await signed(still, made, ago=1)).json()["duplicate"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [(b"", 400, "bad_payload"), (b"{", 400, "bad_payload"), (b"\xff", 400, "bad_payload"),
     (b'"' + b"x" * 300_000 + b'"', 413, "payload_too_large"), (b'"\\u0000"', 400, "bad_payload"),
     (b"[" * 5_000 + b"]" * 5_000, 400, "bad_payload")],
)  # fmt: skip
async def test_invalid_body_is_refused_after_authentication(still: System, body: bytes, status: int, code: str) -> None:
    await deploy(still, source_job(**HMAC))
    reply = await signed(still, await secret_of(still), body)
    assert (reply.status_code, reply.json()["code"]) == (status, code), reply.text


async def test_both_secrets_are_valid_for_an_hour_after_a_rotation(still: System, clock: ManualClock) -> None:
    await deploy(still, source_job(**HMAC))
    old = await secret_of(still)
    again = await still.user("POST", SECRET, json={})
    assert (again.status_code, again.json()["code"]) == (409, "secret_exists")
    new = await secret_of(still, rotate=True)
    assert new["path"] == old["path"]
    assert new["secret"] != old["secret"]
    clock.advance(OVERLAP_SECONDS - 1)
    assert (await signed(still, old)).status_code == 200
    assert (await signed(still, new)).status_code == 200
    clock.advance(2)
    assert (await signed(still, old)).status_code == 401
    assert (await signed(still, new)).status_code == 200


async def test_redeploy_keeps_hook_and_secret(still: System) -> None:
    await deploy(still, source_job(**HMAC))
    made = await secret_of(still)
    await deploy(still, source_job(**HMAC) | {"config": {"changed": True}})
    assert (await signed(still, made)).status_code == 200
    (source, *_) = (await still.user("GET", "/v1/dags/feeds/sources")).json()["sources"]
    assert source["hook"] == made["path"]


async def test_another_authentication_method_needs_another_secret(still: System) -> None:
    await deploy(still, source_job(**TOKEN))
    old = await secret_of(still)
    await deploy(still, source_job(**HMAC))
    assert (await signed(still, old)).status_code == 401
    new = await secret_of(still, rotate=True)
    assert new["auth"] == "hmac"
    assert (await signed(still, new)).status_code == 200


async def test_paused_source_accepts_calls_and_processes_them_later(still: System) -> None:
    await deploy(still, source_job(**HMAC))
    made = await secret_of(still)
    await hold_back(still, await active_job(still))
    assert (await signed(still, made)).status_code == 200
    await make_tasks(still)
    assert await payloads(still, await active_job(still)) == []


async def test_removed_job_accepts_no_calls(still: System) -> None:
    await deploy(still, source_job(**HMAC))
    made = await secret_of(still)
    await still.value("update interlock.jobs set active = false")
    assert told(await signed(still, made)) == REFUSED


async def test_only_org_admins_create_secrets_and_only_for_webhooks(still: System) -> None:
    await deploy(still, source_job(**HMAC), source_job("hand", kind="manual"))
    for key, status in (
        (await other_key(still, Role.WRITER), 403),
        (await other_key(still, Role.ADMIN, "others"), 404),
    ):
        assert (await still.user("POST", SECRET, json={}, key=key)).status_code == status
    reply = await still.user("POST", "/v1/dags/feeds/jobs/hand/secret", json={})
    assert (reply.status_code, reply.json()["code"]) == (409, "not_a_webhook")
    assert (await still.user("POST", "/v1/dags/feeds/jobs/nobody/secret", json={})).status_code == 404
