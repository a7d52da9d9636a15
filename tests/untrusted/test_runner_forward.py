"""Requests of user code through the runner's forwarder: task paths and objects pass, nothing else in any form."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from interlock.untrusted.runner.contract import Endpoints
from interlock.untrusted.runner.forwarder import Forwarder, open_routes
from tests.support.polls import PATIENCE
from tests.support.system import System, fence
from tests.support.third_party_servers import answer, identity, stranger, terminating

HERE = b"User code may request only"
TASK = b"/v1/task/heartbeat"


@dataclass
class Inside:
    """Ports of the forwarder on 127.0.0.1, as user code has them."""

    dispatcher: int
    gateway: int

    async def raw(self, data: bytes) -> bytes:
        """Sends bytes to the dispatcher's address and returns everything it sends until it closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.dispatcher)
        writer.write(data)
        writer.write_eof()
        async with asyncio.timeout(PATIENCE):
            got = await reader.read()
        writer.close()
        return got


@asynccontextmanager
async def inside(dispatcher: str, gateway: str, trusted: Path | None = None) -> AsyncIterator[Inside]:
    endpoints = Endpoints(dispatcher_url=dispatcher, objects_url=gateway)
    tls = ssl.create_default_context(cafile=trusted)
    with open_routes(endpoints, own_network=False) as routes:
        forwarder = Forwarder(routes.listeners, routes.targets, tls)
        forwarder.start()
        try:
            yield Inside(*(place.port for place in routes.places))
        finally:
            await forwarder.close()


@pytest.fixture(scope="module")
def localhost(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return identity(tmp_path_factory.mktemp("identity") / "localhost.pem", "localhost")


@pytest.fixture(params=["http", "https"])
async def code(request: pytest.FixtureRequest, shared: System, localhost: Path) -> AsyncIterator[Inside]:
    if request.param == "http":
        async with inside(shared.internal_url, shared.gateway_url) as addresses:
            yield addresses
        return
    async with (
        terminating(shared.internal_url, localhost) as dispatcher,
        terminating(shared.gateway_url, localhost) as gateway,
        inside(dispatcher, gateway, localhost) as addresses,
    ):
        yield addresses


async def test_only_task_and_object_routes_are_reachable(shared: System, code: Inside) -> None:
    reached = {}
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
async def test_no_request_form_smuggles_another_path(code: Inside, form: str) -> None:
    got = await code.raw(SMUGGLED[form])
    assert b'"checks"' not in got, got  # part of the response of /healthz
    assert b"HTTP/1.1 200" not in got, got


async def test_attempt_works_through_the_forwarder(shared: System, code: Inside) -> None:
    claim = await shared.claim(await shared.one())
    headers = {"X-Trace-Task-Capability": claim["capability_token"]}

    async def parts() -> AsyncIterator[bytes]:
        yield httpx.Request("POST", "http://x", json=fence(claim) | {"status": "Completed"}).content

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{code.dispatcher}") as client:
        for _ in range(3):  # on one connection
            beat = await client.post("/v1/task/heartbeat", headers=headers, json=fence(claim))
            assert beat.status_code == 200, beat.text
        json = {"Content-Type": "application/json"}
        done = await client.post("/v1/task/complete", headers=headers | json, content=parts())
        assert done.status_code == 200, done.text
    assert (await shared.task(claim["task_id"]))["status"] == "Completed"


async def test_platform_sees_its_own_host_name_and_a_verified_connection(localhost: Path) -> None:
    async with stranger(localhost) as there, inside(there.url("", "localhost"), "http://x", localhost) as code:
        there.says("/v1/task/heartbeat", answer(b"seen"))
        assert b"seen" in await code.raw(HEAD + b"Content-Length: 0\r\n\r\n")
    assert [asked.headers["host"] for asked in there.asked] == [f"localhost:{there.port}"]
    assert there.named == ["localhost"]


@pytest.mark.parametrize("reply", [b"no HTTP\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Le"])
async def test_unreadable_reply_is_reported_as_a_platform_error(reply: bytes) -> None:
    async with stranger() as there, inside(there.url(""), "http://x") as code:
        there.says("/v1/task/heartbeat", reply)
        assert (await code.raw(HEAD + b"Content-Length: 0\r\n\r\n")).startswith(b"HTTP/1.1 502 ")


@pytest.mark.parametrize("problem", ["another authority", "another host name"])
async def test_no_request_is_sent_to_a_server_whose_certificate_is_wrong(
    localhost: Path, tmp_path: Path, problem: str
) -> None:
    trusted, host = (identity(tmp_path / "other.pem", "localhost"), "localhost")
    if problem == "another host name":
        trusted, host = localhost, "127.0.0.1"
    async with stranger(localhost) as there, inside(there.url("", host), "http://x", trusted) as code:
        there.says("/v1/task/heartbeat", answer(b"seen"))
        assert await code.raw(HEAD + b"Content-Length: 0\r\n\r\n") == b""
    assert there.asked == []


def test_each_url_gets_its_own_address_and_a_bucket_keeps_its_name() -> None:
    endpoints = Endpoints("https://a/base/", "https://a", "https://b:17070", objects_in_bucket=True)
    with open_routes(endpoints, own_network=True) as routes:
        assert routes.urls == {
            "dispatcher_url": "http://127.0.0.1:17071/base/",
            "query_url": "http://127.0.0.1:17072",
            "objects_url": "https://b:17070",
        }
        assert (routes.listeners, routes.hosts) == ([], {"b": "127.0.0.10"})
    with open_routes(endpoints, own_network=False) as routes:
        ports = [listener.getsockname()[1] for listener in routes.listeners]
        assert [place.port for place in routes.places] == ports
        assert routes.urls["objects_url"] == f"http://127.0.0.1:{ports[2]}"
        assert routes.hosts == {}
