"""The module with which users test operators."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession, functions

from interlock.spark import TaskContext, operator
from interlock.spark.testing import Rows, run
from interlock.workers.failures import NullInColumn, RowOutsideScope, WrongColumns

pytestmark = pytest.mark.usefixtures("spark")

PAYMENTS = "block_number bigint not null, payer string not null, amount decimal(38,0)"
TOTALS = "payer string not null, total decimal(38,0), payments bigint not null"


@operator(inputs={"payments": PAYMENTS}, output=TOTALS)
def totals(payments: DataFrame, ctx: TaskContext) -> DataFrame:
    ctx.progress(0.5, "half")
    grouped = payments.groupBy("payer")
    return grouped.agg(
        functions.sum("amount").cast("decimal(38,0)").alias("total"),
        functions.count(functions.lit(1)).alias("payments"),
    ).orderBy("payer")


def test_operator_is_called_with_rows_and_returns_rows() -> None:
    result = run(
        totals,
        payments=[
            {"block_number": 1, "payer": "ada", "amount": 5},
            {"block_number": 2, "payer": "ada", "amount": 2**100},
            {"block_number": 3, "payer": "bob"},
            {"block_number": 100, "payer": "out", "amount": 1},
        ],
        scope=(0, 99),
    )
    assert result.rows == [
        {"payer": "ada", "total": Decimal(5 + 2**100), "payments": 2},
        {"payer": "bob", "total": None, "payments": 1},
    ]
    assert result.progress == [(0.5, "half")]
    assert result.value == {"outputs": {"output": {"rows": 2, "bytes": result.value["outputs"]["output"]["bytes"]}}}


def test_rows_may_be_dicts_tables_pandas_or_spark_frames(spark: SparkSession) -> None:
    rows = [{"block_number": 1, "payer": "ada", "amount": 5}]
    schema = pa.schema([("block_number", pa.int64()), ("payer", pa.string()), ("amount", pa.decimal128(38, 0))])
    table = pa.Table.from_pylist(rows, schema=schema)
    given: list[Rows] = [rows, table, table.to_pandas(), spark.createDataFrame(table)]
    for one in given:
        assert run(totals, {"payments": one}).rows == [{"payer": "ada", "total": Decimal(5), "payments": 1}]


def test_several_outputs_are_returned_by_name() -> None:
    @operator(inputs={"payments": PAYMENTS}, outputs={"small": PAYMENTS, "large": PAYMENTS})
    def parted(payments: DataFrame, ctx: TaskContext) -> dict[str, DataFrame]:
        return {"small": payments.filter("amount < 10"), "large": payments.filter("amount >= 10")}

    rows = [{"block_number": n, "payer": "ada", "amount": Decimal(n)} for n in (1, 10, 11)]
    result = run(parted, payments=rows)
    assert result.output_rows == {"small": rows[:1], "large": rows[1:]}
    with pytest.raises(LookupError, match="there are 2 outputs"):
        _ = result.rows


def test_operator_with_any_inputs_gets_all_and_may_return_json() -> None:
    @operator()
    def counted(inputs: Mapping[str, DataFrame], ctx: TaskContext) -> dict[str, Any]:
        assert ctx.scope is not None
        counts = {name: frame.count() for name, frame in inputs.items()}
        return {"counts": counts, "start": ctx.scope.start, "payload": ctx.payload}

    result = run(counted, a=[{"x": 1}], b=[{"y": "z"}] * 2, scope=(7, 9), payload=[1])
    assert result.value == {"counts": {"a": 1, "b": 2}, "start": 7, "payload": [1]}
    assert result.tables == {}


def test_udf_of_an_operator_runs_inside_spark() -> None:
    @operator(inputs={"payments": PAYMENTS}, output="block_number bigint, payer string")
    def shouted(payments: DataFrame, ctx: TaskContext) -> DataFrame:
        shout = functions.udf(lambda name: name.upper(), "string")
        return payments.select("block_number", shout("payer").alias("payer"))

    assert run(shouted, payments=[{"block_number": 1, "payer": "ada"}]).rows == [{"block_number": 1, "payer": "ADA"}]


def test_outputs_are_checked_like_on_the_platform() -> None:
    @operator(inputs={"payments": PAYMENTS}, output=PAYMENTS)
    def by_config(payments: DataFrame, ctx: TaskContext) -> DataFrame:
        return payments.selectExpr(*ctx.config["select"])

    row = {"block_number": 1, "payer": "ada", "amount": 1}
    for select, failure in (
        (["block_number", "payer"], WrongColumns),
        (["block_number", "cast(null as string) payer", "amount"], NullInColumn),
        (["block_number + 100 as block_number", "payer", "amount"], RowOutsideScope),
    ):
        with pytest.raises(failure):
            run(by_config, payments=[row], scope=(0, 99), config={"select": select})


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ({"payments": [{"block_number": 1, "payer": "ada", "amuont": 1}]}, "payments has no column 'amuont'"),
        ({"payments": [{"block_number": 1}]}, "has no value for payer, which is declared as not null"),
    ],
)
def test_invalid_input_row_of_a_test_is_reported(rows: dict[str, Rows], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        run(totals, rows)


def test_missing_input_of_a_test_is_reported() -> None:
    with pytest.raises(TypeError, match="takes the inputs payments, but the test gives none"):
        run(totals)
