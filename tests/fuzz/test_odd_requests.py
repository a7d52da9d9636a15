"""Requests that no client library would send: odd addresses, odd framing, and random bytes on the socket."""

from __future__ import annotations

import asyncio
import base64
import json
from urllib.parse import quote
from uuid import uuid4

import httpx
import msgspec
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.listeners import FuzzedListeners
from tests.fuzz.responses import exchanged, require_orderly
from tests.fuzz.schemathesis_driver import EXAMPLES
from tests.fuzz.seeded_state import FOREIGN, RUN, RUNNING, State

ODD_TEXTS = [
    *(
        "%00",
        "%ff",
        "%c0%af",
        "%zz",
        "%",
        "%2",
        "%2e%2e",
        "..",
        "%2F",
        "%5C",
        "%0d%0aX-Evil:%201",
        "%20",
        "+",
        "%E2%80%AE",
    ),
    *(
        "null",
        "None",
        "true",
        "[]",
        "{}",
        "*",
        "~",
        "-1",
        "0",
        "NaN",
        "1e3",
        "%D9%A3",
        "%C2%B2",
        "'--",
        "%22",
        "a" * 5000,
    ),
    *(
        "9" * 400,
        "%F0%9F%98%80",
        "%ED%A0%80",
        "00000000000000000000000000000000",
        "{5EED0000-0000-4000-8000-000000000001}",
    ),
]
PATHS = [
    ("GET", "/v1/jobs/{}"),
    ("GET", "/v1/jobs/{}/runs"),
    ("GET", "/v1/jobs/{}/tasks"),
    ("GET", "/v1/runs/{}"),
    ("GET", "/v1/jobs/{}/receipt"),
    ("GET", "/v1/jobs/fuzzed-job/tasks/{}"),
    ("GET", "/v1/results/{}/0"),
    ("GET", "/v1/results/00000000-0000-0000-0000-000000000000/{}"),
    ("GET", "/v1/jobs/fuzzed-job/exports/{}"),
    ("POST", "/v1/jobs/{}/pause"),
    ("POST", "/v1/jobs/{}/close"),
    ("POST", "/v1/jobs/{}/resume"),
    ("POST", "/v1/jobs/{}/cancel"),
    ("DELETE", "/v1/jobs/{}"),
    ("POST", "/v1/runs/{}/cancel"),
    ("GET", "/v1/tasks/{}"),
    ("GET", "/v1/tasks/{}/attempts"),
    ("GET", "/v1/tasks/{}/explain"),
    ("POST", "/v1/tasks/{}/cancel"),
    ("POST", "/v1/tasks/{}/retry"),
    ("GET", "/v1/queues/{}/dead-letters"),
    ("POST", "/v1/queues/{}/redrive"),
    ("DELETE", "/v1/keys/{}"),
    ("DELETE", "/v1/worker-tokens/{}"),
    ("GET", "/v1/jobs?cursor={}"),
    ("GET", "/v1/jobs?limit={}"),
    ("GET", "/v1/jobs/fuzzed-job/runs?cursor={}"),
    ("GET", "/v1/tasks?cursor={}"),
    ("GET", "/v1/tasks?job={}"),
    ("GET", "/v1/tasks?run={}"),
    ("GET", "/v1/tasks?status={}"),
    ("GET", "/v1/tasks?status=Queued&status={}"),
    ("GET", "/v1/tasks?limit={}&limit=1"),
    ("GET", "/v1/tasks?{}"),
    ("GET", "/v1/tasks?{}=1"),
    ("GET", "/{}"),
    ("GET", "//{}//"),
    ("DELETE", "/v1/{}/keys"),
]
INTERNAL = [("GET", "/internal/task-fetch?task_id={}"), ("GET", "/internal/{}"), ("POST", "/v1/task/{}")]


def request(site: FuzzedListeners, method: str, target: bytes, *headers: bytes, body: bytes = b"") -> bytes:
    lines = [
        method.encode() + b" " + target + b" HTTP/1.1",
        b"Host: localhost",
        b"Connection: close",
        b"Authorization: Bearer " + site.admin_key.encode(),
        b"X-Trace-Worker-Token: " + site.worker_token.encode(),
        *headers,
    ]
    return b"\r\n".join([*lines, b"", body])


# Addresses


@pytest.mark.parametrize(("method", "path"), [*PATHS, *INTERNAL])
async def test_odd_address_gets_an_orderly_response(
    site: FuzzedListeners, state: State, method: str, path: str
) -> None:
    url = site.internal_url if (method, path) in INTERNAL else site.gateway_url
    targets = [path.format(odd).encode() for odd in ODD_TEXTS]
    targets += [
        path.encode().replace(b"{}", raw) for raw in (b"\xff", b"\xc3\xa9", b"\x7f", b"a#b", b"a?b", b";", b"a&b=c")
    ]
    answers = await asyncio.gather(*(exchanged(url, request(site, method, target)) for target in targets))
    for target, got in zip(targets, answers, strict=True):
        assert len(got) == 1, target
        require_orderly(got[0], target)
    assert site.complaints() == []


@settings(max_examples=5 * EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
async def test_forged_cursor_shows_no_tasks_of_other_orgs(
    site: FuzzedListeners, state: State, http: httpx.AsyncClient, data: st.DataObject
) -> None:
    """A cursor is opaque but not secret: a client may decode one and change it."""
    foreign = site.user("GET", f"/v1/tasks/{state.take(FOREIGN)}", key=site.rival_key)
    ids = st.sampled_from(
        [foreign["job_id"], foreign["run_id"], foreign["task_id"], state.take(RUN), str(uuid4()), None]
    )
    numbers = st.one_of(st.integers(-(2**63), 2**64 - 1), st.sampled_from([-1, 0, 1, 5, 2**62 - 1, 2**62]))
    odd = st.one_of(st.none(), st.floats(), st.text(max_size=5), st.binary(max_size=20), numbers, ids)
    sound = st.tuples(ids, ids, numbers, numbers, ids)
    parts = data.draw(st.one_of(sound, st.lists(odd, max_size=7), odd))
    cursor = base64.urlsafe_b64encode(msgspec.msgpack.encode(parts)).rstrip(b"=").decode()
    for path in ("/v1/tasks?", f"/v1/tasks?run={state.take(RUN)}&", "/v1/jobs/fuzzed-job/tasks?", "/v1/jobs?"):
        url = f"{site.gateway_url}{path}limit=50&cursor={quote(cursor)}"
        reply = await http.get(url, headers={"Authorization": f"Bearer {site.admin_key}"})
        if require_orderly(reply, parts) == 200:
            assert foreign["job_id"] not in reply.text
    assert site.complaints() == []


# Framing

JSON = b"Content-Type: application/json"
FRAMES: dict[str, tuple[list[bytes], bytes, set[int]]] = {
    "a length that is no number": ([JSON, b"Content-Length: ten"], b"{}", {400}),
    "a length below zero": ([JSON, b"Content-Length: -1"], b"{}", {400}),
    "a length with a sign": ([JSON, b"Content-Length: +2"], b"{}", {400}),
    "a length past 64 bits": ([JSON, b"Content-Length: 99999999999999999999999"], b"{}", {400}),
    "a length of a terabyte": ([JSON, b"Content-Length: 1099511627776"], b"{}", {413}),
    "two lengths that differ": ([JSON, b"Content-Length: 2", b"Content-Length: 3"], b"{} ", {400}),
    "a length and chunks": (
        [JSON, b"Content-Length: 2", b"Transfer-Encoding: chunked"],
        b"2\r\n{}\r\n0\r\n\r\n",
        {400},
    ),
    "chunks": ([JSON, b"Transfer-Encoding: chunked"], b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n", {400}),
    "chunks with an extension": ([JSON, b"Transfer-Encoding: chunked"], b"2;a=b\r\n{}\r\n0\r\n\r\n", {400}),
    "chunks with trailers": ([JSON, b"Transfer-Encoding: chunked"], b"2\r\n{}\r\n0\r\nX-Late: 1\r\n\r\n", {400}),
    "a chunk without a size": ([JSON, b"Transfer-Encoding: chunked"], b"z\r\n{}\r\n0\r\n\r\n", {400}),
    "a chunk past 64 bits": ([JSON, b"Transfer-Encoding: chunked"], b"fffffffffffffffff\r\n{}\r\n", {400}),
    "chunks twice": ([JSON, b"Transfer-Encoding: chunked, chunked"], b"2\r\n{}\r\n0\r\n\r\n", {400}),
    "another encoding": ([JSON, b"Transfer-Encoding: gzip"], b"{}", {400}),
    "a body that is packed": ([JSON, b"Content-Encoding: gzip", b"Content-Length: 2"], b"\x1f\x8b", {400}),
    "no body": ([JSON, b"Content-Length: 0"], b"", {400}),
    "not even a length": ([JSON], b"", {400}),
    "two types": ([JSON, b"Content-Type: text/plain", b"Content-Length: 2"], b"{}", {415}),
    "a type of bytes": ([b"Content-Type: \xff\xfe", b"Content-Length: 2"], b"{}", {415}),
    "a type without end": ([b"Content-Type: application/json;" + b"a=b;" * 5000, b"Content-Length: 2"], b"{}", {400}),
    "JSON in UTF-16": (
        [b"Content-Type: application/json; charset=utf-16", b"Content-Length: 6"],
        b"\xff\xfe{\0}\0",
        {400},
    ),
    "an upgrade": ([JSON, b"Connection: upgrade", b"Upgrade: websocket", b"Content-Length: 2"], b"{}", {400}),
    "another upgrade": ([JSON, b"Connection: upgrade", b"Upgrade: h2c", b"Content-Length: 2"], b"{}", {400}),
    "an expectation": ([JSON, b"Expect: 100-continue", b"Content-Length: 2"], b"{}", {100, 400}),
    "a header without a colon": ([b"Nonsense"], b"", {400}),
    "a header without a name": ([b": value"], b"", {400}),
    "a space before the colon": ([b"X-Request-Id : 1"], b"", {400}),
    "a folded header": ([b"X-Request-Id: a\r\n b"], b"", {400}),
    "a NUL in a header": ([b"X-Request-Id: a\x00b"], b"", {400}),
    "a carriage return in a header": ([b"X-Request-Id: a\rb"], b"", {400}),
    "a header beyond ASCII": ([b"X-Request-Id: \xff", b"Content-Length: 0"], b"", {400}),
    "a header of 60 KB": ([b"X-Long: " + b"x" * 60_000, b"Content-Length: 0"], b"", {400}),
    "a header of 100 KB": ([b"X-Long: " + b"x" * 100_000], b"", {431}),
    "a header of 10 MB": ([b"X-Long: " + b"x" * 10_000_000], b"", {431}),
    "ten thousand headers": ([b"X-Many: x"] * 10_000, b"", {431}),
    "a host that is none": ([b"Host: a b"], b"", {400}),
}


@pytest.mark.parametrize("frame", FRAMES)
async def test_odd_framing_gets_an_orderly_response(site: FuzzedListeners, frame: str) -> None:
    headers, body, expected = FRAMES[frame]
    for url, path in ((site.gateway_url, b"/v1/jobs"), (site.internal_url, b"/internal/task-claim")):
        answers = await exchanged(url, request(site, "POST", path, *headers, body=body))
        assert {answer.status_code for answer in answers} == expected, answers
        for answer in answers:
            if answer.status_code != 100:
                require_orderly(answer, frame)
    assert site.complaints() == []


LINES = {
    "a long address": (b"GET /" + b"x" * 100_000 + b" HTTP/1.1", 431),
    "a method of its own": (b"BREW /v1/jobs HTTP/1.1", 400),
    "a method in lower case": (b"get /v1/jobs HTTP/1.1", 400),
    "a tunnel": (b"CONNECT example.com:443 HTTP/1.1", 400),
    "a proxy's address": (b"GET http://elsewhere/v1/nowhere HTTP/1.1", 404),
    "a star": (b"OPTIONS * HTTP/1.1", 404),
    "no address": (b"GET  HTTP/1.1", 400),
    "no slash": (b"GET v1/jobs HTTP/1.1", 400),
    "another version": (b"GET /healthz HTTP/9.9", 400),
    "no version": (b"GET /healthz", 200),
    "another protocol": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "HTTP/2": (b"PRI * HTTP/2.0", 400),
    "an echo": (b"TRACE /healthz HTTP/1.1", 405),
}


@pytest.mark.parametrize("line", LINES)
async def test_odd_request_line_gets_an_orderly_response(site: FuzzedListeners, line: str) -> None:
    raw, status = LINES[line]
    for url in (site.gateway_url, site.internal_url):
        answers = await exchanged(url, raw + b"\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert [answer.status_code for answer in answers] == [status], answers
        require_orderly(answers[0], line)


async def test_endless_request_head_is_cut_off(site: FuzzedListeners) -> None:
    """An unauthenticated request without end: the server must not store what it cannot use."""
    host, port = site.gateway_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET / HTTP/1.1\r\nX-Long: ")
    sent = 0
    while not reader.at_eof() and sent < 50_000_000:
        writer.write(b"x" * 65_536)
        sent += 65_536
        try:
            await writer.drain()
        except ConnectionError:
            break
    assert sent < 5_000_000
    writer.close()


CHUNKED = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
TRAILERS = {"many trailers": (b"0\r\n", b"X-Late: 1\r\n" * 6000), "one trailer": (b"0\r\nX-Late: ", b"x" * 65_536)}


@pytest.mark.parametrize("listener", ["gateway", "dispatcher", "query"])
@pytest.mark.parametrize("form", TRAILERS)
async def test_endless_trailers_use_no_memory(site: FuzzedListeners, listener: str, form: str) -> None:
    """Unauthenticated: the response is a 401 or a 404, and the trailers continue after it."""
    opening, piece = TRAILERS[form]
    host, port = site.urls[listener].removeprefix("http://").split(":")
    process = psutil.Process(site.processes[listener].pid)
    before, sent = process.memory_info().rss, 0
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(CHUNKED + opening)
        while sent < 200_000_000 and not reader.at_eof():
            writer.write(piece)
            sent += len(piece)
            await writer.drain()
    except ConnectionError:
        pass  # the server closed the connection, as it should
    finally:
        writer.transport.abort()
    assert sent < 30_000_000
    assert process.memory_info().rss - before < 30_000_000
    assert (await exchanged(site.urls[listener], request(site, "GET", b"/healthz")))[0].status_code == 200


async def test_requests_are_served_beside_a_thousand_half_open_ones(site: FuzzedListeners) -> None:
    host, port = site.gateway_url.removeprefix("http://").split(":")
    held = []
    try:
        for number in range(1000):
            source = (f"127.0.0.{2 + number % 4}", 0)
            _, writer = await asyncio.open_connection(host, int(port), local_addr=source)
            writer.write(b"GET /healthz HT" if number % 2 else CHUNKED)
            held.append(writer)
        for target in (b"/healthz", b"/v1/jobs", b"/v1/tasks"):
            assert [a.status_code for a in await exchanged(site.gateway_url, request(site, "GET", target))] == [200]
    finally:
        for writer in held:
            writer.transport.abort()


# Noise


def noise(valid: bytes) -> st.SearchStrategy[bytes]:
    """Generates bytes near a valid request: some changed, dropped, repeated or truncated."""
    place, piece = st.integers(0, len(valid) - 1), st.binary(min_size=1, max_size=4)
    changed = st.builds(lambda i, b: valid[:i] + b + valid[i + len(b) :], place, piece)
    added = st.builds(lambda i, b: valid[:i] + b + valid[i:], place, piece)
    dropped = st.builds(lambda i, n: valid[:i] + valid[i + n :], place, st.integers(1, 40))
    doubled = st.builds(lambda i, n: valid[: i + n] + valid[i:], place, st.integers(1, 40))
    cut = st.builds(lambda i: valid[:i], place)
    return st.one_of(changed, added, dropped, doubled, cut)


@settings(max_examples=2 * EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
async def test_random_bytes_on_the_socket_break_nothing(
    site: FuzzedListeners, state: State, data: st.DataObject
) -> None:
    claim = json.dumps({"worker_id": "noise", "task_id": state.take(RUNNING)["task_id"]}).encode()
    framed = request(site, "POST", b"/internal/task-claim", JSON, b"Content-Length: %d" % len(claim), body=claim)
    plain = request(site, "GET", b"/v1/tasks?limit=1&status=Queued")
    for url, valid in ((site.internal_url, framed), (site.gateway_url, plain)):
        noises = data.draw(st.lists(noise(valid), min_size=8, max_size=8))
        # The server waits for the rest of a truncated request and sends no response, so the test does not wait for one.
        for raw, answers in zip(
            noises, await asyncio.gather(*(exchanged(url, n, patience=0.05) for n in noises)), strict=True
        ):
            for answer in answers:
                require_orderly(answer, raw)
    assert (await asyncio.gather(*(exchanged(url, request(site, "GET", b"/healthz")) for url in site.urls.values())))[0]
    assert site.complaints() == []
