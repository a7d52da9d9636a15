"""What code inside can ask of the platform through the runner's forwarder: task paths and objects, in no other form."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest

from interlock.runner.contract import Endpoints
from interlock.runner.forward import Forwarder, Target, targets_of
from tests.patience import PATIENCE
from tests.system import System, fence

HERE = b"Code of a bundle reaches"
TASK = b"/v1/task/heartbeat"


@dataclass
class Inside:
    """The forwarder's addresses, as code inside has them."""

    dispatcher: int
    gateway: int

    async def raw(self, data: bytes) -> bytes:
        """Everything that the dispatcher's address answers to some bytes, until it closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.dispatcher)
        writer.write(data)
        writer.write_eof()
        async with asyncio.timeout(PATIENCE):
            got = await reader.read()
        writer.close()
        return got


@asynccontextmanager
async def inside(system: System) -> AsyncIterator[Inside]:
    targets = targets_of(Endpoints(dispatcher_url=system.internal_url, objects_url=system.gateway_url))
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in targets]
    forwarder = Forwarder(listeners, targets)
    forwarder.start()
    ports = [listener.getsockname()[1] for listener in listeners]
    try:
        yield Inside(*ports)
    finally:
        await forwarder.close()


async def test_no_route_but_those_of_tasks_and_objects_is_reached(shared: System) -> None:
    reached = {}
    async with inside(shared) as code:
        for url, port in ((shared.internal_url, code.dispatcher), (shared.gateway_url, code.gateway)):
            paths = (await shared.http.get(f"{url}/openapi.json")).json()["paths"]
            for path in [*paths, "/openapi.json", "/"]:
                for method in paths.get(path, {"get": {}}):
                    reply = await shared.http.request(method, f"http://127.0.0.1:{port}{path}")
                    if not reply.content.startswith(HERE):
                        reached[path.partition("{")[0].rstrip("/")] = port
    tasks = {f"/v1/task/{name}" for name in ("heartbeat", "complete", "events", "buffer-publish", "credentials")}
    assert {path for path, port in reached.items() if port == code.dispatcher} == tasks
    assert {path for path, port in reached.items() if port == code.gateway} == {"/v1/objects"}


HEAD = b"POST " + TASK + b" HTTP/1.1\r\nHost: x\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
SMUGGLED = {
    "a length and chunks": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HEALTH,
    "two lengths": HEAD + b"Content-Length: 0\r\nContent-Length: 50\r\n\r\n" + HEALTH,
    "chunks by another name": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n" + HEALTH,
    "chunks after a space": HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + HEALTH,
    "a second request": HEAD + b"Content-Length: 0\r\n\r\n" + HEALTH,
    "a second request with bare line ends": HEAD + b"Content-Length: 0\r\n\r\n" + HEALTH.replace(b"\r", b""),
    "a body that is a request": HEAD + b"Content-Length: %d\r\n\r\n" % len(HEALTH) + HEALTH,
    "a folded header": HEAD + b"X: a\r\n Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n" + HEALTH,
    "an upgrade": HEAD + b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 0\r\n\r\n" + HEALTH,
    "a chunk with an extension": HEAD + b"Transfer-Encoding: chunked\r\n\r\n0;a=b\r\n\r\n" + HEALTH,
    "a trailer": HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 9\r\n\r\n" + HEALTH,
    "an absolute address": b"GET http://x/healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    "an absolute address with a task path": b"GET http://x/v1/task/../../healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    "dots": b"GET /v1/task/../../healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    "encoded dots": b"GET /v1/task/%2e%2e/%2E./healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    "an encoded slash": b"GET /v1/task/..%2f..%2fhealthz HTTP/1.1\r\nHost: x\r\n\r\n",
    "two slashes": b"GET //v1/task/../metrics HTTP/1.1\r\nHost: x\r\n\r\n",
    "a tunnel": b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n" + HEALTH,
    "a fragment": b"GET /v1/task#/../healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    "an old version": b"GET /healthz HTTP/1.0\r\n\r\n",
    "no version": b"GET /healthz\r\n\r\n",
    "a line end in a header": HEAD + b"X: a\rGET /healthz HTTP/1.1\r\n\r\n",
    "a NUL": HEAD + b"X: a\x00b\r\n\r\n" + HEALTH,
    "noise": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


@pytest.mark.parametrize("form", SMUGGLED)
async def test_no_form_of_a_request_gets_another_path_through(shared: System, form: str) -> None:
    async with inside(shared) as code:
        got = await code.raw(SMUGGLED[form])
    assert b'"checks"' not in got, got  # what /healthz answers
    assert b"HTTP/1.1 200" not in got, got


async def test_an_attempt_works_through_the_forwarder(shared: System) -> None:
    claim = await shared.claim(await shared.one())
    headers = {"X-Trace-Task-Capability": claim["capability_token"]}

    async def parts() -> AsyncIterator[bytes]:
        yield httpx.Request("POST", "http://x", json=fence(claim) | {"status": "Completed"}).content

    async with inside(shared) as code, httpx.AsyncClient(base_url=f"http://127.0.0.1:{code.dispatcher}") as client:
        for _ in range(3):  # on one connection
            beat = await client.post("/v1/task/heartbeat", headers=headers, json=fence(claim))
            assert beat.status_code == 200, beat.text
        json = {"Content-Type": "application/json"}
        done = await client.post("/v1/task/complete", headers=headers | json, content=parts())
        assert done.status_code == 200, done.text
    assert (await shared.task(claim["task_id"]))["status"] == "Completed"


def test_a_bucket_and_an_encrypted_address_are_passed_on_as_they_are() -> None:
    there = targets_of(Endpoints("http://a:1/base/", "http://a:1", "http://b:2", objects_in_bucket=True))
    assert there == [Target("a", 1, frozenset({"/base/v1/task", "/v1/task"})), Target("b", 2, None)]
    assert targets_of(Endpoints("https://a")) == [Target("a", 443, None)]
