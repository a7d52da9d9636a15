"""Converts unsigned 256-bit numbers from hex to exact decimal text."""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - PySpark's usual alias
from pyspark.sql.types import StringType

from interlock.spark.built_in.config import read_config
from interlock.spark.context import TaskContext
from interlock.spark.operators import operator


def decimal_text(digits: Column) -> Column:
    """Converts hex digits to decimal text.

    Spark's decimals have at most 38 digits, a uint256 up to 78. Python's integers have no limit, and a Python UDF is
    faster than arithmetic on 32-bit parts in Spark despite the transfer: 1.5 s against 5 to 10 s for a million rows,
    warm, on a busy machine.
    """
    return F.udf(_decimal_text, StringType(), useArrow=True)(digits)


def _decimal_text(digits: str | None) -> str | None:
    return None if digits is None else str(int(digits, 16))


TRANSFER: Final = "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef"
"""keccak256("Transfer(address,address,uint256)")."""
_DIGITS: Final = 38

LOGS: Final = """
    block_number bigint, log_index int, block_hash string, block_timestamp timestamp, transaction_hash string,
    transaction_index int, address string, topic0 string, topic1 string, topic2 string, topic3 string, data string
"""
TRANSFERS: Final = """
    block_number bigint not null, log_index int not null, block_hash string not null,
    block_timestamp timestamp not null, transaction_hash string not null, transaction_index int not null,
    token string not null, from_address string not null, to_address string not null, value decimal(38,0),
    value_text string not null
"""
_WORD: Final = "^0x[0-9a-fA-F]{64}$"


class TransfersConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokens: list[str] = []
    """Addresses of token contracts. Empty: all."""


@operator(inputs={"logs": LOGS}, output=TRANSFERS)
def erc20_transfers(logs: DataFrame, ctx: TaskContext) -> DataFrame:
    """Returns the `Transfer` logs with two indexed addresses and an amount.

    ERC-721 has the same event, with the token as a third indexed topic; such logs are skipped.
    """
    config = read_config(ctx, TransfersConfig)
    transfers = logs.where(
        F.col("topic0").isin(TRANSFER, "0x" + TRANSFER[2:].upper())
        & F.col("topic3").isNull()
        & F.col("topic1").rlike(_WORD)
        & F.col("topic2").rlike(_WORD)
        & F.col("data").rlike(_WORD)
    )
    if config.tokens:
        transfers = transfers.where(F.lower("address").isin([token.lower() for token in config.tokens]))
    amounts = transfers.withColumn("value_text", decimal_text(F.substring("data", 3, 64)))
    return amounts.select(
        "block_number",
        "log_index",
        "block_hash",
        "block_timestamp",
        "transaction_hash",
        "transaction_index",
        F.lower("address").alias("token"),
        _address("topic1").alias("from_address"),
        _address("topic2").alias("to_address"),
        F.when(F.length("value_text") <= _DIGITS, F.col("value_text").cast(f"decimal({_DIGITS},0)")).alias("value"),
        "value_text",
    )


def _address(topic: str) -> Column:
    """Returns the address in a topic: the last 20 of its 32 bytes."""
    return F.concat(F.lit("0x"), F.lower(F.substring(topic, 27, 40)))
