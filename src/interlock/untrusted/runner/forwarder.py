"""Connections from user code to the platform, and to no other address.

Code gets URLs on 127.0.0.1. The runner accepts connections there, checks each request and sends it to the platform,
over TLS if the platform's URL is https. A bucket is the exception if the code has its own network: the code uses the
bucket's own URL, and the connection is forwarded unchanged.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

import h11
import structlog

from interlock.untrusted.runner.contract import Endpoints
from interlock.untrusted.runner.in_sandbox.job import Place

log = structlog.get_logger()

MAX_CONNECTIONS: Final = 64
"""Maximum number of open connections of one invocation; further ones wait to be accepted."""
_CHUNK: Final = 1 << 16
_CONNECT_SECONDS: Final = 10.0
_PORTS: Final = {"http": 80, "https": 443}
_LOOPBACK: Final = "127.0.0.1"
_FIRST_PORT: Final = 17_070
"""Used in the code's own network, where every port is free."""
_BUCKET_ADDRESS: Final = "127.0.0.10"
"""The address of a bucket's host name in the code's own network."""


@dataclass(frozen=True)
class Target:
    """One URL of the platform, and the paths that code may request there."""

    name: str
    """The field of `endpoints`."""
    url: SplitResult
    paths: str | None
    """Prefix of the allowed paths, below the URL. None for a tunnel to a bucket, which has only objects; each request
    to it is signed for the host name that the client uses.
    """

    @property
    def host(self) -> str:
        return self.url.hostname or ""

    @property
    def port(self) -> int:
        return self.url.port or _PORTS[self.url.scheme]

    @property
    def host_header(self) -> bytes:
        return self.url.netloc.rpartition("@")[2].encode()

    def allows(self, path: bytes) -> bool:
        """Refuses every path that a server could interpret in two ways: dots and empty segments, encoded or not."""
        plain = unquote_to_bytes(path.partition(b"?")[0])
        odd = {b"", b".", b".."} & set(plain.split(b"/")[1:]) or b"\\" in plain or b"#" in path
        start = f"{self.url.path.rstrip('/')}{self.paths}".encode()
        return not odd and path.startswith(start) and path[len(start) :][:1] in b"/?"


def _targets(endpoints: Endpoints, *, tunnels: bool) -> list[Target]:
    bucket = None if tunnels else ""
    paths = {
        "dispatcher_url": "/v1/task",
        "query_url": "/v1/task",
        "objects_url": bucket if endpoints.objects_in_bucket else "/v1/objects",
    }
    urls = ((name, getattr(endpoints, name)) for name in paths)
    return [Target(name, urlsplit(url), paths[name]) for name, url in urls if url is not None]


@dataclass(frozen=True)
class Routes:
    """The targets of one invocation, and the addresses where its code reaches them."""

    targets: list[Target]
    places: list[Place]
    """In the order of the targets."""
    listeners: list[socket.socket]
    """In the order of the targets; empty if they are created inside the code's own network."""
    hosts: dict[str, str]
    """Names that the code must be able to resolve."""

    @property
    def urls(self) -> dict[str, str]:
        """The values of `endpoints` for the code."""
        pairs = zip(self.targets, self.places, strict=True)
        return {target.name: _url_inside(target, place) for target, place in pairs}


def _url_inside(target: Target, place: Place) -> str:
    if target.paths is None:
        return target.url.geturl()
    return f"http://{place.host}:{place.port}{target.url.path}"


@contextmanager
def open_routes(endpoints: Endpoints, *, own_network: bool) -> Iterator[Routes]:
    """Opens listeners in this process if the code has no network of its own; they are closed at the end."""
    targets = _targets(endpoints, tunnels=own_network)
    if own_network:
        yield _routes_inside(targets)
        return
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server((_LOOPBACK, 0))) for _ in targets]
        yield Routes(targets, [Place(*each.getsockname()) for each in listeners], listeners, {})


def _routes_inside(targets: list[Target]) -> Routes:
    tunnels = [target for target in targets if target.paths is None]
    taken = {target.port for target in tunnels}
    ports = (port for port in itertools.count(_FIRST_PORT) if port not in taken)
    places = [
        Place(_LOOPBACK, next(ports)) if target.paths is not None else Place(_address(target.host), target.port)
        for target in targets
    ]
    named = [target.host for target in tunnels if _address(target.host) == _BUCKET_ADDRESS]
    return Routes(targets, places, [], dict.fromkeys(named, _BUCKET_ADDRESS))


def _address(host: str) -> str:
    """A tunnel keeps a literal address. Every resolver knows `localhost`, regardless of the hosts file."""
    if host == "localhost":
        return _LOOPBACK
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return _BUCKET_ADDRESS


class Forwarder:
    """Accepts connections of one invocation on listeners, which are in the order of their targets."""

    def __init__(self, listeners: Sequence[socket.socket], targets: Sequence[Target], tls: ssl.SSLContext) -> None:
        self._listeners = listeners
        self._targets = targets
        self._tls = tls
        self._reported: set[Target] = set()
        self._room = asyncio.Semaphore(MAX_CONNECTIONS)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        for listener, target in zip(self._listeners, self._targets, strict=True):
            listener.setblocking(False)
            self._begin(self._accept(listener, target))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket, target: Target) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._room.acquire()
            inner, _ = await loop.sock_accept(listener)
            self._begin(self._pass(inner, target))

    async def _pass(self, inner: socket.socket, target: Target) -> None:
        try:
            here = await asyncio.open_connection(sock=inner)
            try:
                if there := await self._connect(target):
                    with suppress(OSError):  # either side may disconnect at any time
                        await _exchange(here, there, target)
            finally:
                here[1].close()
        finally:
            self._room.release()

    async def _connect(self, target: Target) -> Stream | None:
        """Verifies certificate and host name if TLS ends here."""
        tls = self._tls if target.url.scheme == "https" and target.paths is not None else None
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                return await asyncio.open_connection(target.host, target.port, ssl=tls)
        except (OSError, TimeoutError) as error:
            if target not in self._reported:  # once, since code can cause any number of failures
                self._reported.add(target)
                where = f"{target.host}:{target.port}"
                log.warning("runner.platform_unreachable", address=where, reason=str(error) or "timeout")
            return None


async def _exchange(here: Stream, there: Stream, target: Target) -> None:
    try:
        if target.paths is None:
            await _both_ways(here, there)
        else:
            await exchange_all(here, there, target.host_header, target.allows)
    finally:
        there[1].close()


async def _both_ways(one: Stream, other: Stream) -> None:
    await asyncio.gather(_one_way(one[0], other[1]), _one_way(other[0], one[1]))


async def _one_way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_HOP_BY_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade", b"expect"}
)
_BODIES: Final = {
    400: b"This request cannot be read.\n",
    404: b"User code may request only task paths and objects of the platform.\n",
    502: b"The platform did not reply to this request.\n",
}


class _Refused(Exception):
    """A request that is not forwarded."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class _Side:
    """One end of a connection: converts the bytes of a stream to HTTP events."""

    def __init__(self, stream: Stream, role: type[h11.CLIENT] | type[h11.SERVER]) -> None:
        self._reader, self._writer = stream
        self.http = h11.Connection(role, max_incomplete_event_size=_CHUNK)

    async def event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        while True:
            event = self.http.next_event()
            if event is not h11.NEED_DATA:
                return event
            if self.http.they_are_waiting_for_100_continue:
                await self.send(h11.InformationalResponse(status_code=100, headers=[]))
            self.http.receive_data(await self._reader.read(_CHUNK))

    async def send(self, event: h11.Event) -> None:
        self._writer.write(self.http.send(event) or b"")
        await self._writer.drain()


async def exchange_all(inner: Stream, outer: Stream, host: bytes, allows: Callable[[bytes], bool]) -> None:
    """Forwards requests until one side closes. `allows` checks the target of each request; `host` is the Host header
    for the platform.
    """
    here, there = _Side(inner, h11.SERVER), _Side(outer, h11.CLIENT)
    try:
        while await _filtered_exchange(here, there, host, allows):
            here.http.start_next_cycle()
            there.http.start_next_cycle()
    except (_Refused, h11.ProtocolError) as error:
        if here.http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            await _answer(here, error.status if isinstance(error, _Refused) else 400)


async def _filtered_exchange(here: _Side, there: _Side, host: bytes, allows: Callable[[bytes], bool]) -> bool:
    """Forwards one request and its reply. Returns False if no other request may follow."""
    request = await here.event()
    if not isinstance(request, h11.Request):
        return False
    await there.send(_checked(request, host, allows))
    sending = asyncio.create_task(_pass_body(here, there))
    replying = asyncio.create_task(_pass_reply(there, here))
    try:
        await asyncio.wait({sending, replying}, return_when=asyncio.FIRST_COMPLETED)
        if not replying.done():
            sending.result()  # raises if the code has disconnected
        try:
            await replying
        except h11.RemoteProtocolError:
            raise _Refused(502) from None
        # A reply that is complete before its request must be the last: the start of the next request is unknown.
        if not sending.done():
            return False
        sending.result()
        return all(side.http.our_state is side.http.their_state is h11.DONE for side in (here, there))
    finally:
        for task in (sending, replying):
            task.cancel()
        await asyncio.gather(sending, replying, return_exceptions=True)


def _checked(request: h11.Request, host: bytes, allows: Callable[[bytes], bool]) -> h11.Request:
    names = [name for name, _ in request.headers]
    if b"content-length" in names and b"transfer-encoding" in names:
        raise _Refused(400)
    if request.http_version != b"1.1" or names.count(b"host") != 1:
        raise _Refused(400)
    if not allows(request.target):
        raise _Refused(404)
    kept = [(name, value) for name, value in request.headers if name not in _HOP_BY_HOP and name != b"host"]
    return h11.Request(method=request.method, target=request.target, headers=[(b"host", host), *kept])


async def _pass_body(here: _Side, there: _Side) -> None:
    while isinstance(event := await here.event(), h11.Data):
        await there.send(h11.Data(data=event.data))
    if not isinstance(event, h11.EndOfMessage):
        raise h11.RemoteProtocolError("the request ended too soon")
    await there.send(h11.EndOfMessage())  # trailers are not forwarded


async def _pass_reply(there: _Side, here: _Side) -> None:
    while not isinstance(event := await there.event(), h11.EndOfMessage):
        if isinstance(event, h11.Response):
            headers = [(name, value) for name, value in event.headers if name not in _HOP_BY_HOP]
            await here.send(h11.Response(status_code=event.status_code, headers=headers, reason=event.reason))
        elif isinstance(event, h11.Data):
            await here.send(h11.Data(data=event.data))
        elif not isinstance(event, h11.InformationalResponse):
            raise h11.RemoteProtocolError("the reply ended too soon")
    await here.send(h11.EndOfMessage())


async def _answer(here: _Side, status: int) -> None:
    body = _BODIES[status]
    headers = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    await here.send(h11.Response(status_code=status, headers=headers))
    await here.send(h11.Data(data=body))
    await here.send(h11.EndOfMessage())
