"""The work of both sides: keeps some of the log-like rows, and derives columns from them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the customary name

from interlock.spark import TaskContext, operator

ROWS: Final = (
    "block_number bigint not null, log_index int not null, block_timestamp timestamp not null, "
    "transaction_hash string not null, address string not null, topic0 string not null, value bigint not null"
)
DERIVED: Final = (
    "block_number bigint not null, log_index int not null, block_timestamp timestamp not null, "
    "transaction_hash string not null, token string not null, amount double not null, hour timestamp not null"
)
ARROW: Final = pa.schema(
    [
        pa.field("block_number", pa.int64(), nullable=False),
        pa.field("log_index", pa.int32(), nullable=False),
        pa.field("block_timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("transaction_hash", pa.string(), nullable=False),
        pa.field("address", pa.string(), nullable=False),
        pa.field("topic0", pa.string(), nullable=False),
        pa.field("value", pa.int64(), nullable=False),
    ]
)
WANTED: Final = "0x" + "dd" * 32
OTHER: Final = "0x" + "8c" * 32
LOGS_PER_BLOCK: Final = 100
_SECOND: Final = 1_000_000
_BLOCK_SECONDS: Final = 12


def derived(rows: DataFrame) -> DataFrame:
    """Keeps half of the rows, with some columns unchanged and some computed."""
    return rows.filter(F.col("topic0") == WANTED).select(
        "block_number",
        "log_index",
        "block_timestamp",
        "transaction_hash",
        F.lower("address").alias("token"),
        (F.col("value") / 1e6).alias("amount"),
        F.date_trunc("hour", "block_timestamp").alias("hour"),
    )


@operator(inputs={"rows": ROWS}, output=DERIVED)
def derive(rows: DataFrame, ctx: TaskContext) -> DataFrame:  # noqa: ARG001 - operators receive a context
    return derived(rows)


def rows_of(start: int, count: int, random: Any) -> pa.Table:
    """Generates rows of the blocks from `start` on. Any: a NumPy generator, whose type mypy does not know here."""
    numbers = np.arange(count)
    blocks = start + numbers // LOGS_PER_BLOCK
    tokens = np.array(["0x" + random.bytes(20).hex().upper() for _ in range(500)])
    hashes = ["0x" + random.bytes(32).hex() for _ in range(count // 2 + 1)]
    columns = {
        "block_number": blocks,
        "log_index": (numbers % LOGS_PER_BLOCK).astype(np.int32),
        "block_timestamp": blocks * _BLOCK_SECONDS * _SECOND,
        "transaction_hash": [hashes[number // 2] for number in range(count)],
        "address": tokens[random.integers(0, len(tokens), count)],
        "topic0": np.where(numbers % 2 == 0, WANTED, OTHER),
        "value": random.integers(0, 10**12, count),
    }
    return pa.table([pa.array(columns[field.name]).cast(field.type) for field in ARROW], schema=ARROW)
