"""Speed at which block_follower reads a chain: `python -m bench.follower [--blocks 3000]`.

    fetch     the same blocks and logs from the same development chain, by one client that parses nothing
    copy      the same rows by bare COPY into tables with the same keys, nothing else in the transaction
    follower  the operator itself: fetch, parse, check, delete, COPY, hashes, emit

The chain and PostgreSQL run on the same machine, so the three share its cores. The figures go to
`bench/results/follower.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import msgspec

from bench.harness import machine
from interlock.client._http import Http
from interlock.outbound import Exceptions, Guard
from interlock.outbound.exchange import KeptSender, Request
from interlock.stores.embedded import EmbeddedPostgres
from interlock.wire.attempts import Event, WriteGrant
from interlock.workers.block_follower.chain import COLUMNS, Chain, Record, records
from interlock.workers.block_follower.config import KINDS, Kind
from interlock.workers.block_follower.operator import block_follower
from interlock.workers.block_follower.rpc import Endpoint
from interlock.workers.context import TaskContext
from interlock.workers.protocol import Assignment, Outbound, Work

BATCH = 50
RESULTS = Path(__file__).parent / "results" / "follower.json"


@contextmanager
def chain(blocks: int, transactions: int) -> Iterator[str]:
    options = ["--listen", "127.0.0.1:0", "--manual", "--output", "json", "--reorg-every", "0"]
    sizes = ["--blocks", str(blocks), "--transactions", str(transactions)]
    command = [sys.executable, "-m", "interlock.cli", "devchain", *options, *sizes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
        process.terminate()


class Counting:
    """Stands in for the platform: counts emitted events and discards them."""

    announced = 0

    def progress(self, slot: int, fraction: float, text: str | None) -> None: ...

    def emit(self, slot: int, events: list[Event]) -> int:  # noqa: ARG002 - as the context calls it
        self.announced += len(events)
        return len(events)

    def canceled(self, slot: int) -> bool:  # noqa: ARG002 - as above
        return False

    def paused(self, slot: int) -> bool:  # noqa: ARG002 - as above
        return False


async def fetch(url: str, blocks: int) -> float:
    """Keeps three requests in flight, as the follower does."""
    started = time.perf_counter()
    async with Http(url, headers={}) as http:
        gate = asyncio.Semaphore(3)

        async def one(first: int) -> None:
            numbers = range(first, min(first + BATCH, blocks + 1))
            calls = [("eth_getBlockByNumber", [hex(number), True]) for number in numbers]
            logs = ("eth_getLogs", [{"fromBlock": hex(numbers[0]), "toBlock": hex(numbers[-1])}])
            documents = [
                {"jsonrpc": "2.0", "id": place, "method": method, "params": params}
                for place, (method, params) in enumerate([*calls, logs])
            ]
            async with gate:
                await http.exchange("POST", "/", json.dumps(documents).encode(), timeout=60)

        await asyncio.gather(*(one(first) for first in range(0, blocks + 1, BATCH)))
    return time.perf_counter() - started


async def read(url: str, blocks: int) -> list[dict[Kind, list[Record]]]:
    sender = KeptSender(Guard(Exceptions.read(["127.0.0.1"])))
    endpoint = Endpoint(Request(url), sender, timeout=60, patience=10, most_calls=BATCH + 1)
    reader = Chain(endpoint, in_full=True, with_logs=True, span=BATCH)
    batches = []
    for first in range(0, blocks + 1, BATCH):
        found = await reader.blocks(first, min(first + BATCH - 1, blocks))
        batches.append({kind: records(kind, found) for kind in KINDS})
    await endpoint.close()
    return batches


async def copy(data_url: str, batches: list[dict[Kind, list[Record]]]) -> float:
    connection = await asyncpg.connect(data_url)
    for kind in KINDS:
        await connection.execute(f"create table bare_{kind} (like datasets.template_{kind} including all)")
    started = time.perf_counter()
    for batch in batches:
        async with connection.transaction():
            for kind in KINDS:
                await connection.copy_records_to_table(f"bare_{kind}", columns=COLUMNS[kind], records=batch[kind])
    seconds = time.perf_counter() - started
    await connection.close()
    return seconds


async def follow(url: str, data_url: str, blocks: int) -> float:
    grants = [WriteGrant(index, uuid4(), uuid4(), write_prefix="", buffer_prefix="") for index in range(3)]
    config = msgspec.json.encode({"rpc_url": url, "end_block": blocks, "batch_size": BATCH})
    here = Outbound(["127.0.0.1"])
    work = Work("block_follower", ("bench", "follow"), None, 1, config, [], grants, data_url, outbound=here)
    context = TaskContext(work, Assignment(1, uuid4(), None, b"null"), Counting())
    started = time.perf_counter()
    await asyncio.to_thread(block_follower, None, context)
    return time.perf_counter() - started


async def measure(blocks: int, transactions: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="interlock-bench-") as folder, chain(blocks, transactions) as url:
        server = EmbeddedPostgres(Path(folder) / "data", name="bench", log=Path(folder) / "postgres.log")
        data_url = await server.start()
        try:
            batches = await read(url, blocks)  # the chain generates its blocks here: the same start for all three
            rows = sum(len(batch[kind]) for batch in batches for kind in KINDS)
            fetched = await fetch(url, blocks)
            followed = await follow(url, data_url, blocks)
            copied = await copy(data_url, batches)
        finally:
            await server.stop()
    return {
        "machine": machine(),
        "blocks": blocks + 1,
        "rows": rows,
        "fetch_blocks_per_second": (blocks + 1) / fetched,
        "copy_rows_per_second": rows / copied,
        "follower_blocks_per_second": (blocks + 1) / followed,
        "follower_rows_per_second": rows / followed,
        "of_fetch": fetched / followed,
        "of_fetch_and_copy_one_after_the_other": (fetched + copied) / followed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=3_000)
    parser.add_argument("--transactions", type=int, default=40)
    options = parser.parse_args()
    figures = asyncio.run(measure(options.blocks, options.transactions))
    for name, figure in figures.items():
        print(f"{name:40} {figure:,.2f}" if isinstance(figure, float) else f"{name:40} {figure}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
