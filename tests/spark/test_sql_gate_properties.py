"""Random statements: those that the gate accepts name, read and reveal only the inputs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from interlock.spark.built_in.sql import _frame
from interlock.spark.built_in.sql_gate import UnsafeQuery, checked
from interlock.workers.failures import BadConfig
from tests.support.random_statements import Dialect, Writer

pytestmark = pytest.mark.timeout(300)

MARK = "planted_column"
_RELATION = re.compile(r"'UnresolvedRelation \[([^\]]*)\]")
_DEFINED = re.compile(r"\bwith\s+(?:/\*.*?\*/|--[^\n]*\n|\s)*(\w+)", re.IGNORECASE | re.DOTALL)


@pytest.fixture(scope="module")
def planted(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session in which every secret can be resolved, so that a leak shows in the analysed plan."""
    session = spark.newSession()
    secret = session.range(1).withColumnRenamed("id", MARK)
    secret.createOrReplaceTempView("secret")
    secret.createOrReplaceGlobalTempView("secret_of_all")
    yield session
    session.catalog.dropGlobalTempView("secret_of_all")


@pytest.fixture(scope="module")
def dialect(tmp_path_factory: pytest.TempPathFactory) -> Dialect:
    path = Path(tmp_path_factory.mktemp("planted") / "secret.csv")
    path.write_text(f"{MARK}\n1\n")
    return Dialect(
        granted=["logs", "blocks"],
        secret=["secret", "`secret`", "global_temp.secret_of_all", f"csv.`{path}`", f"text.`{path}`"],
        columns=["a", "b", "t.a", "logs.b", "`a`", "*"],
        functions=["abs", "max", "array", "coalesce", "upper", "length"],
        quote="`",
        odd=0.4,
    )


def test_accepted_statement_names_and_reads_only_the_inputs(planted: SparkSession, dialect: Dialect) -> None:
    inputs = {name: planted.createDataFrame([(1, "x")], "a int, b string") for name in dialect.granted}
    counted: Counter[str] = Counter()

    @settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**64))
    def judge(seed: int) -> None:
        text = Writer(Random(seed), dialect).statement()
        try:
            plan = checked(planted, text, inputs)
        except UnsafeQuery:
            counted["refused"] += 1
        except BadConfig:
            counted["no statement"] += 1
        else:
            counted["accepted"] += 1
            _require_only_inputs(plan, text, dialect)
            assert MARK not in _analysed(planted, plan, inputs), text

    judge()
    assert min(counted["accepted"], counted["refused"]) > 30, counted


def _require_only_inputs(plan: Any, text: str, dialect: Dialect) -> None:
    """Checks the plan that Spark prints, which the gate does not use."""
    named = {one.strip().lower() for one in _RELATION.findall(plan.toString())}
    defined = {one.lower() for one in _DEFINED.findall(text)}
    assert named <= {*dialect.granted, *defined}, text


def _analysed(session: SparkSession, plan: Any, inputs: dict[str, Any]) -> str:
    """Returns the analysed plan with all its subqueries, or Spark's error message."""
    try:
        analysed: str = _frame(session, plan, inputs)._jdf.queryExecution().analyzed().toString()
    except AnalysisException as error:
        return str(error)
    return analysed
