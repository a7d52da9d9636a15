"""The development chain over JSON-RPC and HTTP, in the test process: every method, every limit, any input."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from interlock.dev.chain import Chain, Shape
from interlock.dev.contents import APPROVAL, TRANSFER
from interlock.dev.methods import Methods, Serving
from interlock.dev.rpc import Endpoint, Limits, Method
from interlock.dev.server import Application

NOWHERE = "0x" + "ab" * 32


class Node:
    """A chain behind its endpoint, called like a client does."""

    def __init__(self, *, blocks: int = 40, serving: Serving | None = None, limits: Limits | None = None) -> None:
        self.paces: list[float] = []
        self.chain = Chain(Shape(seed=5, transactions=6, reorg_every=9), blocks=blocks)
        self.endpoint = Endpoint(Methods(self.chain, self.paces.append, serving).table(), limits)

    def raw(self, body: bytes) -> Any:
        answer = self.endpoint.answer(body)
        return None if answer is None else json.loads(answer)

    def send(self, document: Any) -> Any:
        return self.raw(json.dumps(document).encode())

    def reply(self, method: str, *params: Any) -> Any:
        return self.send({"jsonrpc": "2.0", "id": 1, "method": method, "params": list(params)})

    def call(self, method: str, *params: Any) -> Any:
        return self.reply(method, *params)["result"]

    def error(self, method: str, *params: Any) -> tuple[int, str]:
        error = self.reply(method, *params)["error"]
        return error["code"], error["message"]


@pytest.fixture
def node() -> Node:
    return Node()


# Methods


def test_node_reports_its_identity(node: Node) -> None:
    assert node.call("web3_clientVersion").startswith("interlock-devchain/")
    assert node.call("eth_chainId") == "0x7a69"
    assert node.call("net_version") == "31337"
    assert node.call("eth_syncing") is False
    assert node.call("eth_blockNumber") == "0x28"


def test_block_tags_resolve_to_the_right_blocks(node: Node) -> None:
    numbers = {
        tag: node.call("eth_getBlockByNumber", tag)["number"]
        for tag in ("earliest", "finalized", "safe", "latest", "pending", "0x7")
    }
    assert numbers == {
        "earliest": "0x0",
        "finalized": "0x8",
        "safe": "0x22",
        "latest": "0x28",
        "pending": "0x28",
        "0x7": "0x7",
    }
    assert node.call("eth_getBlockByNumber", "0x29", False) is None


def test_block_is_returned_with_hashes_or_full_transactions(node: Node) -> None:
    with_hashes = node.call("eth_getBlockByNumber", "latest", False)
    in_full = node.call("eth_getBlockByNumber", "latest", True)
    assert with_hashes["transactions"] == [each["hash"] for each in in_full["transactions"]] != []
    assert {**in_full, "transactions": ()} == {**with_hashes, "transactions": ()}
    assert node.call("eth_getBlockByHash", in_full["hash"].upper().replace("0X", "0x"), True) == in_full


def test_transactions_and_receipts_are_found_by_hash(node: Node) -> None:
    block = node.call("eth_getBlockByNumber", "0x14", True)
    receipts = node.call("eth_getBlockReceipts", "0x14")
    assert receipts == node.call("eth_getBlockReceipts", block["hash"])
    for transaction, receipt in zip(block["transactions"], receipts, strict=True):
        assert node.call("eth_getTransactionByHash", transaction["hash"]) == transaction
        assert node.call("eth_getTransactionReceipt", transaction["hash"]) == receipt
    for method in ("eth_getTransactionByHash", "eth_getTransactionReceipt", "eth_getBlockByHash"):
        assert node.call(method, NOWHERE) is None
    assert node.call("eth_getBlockReceipts", NOWHERE) is None
    assert node.call("eth_getBlockReceipts", "0xffff") is None


@pytest.mark.parametrize("abandoned", [True, False])
def test_replaced_block_is_found_only_by_hash(abandoned: bool) -> None:
    node = Node(serving=Serving(abandoned=abandoned))
    old = node.call("eth_getBlockByNumber", "latest", True)
    assert old["transactions"]
    head = node.call("dev_reorg", 2)
    assert head["number"] == old["number"]
    assert head["hash"] == node.call("eth_getBlockByNumber", "latest")["hash"] != old["hash"]
    assert node.call("eth_getBlockByHash", old["hash"], True) == (old if abandoned else None)
    assert node.call("eth_getBlockReceipts", old["hash"]) is None
    assert node.call("eth_getTransactionByHash", old["transactions"][0]["hash"]) is None
    assert node.call("eth_getTransactionReceipt", old["transactions"][0]["hash"]) is None
    assert node.error("eth_getLogs", {"blockHash": old["hash"]}) == (-32000, "unknown block")


def test_dev_methods_control_the_chain(node: Node) -> None:
    assert node.call("dev_mine")["number"] == "0x29"
    assert node.call("dev_mine", 3)["number"] == "0x2c"
    assert node.call("dev_mine", "0x10")["number"] == "0x3c"
    assert node.call("dev_setAutomine", 0.5) is True
    assert node.call("dev_setAutomine", 0) is True
    assert node.paces == [0.5, 0.0]


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("dev_mine", [0]),
        ("dev_mine", [-1]),
        ("dev_mine", [True]),
        ("dev_mine", [1.5]),
        ("dev_mine", [100_001]),
        ("dev_mine", ["0x00"]),
        ("dev_mine", [None]),
        ("dev_reorg", [0]),
        ("dev_reorg", [33]),
        ("dev_reorg", []),
        ("dev_setAutomine", [-1]),
        ("dev_setAutomine", [True]),
        ("dev_setAutomine", ["1"]),
        ("dev_setAutomine", [1e9]),
        ("dev_setAutomine", [0.0001]),
        ("eth_chainId", [1]),
        ("eth_getBlockByNumber", []),
        ("eth_getBlockByNumber", ["newest"]),
        ("eth_getBlockByNumber", ["0x"]),
        ("eth_getBlockByNumber", ["0x01"]),
        ("eth_getBlockByNumber", ["1"]),
        ("eth_getBlockByNumber", [1]),
        ("eth_getBlockByNumber", ["0x" + "1" * 17]),
        ("eth_getBlockByNumber", ["0x1\n"]),
        ("eth_getBlockByNumber", ["latest", 1]),
        ("eth_getBlockByNumber", ["latest", None]),
        ("eth_getBlockByNumber", ["latest", True, True]),
        ("eth_getBlockByHash", ["latest"]),
        ("eth_getBlockByHash", [NOWHERE[:-1]]),
        ("eth_getBlockByHash", [NOWHERE[:-1] + "g"]),
        ("eth_getBlockReceipts", [[]]),
        ("eth_getTransactionByHash", [NOWHERE + "0"]),
        ("eth_getTransactionReceipt", [None]),
        ("eth_getLogs", ["latest"]),
        ("eth_getLogs", [{"fromBlock": "0x2", "toBlock": "0x1"}]),
        ("eth_getLogs", [{"fromBlock": "latest", "toBlock": "earliest"}]),
        ("eth_getLogs", [{"fromBlock": 1}]),
        ("eth_getLogs", [{"blockHash": NOWHERE, "fromBlock": "0x1"}]),
        ("eth_getLogs", [{"blockHash": "0x1"}]),
        ("eth_getLogs", [{"address": "0x12"}]),
        ("eth_getLogs", [{"address": [None]}]),
        ("eth_getLogs", [{"topics": TRANSFER}]),
        ("eth_getLogs", [{"topics": ["0x1"]}]),
        ("eth_getLogs", [{"topics": [[[TRANSFER]]]}]),
        ("eth_getLogs", [{"topics": [None] * 5}]),
        ("eth_getLogs", [{"topics": [[TRANSFER] * 1_001]}]),
    ],
    ids=str,
)
def test_invalid_parameters_are_reported_and_change_nothing(node: Node, method: str, params: list[Any]) -> None:
    head = node.call("eth_getBlockByNumber", "latest")
    code, message = node.error(method, *params)
    assert code == -32602
    assert len(message) < 300
    assert node.call("eth_getBlockByNumber", "latest") == head
    assert node.paces == []


# Logs


def naive_logs(node: Node, first: int, last: int, filter_: dict[str, Any]) -> list[Any]:
    """Applies the filter exactly as specified, to the receipts of every block."""
    logs = []
    for number in range(first, min(last, int(node.call("eth_blockNumber"), 16)) + 1):
        for receipt in node.call("eth_getBlockReceipts", hex(number)):
            logs += [log for log in receipt["logs"] if naively_matches(log, filter_)]
    return logs


def naively_matches(log: Any, filter_: dict[str, Any]) -> bool:
    address = filter_.get("address")
    if isinstance(address, str):
        address = [address]
    if address and log["address"] not in [each.lower() for each in address]:
        return False
    for position, wanted in enumerate(filter_.get("topics") or []):
        if position >= len(log["topics"]):
            return False
        if wanted is None or wanted == [] or (isinstance(wanted, list) and None in wanted):
            continue
        if log["topics"][position] not in ([wanted] if isinstance(wanted, str) else wanted):
            return False
    return True


FILTERED = Node(blocks=40)
_LOGS = naive_logs(FILTERED, 0, 40, {})
_ADDRESSES = [*sorted({log["address"] for log in _LOGS})[:12], "0x" + "00" * 20]
_TOPICS = [TRANSFER, APPROVAL, NOWHERE, *(topic for log in _LOGS[:10] for topic in log["topics"][1:])]
addresses = st.sampled_from(_ADDRESSES) | st.lists(st.sampled_from(_ADDRESSES), max_size=4) | st.none()
topic = st.sampled_from(_TOPICS) | st.none()
topics = st.lists(topic | st.lists(topic, max_size=3), max_size=4) | st.none()
filters = st.fixed_dictionaries({}, optional={"address": addresses, "topics": topics})


@given(filters, st.integers(0, 45), st.integers(0, 45))
@settings(max_examples=150, deadline=None)
def test_logs_are_the_filtered_union_of_receipts(filter_: dict[str, Any], one: int, other: int) -> None:
    first, last = sorted((one, other))
    got = FILTERED.call("eth_getLogs", filter_ | {"fromBlock": hex(first), "toBlock": hex(last)})
    assert got == naive_logs(FILTERED, first, last, filter_)


@given(filters, st.integers(0, 40))
@settings(max_examples=50, deadline=None)
def test_logs_of_one_block_are_those_of_its_hash(filter_: dict[str, Any], number: int) -> None:
    block = FILTERED.call("eth_getBlockByNumber", hex(number))
    got = FILTERED.call("eth_getLogs", filter_ | {"blockHash": block["hash"]})
    assert got == naive_logs(FILTERED, number, number, filter_)


def test_log_filter_defaults_to_newest_block_and_is_case_insensitive() -> None:
    node = Node()
    newest = naive_logs(node, 40, 40, {})
    assert newest
    assert node.call("eth_getLogs", {}) == newest
    assert node.call("eth_getLogs", {"fromBlock": None, "toBlock": "latest"}) == newest
    loud = "0x" + newest[0]["address"][2:].upper()
    assert newest[0] in node.call("eth_getLogs", {"address": loud, "topics": ["0x" + TRANSFER[2:].upper()]})


def test_logs_follow_a_reorg() -> None:
    node = Node()
    before = node.call("eth_getLogs", {"fromBlock": "0x1", "toBlock": "latest"})
    node.call("dev_reorg", 5)
    after = node.call("eth_getLogs", {"fromBlock": "0x1", "toBlock": "latest"})
    assert [log for log in after if log in before] == naive_logs(node, 1, 35, {})
    assert after == naive_logs(node, 1, 40, {})


# Limits


def test_range_or_a_result_past_the_limit_is_refused() -> None:
    node = Node(serving=Serving(log_range=10, log_results=50))
    few = {"topics": [NOWHERE]}
    assert node.call("eth_getLogs", few | {"fromBlock": "0x1", "toBlock": "0xa"}) == []
    assert node.call("eth_getLogs", few | {"fromBlock": "0x23", "toBlock": "0xffffffff"}) == []
    reply = node.reply("eth_getLogs", few | {"fromBlock": "0x1", "toBlock": "0xb"})
    assert reply["error"] == {
        "code": -32005,
        "message": "query exceeds max block range 10",
        "data": {"limit": 10},
    }
    code, message = node.error("eth_getLogs", {"fromBlock": "0x1", "toBlock": "0xa"})
    assert (code, message) == (-32005, "query returned more than 50 results")


def test_batch_past_the_limit_is_refused_as_a_whole() -> None:
    node = Node(limits=Limits(batch=3))
    call = {"jsonrpc": "2.0", "id": 1, "method": "dev_mine"}
    assert len(node.send([call] * 3)) == 3
    reply = node.send([call] * 4)
    assert (reply["id"], reply["error"]["code"]) == (None, -32005)
    assert node.call("eth_blockNumber") == "0x2b"


def test_batch_with_too_large_an_answer_is_truncated() -> None:
    node = Node(limits=Limits(response_bytes=20_000))
    call = {"jsonrpc": "2.0", "method": "eth_getBlockByNumber", "params": ["latest", True]}
    replies = node.send([call | {"id": number} for number in range(50)])
    assert [reply["id"] for reply in replies] == list(range(50))
    assert "result" in replies[0]
    assert replies[-1]["error"]["code"] == -32003
    assert len(json.dumps(replies)) < 60_000


# JSON-RPC 2.0


@pytest.mark.parametrize(
    ("body", "code", "id_"),
    [
        (b"", -32700, None),
        (b"{", -32700, None),
        (b'{"jsonrpc": "2.0", "method": "foobar, "params": "bar", "baz]', -32700, None),
        (b'[{"jsonrpc": "2.0", "method": "eth_chainId", "id": "1"}, {"jsonrpc": "2.0", "method"', -32700, None),
        (b"\xff\xfe", -32700, None),
        (b'"\\ud800"', -32700, None),
        (b"[" * 100_000, -32700, None),
        (b'{"a":' * 100_000, -32700, None),
        (b"[]", -32600, None),
        (b"null", -32600, None),
        (b"1", -32600, None),
        (b'{"jsonrpc": "2.0", "method": 1, "params": "bar"}', -32600, None),
        (b'{"jsonrpc": "2.0", "method": 1, "id": 7}', -32600, 7),
        (b'{"jsonrpc": "1.0", "method": "eth_chainId", "id": 7}', -32600, 7),
        (b'{"method": "eth_chainId", "id": 7}', -32600, 7),
        (b'{"jsonrpc": "2.0", "method": "eth_chainId", "id": {}}', -32600, None),
        (b'{"jsonrpc": "2.0", "method": "eth_chainId", "id": true}', -32600, None),
        (b'{"jsonrpc": "2.0", "method": "eth_chainId", "id": 123456789012345678901234567890}', -32600, None),
        (b'{"jsonrpc": "2.0", "method": "eth_chainId", "params": "bar", "id": "x"}', -32600, "x"),
        (b'{"jsonrpc": "2.0", "method": "eth_chainId", "params": {"a": 1}, "id": "x"}', -32602, "x"),
        (b'{"jsonrpc": "2.0", "method": "foobar", "id": "x"}', -32601, "x"),
        (b'{"jsonrpc": "2.0", "method": "", "id": "x"}', -32601, "x"),
        (b'{"jsonrpc": "2.0", "method": "eth_chainId", "params": [1], "id": 1.5}', -32602, 1.5),
    ],
    ids=lambda value: value[:60].decode(errors="replace") if isinstance(value, bytes) else "",
)
def test_malformed_request_gets_the_error_code_of_the_specification(
    node: Node, body: bytes, code: int, id_: Any
) -> None:
    reply = node.raw(body)
    assert (reply["jsonrpc"], reply["id"], reply["error"]["code"]) == ("2.0", id_, code)


def test_batch_answers_each_call_in_order_and_no_notification(node: Node) -> None:
    replies = node.send(
        [
            {"jsonrpc": "2.0", "method": "eth_chainId", "id": "1"},
            {"jsonrpc": "2.0", "method": "dev_mine"},
            {"foo": "boo"},
            1,
            {"jsonrpc": "2.0", "method": "no_such", "id": "5"},
            {"jsonrpc": "2.0", "method": "eth_blockNumber", "id": None},
        ]
    )
    assert [reply["id"] for reply in replies] == ["1", None, None, "5", None]
    assert [reply.get("error", {}).get("code") for reply in replies] == [None, -32600, -32600, -32601, None]
    assert replies[-1]["result"] == "0x29"


def test_notifications_are_executed_and_never_answered(node: Node) -> None:
    assert node.send({"jsonrpc": "2.0", "method": "dev_mine", "params": [2]}) is None
    assert node.send([{"jsonrpc": "2.0", "method": "dev_mine"}, {"jsonrpc": "2.0", "method": "no_such"}]) is None
    assert node.call("eth_blockNumber") == "0x2b"


def test_exception_in_a_method_is_logged_and_becomes_an_opaque_internal_error() -> None:
    def broken() -> None:
        raise RuntimeError("a secret")

    endpoint = Endpoint({"broken": Method(broken)})
    with capture_logs() as lines:
        answer = endpoint.answer(b'{"jsonrpc": "2.0", "method": "broken", "id": 1}')
    assert [(line["event"], line["method"]) for line in lines] == [("devchain.method_failed", "broken")]
    assert answer is not None
    assert json.loads(answer)["error"]["code"] == -32603
    assert b"secret" not in answer


# Small or out of range: numbers in between would make dev_mine slow and prove nothing more.
numbers = st.integers(-3, 3) | st.integers(2**20, 2**70) | st.floats(allow_nan=False)
texts = st.text(max_size=8) | st.sampled_from(["latest", "safe", "0x1", "0x", NOWHERE, TRANSFER, _ADDRESSES[0]])
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["fromBlock", "toBlock", "blockHash", "address", "topics"]) | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
methods = st.sampled_from(sorted(Methods(FILTERED.chain, FILTERED.paces.append).table()))
calls = st.fixed_dictionaries(
    {"jsonrpc": st.just("2.0") | values, "method": methods | values},
    optional={"id": values, "params": st.lists(values, max_size=3) | values},
)
WELL_FORMED = {-32700, -32600, -32601, -32602, -32000, -32005}


def check_reply(reply: Any) -> None:
    assert set(reply) in ({"jsonrpc", "id", "result"}, {"jsonrpc", "id", "error"})
    assert reply["jsonrpc"] == "2.0"
    if "error" in reply:
        assert reply["error"]["code"] in WELL_FORMED
        assert isinstance(reply["error"]["message"], str)


def application(node: Node) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=Application(node.endpoint), raise_app_exceptions=True)
    return httpx.AsyncClient(transport=transport, base_url="http://devchain")


@given(st.binary(max_size=200) | (calls | st.lists(calls | values, max_size=4) | values).map(json.dumps))
@settings(max_examples=250, deadline=None)
async def test_any_body_gets_a_json_rpc_answer_and_never_a_server_error(body: bytes | str) -> None:
    async with application(FUZZED) as http:
        reply = await http.post("/", content=body)
    if reply.status_code == 204:
        assert reply.content == b""
        return
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/json")
    answer = reply.json()
    for each in answer if isinstance(answer, list) else [answer]:
        check_reply(each)


FUZZED = Node(blocks=10)


# HTTP


async def test_only_post_to_the_root_is_served(node: Node) -> None:
    async with application(node) as http:
        assert (await http.post("/rpc", content=b"{}")).status_code == 404
        refused = await http.get("/")
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        assert (await http.post("/", content=b" " * (5 * 1024 * 1024 + 1))).status_code == 413
        largest = await http.post("/", content=b"1" + b" " * (5 * 1024 * 1024 - 1))
        assert largest.json()["error"]["code"] == -32600
