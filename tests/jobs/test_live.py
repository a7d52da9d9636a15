"""The live stream: one computation for all pages, its end with the session or the process, and other orgs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from interlock.jobs import live
from tests.support.system import System, until

SECONDS = 20.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "TICK_SECONDS", 0.02)


async def signed_in(system: System, key: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns the cookie header of a new session, and the session."""
    reply = await system.http.post(f"{system.gateway_url}/v1/sign-in/key", json={"key": key})
    cookie = reply.headers["set-cookie"].partition(";")[0]
    system.http.cookies.clear()
    return {"Cookie": cookie}, reply.json()


@asynccontextmanager
async def stream(system: System, headers: dict[str, str]) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    async with (
        httpx.AsyncClient(timeout=SECONDS) as client,
        client.stream("GET", f"{system.gateway_url}/v1/live", headers=headers) as reply,
    ):
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        yield _events(reply)


async def _events(reply: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in reply.aiter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


async def test_stream_shows_a_run_that_begins_while_it_is_open(system: System) -> None:
    headers, _ = await signed_in(system, system.admin_key)
    async with stream(system, headers) as events:
        name, first = await anext(events)
        assert (name, first["overview"]["runs"]) == ("overview", [])
        run = await system.submit([{}], name="nightly")
        async for _, update in events:
            if update["overview"]["runs"]:
                assert update["overview"]["runs"][0]["run_id"] == run["run_id"]
                break


async def test_many_pages_cost_one_computation(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "TICK_SECONDS", 3600.0)
    headers, _ = await signed_in(system, system.admin_key)
    streams = system.kernel.jobs.live
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(stream(system, headers)) for _ in range(20)]
        seen = [await anext(events) for events in opened]
        assert streams.open == 20
    assert len({json.dumps(update) for _, update in seen}) == 1
    assert streams.computed == 1


async def test_nothing_is_computed_once_the_last_page_is_closed(system: System) -> None:
    headers, _ = await signed_in(system, system.admin_key)
    async with stream(system, headers) as events:
        await anext(events)
    streams = system.kernel.jobs.live

    async def idle() -> bool:
        return streams.open == streams.channels == 0

    await until(idle)


@pytest.mark.parametrize("how", ["sign out", "revoked key"])
async def test_stream_ends_with_its_session(system: System, how: str) -> None:
    made = (await system.user("POST", "/v1/keys", json={"user": "ada", "role": "reader"})).json()
    headers, session = await signed_in(system, made["key"])
    async with stream(system, headers) as events:
        await anext(events)
        if how == "sign out":
            url = f"{system.gateway_url}/v1/session"
            reply = await system.http.delete(url, headers=headers | {"X-Interlock-CSRF": session["csrf"]})
            assert reply.status_code == 204
        else:
            await system.user("DELETE", f"/v1/keys/{made['view']['key_id']}")
        async with asyncio.timeout(SECONDS):
            last = [event async for event in events][-1]
        assert last == ("end", {"code": "session_expired"})


async def test_stream_of_another_org_shows_nothing_of_this_one(system: System) -> None:
    await system.submit([{}], name="secret-job")
    await system.user("POST", "/v1/orgs", json={"name": "elsewhere"})
    made = await system.user("POST", "/v1/keys", json={"user": "x", "role": "admin", "org": "elsewhere"})
    headers, _ = await signed_in(system, made.json()["key"])
    own, _ = await signed_in(system, system.admin_key)
    async with stream(system, headers) as strange, stream(system, own) as mine:
        assert "secret-job" in json.dumps(await anext(mine))
        assert "secret-job" not in json.dumps(await anext(strange))


async def test_stream_needs_a_session_that_may_read(system: System) -> None:
    reply = await system.user("GET", "/v1/live")
    assert (reply.status_code, reply.json()["code"]) == (401, "session_missing")
    body = {"user": "x", "role": "writer", "scopes": ["tasks:read"]}
    narrow = (await system.user("POST", "/v1/keys", json=body)).json()["key"]
    headers, _ = await signed_in(system, narrow)
    reply = await system.http.get(f"{system.gateway_url}/v1/live", headers=headers)
    assert (reply.status_code, reply.json()["code"]) == (403, "forbidden")


async def test_number_of_streams_is_limited(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_STREAMS", 1)
    headers, _ = await signed_in(system, system.admin_key)
    async with stream(system, headers) as events:
        await anext(events)
        reply = await system.http.get(f"{system.gateway_url}/v1/live", headers=headers)
        assert (reply.status_code, reply.json()["code"]) == (429, "too_many_requests")
