"""Serves a chain over HTTP until it is stopped, and mines blocks at intervals."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias

import uvicorn

from interlock.dev.chain import KEPT_BLOCKS, MAX_BLOCKS, Chain
from interlock.dev.methods import Methods, Serving
from interlock.dev.rpc import Endpoint, Limits
from interlock.http.connection import ConnectionLimits
from interlock.http.server import Server, config_of

# ASGI's types: the keys of a message depend on its type.
_Message: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Message]]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]

_BODY_LIMIT: Final = 5 * 1024 * 1024
_GRACE_SECONDS: Final = 5
_JSON: Final = (b"content-type", b"application/json")
_TEXT: Final = (b"content-type", b"text/plain; charset=utf-8")


class Miner:
    """Mines one block per interval. The interval may change at any time."""

    def __init__(self, chain: Chain, seconds: float) -> None:
        self._chain = chain
        self._seconds = seconds
        self._changed = asyncio.Event()

    def set_pace(self, seconds: float) -> None:
        """Sets the seconds between blocks; 0 stops mining."""
        self._seconds = seconds
        self._changed.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + self._seconds
        while True:
            try:
                async with asyncio.timeout_at(due if self._seconds else None):
                    await self._changed.wait()
                self._changed.clear()
                due = loop.time() + self._seconds
            except TimeoutError:
                self._mine()
                due = max(due + self._seconds, loop.time())

    def _mine(self) -> None:
        """Mines a block and generates its contents immediately, so that the first reader need not wait."""
        if self._chain.head.number < MAX_BLOCKS:
            self._chain.contents(self._chain.mine())


class Application:
    """Serves one endpoint: POST / with a JSON-RPC body."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":  # a websocket; uvicorn turns the refusal into a 403
            await send({"type": "websocket.close"})
        elif scope["path"] != "/":
            await _reply(send, 404, b"JSON-RPC is at /.\n", _TEXT)
        elif scope["method"] != "POST":
            await _reply(send, 405, b"Send JSON-RPC 2.0 with POST.\n", _TEXT, (b"allow", b"POST"))
        else:
            await self._answer(receive, send)

    async def _answer(self, receive: _Receive, send: _Send) -> None:
        body = await _body(receive)
        if body is None:
            await _reply(send, 413, b"A request may have at most 5 MiB.\n", _TEXT, (b"connection", b"close"))
            return
        answer = self._endpoint.answer(body)
        if answer is None:
            await _reply(send, 204, b"")
        else:
            await _reply(send, 200, answer, _JSON)


async def _body(receive: _Receive) -> bytes | None:
    """Returns None if the body is too large. A request that the client aborts is still processed."""
    parts, size, more = list[bytes](), 0, True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > _BODY_LIMIT:
            return None
        more = message.get("more_body", False)
    return b"".join(parts)


async def _reply(send: _Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    length = [] if status == 204 else [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *length]})
    await send({"type": "http.response.body", "body": body})


async def serve(
    chain: Chain,
    listener: socket.socket,
    *,
    seconds: float,
    serving: Serving | None = None,
    limits: Limits | None = None,
    on_ready: Callable[[], None],
) -> None:
    """Serves until SIGTERM or Ctrl-C. `seconds` is the time between blocks; 0 mines only on request."""
    miner = Miner(chain, seconds)
    endpoint = Endpoint(Methods(chain, miner.set_pace, serving).table(), limits)
    config = config_of(Application(endpoint), grace_seconds=_GRACE_SECONDS, lifespan="off")
    server = Server(config, ConnectionLimits())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _stop, server)
    gc.freeze()  # a long chain has a million permanent small objects, which the collector need not scan
    background = [asyncio.create_task(miner.run()), asyncio.create_task(_write_ahead(chain))]
    on_ready()  # the socket already listens: a client that connects now waits a moment and is served
    try:
        await server.serve(sockets=[listener])
    finally:
        await _end(background)


async def _write_ahead(chain: Chain) -> None:
    """Generates the first blocks while the server is idle: clients usually read a chain from its start."""
    for header in chain.between(0, KEPT_BLOCKS - 1):
        chain.contents(header)
        await asyncio.sleep(0)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome


def _stop(server: uvicorn.Server) -> None:
    server.should_exit = True
