"""block_follower with endpoints that are slow, unavailable, strict, broken, or not RPC endpoints."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import asyncpg
import pytest

from interlock.dev.methods import Serving
from interlock.dev.rpc import Limits
from interlock.workers import TaskFailed
from interlock.workers.block_follower import rpc
from interlock.workers.block_follower.chain import COLUMNS
from interlock.workers.block_follower.config import FollowerConfig, read_config
from interlock.workers.failures import BadConfig
from interlock.workers.operator_requests import Placeholders
from interlock.workers.protocol import Outbound
from tests.support.block_followers import KINDS, FollowedDatasets, data_database
from tests.support.dev_chain import Answer, Node, Spoiler, served
from tests.support.documentation import read, rows, spans


@pytest.fixture
async def site(postgres_url: str) -> AsyncIterator[FollowedDatasets]:
    async with data_database(postgres_url) as url:
        connection = await asyncpg.connect(url)
        yield FollowedDatasets(url, connection)
        await connection.close()


def _calls(document: Any) -> list[Any]:
    return document if isinstance(document, list) else [document]


def _reply(answers: Any) -> Answer:
    return Answer(200, json.dumps(answers).encode())


async def test_unordered_partial_and_foreign_answers_are_matched_by_id(site: FollowedDatasets) -> None:
    async def spoil(document: Any, node: Node) -> Answer | None:
        if not isinstance(document, list):
            return None
        answers = node.answer(document)[::-1]
        failing = [{"jsonrpc": "2.0", "id": one["id"], "error": {"code": -32603, "message": "x"}} for one in answers]
        pairs = enumerate(zip(answers, failing, strict=True), node.requests)
        mixed = [good if place % 3 else bad for place, (good, bad) in pairs]
        missing = mixed[: max(1, len(mixed) - 2)]
        return _reply([{"jsonrpc": "2.0", "id": "nobody's", "result": None}, *missing])

    await _follows(site, spoil)


async def test_ids_may_be_returned_as_text(site: FollowedDatasets) -> None:
    async def spoil(document: Any, node: Node) -> Answer | None:
        answers = [one | {"id": str(one["id"])} for one in (node.answer([call])[0] for call in _calls(document))]
        return _reply(answers if isinstance(document, list) else answers[0])

    await _follows(site, spoil)


async def _follows(site: FollowedDatasets, spoil: Spoiler, **config: Any) -> Node:
    async with served(blocks=60) as node:
        node.spoil = spoil
        await site.follow(node.url, end_block=60, **{"batch_size": 10} | config)
        await site.check(node.chain, 0, 60)
    return node


@pytest.mark.parametrize(
    "limits",
    [
        {"limits": Limits(batch=3)},
        {"limits": Limits(batch=1)},
        {"limits": Limits(response_bytes=20_000)},
        {"serving": Serving(log_range=3)},
        {"serving": Serving(log_results=6)},
    ],
    ids=["small batches", "one call at a time", "short answers", "short log ranges", "few logs"],
)
async def test_requests_adapt_to_an_endpoint_with_small_limits(site: FollowedDatasets, limits: dict[str, Any]) -> None:
    async with served(blocks=60, transactions=2, **limits) as node:
        await site.follow(node.url, end_block=60, batch_size=25)
        await site.check(node.chain, 0, 60)


async def test_batch_too_large_for_http_is_halved(site: FollowedDatasets) -> None:
    async def spoil(document: Any, node: Node) -> Answer | None:
        return Answer(413, b"too large") if len(_calls(document)) > 4 else None

    await _follows(site, spoil, batch_size=40)


async def test_batch_that_times_out_is_halved(site: FollowedDatasets) -> None:
    async def spoil(document: Any, node: Node) -> Answer | None:
        if len(_calls(document)) > 6:
            await asyncio.Event().wait()
        return None

    await _follows(site, spoil, batch_size=20, rpc_timeout_seconds=0.2, requests=1)


TROUBLES = {
    "overloaded": Answer(503, b"later"),
    "too many requests": Answer(429, b"", "Retry-After: 0\r\n"),
    "a page of a proxy": Answer(200, b"<html>maintenance</html>"),
    "nothing": Answer(200, b""),
    "a number": Answer(200, b"17"),
    "a null": Answer(200, b"null"),
    "not text": Answer(200, b'[{"id": 1, "result": "\xff\xfe"}]'),
}


@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES.keys())
async def test_failing_endpoint_is_retried(site: FollowedDatasets, trouble: Answer) -> None:
    bad = 0

    async def spoil(document: Any, node: Node) -> Answer | None:
        nonlocal bad
        if node.requests in (4, 5, 9):
            bad += 1
            return trouble
        return None

    await _follows(site, spoil)
    assert bad == 3


async def test_follower_waits_for_a_node_that_comes_back(site: FollowedDatasets) -> None:
    async with served(blocks=20) as node, site.following(node.url, rpc_patience_seconds=30):
        await site.reaches(20)
        await node.stop()
        await site.shows("127.0.0.1: ")
        node.chain.mine(5)
        await node.start()
        await site.reaches(25)
        await site.check(node.chain, 0, 25)


async def test_unavailable_node_fails_the_attempt_and_the_next_one_succeeds(site: FollowedDatasets) -> None:
    async with served(blocks=20) as node:
        await site.follow(node.url, end_block=10)
        await node.stop()
        with pytest.raises(TaskFailed, match="cannot be used") as failed:
            await site.follow(node.url, attempt=2, end_block=20, rpc_patience_seconds=0.3)
        assert failed.value.error_class == "RpcUnavailable"
        await node.start()
        await site.follow(node.url, attempt=3, end_block=20)
        await site.check(node.chain, 0, 20)


@pytest.mark.parametrize(
    ("answer", "error_class"),
    [
        (Answer(200, b"<html>hello</html>"), "NotAnRpcEndpoint"),
        (Answer(404, b"no such page"), "NotAnRpcEndpoint"),
        (Answer(401, b"who are you"), "NotAnRpcEndpoint"),
        (Answer(200, b'[{"id": 1, "result": "abc"}, {"id": 2, "result": 5}]'), "NotAnRpcEndpoint"),
        (
            Answer(200, b'[{"id": 1, "error": {"code": -32601, "message": "no"}}, {"id": 2, "result": null}]'),
            "RpcMethodMissing",
        ),
    ],
    ids=["a web page", "nothing there", "no key", "another protocol", "no such method"],
)
async def test_endpoint_that_is_no_chain_fails_without_retries(
    site: FollowedDatasets, answer: Answer, error_class: str
) -> None:
    async def spoil(document: Any, node: Node) -> Answer | None:
        return answer

    async with served(blocks=1) as node:
        node.spoil = spoil
        with pytest.raises(TaskFailed, match="RPC endpoint") as failed:
            await site.follow(node.url, end_block=1)
    assert failed.value.error_class == error_class
    assert node.requests == 1


async def test_unreachable_endpoint_is_reported_without_its_path(site: FollowedDatasets) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v3/secret-key?key=secret-key"
        with pytest.raises(TaskFailed) as failed:
            await site.follow(url, end_block=1, rpc_patience_seconds=0)
    assert failed.value.error_class == "RpcUnavailable"
    assert "secret-key" not in str(failed.value)


async def test_missing_logs_and_logs_of_another_branch_are_refused(site: FollowedDatasets) -> None:
    """Simulates another node behind the same URL that answers for the logs, or a reorg between two answers."""
    spoiled = 0

    async def spoil(document: Any, node: Node) -> Answer | None:
        nonlocal spoiled
        calls = _calls(document)
        if not any("fromBlock" in str(call["params"]) for call in calls) or spoiled > 4:
            return None
        spoiled += 1
        answers = node.answer(calls)
        for call, one in zip(calls, answers, strict=True):
            if call["method"] == "eth_getLogs":
                foreign = [log | {"blockHash": "0x" + "1" * 64} for log in one["result"]]
                one["result"] = [] if spoiled % 2 else foreign
        return _reply(answers)

    await _follows(site, spoil)
    assert spoiled == 5


async def test_reorg_between_blocks_and_logs_is_detected(site: FollowedDatasets) -> None:
    """The branch of the logs has no logs in a block for which the branch of the blocks has some."""

    async def spoil(document: Any, node: Node) -> Answer | None:
        if node.requests != 3:
            return None
        calls = _calls(document)
        blocks = node.answer([call for call in calls if call["method"] != "eth_getLogs"])
        node.chain.reorg(10)
        logs = [{"id": call["id"], "result": []} for call in calls if call["method"] == "eth_getLogs"]
        return _reply([*blocks, *logs])

    async with served(blocks=20) as node:
        node.spoil = spoil
        await site.follow(node.url, end_block=20, batch_size=30)
        await site.check(node.chain, 0, 20)


async def test_numbers_beyond_64_bits_and_missing_fields_are_stored(site: FollowedDatasets) -> None:
    huge = 2**256 - 1

    async def spoil(document: Any, node: Node) -> Answer | None:
        answers = [node.answer([call])[0] for call in _calls(document)]
        for one in answers:
            block = one.get("result")
            if isinstance(block, dict) and block.get("transactions") and isinstance(block["transactions"][0], dict):
                block |= {"difficulty": hex(huge), "gasLimit": hex(2**64 - 1)}
                block.pop("baseFeePerGas")
                first = block["transactions"][0]
                first |= {"value": hex(huge), "nonce": hex(2**64 - 2), "to": None}
                for name in ("maxFeePerGas", "maxPriorityFeePerGas", "type"):
                    first.pop(name)
        return _reply(answers if isinstance(document, list) else answers[0])

    async with served(blocks=3) as node:
        node.spoil = spoil
        await site.follow(node.url, start_block=1, end_block=3)
    block = (await site.rows("blocks"))[0]
    assert (block["difficulty"], block["gas_limit"], block["base_fee_per_gas"]) == (huge, 2**64 - 1, None)
    transaction = (await site.rows("transactions"))[0]
    assert (transaction["value"], transaction["nonce"], transaction["to_address"]) == (huge, 2**64 - 2, None)
    assert (transaction["max_fee_per_gas"], transaction["type"]) == (None, None)


async def test_invalid_block_fails_with_the_reason(site: FollowedDatasets) -> None:
    async def spoil(document: Any, node: Node) -> Answer | None:
        answers = node.answer(_calls(document))
        for one in answers:
            if isinstance(one["result"], dict) and one["result"]["number"] != "0x0":
                one["result"]["gasUsed"] = "twelve"
        return _reply(answers if isinstance(document, list) else answers[0])

    async with served(blocks=3) as node:
        node.spoil = spoil
        with pytest.raises(TaskFailed, match="twelve") as failed:
            await site.follow(node.url, end_block=3)
    assert failed.value.error_class == "BadBlock"
    assert await site.rows("blocks") == []


# The config


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({}, "missing required field `rpc_url`"),
        ({"rpc_url": "http://x", "start": 5}, "unknown field `start`"),
        ({"rpc_url": "http://x", "batch_size": 0}, "batch_size"),
        ({"rpc_url": "http://x", "start_block": 5, "end_block": 4}, "at least start_block (5), got 4"),
        ({"rpc_url": "ws://x"}, "http://host:port/path"),
        ({"rpc_url": "http://user:password@x"}, "put credentials into headers"),
        ({"rpc_url": "http://x", "outputs": ["blocks"]}, "The job has 3 outputs"),
        ({"rpc_url": "http://x", "outputs": ["blocks", "logs", "logs"]}, "each at most once"),
        ({"rpc_url": "http://x", "outputs": ["blocks", "logs", "traces"]}, "Invalid enum value 'traces'"),
        ({"rpc_url": "http://x", "headers": {"a": "b\r\nc: d"}}, "cannot be sent"),
        ({"rpc_url": "https://x/${NOWHERE}"}, "--pass-env ORG:NOWHERE"),
        ({"rpc_url": "http://x", "headers": {"Transfer-Encoding": "chunked"}}, "is set by the HTTP client"),
    ],
)
def test_invalid_config_is_refused_with_advice(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadConfig) as failed:
        read_config(config, len(KINDS), Placeholders())
    assert sentence in str(failed.value)


def test_every_field_of_the_config_is_documented_with_its_default() -> None:
    documented = {row[0].strip("`"): row[1].strip("`") for row in rows(read("docs/block-follower.md"))}
    for name, default in zip(FollowerConfig.__struct_fields__, _defaults(), strict=True):
        assert documented[name] == default, name


def _defaults() -> list[str]:
    unset = {"rpc_url": "required", "headers": "none", "outputs": "[blocks, transactions, logs]", "end_block": "none"}
    config = FollowerConfig(rpc_url="")
    return [unset.get(name) or f"{getattr(config, name):g}" for name in FollowerConfig.__struct_fields__]


def test_every_column_is_documented() -> None:
    page = read("docs/block-follower.md")
    hidden = {"topic1", "topic2"}
    missing = {column for columns in COLUMNS.values() for column in columns} - set(spans(page)) - hidden
    assert missing == set()


def test_variables_come_from_the_workers_environment() -> None:
    given = {"rpc_url": "https://node/v3/${KEY}?a=b", "headers": {"Authorization": "Bearer ${TOKEN}"}}
    config = read_config(given, len(KINDS), Placeholders(environment={"KEY": "k1", "TOKEN": "t1"}))
    assert config.rpc_url == "https://node/v3/k1?a=b"
    assert config.headers == {"Authorization": "Bearer t1"}
    assert config.outputs == list(KINDS)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254", "10.0.0.7", "0.0.0.1", "2130706433"],
)
async def test_private_address_is_refused_unless_allowed(site: FollowedDatasets, host: str) -> None:
    site.outbound = Outbound()
    async with served(blocks=3) as node:
        port = node.url.rpartition(":")[2]
        with pytest.raises(TaskFailed) as failed:
            await site.follow(f"http://{host}:{port}", end_block=1)
        assert failed.value.error_class == "AddressRefused"
        assert "outbound_allow" in str(failed.value)
        assert node.requests == 0


async def test_exception_may_allow_one_port_of_a_host(site: FollowedDatasets) -> None:
    async with served(blocks=3) as node, served(blocks=3) as other:
        site.outbound = Outbound([node.url.removeprefix("http://")])
        await site.follow(node.url, end_block=3)
        await site.check(node.chain, 0, 3)
        with pytest.raises(TaskFailed) as failed:
            await site.follow(other.url, end_block=3)
        assert failed.value.error_class == "AddressRefused"
        assert other.requests == 0


async def test_redirect_is_not_followed(site: FollowedDatasets) -> None:
    async with served(blocks=3) as node, served(blocks=3) as other:

        async def spoil(document: Any, node: Node) -> Answer | None:
            return Answer(302, b"", f"Location: {other.url}\r\n")

        node.spoil = spoil
        with pytest.raises(TaskFailed, match="it answered with status 302"):
            await site.follow(node.url, end_block=3, rpc_patience_seconds=0)
        assert other.requests == 0


async def test_reply_that_decompresses_beyond_the_limit_is_refused(
    site: FollowedDatasets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "REPLY_BYTES", 1 << 16)

    async def spoil(document: Any, node: Node) -> Answer | None:
        bomb = gzip.compress(json.dumps({"jsonrpc": "2.0", "id": 1, "result": "0" * (1 << 22)}).encode())
        return Answer(200, bomb, "Content-Encoding: gzip\r\n")

    async with served(blocks=3) as node:
        node.spoil = spoil
        with pytest.raises(TaskFailed, match="more than 65536 bytes") as failed:
            await site.follow(node.url, end_block=3, rpc_patience_seconds=0)
        assert failed.value.error_class == "ReplyTooLarge"


async def test_batch_with_too_large_a_reply_is_halved(site: FollowedDatasets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "REPLY_BYTES", 30_000)
    async with served(blocks=60, transactions=2) as node:
        await site.follow(node.url, end_block=60, batch_size=25)
        await site.check(node.chain, 0, 60)


async def test_path_query_and_headers_are_sent_unchanged(site: FollowedDatasets) -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            seen.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(TaskFailed):
        await site.follow(f"http://127.0.0.1:{port}/rpc/?key=1", headers={"X-Key": "abc"})
    server.close()
    assert seen[0].startswith(b"POST /rpc/?key=1 HTTP/1.1\r\n")
    assert b"x-key: abc\r\n" in seen[0].lower()
