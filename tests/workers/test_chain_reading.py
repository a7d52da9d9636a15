"""Reading a chain in Spark executors, without Spark: addresses and bound secrets are checked there."""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle

from interlock.outbound.exchange import Request
from interlock.outbound.guard import Binding
from interlock.spark.built_in.chain_rows import Reading, Source, whole_blocks
from interlock.spark.context import Scope
from interlock.workers.protocol import Outbound
from tests.support.dev_chain import served


@pytest.mark.parametrize(
    ("allow", "host", "problem"),
    [
        ([], None, "AddressRefused"),
        (["127.0.0.1:1"], None, "AddressRefused"),
        (["127.0.0.1"], "rpc.test", "HostNotBound"),
        (["127.0.0.1"], "127.0.0.1", None),
        (["{place}"], "{place}", None),
    ],
)
async def test_executor_checks_the_host_it_connects_to(allow: list[str], host: str | None, problem: str | None) -> None:
    async with served(blocks=20) as node:
        place = node.url.removeprefix("http://")
        bindings = () if host is None else (Binding.read("KEY", [host.format(place=place)]),)
        source = Source(
            asked=Request(node.url, headers={"x-key": "value"}, bindings=bindings),
            outbound=Outbound([entry.format(place=place) for entry in allow]),
            timeout=10,
            patience=0,
            batch=5,
            parallel=1,
        )
        sent: Reading = cloudpickle.loads(cloudpickle.dumps(Reading(source, Scope(0, 9), whole_blocks(["blocks"]))))  # type: ignore[no-untyped-call]
        rows = await asyncio.to_thread(_read, sent)
        assert {row["problem_class"] for row in rows} == {problem}
        assert (node.requests == 0) == (problem is not None)
        assert problem is not None or len(rows) == 10


def _read(reading: Reading) -> list[dict[str, Any]]:
    numbers = pa.RecordBatch.from_pydict({"id": [0, 1]})
    return [row for batch in reading.rows(iter([numbers])) for row in batch.to_pylist()]
