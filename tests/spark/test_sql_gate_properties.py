"""Random statements: those that the gate accepts name, read and reveal only the inputs."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from interlock.spark.built_in.sql import _frame
from interlock.spark.built_in.sql_gate import MAX_COLUMNS, UnsafeQuery, checked
from interlock.workers.failures import BadConfig
from tests.support.random_statements import ASKED, Dialect, Writer, examples

pytestmark = pytest.mark.timeout(300 + ASKED)

MARK = "planted_column"
_RELATION = re.compile(r"'UnresolvedRelation \[([^\]]*)\]")
_DEFINED = re.compile(r"\bwith\s+(?:/\*.*?\*/|--[^\n]*\n|\s)*(\w+)", re.IGNORECASE | re.DOTALL)

_COMMON = re.compile(r",\s*(?:/\*.*?\*/|--[^\n]*\n|\s)*(\w+)\s+as\b", re.IGNORECASE | re.DOTALL)

MAX_SECONDS = 30
"""An accepted statement is analysed within this time on a busy machine."""

RELATIONS = [
    "{relation} tablesample ( 10 percent )",
    "identifier ( 'secret' )",
    "range ( {count} )",
    "explode ( sequence ( 1 , {count} ) ) {alias}",
    "{relation} pivot ( max( a ) for b in ( 'x' , 'y' ) ) {alias}",
    "{relation} unpivot ( v for k in ( a ) ) {alias}",
    "( select * , * from ( select * , * , * from ( {query} ) ) ) {alias}",
    "( select s.* , s.* from ( select struct( * , * ) as s from {relation} ) ) {alias}",
    "{relation} join {relation} using ( a )",
    "lateral ( {query} ) {alias}",
]
CLAUSES = [
    "lateral view explode( array( {value} ) ) {alias} as e",
    "lateral view outer posexplode( array_repeat( {value} , {count} ) ) p as i , e",
    "window w as ( partition by {value} order by {value} )",
    "group by grouping sets ( ( a , b ) , ( {column} ) , ( ) )",
    "group by cube ( a , b , a , b , a , b ) , rollup ( a , b , {column} )",
    "group by grouping sets ( cube ( a , b ) )",
    "group by a , b with rollup",
    "group by all having {value} > 1",
    "qualify row_number( ) over ( order by {value} ) = 1",
    "|> where {value} is not null",
    "|> select {column} , {value}",
    "|> join {relation} on true",
    "|> aggregate count( * ) group by a",
    "union all select * from {relation}",
]
VALUES = [
    "repeat( {value} , {count} )",
    "array_join( array_repeat( 'a' , {count} ) , {value} )",
    "concat_ws( {value} , sequence( 1 , {count} ) )",
    "format_string( '%1$s%1$s%1$s' , {value} )",
    "transform( array_repeat( {value} , {count} ) , z -> concat( z , z ) )",
    "aggregate( array( 1 ) , 'a' , ( acc , z ) -> concat( acc , {value} ) )",
    "window( timestamp '2020-01-01' , '{count} seconds' , '1 second' )",
    "from_json( {value} , 'a array<array<int>>' )",
    "date_format( timestamp '2020-01-01' , {value} )",
    "struct( * , {value} )",
    "hash( * , * )",
    "count( distinct {value} )",
    "{value} rlike '(a|b)?c+'",
    "levenshtein( repeat( 'a' , {count} ) , {value} )",
    "collect_list( {value} )",
    "max( {value} ) over w",
    "( select max( {column} ) from {relation} )",
    "identifier( 'a' )",
]


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
        relations=RELATIONS,
        clauses=CLAUSES,
        values=VALUES,
    )


def test_accepted_statement_names_and_reads_only_the_inputs(planted: SparkSession, dialect: Dialect) -> None:
    inputs = {name: planted.createDataFrame([(1, "x")], "a int, b string") for name in dialect.granted}
    counted: Counter[str] = Counter()

    schemas = {name: frame.schema for name, frame in inputs.items()}

    @examples(300)
    @given(st.integers(0, 2**64))
    def judge(seed: int) -> None:
        text = Writer(Random(seed), dialect).statement()
        try:
            plan = checked(planted, text, schemas)
        except UnsafeQuery:
            counted["refused"] += 1
        except BadConfig:
            counted["no statement"] += 1
        else:
            counted["accepted"] += 1
            _require_only_inputs(plan, text, dialect)
            began = time.monotonic()
            analysed, columns = _analysed(planted, plan, inputs)
            assert MARK not in analysed, text
            assert columns <= MAX_COLUMNS, text
            assert time.monotonic() - began < MAX_SECONDS, text

    judge()
    assert min(counted["accepted"], counted["refused"]) > 30, counted


def _require_only_inputs(plan: Any, text: str, dialect: Dialect) -> None:
    """Checks the plan that Spark prints, which the gate does not use."""
    named = {one.strip().lower() for one in _RELATION.findall(plan.toString())}
    defined = {one.lower() for one in [*_DEFINED.findall(text), *_COMMON.findall(text)]}
    assert named <= {*dialect.granted, *defined}, text


def _analysed(session: SparkSession, plan: Any, inputs: dict[str, Any]) -> tuple[str, int]:
    """Returns the analysed plan with all its subqueries and its number of columns, or Spark's error message and 0."""
    try:
        analysed = _frame(session, plan, inputs)._jdf.queryExecution().analyzed()
    except AnalysisException as error:
        return str(error), 0
    except Py4JJavaError as error:  # an internal error of Spark's analyser
        return str(error.java_exception), 0
    return analysed.toString(), analysed.output().length()
