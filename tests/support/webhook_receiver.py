"""A webhook receiver: a real HTTP server in this process with scripted answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from interlock.client import verify_webhook
from interlock.wire.webhooks import WebhookEvent


@dataclass
class Call:
    path: str
    headers: dict[str, str]
    """Names are in lower case."""
    body: bytes

    @property
    def event(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def delivery(self) -> str:
        return self.headers["x-interlock-delivery"]

    def verified(self, secrets: str | list[str], now: float) -> WebhookEvent:
        return verify_webhook(secrets, self.headers, self.body, now=now)


@dataclass
class Answer:
    status: int = 204
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    gate: asyncio.Event | None = None
    """The answer waits for this event."""


@dataclass
class Receiver:
    url: str
    port: int
    calls: list[Call] = field(default_factory=list)
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    """The next answers by path. The last one repeats."""
    most_at_once: int = 0
    _at_once: int = 0

    def at(self, path: str) -> list[Call]:
        return [call for call in self.calls if call.path == path]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            call = await _read(reader)
            self.calls.append(call)
            answer = self._next(call.path)
            if answer.gate is not None:
                await answer.gate.wait()
            writer.write(_written(answer))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the caller has disconnected
        finally:
            self._at_once -= 1
            writer.close()

    def _next(self, path: str) -> Answer:
        waiting = self.answers.get(path) or [Answer()]
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]


async def _read(reader: asyncio.StreamReader) -> Call:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip("\r\n").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Call(first.split(" ")[1], headers, body)


def _written(answer: Answer) -> bytes:
    headers = {"Content-Length": str(len(answer.body)), "Connection": "close"} | answer.headers
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {answer.status} Something\r\n{head}\r\n".encode() + answer.body


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    receiver = Receiver("", 0)
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    receiver.port = server.sockets[0].getsockname()[1]
    receiver.url = f"http://127.0.0.1:{receiver.port}"
    async with server:
        yield receiver
