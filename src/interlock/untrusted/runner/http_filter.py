"""HTTP from user code to the platform, request by request.

Every request is parsed, checked and serialized again: the platform reads exactly what was checked here, so no ambiguous
framing, malformed line end or second request on the same connection gets past the check.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import h11

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_CHUNK: Final = 1 << 16
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
        while await _exchange(here, there, host, allows):
            here.http.start_next_cycle()
            there.http.start_next_cycle()
    except (_Refused, h11.ProtocolError) as error:
        if here.http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            await _answer(here, error.status if isinstance(error, _Refused) else 400)


async def _exchange(here: _Side, there: _Side, host: bytes, allows: Callable[[bytes], bool]) -> bool:
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
