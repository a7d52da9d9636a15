"""The direct route for commands replies like the framework's handler, which takes other spellings of the path."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from interlock.access.principals import Principal
from interlock.bus.path.persistence import QueueNotifier
from interlock.errors import Unauthenticated, Unavailable
from tests.support.bus_services import Bus, fresh, opened
from tests.support.system import System

SHORT, LONG = "/v1/commands", "/v1/commands/"


@pytest.fixture
async def bus(system: System) -> Bus:
    return await opened(system)


async def _parts(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def _asked(bus: Bus, path: str, **request: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Returns status, body and common headers, without values that differ in every reply."""
    request.setdefault("headers", {}).setdefault("Content-Type", "application/json")
    reply = await bus.system.user(request.pop("method", "POST"), path, **{"key": bus.key} | request)
    answer = reply.json()
    answer.pop("request_id", None)
    told = {name: reply.headers[name] for name in ("content-type", "www-authenticate") if name in reply.headers}
    assert len(reply.headers["x-request-id"]) == 32
    return reply.status_code, answer, told


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        pytest.param({"key": "ilk_nonsense", "content": b"{}"}, 401, id="unknown key"),
        pytest.param({"headers": {"Authorization": "Basic eA=="}, "content": b"{}"}, 401, id="no bearer"),
        pytest.param({"headers": {"X-Interlock-Org": "other"}, "content": b"{}"}, 403, id="another org"),
        pytest.param({"headers": {"Content-Type": "text/plain"}, "content": b"{}"}, 415, id="no JSON by its type"),
        pytest.param({"content": b""}, 400, id="nothing"),
        pytest.param({"content": b"{"}, 400, id="cut off"),
        pytest.param({"content": b"{}"}, 400, id="no command"),
        pytest.param({"content": b'{"commands":[]}'}, 400, id="an empty batch"),
        pytest.param({"content": b'{"commands":[{}],"metadata":{}}'}, 400, id="one and a batch"),
        pytest.param({"content": b"[" * 100_000}, 400, id="too deep"),
        pytest.param({"content": b'{"metadata":{},"command":{}}'}, 202, id="a command that is none"),
        pytest.param({"method": "PUT"}, 405, id="another method"),
        pytest.param({"content": b'{"metadata":{},"command":{}}', "params": {"wait": "0.5"}}, 202, id="a wait"),
    ],
)
async def test_both_handlers_reply_alike(bus: Bus, request_: dict[str, Any], status: int) -> None:
    short, long = [await _asked(bus, path, **_copied(request_)) for path in (SHORT, LONG)]
    assert short[0] == status
    assert short == long


@pytest.mark.parametrize("path", [SHORT, LONG])
@pytest.mark.parametrize("wait", ["-1", "31", "nan", "soon", ""])
async def test_wait_that_is_no_number_of_seconds_is_refused(bus: Bus, path: str, wait: str) -> None:
    status, answer, _ = await _asked(bus, path, params={"wait": wait}, content=bus.message())
    assert (status, answer["code"]) == (400, "invalid_request")


def _copied(request: dict[str, Any]) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, dict) else value for name, value in request.items()}


@pytest.mark.parametrize("path", [SHORT, LONG])
async def test_body_over_the_limit_is_refused_with_and_without_content_length(bus: Bus, path: str) -> None:
    limit = bus.system.kernel.settings.body_limit_bytes
    for content in (b" " * (limit + 1), _parts(b" " * limit, b" ")):
        status, answer, _ = await _asked(bus, path, content=content)
        assert (status, answer["code"]) == (413, "too_large")


async def test_body_in_several_chunks_is_joined(bus: Bus) -> None:
    message = bus.message(command_id=(command_id := fresh()))
    _, verdict, _ = await _asked(bus, SHORT, content=_parts(message[:100], message[100:]))
    assert (verdict["command_id"], verdict["outcome"]) == (command_id, "delivered")


async def test_key_without_the_scope_is_refused_by_both_handlers(bus: Bus) -> None:
    for path in (SHORT, LONG):
        status, answer, _ = await _asked(bus, path, key=bus.system.admin_key, content=bus.message())
        assert (status, answer["code"]) == (403, "forbidden")


async def test_internal_error_is_reported_without_details(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(bus.system.kernel.bus.ingress, "accept", fails)
    for path in (SHORT, LONG):
        status, answer, _ = await _asked(bus, path, content=bus.message())
        assert (status, answer["code"]) == (500, "internal")
        assert "secret" not in str(answer)


# Concurrent requests with the same key


class _Looked:
    """Lookups that wait until the test releases them."""

    def __init__(self, answer: Principal | Exception) -> None:
        self.calls = 0
        self.let = asyncio.Event()
        self._answer = answer

    async def __call__(self, _key: str) -> Principal:
        self.calls += 1
        await self.let.wait()
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


async def test_concurrent_requests_share_one_key_lookup(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    principals = bus.system.kernel.access.principals
    looked = _Looked(await principals.authenticate(bus.key))
    monkeypatch.setattr(principals, "authenticate", looked)
    waiting = [asyncio.create_task(principals.authenticate_warm("ilk_fresh")) for _ in range(5)]
    await asyncio.sleep(0)  # noqa: TID251 - lets them ask
    waiting[0].cancel()  # the request that started the lookup is canceled, and the others get its result
    looked.let.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert all(isinstance(each, Principal) for each in found[1:])
    assert looked.calls == 1


async def test_key_lookup_survives_a_cancelled_request(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    principals = bus.system.kernel.access.principals
    looked = _Looked(Unauthenticated("no"))
    monkeypatch.setattr(principals, "authenticate", looked)
    alone = asyncio.create_task(principals.authenticate_warm("ilk_gone"))
    await asyncio.sleep(0)  # noqa: TID251 - lets it ask
    (asked,) = principals._asked.values()
    alone.cancel()
    await asyncio.gather(alone, return_exceptions=True)
    looked.let.set()
    await asyncio.wait({asked})
    assert (looked.calls, asked._log_traceback) == (1, False)


async def test_invalid_key_is_refused_for_all_concurrent_requests(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    principals = bus.system.kernel.access.principals
    looked = _Looked(Unauthenticated("no"))
    looked.let.set()
    monkeypatch.setattr(principals, "authenticate", looked)
    asked = (principals.authenticate_warm("ilk_wrong") for _ in range(3))
    assert all(isinstance(each, Unauthenticated) for each in await asyncio.gather(*asked, return_exceptions=True))
    with pytest.raises(Unauthenticated):
        await principals.authenticate_warm("ilk_wrong")
    assert looked.calls == 2  # refusals are not cached


# Notifications after the commit


async def test_each_queue_is_notified_once_per_group(bus: Bus, state_url: str) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()
    connection = await asyncpg.connect(state_url)
    await connection.add_listener("interlock_commands", lambda *said: heard.put_nowait(str(said[3])))
    wakes = QueueNotifier(bus.system.kernel.stores.database)
    wakes.add(["a", "b"])
    wakes.add(["b"])
    wakes.add([])
    await wakes.close()
    async with asyncio.timeout(10):
        assert {await heard.get(), await heard.get()} == {"a", "b"}
    wakes.add(["c"])
    await wakes.close()
    async with asyncio.timeout(10):
        assert await heard.get() == "c"
    assert heard.empty()
    await connection.close()


async def test_failed_notification_fails_no_request(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    database = bus.system.kernel.stores.database

    def away() -> None:
        raise Unavailable("gone")

    wakes = QueueNotifier(database)
    with monkeypatch.context() as patched:
        patched.setattr(database, "connection", away)
        wakes.add(["a"])
        await wakes.close()
    assert wakes._waiting == set()
