"""Translation of `where` to Spark SQL."""

from __future__ import annotations

from datetime import UTC, date, datetime

import pytest
from pyspark.sql import SparkSession

from interlock.dags.where import parse, sql
from interlock.spark.columns import columns, spark_text
from interlock.workers.failures import BadConfig


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("a = 'it''s'", r"`a` = 'it\'s'"),
        (r"a = '\n%'", r"`a` = '\\n%'"),
        ('"a""b`c" = 1', '`a"b``c` = 1'),
        ("a = '\"x\" TIMESTAMP 12'", "`a` = '\"x\" TIMESTAMP 12'"),
        ("a BETWEEN -5 AND 2.5", "`a` BETWEEN -5 AND 2.5BD"),
        ("a > 2e6", "`a` > 2000000BD"),
        ("a > 9223372036854775807", "`a` > 9223372036854775807"),
        ("a > 9223372036854775808", "`a` > CAST('9223372036854775808' AS DECIMAL(19,0))"),
        ("a < 1e60", "`a` < 1E+60D"),
        ("a > 1e-60", "`a` > 1E-60D"),
        ("at >= TIMESTAMP '2026-01-31 12:00:00'", "`at` >= TIMESTAMP_NTZ '2026-01-31 12:00:00'"),
        ("at >= TIMESTAMP '2026-01-31 12:00:00Z'", "`at` >= TIMESTAMP_LTZ '2026-01-31 12:00:00+00:00'"),
        ("day = DATE '2026-01-31' AND NOT (x1 OR y)", "`day` = DATE '2026-01-31' AND NOT (`x1` OR `y`)"),
    ],
)
def test_where_is_translated_to_spark_sql(where: str, text: str) -> None:
    assert spark_text(sql(parse(where))) == text


def test_where_cannot_read_the_environment_of_the_driver(spark: SparkSession) -> None:
    """Drivers turn substitution off for each session, but the worker's spark_conf may turn it on again."""
    assert spark.conf.get("spark.sql.variable.substitute") == "false"
    session = spark.newSession()
    session.conf.set("spark.sql.variable.substitute", "true")
    frame = session.createDataFrame([("${env:PATH}",)], "a string")
    assert frame.filter(spark_text(sql(parse("a = '${env:PATH}'")))).count() == 1
    with pytest.raises(BadConfig, match="rename the column"):
        spark_text(sql(parse('"${env:PATH}" = 1')))


def test_columns_are_listed_once_without_string_literals() -> None:
    assert columns(sql(parse("a = 'b' AND (\"C d\" > a OR a IN ('\"x\"'))"))) == ["a", "C d"]


def test_literal_beyond_bigint_does_not_match_null(spark: SparkSession) -> None:
    """Spark folds a comparison with a literal beyond bigint to a constant, even for nulls."""
    frame = spark.createDataFrame([(None,), (5,)], "n int")
    for where in ("NOT n > 10000000000000000000", "n < 10000000000000000000.5", "NOT n = 1e60"):
        assert frame.filter(spark_text(sql(parse(where)))).collect() == [(5,)], where


def test_timestamps_are_compared_in_utc(spark: SparkSession) -> None:
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    row = (noon, noon.replace(tzinfo=None), date(2026, 1, 31))
    frame = spark.createDataFrame([row], "at timestamp, local timestamp_ntz, day date")
    for where in (
        "at = TIMESTAMP '2026-01-31 12:00:00'",
        "at = TIMESTAMP '2026-01-31 13:00:00+01:00'",
        "local = TIMESTAMP '2026-01-31 12:00:00'",
        "local = TIMESTAMP '2026-01-31 11:00:00-01:00'",
        "day = DATE '2026-01-31' AND at < TIMESTAMP '2026-01-31 12:00:00.000001Z'",
    ):
        assert frame.filter(spark_text(sql(parse(where)))).count() == 1, where
