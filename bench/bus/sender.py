"""A minimal HTTP client: it shares two cores with the processes it measures.

It sends one request at a time per connection, and opens as many connections as there are concurrent requests.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final, cast
from urllib.parse import urlsplit

from bench.bus.registry import Registered

_LENGTH: Final = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
_END: Final = b"\r\n\r\n"


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._received = b""
        self._reply: asyncio.Future[tuple[int, bytes]] | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error or ConnectionResetError("the gateway closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(_END)
        length = _LENGTH.search(head + b"\r\n") if end else None
        if length is not None and len(body) >= int(length[1]) and self._reply is not None:
            self._received = b""
            self._reply.set_result((int(head[9:12]), body))

    async def ask(self, request: list[bytes]) -> tuple[int, bytes]:
        if self.transport is None:
            raise ConnectionResetError("the gateway closed the connection")
        self._reply = asyncio.get_running_loop().create_future()
        self.transport.writelines(request)
        return await self._reply


class Sender:
    def __init__(self, url: str, registered: Registered) -> None:
        self._host, self._port = urlsplit(url).hostname or "", urlsplit(url).port or 80
        self._head = (
            f"POST /v1/commands HTTP/1.1\r\nHost: {self._host}\r\nAuthorization: Bearer {registered.key}\r\n"
            "Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        self._idle: list[_Connection] = []

    async def send(self, content: bytes) -> bytes:
        """Sends a request and returns the answer. Fails unless the gateway accepts it."""
        connection = await self._connection()
        status, answer = await connection.ask([(self._head % len(content)).encode(), content])
        self._idle.append(connection)
        assert status == 202, answer
        return answer

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.transport is not None:
                return connection
        _, made = await asyncio.get_running_loop().create_connection(_Connection, self._host, self._port)
        return made

    def close(self) -> None:
        for connection in self._idle:
            if connection.transport is not None:
                connection.transport.close()
