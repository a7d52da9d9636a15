"""The transport of the SDK against a server that follows the test's script, byte by byte."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest

from interlock import client as sdk
from interlock.client import Client, Fence, QueryClient, TaskClient, WorkerClient
from interlock.client._http import Http
from interlock.errors import (
    BadRequest,
    Conflict,
    Fenced,
    Forbidden,
    InterlockError,
    NotFound,
    ServerUnreachable,
    TooLarge,
    TooManyRequests,
    Unauthenticated,
    Unavailable,
)
from interlock.wire.access import KeyRequest
from interlock.wire.attempts import HeartbeatReply
from interlock.wire.queries import QueryFormat
from interlock.wire.tasks import MessageRef, SettleRequest

Answer = bytes | None
"""The bytes that the server writes; None closes the connection instead."""


class Request:
    def __init__(self, raw: bytes, connection: int) -> None:
        head, _, self.body = raw.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        self.method, self.target, _ = first.split()
        self.headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        self.connection = connection


class Scripted:
    """A server that answers each request with the next entry of its script."""

    def __init__(self) -> None:
        self.script: list[Answer] = []
        self.requests: list[Request] = []
        self.url = ""
        self._connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        number = self._connections
        while raw := await _request(reader):
            self.requests.append(Request(raw, number))
            answer = self.script.pop(0)
            if answer is None:
                break
            writer.write(answer)
            if b"connection: close" in answer:
                break
        writer.close()


async def _request(reader: asyncio.StreamReader) -> bytes:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        return head + await reader.readexactly(int(length[1]) if length else 0)
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


def reply(body: Any, status: int = 200, *headers: str) -> bytes:
    content = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(content)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def problem(status: int, code: str = "some_code", **more: Any) -> bytes:
    return reply({"type": "x", "title": "x", "status": status, "detail": "Because.", "code": code} | more, status)


@pytest.fixture
async def server() -> AsyncIterator[Scripted]:
    scripted = Scripted()
    listening = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
    scripted.url = "http://{}:{}".format(*listening.sockets[0].getsockname())
    yield scripted
    listening.close()
    await listening.wait_closed()


SETTLE = SettleRequest(queue="q", items=[MessageRef("1", "r")])
SETTLED = reply({"settled": 1})


async def test_calls_share_a_connection_and_carry_the_token(server: Scripted) -> None:
    server.script = [SETTLED, SETTLED]
    async with WorkerClient(server.url, "the-token") as client:
        assert (await client.ack(SETTLE)).settled == 1
        assert (await client.nack(SETTLE)).settled == 1
    assert [(r.method, r.target, r.connection) for r in server.requests] == [
        ("POST", "/internal/queue/ack", 1),
        ("POST", "/internal/queue/nack", 1),
    ]
    assert {r.headers["x-trace-worker-token"] for r in server.requests} == {"the-token"}
    assert json.loads(server.requests[0].body) == {"queue": "q", "items": [{"message_id": "1", "receipt": "r"}]}


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, BadRequest),
        (401, Unauthenticated),
        (403, Forbidden),
        (404, NotFound),
        (409, Conflict),
        (413, TooLarge),
        (418, BadRequest),
        (500, InterlockError),
    ],
)
async def test_problem_document_becomes_the_error_of_its_status(
    server: Scripted, status: int, error: type[InterlockError]
) -> None:
    server.script = [problem(status)]
    async with WorkerClient(server.url, "t") as client:
        with pytest.raises(InterlockError) as raised:
            await client.ack(SETTLE)
    assert type(raised.value) is error
    assert (raised.value.code, raised.value.detail) == ("some_code", "Because.")


async def test_fenced_write_names_the_stale_part(server: Scripted) -> None:
    server.script = [problem(409, "fenced", stale="attempt")]
    async with TaskClient(server.url, "jwt", Fence(uuid4(), 1, uuid4())) as client:
        with pytest.raises(Fenced) as raised:
            await client.complete("Completed", result=None)
    assert raised.value.stale == "attempt"
    assert json.loads(server.requests[0].body)["result"] is None


async def test_error_without_problem_document_is_still_an_error(server: Scripted) -> None:
    server.script = [reply("<html>", 404)]
    async with WorkerClient(server.url, "t") as client:
        with pytest.raises(NotFound, match="404"):
            await client.ack(SETTLE)


@pytest.mark.parametrize("away", [problem(503), reply("bad gateway", 502), None])
async def test_repeatable_call_is_retried_until_the_server_is_back(server: Scripted, away: Answer) -> None:
    server.script = [away, away, SETTLED]
    heard: list[InterlockError] = []
    async with WorkerClient(server.url, "t", on_retry=heard.append) as client:
        assert (await client.ack(SETTLE)).settled == 1
    assert len(server.requests) == 3
    assert len(heard) == 2


async def test_retries_end_after_the_patience(server: Scripted) -> None:
    server.script = [problem(503)]
    async with WorkerClient(server.url, "t", patience=0) as client:
        with pytest.raises(Unavailable):
            await client.ack(SETTLE)


@pytest.mark.parametrize("lost", [problem(503), None])
async def test_non_repeatable_call_is_not_retried(server: Scripted, lost: Answer) -> None:
    server.script = [lost, SETTLED]
    async with Client(server.url, "key") as client:
        with pytest.raises((ServerUnreachable, Unavailable)):
            await client.create_key(KeyRequest(user="ada"))
    assert len(server.requests) == 1


async def test_non_repeatable_call_opens_a_new_connection(server: Scripted) -> None:
    server.script = [reply({"status": "ok", "checks": {}}), problem(403)]
    async with Client(server.url, "key") as client:
        await client.health()
        with pytest.raises(Forbidden):
            await client.create_key(KeyRequest(user="ada"))
    assert [request.connection for request in server.requests] == [1, 2]


async def test_rate_limited_call_waits_for_retry_after(server: Scripted) -> None:
    server.script = [problem(429, retry_after_ms=50), SETTLED]
    async with WorkerClient(server.url, "t") as client:
        start = time.monotonic()
        await client.ack(SETTLE)
        assert time.monotonic() - start >= 0.05


async def test_retry_after_beyond_the_patience_is_an_error(server: Scripted) -> None:
    server.script = [reply("slow down", 429, "Retry-After: 120")]
    async with WorkerClient(server.url, "t", patience=1) as client:
        with pytest.raises(TooManyRequests) as raised:
            await client.ack(SETTLE)
    assert raised.value.retry_after == 120


async def test_unreachable_server_error_names_it_with_advice(server: Scripted) -> None:
    gone = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    url = "http://{}:{}".format(*gone.sockets[0].getsockname())
    gone.close()
    await gone.wait_closed()
    async with Client(url, "key", patience=0.1) as client:
        with pytest.raises(ServerUnreachable, match=rf"{url} does not answer .*interlock up"):
            await client.queues()


async def test_call_cancelled_during_its_response_leaks_no_connection() -> None:
    hung_up = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        writer.write(SETTLED)
        await reader.read()
        writer.close()
        hung_up.set()

    def cancel(_body: bytes) -> None:
        asyncio.get_running_loop().call_soon(call.cancel)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        url = "http://{}:{}".format(*listening.sockets[0].getsockname())
        async with Http(url, headers={}) as http:
            call = asyncio.create_task(http.exchange("GET", "/", b"", timeout=30, take=cancel))
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.wait_for(hung_up.wait(), 30)


async def test_response_in_pieces_is_read_completely(server: Scripted) -> None:
    chunks = b'b\r\n{"settled":\r\n3\r\n 7}\r\n0\r\n\r\n'
    server.script = [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks, SETTLED]
    async with WorkerClient(server.url, "t") as client:
        assert (await client.ack(SETTLE)).settled == 7
        assert (await client.ack(SETTLE)).settled == 1


async def test_connection_closed_by_the_server_is_not_reused(server: Scripted) -> None:
    server.script = [reply({"settled": 1}, 200, "connection: close"), SETTLED]
    async with WorkerClient(server.url, "t") as client:
        await client.ack(SETTLE)
        await client.ack(SETTLE)
    assert [request.connection for request in server.requests] == [1, 2]


async def test_unsolicited_bytes_are_not_a_response(server: Scripted) -> None:
    server.script = [SETTLED + reply({"settled": 99})[:20], SETTLED]
    async with WorkerClient(server.url, "t") as client:
        assert (await client.ack(SETTLE)).settled == 1
        assert (await client.ack(SETTLE)).settled == 1
    assert [request.connection for request in server.requests] == [1, 2]


async def test_error_while_reading_a_response_is_raised_as_it_is(server: Scripted) -> None:
    server.script = [reply("rows")]

    def full(_: bytes) -> None:
        raise OSError(28, "No space left on device")

    async with QueryClient(server.url, "key") as queries:
        with pytest.raises(OSError, match="No space left"):
            await queries.stream("select 1", QueryFormat.CSV, full)


@pytest.mark.parametrize("secret", ["a\r\nX-Other: b", "a\nb", "a\0b"])
def test_header_injection_is_refused(secret: str) -> None:
    for make in _clients(secret):
        with pytest.raises(ValueError, match="line break"):
            make()


def _clients(secret: str) -> list[Callable[[], object]]:
    return [
        lambda: Client("http://localhost", secret),
        lambda: WorkerClient("http://localhost", secret),
        lambda: TaskClient("http://localhost", secret, Fence(uuid4(), 1, uuid4())),
    ]


@pytest.mark.parametrize("url", ["localhost:7070", "ftp://localhost", "http://"])
def test_address_must_be_a_url(url: str) -> None:
    with pytest.raises(ValueError, match="http://host:port"):
        Client(url, "key")


async def test_base_path_is_kept_and_names_are_quoted(server: Scripted) -> None:
    server.script = [reply({"messages": []})]
    async with Client(f"{server.url}/proxied/", "key") as client:
        await client.dead_letters("../a b?c", limit=5)
    assert server.requests[0].target == "/proxied/v1/queues/..%2Fa%20b%3Fc/dead-letters?limit=5"


async def test_retried_submission_keeps_its_idempotency_key(server: Scripted) -> None:
    accepted = {
        "job_id": str(uuid4()),
        "run_id": str(uuid4()),
        "state": "Running",
        "total": 2,
        "deduplicated": 0,
        "tasks_url": "/v1/tasks",
        "status_url": "/v1/jobs",
    }
    server.script = [None, reply(accepted, 201), reply(accepted, 201)]
    async with Client(server.url, "key") as client:
        assert (await client.submit([1, {"a": 2}], operator="echo")).total == 2
        await client.submit([1], operator="echo", idempotency_key="mine")
    keys = [request.headers["idempotency-key"] for request in server.requests]
    assert keys[0] == keys[1] != keys[2] == "mine"
    assert json.loads(server.requests[0].body)["tasks"] == [1, {"a": 2}]


async def test_pagination_continues_past_an_empty_page(server: Scripted) -> None:
    job = {
        "job_id": str(uuid4()),
        "dag_name": None,
        "name": "a",
        "operator": "echo",
        "runtime": "platform",
        "priority": "normal",
        "config": {"kept": ["raw"]},
        "policy": {},
        "scaling": {},
        "created_at": "2025-01-01T00:00:00Z",
        "state": None,
        "run": None,
    }
    pages = [([job], "c 1"), ([], "c2"), ([job, job], None)]
    server.script = [reply({"jobs": jobs, "next_cursor": cursor}) for jobs, cursor in pages]
    async with Client(server.url, "key") as client:
        jobs = [job async for job in client.jobs(page_size=2)]
    assert len(jobs) == 3
    assert json.loads(bytes(jobs[0].config)) == {"kept": ["raw"]}
    assert [request.target for request in server.requests] == [
        "/v1/jobs?limit=2",
        "/v1/jobs?cursor=c+1&limit=2",
        "/v1/jobs?cursor=c2&limit=2",
    ]


async def test_renewed_capability_token_replaces_the_old_one(server: Scripted) -> None:
    task_id = uuid4()
    beat = {
        "task_id": str(task_id),
        "lease_expires_at": "2025-01-01T00:00:00Z",
        "cancel_requested": False,
        "status": "Running",
        "capability_token": "second",
    }
    server.script = [reply(beat), reply({"accepted": 0})]
    async with TaskClient(server.url, "first", Fence(task_id, 1, uuid4())) as client:
        answered: HeartbeatReply = await client.heartbeat(0.5, "half", renew=True)
        assert not answered.cancel_requested
        await client.events([])
    assert [request.headers["x-trace-task-capability"] for request in server.requests] == ["first", "second"]


def test_public_names_are_unchanged() -> None:
    public = {
        name for name, value in vars(sdk).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public == set(sdk.__all__)
