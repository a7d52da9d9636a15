"""The demo's chain, its own development chain or any endpoint, and the expected results computed from its logs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

import msgspec
from msgspec import Raw

from interlock.errors import InterlockError
from interlock.outbound import Exceptions, Guard
from interlock.outbound.exchange import KeptSender, Request
from interlock.processes.child import Child
from interlock.workers.block_follower.chain import Block, Chain
from interlock.workers.block_follower.rpc import Call, Endpoint, Refused

TRANSFER: Final = "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef"
"""keccak256("Transfer(address,address,uint256)")."""
BLOCKS: Final = 240
"""Number of blocks that exist at the start."""
LARGE: Final = 4 * 10**24
"""The threshold of alerts, as in the DAG file."""
_TOO_LONG: Final = 10**38
_SPAN: Final = 60
_START_SECONDS: Final = 30.0
_STOP_SECONDS: Final = 10.0
_HOUR: Final = 3600


Place: TypeAlias = tuple[str, int]
"""Position of a log: the hash of its block, and its index in the block."""


class ChainFailed(InterlockError):
    """The chain did not answer correctly."""


@dataclass
class Answer:
    """The expected results: number of transfers, and count and sum by hour and token."""

    transfers: int = 0
    volumes: Counter[tuple[int, str]] = field(default_factory=Counter)
    counts: Counter[tuple[int, str]] = field(default_factory=Counter)
    busy_logs: int = 0
    """Logs of contracts that have two or more in a range."""
    large: dict[Place, int | None] = field(default_factory=dict)
    """Transfers that must have an alert; None is an amount of more than 38 digits."""


class FollowedChain:
    """The chain, queried directly and not through the pipeline."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.place = _place(url)
        """Host and port, in the format of `outbound_allow`."""
        sender = KeptSender(Guard(Exceptions.read([self.place])))
        self._endpoint = Endpoint(Request(url), sender, timeout=30, patience=30, most_calls=100)
        self._chain = Chain(self._endpoint, in_full=False, with_logs=True, span=_SPAN)

    async def close(self) -> None:
        await self._endpoint.close()

    async def call(self, method: str, *parameters: Any) -> Any:
        (answer,) = await self._endpoint.ask([Call(method, list(parameters))])
        if isinstance(answer, Refused):
            raise ChainFailed(f"The chain refused {method}: {answer.message}.")
        return msgspec.json.decode(Raw(answer))

    async def head(self) -> int:
        return int(await self.call("eth_blockNumber"), 16)

    async def answer(self, first: int, last: int, size: int) -> Answer:
        """Computes the expected results in plain Python, in ranges of `size` blocks."""
        found = Answer()
        for start in range(first, last + 1, size):
            logs: Counter[str] = Counter()
            for block in await self._chain.blocks(start, min(start + size - 1, last)):
                _count(block, found)
                logs.update(log.address for log in block.logs)
            found.busy_logs += sum(count for count in logs.values() if count > 1)
        return found


def _place(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise ChainFailed(
            f"{url!r} is not the URL of an endpoint; write one such as https://rpc.example.org."
        ) from None
    host = parts.hostname or ""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _count(block: Block, found: Answer) -> None:
    hour = int(block.timestamp, 16) // _HOUR
    for log in block.logs:
        if len(log.topics) == 3 and log.topics[0] == TRANSFER and len(log.data) == 66:
            amount = int(log.data, 16)
            found.transfers += 1
            found.counts[hour, log.address] += 1
            found.volumes[hour, log.address] += amount
            if amount >= LARGE:
                found.large[block.hash, int(log.log_index, 16)] = amount if amount < _TOO_LONG else None


@asynccontextmanager
async def development_chain() -> AsyncIterator[FollowedChain]:
    """Starts a child process that mines and reorganises on request."""
    options = ["--listen", "127.0.0.1:0", "--manual", "--blocks", str(BLOCKS), "--transactions", "20"]
    options += ["-o", "json", "--parent", str(os.getpid())]
    command = [sys.executable, "-P", "-m", "interlock.cli", "devchain", *options]
    child = await Child.start(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        chain = FollowedChain(await _url(child))
        try:
            yield chain
        finally:
            await chain.close()
    finally:
        await child.stop(_STOP_SECONDS)


async def _url(child: Child) -> str:
    try:
        line = await asyncio.wait_for(child.output.readline(), _START_SECONDS)
        url: str = json.loads(line)["url"]
    except (TimeoutError, ValueError) as error:
        raise ChainFailed("The development chain did not start; run `interlock devchain` to see why.") from error
    return url


@asynccontextmanager
async def foreign_chain(url: str) -> AsyncIterator[FollowedChain]:
    chain = FollowedChain(url)
    try:
        yield chain
    finally:
        await chain.close()


def example(name: str) -> Path:
    """Finds an example in the installed package, or in the repository."""
    installed = Path(str(resources.files("interlock"))) / "examples" / name
    return installed if installed.exists() else Path(__file__).parents[4] / "examples" / name


def drawn(text: str) -> str:
    """Draws a DAG file."""
    from interlock.dags import drawing
    from interlock.dags.parser import Vocabulary, read
    from interlock.settings import load

    return drawing.draw_text(read(text.encode(), "demo.yaml", Vocabulary.of(load())))
