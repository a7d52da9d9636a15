"""A development chain served in the test process. A test can replace its answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from interlock.dev.chain import Chain, Shape
from interlock.dev.methods import Methods, Serving
from interlock.dev.rpc import Endpoint, Limits


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: str = ""


Spoiler = Callable[[Any, "Node"], Awaitable[Answer | None]]
"""Takes a request's document and returns a replacement answer, or None for the usual one. May also change the chain."""


class Node:
    """An RPC node. `requests` counts the requests; `spoil` sees each one first."""

    def __init__(self, chain: Chain, serving: Serving | None = None, limits: Limits | None = None) -> None:
        self.chain = chain
        self._endpoint = Endpoint(Methods(chain, lambda _: None, serving).table(), limits)
        self.spoil: Spoiler | None = None
        self.requests = 0
        self._came = asyncio.Event()
        self.url = ""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Starts the server, on the same port if it ran before."""
        port = urlsplit(self.url).port or 0 if self.url else 0
        self._server = await asyncio.start_server(self.serve, "127.0.0.1", port)
        self.url = "http://{}:{}".format(*self._server.sockets[0].getsockname())

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            await self._server.wait_closed()

    async def asked(self, times: int) -> None:
        """Waits for that many more requests."""
        wanted = self.requests + times
        async with asyncio.timeout(30):
            while self.requests < wanted:
                self._came.clear()
                await self._came.wait()

    def answer(self, document: Any) -> Any:
        """Returns the chain's answer, for spoilers that change only a part of it."""
        reply = self._endpoint.answer(json.dumps(document).encode())
        return json.loads(reply or b"null")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"Content-Length" in line)
                answer = await self._respond(await reader.readexactly(length))
                top = f"HTTP/1.1 {answer.status} X\r\n{answer.headers}Content-Length: {len(answer.body)}\r\n\r\n"
                writer.write(top.encode() + answer.body)
        except (EOFError, OSError):
            pass  # the client has disconnected
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _respond(self, body: bytes) -> Answer:
        self.requests += 1
        self._came.set()
        spoiled = await self.spoil(json.loads(body), self) if self.spoil else None
        return spoiled or Answer(200, self._endpoint.answer(body) or b"")


@asynccontextmanager
async def served(
    blocks: int = 40, *, seed: int = 7, serving: Serving | None = None, limits: Limits | None = None, **shape: int
) -> AsyncIterator[Node]:
    chain = Chain(Shape(**({"seed": seed, "transactions": 5, "reorg_every": 0} | shape)), blocks=blocks)
    node = Node(chain, serving, limits)
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


# The rows that a follower must have stored, read directly from the chain


def _number(text: str | None) -> int | None:
    return None if text is None else int(text, 16)


def expected_rows(chain: Chain, first: int, last: int) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {"blocks": [], "transactions": [], "logs": []}
    for header in chain.between(first, last):
        contents = chain.contents(header)
        block = contents.in_full()
        common = {
            "block_number": header.number,
            "block_hash": header.hash,
            "block_timestamp": datetime.fromtimestamp(int(block.timestamp, 16), UTC),
        }
        rows["blocks"].append(
            common
            | {name: getattr(block, name) for name in ("parent_hash", "miner", "extra_data", "state_root")}
            | {name: getattr(block, name) for name in ("transactions_root", "receipts_root")}
            | {name: _number(getattr(block, name)) for name in ("gas_limit", "gas_used", "base_fee_per_gas")}
            | {name: _number(getattr(block, name)) for name in ("difficulty", "size")}
            | {"transaction_count": len(block.transactions)}
        )
        rows["transactions"] += [common | _transaction(one) for one in block.transactions]
        rows["logs"] += [common | _log(one) for one in contents.logs]
    return rows


def _transaction(one: Any) -> dict[str, Any]:
    numbers = ("transaction_index", "value", "nonce", "gas", "gas_price", "max_fee_per_gas")
    names = {"transaction_hash": one.hash, "from_address": one.from_, "to_address": one.to, "input": one.input}
    more = {"max_priority_fee_per_gas": _number(one.max_priority_fee_per_gas), "type": _number(one.type)}
    return names | more | {name: _number(getattr(one, name)) for name in numbers}


def _log(one: Any) -> dict[str, Any]:
    topics = [*one.topics, None, None, None, None]
    return {
        "log_index": _number(one.log_index),
        "transaction_hash": one.transaction_hash,
        "transaction_index": _number(one.transaction_index),
        "address": one.address,
        "data": one.data,
    } | {f"topic{place}": topics[place] for place in range(4)}
