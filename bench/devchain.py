"""Speed at which `interlock devchain` serves history: `python -m bench.devchain [--blocks 5000]`.

One client, which parses nothing, reads batches of 100 whole blocks, each followed by one eth_getLogs over the same
range. In the first pass the server must generate most blocks; the second rereads the newest thousand, which the server
still holds. Besides wall-clock time, the server's CPU time is shown, which other load on the machine affects less.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import psutil

BATCH = 100
KEPT = 1_000


@contextmanager
def chain(blocks: int, transactions: int) -> Iterator[tuple[http.client.HTTPConnection, psutil.Process]]:
    options = ["--listen", "127.0.0.1:0", "--manual", "--output", "json"]
    sizes = ["--blocks", str(blocks), "--transactions", str(transactions)]
    command = [sys.executable, "-m", "interlock.cli", "devchain", *options, *sizes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        yield connection, psutil.Process(process.pid)
        connection.close()
        process.terminate()


def read(connection: http.client.HTTPConnection, first: int) -> int:
    """Reads blocks and logs from `first` on, and returns the bytes received."""
    numbers = range(first, first + BATCH)
    batch = [_call("eth_getBlockByNumber", [hex(number), True]) for number in numbers]
    logs = _call("eth_getLogs", [{"fromBlock": hex(numbers[0]), "toBlock": hex(numbers[-1])}])
    return sum(_post(connection, document) for document in (batch, logs))


def _call(method: str, params: list[object]) -> dict[str, object]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


def _post(connection: http.client.HTTPConnection, document: object) -> int:
    connection.request("POST", "/", json.dumps(document))
    return len(connection.getresponse().read())


def measure(connection: http.client.HTTPConnection, server: psutil.Process, first: int, last: int, title: str) -> None:
    start, used = time.perf_counter(), sum(server.cpu_times()[:2])
    received = sum(read(connection, number) for number in range(first, last, BATCH))
    seconds, used = time.perf_counter() - start, sum(server.cpu_times()[:2]) - used
    blocks = last - first
    print(f"{title:24} {blocks / seconds:7,.0f} blocks/s {received / seconds / 1e6:6,.0f} MB/s", end="")
    print(f" {blocks / used:7,.0f} blocks/s of the server's CPU time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=5_000)
    parser.add_argument("--transactions", type=int, default=40)
    options = parser.parse_args()
    end = 1 + options.blocks // BATCH * BATCH
    with chain(options.blocks, options.transactions) as (connection, server):
        measure(connection, server, 1, end, "first read")
        measure(connection, server, max(1, end - KEPT), end, "second read")


if __name__ == "__main__":
    main()
