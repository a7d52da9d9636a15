"""block_ingest and integrity_check against the development chain over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from interlock.dev.chain import Chain, Shape
from interlock.spark.built_in.block_ingest import block_ingest
from interlock.spark.built_in.integrity_check import IntegrityFindings, integrity_check
from interlock.wire.access import TaskSecret
from interlock.wire.attempts import InputData
from interlock.workers.context import TaskFailed
from interlock.workers.protocol import Outbound
from tests.spark.local_attempts import Store, attempt, output, parquet_input, rows_of
from tests.support.block_followers import KEYS, KINDS
from tests.support.dev_chain import Answer, Node, expected_rows, served

QUICK = {"rpc_patience_seconds": 0, "batch_size": 7, "requests": 3}


async def ingest(
    spark: SparkSession, folder: Path, payload: Any, *names: str, **config: Any
) -> dict[str, list[dict[str, Any]]]:
    """Returns rows by output, sorted by key. A range given as a tuple is that of an input."""
    inputs = [parquet_input("ranges", [], payload, None)] if isinstance(payload, tuple) else []
    outputs = [output(Store(folder), name, index) for index, name in enumerate(names)]
    _, written, _ = await asyncio.to_thread(
        attempt, spark, block_ingest, inputs, outputs, operator="block_ingest", payload=payload, config=QUICK | config
    )
    kinds = config.get("outputs", names)
    return {
        name: in_order(rows_of(one.location), KEYS[kind]) for name, kind, one in zip(names, kinds, written, strict=True)
    }


def in_order(rows: list[dict[str, Any]], key: tuple[str, ...]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: [row[name] for name in key])


async def test_block_ingest_writes_the_same_rows_as_the_follower(spark: SparkSession, tmp_path: Path) -> None:
    async with served(blocks=40) as node:
        wanted = expected_rows(node.chain, 3, 33)
        read = await ingest(spark, tmp_path, {"start": 3, "end": 33}, *KINDS, rpc_url=node.url)
        assert read == wanted
        asked = node.requests
        few = await ingest(spark, tmp_path, (5, 6), "logs", rpc_url=node.url)
        assert few == {"logs": [row for row in wanted["logs"] if row["block_number"] in (5, 6)]}
        assert node.requests == asked + 1
        named = {"outputs": ["transactions", "blocks"], "rpc_url": node.url}
        renamed = await ingest(spark, tmp_path, {"start": 9, "end": 9}, "sent", "heads", **named)
        assert renamed["heads"] == [row for row in wanted["blocks"] if row["block_number"] == 9]
        assert renamed["sent"] == [row for row in wanted["transactions"] if row["block_number"] == 9]


async def test_reorg_between_batches_fails_the_attempt_and_the_next_succeeds(
    spark: SparkSession, tmp_path: Path
) -> None:
    async def reorg(document: Any, node: Node) -> Answer | None:
        if any(call["params"][:1] == ["0xa"] for call in document):
            node.spoil = None
            node.chain.reorg(15)
        return None

    async with served(blocks=20) as node:
        node.spoil = reorg
        settings = {"rpc_url": node.url, "batch_size": 5, "requests": 1}
        with pytest.raises(TaskFailed, match="Block 10 is not a child of the block 9") as failed:
            await ingest(spark, tmp_path, {"start": 0, "end": 19}, "blocks", **settings)
        assert failed.value.error_class == "ChainMoved"
        read = await ingest(spark, tmp_path, {"start": 0, "end": 19}, "blocks", **settings)
        assert read["blocks"] == expected_rows(node.chain, 0, 19)["blocks"]


async def test_executors_refuse_a_node_with_a_private_address(spark: SparkSession, tmp_path: Path) -> None:
    async with served(blocks=20) as node:
        outputs = [output(Store(tmp_path), "blocks", 0)]
        asked = {"operator": "block_ingest", "payload": {"start": 0, "end": 9}, "config": QUICK | {"rpc_url": node.url}}
        with pytest.raises(TaskFailed, match="outbound_allow") as refused:
            await asyncio.to_thread(attempt, spark, block_ingest, [], outputs, outbound=Outbound(), **asked)
        assert refused.value.error_class == "AddressRefused"
        assert node.requests == 0


async def test_executors_send_a_bound_secret_only_to_its_host(spark: SparkSession, tmp_path: Path) -> None:
    async with served(blocks=20) as node:
        config = QUICK | {"rpc_url": node.url, "headers": {"x-key": "${secret:KEY}"}}
        asked: dict[str, Any] = {"operator": "block_ingest", "payload": {"start": 0, "end": 9}, "config": config}
        for hosts, error_class in ((["rpc.test"], "HostNotBound"), ([node.url.removeprefix("http://")], None)):
            asked["secrets"] = [TaskSecret("KEY", "a-bound-value", hosts)]
            outputs = [output(Store(tmp_path / hosts[0]), "blocks", 0)]
            if error_class is None:
                await asyncio.to_thread(attempt, spark, block_ingest, [], outputs, **asked)
                assert node.requests > 0
                continue
            with pytest.raises(TaskFailed) as refused:
                await asyncio.to_thread(attempt, spark, block_ingest, [], outputs, **asked)
            assert refused.value.error_class == error_class
            assert node.requests == 0


async def test_node_without_the_whole_range_is_reported(spark: SparkSession, tmp_path: Path) -> None:
    async def pruned(document: Any, node: Node) -> Answer | None:
        calls = document if isinstance(document, list) else [document]
        answers = node.answer(calls)
        for call, answer in zip(calls, answers, strict=True):
            if call["method"] == "eth_getBlockByNumber" and int(call["params"][0], 16) < 10:
                answer["result"] = None
        return Answer(200, msgspec.json.encode(answers if isinstance(document, list) else answers[0]))

    async with served(blocks=20) as node:
        with pytest.raises(TaskFailed, match="up to 25, but the newest block of the node is 20") as late:
            await ingest(spark, tmp_path, {"start": 18, "end": 25}, "blocks", rpc_url=node.url, batch_size=50)
        node.spoil = pruned
        with pytest.raises(TaskFailed, match="does not have block 8, though its newest block is") as early:
            await ingest(spark, tmp_path, {"start": 8, "end": 12}, "blocks", rpc_url=node.url)
        assert {late.value.error_class, early.value.error_class} == {"BlocksMissing"}
        await node.stop()
        with pytest.raises(TaskFailed, match=r"127\.0\.0\.1 cannot be used") as away:
            await ingest(spark, tmp_path, {"start": 8, "end": 12}, "blocks", rpc_url=node.url)
        assert away.value.error_class == "RpcUnavailable"


@pytest.mark.parametrize(
    ("config", "payload", "names", "error_class", "message"),
    [
        ({}, {"start": 0, "end": 1}, ["blocks"], "BadConfig", "needs rpc_url"),
        ({"rpc_url": "ftp://x"}, {"start": 0, "end": 1}, ["blocks"], "BadConfig", "rpc_url must look like"),
        ({"rpc_url": "http://x/${MISSING}"}, {"start": 0, "end": 1}, ["blocks"], "BadConfig", "MISSING"),
        ({"rpc_url": "http://x"}, None, ["blocks"], "NoScope", "trigger it with a payload"),
        ({"rpc_url": "http://x"}, {"start": 2, "end": 1}, ["blocks"], "NoScope", "trigger it with a payload"),
        ({"rpc_url": "http://x"}, {"start": 0, "end": 1}, ["traces"], "BadConfig", "is not named blocks"),
        ({"rpc_url": "http://x", "outputs": ["logs"]}, {"start": 0, "end": 1}, ["a", "b"], "BadConfig", "2 outputs"),
        ({"rpc_url": "http://x", "outputs": ["traces"]}, {"start": 0, "end": 1}, ["a"], "BadConfig", "traces"),
        ({"rpc_url": "http://x", "start_block": 1}, {"start": 0, "end": 1}, ["blocks"], "BadConfig", "start_block"),
    ],
)
async def test_invalid_ingest_job_fails_with_advice(
    spark: SparkSession,
    tmp_path: Path,
    config: dict[str, Any],
    payload: Any,
    names: list[str],
    error_class: str,
    message: str,
) -> None:
    with pytest.raises(TaskFailed) as failed:
        await ingest(spark, tmp_path, payload, *names, **config)
    assert failed.value.error_class == error_class
    assert message in str(failed.value)


# integrity_check


class Data:
    """Stored data of a chain, which tests damage."""

    def __init__(self, folder: Path, chain: Chain, last: int) -> None:
        self.rows = expected_rows(chain, 0, last)
        self._store, self._last = Store(folder), last

    def inputs(self, *kinds: str, **more: Any) -> list[InputData]:
        return [self._input(kind, **more) for kind in kinds or KINDS]

    def _input(self, kind: str, **more: Any) -> InputData:
        """Writes an input in two files."""
        rows, half = self.rows[kind], len(self.rows[kind]) // 2
        table = pa.Table.from_pylist(rows)
        files = [self._store.file(part, 0, self._last) for part in (table[:half], table[half:])]
        return parquet_input(kind, files, (0, self._last), None, **more)

    def change(self, kind: str, number: int, **values: Any) -> dict[str, Any]:
        row = next(row for row in self.rows[kind] if row["block_number"] == number)
        row.update(values)
        return row


def report(spark: SparkSession, inputs: list[InputData], **config: Any) -> dict[str, Any]:
    done, _, _ = attempt(spark, integrity_check, inputs, [], operator="integrity_check", config=config)
    assert isinstance(done, dict)
    return done


def found(done: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(one["kind"], one["input"], one["block_number"], one["expected"], one["found"]) for one in done["first"]]


def test_integrity_check_finds_each_kind_of_damage(spark: SparkSession, tmp_path: Path) -> None:
    chain = Chain(Shape(seed=7, transactions=5, reorg_every=0), blocks=30)
    data = Data(tmp_path, chain, 29)
    assert report(spark, data.inputs()) == {"findings": 0, "kinds": {}, "first": []}
    hashes = {row["block_number"]: row["block_hash"] for row in data.rows["blocks"]}
    doubled = data.rows["logs"][0]
    data.rows["logs"].append(dict(doubled))
    data.rows["blocks"] = [row for row in data.rows["blocks"] if row["block_number"] not in (0, 11, 12)]
    wrong = "0x" + "ab" * 32
    data.change("blocks", 20, parent_hash=wrong)
    for kind in ("transactions", "logs"):
        data.rows[kind] = [row for row in data.rows[kind] if row["block_number"] not in (0, 11, 12)]
    data.change("transactions", 25, block_hash=wrong)
    assert found(report(spark, data.inputs())) == [
        ("broken_link", "blocks", 20, hashes[19], wrong),
        ("duplicate_key", "logs", doubled["block_number"], "1", "2"),
        ("missing_blocks", "blocks", 0, "1", "0"),
        ("missing_blocks", "blocks", 11, "2", "0"),
        ("other_branch", "transactions", 25, hashes[25], wrong),
    ]
    # Blocks that a filter excludes are not missing.
    filtered = report(spark, data.inputs("blocks", where='"block_number" > 12'))
    assert found(filtered) == [("broken_link", "blocks", 20, hashes[19], wrong)]
    only = report(spark, data.inputs("blocks", where='"block_number" > 12'), checks=["gaps"])
    assert found(only) == [("missing_blocks", "blocks", 0, "13", "0")]
    # A custom key is checked in those inputs that have it.
    repeated = data.rows["transactions"][0]["transaction_hash"]
    data.change("transactions", 28, transaction_hash=repeated)
    keyed = report(spark, data.inputs("blocks", "transactions"), checks=["duplicates"], key=["transaction_hash"])
    assert [(one["input"], one["key"], one["block_number"]) for one in keyed["first"]] == [
        ("transactions", repeated, 28)
    ]


async def test_blocks_that_the_source_no_longer_has_are_reported(spark: SparkSession, tmp_path: Path) -> None:
    async with served(blocks=30) as node:
        data = Data(tmp_path, node.chain, 30)
        before = {row["block_number"]: row["block_hash"] for row in data.rows["blocks"]}
        settings: dict[str, Any] = {"rpc_url": node.url, "batch_size": 8, "rpc_patience_seconds": 0}
        clean = await asyncio.to_thread(report, spark, data.inputs("blocks", "logs"), **settings)
        assert clean["findings"] == 0
        node.chain.reorg(2)
        inputs, out = data.inputs("blocks"), output(Store(tmp_path), "findings")
        await asyncio.to_thread(
            attempt, spark, integrity_check, inputs, [out], operator="integrity_check", config=settings
        )
        rows = rows_of(f"{out.write_prefix}findings_0_30.parquet")
        assert sorted((row["block_number"], row["found"]) for row in rows) == [(n, before[n]) for n in (29, 30)]
        assert {(row["kind"], row["input"]) for row in rows} == {("not_at_source", "blocks")}
        assert {row["expected"] for row in rows} == {node.chain.at(n).hash for n in (29, 30)}  # type: ignore[union-attr]
        with pytest.raises(IntegrityFindings, match="2 not_at_source"):
            await asyncio.to_thread(report, spark, inputs, on_findings="fail", **settings)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"checks": ["source"]}, "needs rpc_url"),
        ({"checks": ["everything"]}, "checks"),
        ({"key": ["nothing"]}, "no input has all these columns"),
        ({"on_findings": "ignore"}, "on_findings"),
        ({"checks": ["branches"]}, "No check applies to the inputs"),
        ({"url": "x"}, "unknown field `url`"),
    ],
)
def test_impossible_check_fails_with_the_reason(
    spark: SparkSession, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    data = Data(tmp_path, Chain(Shape(seed=7, reorg_every=0), blocks=3), 2)
    with pytest.raises(TaskFailed, match=message) as failed:
        report(spark, data.inputs("blocks"), **config)
    assert failed.value.error_class == "BadConfig"
