"""`interlock devchain` as a process, asked over HTTP."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from interlock.cli.app import execute
from tests.support.system import until

PATIENCE = 60


class Node:
    """A running `interlock devchain`."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "interlock.cli", "devchain", "--listen", "127.0.0.1:0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        self.url = self.line.split()[0] if self.line.startswith("http") else json.loads(self.line)["url"]
        self.http = httpx.Client(timeout=PATIENCE)

    def send(self, document: Any) -> Any:
        reply = self.http.post(self.url, json=document)
        assert reply.status_code == 200
        return reply.json()

    def call(self, method: str, *params: Any) -> Any:
        return self.send({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})["result"]

    def blocks(self, first: int, last: int) -> list[Any]:
        """In one batch, as a follower reads them."""
        batch = [
            {"jsonrpc": "2.0", "id": number, "method": "eth_getBlockByNumber", "params": [hex(number), True]}
            for number in range(first, last + 1)
        ]
        return [reply["result"] for reply in self.send(batch)] if batch else []

    def end(self, number: signal.Signals) -> tuple[int, str, str]:
        self.http.close()
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err


@contextlib.contextmanager
def node(*options: str, ended_by: signal.Signals = signal.SIGTERM) -> Iterator[Node]:
    running = Node(*options)
    try:
        yield running
        assert running.end(ended_by) == (0, "", "")
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.communicate()


def test_devchain_reports_ready_and_stops_cleanly_on_a_signal() -> None:
    with node("--blocks", "20", "--manual", "--chain-id", "99") as running:
        head = running.call("eth_getBlockByNumber", "latest")
        expected = f"{running.url}  chain 99  head 20 ({head['hash'][:10]}…)  blocks on dev_mine\n"
        assert running.line == expected
    with node("--blocks", "20", "--block-seconds", "3600", "-o", "json", ended_by=signal.SIGINT) as running:
        head = running.call("eth_getBlockByNumber", "latest")
        assert json.loads(running.line) == {
            "url": running.url,
            "chain_id": 31337,
            "seed": 7,
            "head": {"number": 20, "hash": head["hash"]},
            "block_seconds": 3600.0,
        }


def test_same_seed_serves_the_same_bytes_and_another_does_not() -> None:
    def history(seed: str) -> list[Any]:
        with node("--seed", seed, "--blocks", "60", "--manual", "--reorg-every", "6") as running:
            running.call("dev_mine", 20)
            running.call("dev_reorg", 4)
            logs = running.call("eth_getLogs", {"fromBlock": "0x0", "toBlock": "latest"})
            return [running.blocks(0, 80), logs]

    assert history("3") == history("3") != history("4")


def follow(running: Node, seen: list[Any]) -> int:
    """Brings what was seen up to the chain, by parent hashes alone; how many blocks it had to take back."""
    taken_back = 0
    head = int(running.call("eth_blockNumber"), 16)
    while seen and running.blocks(seen[-1]["number"], seen[-1]["number"])[0]["hash"] != seen[-1]["hash"]:
        seen.pop()
        taken_back += 1
    for block in running.blocks(len(seen), head):
        assert not seen or block["parentHash"] == seen[-1]["hash"]
        seen.append({"number": int(block["number"], 16), "hash": block["hash"], "parentHash": block["parentHash"]})
    return taken_back


def test_follower_by_parent_hashes_sees_every_reorg() -> None:
    with node("--blocks", "50", "--manual", "--reorg-every", "5", "--max-depth", "4", "--transactions", "5") as running:
        seen: list[Any] = []
        follow(running, seen)
        depths = []
        for step in range(60):
            running.call("dev_mine", 1)
            if step % 10 == 9:
                running.call("dev_reorg", 7)
            depths.append(follow(running, seen))
        assert {1, 2, 3, 4} <= set(depths)
        assert max(depths) >= 6
        assert [block["hash"] for block in seen] == [block["hash"] for block in running.blocks(0, 110)]
        final = running.call("eth_getBlockByNumber", "finalized")
        assert seen[int(final["number"], 16)]["hash"] == final["hash"]


async def test_blocks_are_mined_at_the_configured_interval() -> None:
    with node("--blocks", "5", "--block-seconds", "0.01") as running:

        async def grown(past: int = 15) -> bool:
            return int(running.call("eth_blockNumber"), 16) > past

        await until(grown)
        assert running.call("dev_setAutomine", 0) is True
        stopped = running.call("eth_blockNumber")
        assert {running.call("eth_blockNumber") for _ in range(30)} == {stopped}
        assert running.call("dev_setAutomine", 0.001) is True
        await until(lambda: grown(int(stopped, 16) + 5))


def test_batch_of_a_hundred_blocks_and_their_logs_agree() -> None:
    with node("--blocks", "300", "--manual") as running:
        blocks = running.blocks(101, 200)
        assert [int(block["number"], 16) for block in blocks] == list(range(101, 201))
        logs = running.call("eth_getLogs", {"fromBlock": hex(101), "toBlock": hex(200)})
        hashes = {transaction["hash"] for block in blocks for transaction in block["transactions"]}
        assert {log["transactionHash"] for log in logs} <= hashes
        assert {log["blockHash"] for log in logs} <= {block["hash"] for block in blocks}
        assert len(logs) > 3_000


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (["--listen", "8545"], "write host:port"),
        (["--listen", "127.0.0.1:99999"], "write host:port"),
        (["--max-depth", "33"], "--max-depth 33 would replace final blocks"),
        (["--block-seconds", "0"], "0.001"),
        (["--transactions", "-1"], "greater than or equal to 0"),
        (["--seed", "seven"], "valid integer"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_options_are_one_sentence_and_exit_code_2(
    line: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["devchain", *line]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert sentence in said.err
    assert said.err.count("\n") == 1


def test_taken_port_is_reported_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert execute(["devchain", "--listen", f"127.0.0.1:{taken.getsockname()[1]}"]) == 1
    assert "Choose another address with --listen host:port" in capsys.readouterr().err
