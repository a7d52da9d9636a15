"""Connections whose clients send too much, too slowly, too often or nothing, against the server of every listener."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from interlock.http.connection import DRAIN_BYTES, MAX_HEAD_BYTES, MAX_PIPELINED, ConnectionLimits, peer_of
from interlock.http.listener import bind
from interlock.http.server import Server, config_of
from interlock.telemetry import REGISTRY
from tests.support.polls import PATIENCE

Message = MutableMapping[str, Any]
QUICK = ConnectionLimits(head_seconds=0.4, body_bytes_per_second=1000, body_window_seconds=0.4, reply_stall_seconds=0.4)
PATIENT = ConnectionLimits(head_seconds=60, body_window_seconds=60)
CHUNKED = b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class App:
    """Answers by path. `/early` replies without reading the body; `/poll` waits for `go`; `/large` has a long reply."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    read: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    requests: int = 0

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        self.requests += 1
        self.entered.set()
        if scope["path"] in ("/poll", "/late"):
            await self.go.wait()
        body = b"x" * 50_000_000 if scope["path"] == "/large" else b"ok"
        if scope["path"] not in ("/early", "/poll", "/large"):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                self.read += len(message["body"])
                more = message["more_body"]
        self.headers = list(scope["headers"])
        length = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": body[:1_000_000], "more_body": len(body) > 1_000_000})
        if len(body) > 1_000_000:
            await send({"type": "http.response.body", "body": body[1_000_000:]})


@dataclass
class Served:
    app: App
    port: int
    clients: list[Client] = field(default_factory=list)

    async def connect(self, source: str = "127.0.0.1") -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port, local_addr=(source, 0)))
        self.clients.append(client)
        return client

    async def status(self, source: str = "127.0.0.1") -> int:
        client = await self.connect(source)
        await client.send(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return int((await client.rest()).split()[1])


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def rest(self) -> bytes:
        """Returns everything up to the end of the connection."""
        got = b""
        with suppress(ConnectionError):  # a reset also ends the connection
            async with asyncio.timeout(PATIENCE):
                while more := await self.reader.read(1 << 16):
                    got += more
        self.writer.close()
        return got

    async def reply(self) -> bytes:
        """Reads a reply of `App`, whose body is `ok`."""
        async with asyncio.timeout(PATIENCE):
            head = await self.reader.readuntil(b"\r\n\r\n")
            return head + await self.reader.readexactly(2)

    async def flood(self, piece: bytes, limit: int) -> int:
        """Sends until the server ends the connection. Returns the number of bytes sent."""
        sent = 0
        with suppress(ConnectionError):  # the server may reset the connection while this sends
            async with asyncio.timeout(PATIENCE):
                while sent < limit and not self.reader.at_eof():
                    await self.send(piece)
                    sent += len(piece)
        return sent


@asynccontextmanager
async def serving(limits: ConnectionLimits) -> AsyncIterator[Served]:
    app = App()
    listener = bind("127.0.0.1:0", setting="gateway")
    server = Server(config_of(app, grace_seconds=1, lifespan="off"), limits)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    served = Served(app, listener.getsockname()[1])
    try:
        yield served
    finally:
        app.go.set()
        for client in served.clients:
            client.writer.transport.abort()
        server.should_exit = True
        await task


def refused(reason: str) -> float:
    return REGISTRY.get_sample_value("interlock_connections_refused_total", {"reason": reason}) or 0.0


# Too much

ENDLESS = {
    "trailers": (CHUNKED % b"/" + b"0\r\n", b"X-Late: 1\r\n" * 1000),
    "one trailer": (CHUNKED % b"/" + b"0\r\nX-Late: ", b"x" * 65_536),
    "trailers after an early reply": (CHUNKED % b"/early" + b"0\r\n", b"X-Late: 1\r\n" * 1000),
    "one trailer after a body": (CHUNKED % b"/" + b"5\r\nhello\r\n0\r\nX-Late: ", b"x" * 65_536),
    "a chunk extension": (CHUNKED % b"/" + b"5;a=", b"x" * 65_536),
    "many chunk extensions": (CHUNKED % b"/", b"1;" + b"x" * 1000 + b"\r\nx\r\n"),
    "chunks of one byte": (CHUNKED % b"/", b"1\r\nx\r\n" * 1000),
    "a chunk size": (CHUNKED % b"/", b"0" * 65_536),
    "a header": (b"GET / HTTP/1.1\r\nX-Long: ", b"x" * 65_536),
    "headers": (b"GET / HTTP/1.1\r\n", b"a:\r\n" * 1000),
    "a request line": (b"GET /", b"x" * 65_536),
    "empty lines": (b"\r\n", b"\r\n" * 1000),
    "bytes after an upgrade": (
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"x" * 65_536,
    ),
    "a body after an early reply": (
        b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999\r\n\r\n",
        b"x" * 65_536,
    ),
    "pipelined requests": (b"GET /poll HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100),
}


@pytest.mark.parametrize("form", ENDLESS)
async def test_endless_request_is_cut_off(form: str) -> None:
    opening, piece = ENDLESS[form]
    async with serving(PATIENT) as served:
        client = await served.connect()
        await client.send(opening)
        # In addition to the bytes that the server reads, the buffers of both sockets hold some megabytes.
        assert await client.flood(piece, 200_000_000) < 30_000_000 + (DRAIN_BYTES if "body" in form else 0)
        assert b"HTTP/1.1 5" not in await client.rest()
        assert await served.status() == 200


async def test_trailers_count_with_the_head_and_become_no_headers() -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nX-Half: " + b"x" * (MAX_HEAD_BYTES // 2)
    async with serving(PATIENT) as served:
        short, long = await served.connect(), await served.connect()
        await short.send(head + b"\r\n\r\n0\r\nAuthorization: late\r\n\r\n")
        assert (await short.reply()).startswith(b"HTTP/1.1 200")
        assert b"authorization" not in dict(served.app.headers)
        await long.send(head + b"\r\n\r\n0\r\nX-Half: " + b"x" * (MAX_HEAD_BYTES // 2) + b"\r\n\r\n")
        assert (await long.rest()).startswith(b"HTTP/1.1 431")


async def test_many_small_chunks_of_a_long_body_are_read() -> None:
    """A list of numbers that a client sends line by line: `1\\n` is a chunk of two bytes."""
    async with serving(PATIENT) as served:
        client = await served.connect()
        await client.send(CHUNKED % b"/" + b"2\r\n1\n\r\n" * 200_000 + b"0\r\n\r\n")
        assert (await client.reply()).startswith(b"HTTP/1.1 200")
        assert served.app.read == 400_000


async def test_rest_of_a_body_within_bounds_is_discarded_and_the_connection_kept() -> None:
    async with serving(PATIENT) as served:
        client = await served.connect()
        await client.send(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n")
        assert (await client.reply()).startswith(b"HTTP/1.1 200")
        await client.send(b"x" * 9_000_000 + b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.reply()).startswith(b"HTTP/1.1 200")


async def test_some_pipelined_requests_are_answered_in_order() -> None:
    async with serving(PATIENT) as served:
        client = await served.connect()
        await client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * MAX_PIPELINED)
        for _ in range(MAX_PIPELINED):
            assert (await client.reply()).startswith(b"HTTP/1.1 200")


async def test_error_never_gets_into_the_reply_to_another_request() -> None:
    async with serving(PATIENT) as served:
        client = await served.connect()
        await client.send(b"GET /poll HTTP/1.1\r\nHost: x\r\n\r\nNOT HTTP AT ALL\r\n\r\n")
        assert await client.rest() == b""


async def test_request_with_an_upgrade_is_answered_as_one_without() -> None:
    async with serving(PATIENT) as served:
        client = await served.connect()
        await client.send(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n")
        reply = await client.rest()
        assert reply.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in reply


# Too slow

SLOW = {
    "nothing": (b"", b""),
    "half a head": (b"GET / HTTP/1.1\r\nHost: x\r\n", b"HTTP/1.1 408"),
    "an empty line": (b"\r\n", b"HTTP/1.1 408"),
    "half a body": (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nx", b"HTTP/1.1 408"),
    "half a chunk": (CHUNKED % b"/" + b"5\r\nhe", b"HTTP/1.1 408"),
    "half a trailer": (CHUNKED % b"/" + b"0\r\nX-", b"HTTP/1.1 408"),
    "half a body after an early reply": (
        b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nx",
        b"HTTP/1.1 200",
    ),
}


@pytest.mark.parametrize("form", SLOW)
async def test_request_that_does_not_arrive_times_out(form: str) -> None:
    sent, expected = SLOW[form]
    async with serving(QUICK) as served:
        client = await served.connect()
        await client.send(sent)
        reply = await client.rest()
        assert reply.startswith(expected), reply
        assert b"request_timeout" in reply or expected != b"HTTP/1.1 408"


async def test_slow_request_body_times_out() -> None:
    async with serving(QUICK) as served:
        client = await served.connect()
        await client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        ticking = asyncio.create_task(_trickle(client))
        assert (await client.rest()).startswith(b"HTTP/1.1 408")
        ticking.cancel()


async def _trickle(client: Client) -> None:
    for _ in range(10_000):
        await client.send(b"x")
        await asyncio.sleep(0.02)  # noqa: TID251 - the rate is what is tested


async def test_unread_reply_times_out() -> None:
    before = refused("reply_stall")
    async with serving(QUICK) as served:
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            client.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(PATIENCE):
                while refused("reply_stall") == before:
                    await served.status()


async def test_server_time_does_not_count_against_the_client() -> None:
    """A long poll, backpressure on a body and a withheld 100 Continue all last longer than any deadline here."""
    async with serving(QUICK) as served:
        polls, slow, asks = [await served.connect() for _ in range(3)]
        await polls.send(b"GET /poll HTTP/1.1\r\nHost: x\r\n\r\n\r\n")
        await asks.send(b"POST /late HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        sending = asyncio.create_task(
            slow.send(b"POST /late HTTP/1.1\r\nHost: x\r\nContent-Length: 20000000\r\n\r\n" + b"x" * 20_000_000)
        )
        before = refused("head_timeout")
        while refused("head_timeout") < before + 3:  # three consecutive deadlines
            idle = await served.connect()
            await idle.send(b"GET / HTTP")
            await idle.rest()
        served.app.go.set()
        assert (await polls.reply()).startswith(b"HTTP/1.1 200")
        async with asyncio.timeout(PATIENCE):
            assert (await asks.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        await asks.send(b"{}")
        assert (await asks.reply()).startswith(b"HTTP/1.1 200")
        await sending
        assert (await slow.reply()).startswith(b"HTTP/1.1 200")


# Too many


async def test_one_peer_cannot_take_the_connections_of_another() -> None:
    async with serving(ConnectionLimits(head_seconds=60, connections=100, per_peer=5)) as served:
        held = [await served.connect("127.0.0.2") for _ in range(5)]
        refused_one = await served.connect("127.0.0.2")
        assert b"too_many_connections" in await refused_one.rest()
        assert await served.status("127.0.0.3") == 200
        held.pop().writer.close()
        async with asyncio.timeout(PATIENCE):
            while await served.status("127.0.0.2") != 200:
                continue


async def test_at_the_cap_idle_and_half_sent_requests_make_room() -> None:
    async with serving(ConnectionLimits(head_seconds=60, connections=20, per_peer=0)) as served:
        for _ in range(100):
            await (await served.connect()).send(b"GET / HTTP/1.1\r\n")
        assert [await served.status() for _ in range(10)] == [200] * 10


async def test_server_full_of_requests_at_work_refuses_more() -> None:
    async with serving(ConnectionLimits(connections=3, per_peer=0)) as served:
        polls = [await served.connect() for _ in range(3)]
        for poll in polls:
            await poll.send(b"GET /poll HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(PATIENCE):
            while served.app.requests < 3:
                served.app.entered.clear()
                await served.app.entered.wait()
        assert await served.status() == 503
        served.app.go.set()
        for poll in polls:
            assert (await poll.reply()).startswith(b"HTTP/1.1 200")


async def test_requests_pass_while_a_thousand_are_half_open() -> None:
    async with serving(ConnectionLimits(head_seconds=60, connections=2000, per_peer=300)) as served:
        for number in range(1000):
            client = await served.connect(f"127.0.0.{2 + number // 250}")
            await client.send(CHUNKED % b"/" if number % 2 else b"GET / HT")
        assert [await served.status() for _ in range(20)] == [200] * 20


def test_addresses_of_one_ipv6_network_are_one_peer() -> None:
    assert peer_of("2001:db8::1") == peer_of("2001:db8::ffff:1") != peer_of("2001:db8:0:1::1")
    assert peer_of("::ffff:192.0.2.1") == peer_of("192.0.2.1") != peer_of("192.0.2.2")
