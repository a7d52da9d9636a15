"""Random statements: no statement that the gate accepts touches anything except the granted views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.errors import InvalidQuery
from interlock.query import sql_gate
from tests.support.random_statements import ASKED, Dialect, Writer, examples

pytestmark = pytest.mark.timeout(120 + ASKED)

MARK = "planted value"
GRANTED = ("logs", "blocks")
RELATIONS = [
    "{relation} tablesample 10 percent",
    "range( 3 ) {alias}",
    "unnest( [ {value} ] ) {alias}",
    "( pivot {relation} on b using max( a ) ) {alias}",
    "( unpivot {relation} on a into name k value v ) {alias}",
    "{relation} pivot ( max( a ) for b in ( 'x' , 'y' ) ) {alias}",
    "lateral ( {query} ) {alias}",
    "query_table( 'secret' )",
]
CLAUSES = [
    "window w as ( partition by {value} order by {value} )",
    "group by grouping sets ( ( a , b ) , ( {column} ) , ( ) )",
    "group by cube ( a , b ) , rollup ( a , {column} )",
    "group by all having {value} > 1",
    "qualify row_number( ) over ( order by {value} ) = 1",
    "positional join {relation}",
    "asof join {relation} on true",
    "using sample 10 percent",
    "union by name select * from {relation}",
]
VALUES = [
    "max( {value} ) over w",
    "columns( * )",
    "list_transform( [ {value} ] , z -> z )",
    "[ z for z in [ {value} ] ]",
    "{value} :: varchar",
    "( select max( {column} ) from {relation} )",
    "struct_pack( k := {value} )",
    "count( distinct {value} )",
]


@pytest.fixture(scope="module")
def dialect(tmp_path_factory: pytest.TempPathFactory) -> Dialect:
    path = Path(tmp_path_factory.mktemp("planted") / "secret.csv")
    path.write_text(f"a,b\n1,{MARK}\n")
    return Dialect(
        granted=GRANTED,
        secret=["secret", '"secret"', "main.secret", f"'{path}'", f"read_text('{path}')", "duckdb_tables()"],
        columns=["a", "b", "t.a", "logs.b", '"a"', "*"],
        functions=["abs", "max", "list_value", "coalesce", "upper", "length"],
        quote='"',
        odd=0.05,
        relations=RELATIONS,
        clauses=CLAUSES,
        values=VALUES,
    )


@pytest.fixture(scope="module")
def planted() -> Iterator[duckdb.DuckDBPyConnection]:
    """A database with all tables, in which files can be opened."""
    with duckdb.connect(":memory:", config={"threads": 1}) as connection:
        _grant(connection)
        connection.execute("create table secret as select 1 as a, 'planted value' as b")
        yield connection


@pytest.fixture(scope="module")
def bare() -> Iterator[duckdb.DuckDBPyConnection]:
    """A database with only the granted tables."""
    with duckdb.connect(":memory:", config={"threads": 1, "enable_external_access": False}) as connection:
        _grant(connection)
        yield connection


def _grant(connection: duckdb.DuckDBPyConnection) -> None:
    for name in GRANTED:
        connection.execute(f"create view {name} as select 1 as a, 'x' as b")


def test_accepted_statement_touches_only_granted_views(
    dialect: Dialect, planted: duckdb.DuckDBPyConnection, bare: duckdb.DuckDBPyConnection
) -> None:
    counted: Counter[str] = Counter()

    @examples(600)
    @given(st.integers(0, 2**64))
    def judge(seed: int) -> None:
        text = Writer(Random(seed), dialect).statement()
        try:
            sql_gate.judge(text, sql_gate.parse(text, planted), GRANTED)
        except InvalidQuery:
            counted["refused"] += 1
            return
        counted["accepted"] += 1
        assert MARK not in _told(planted, text), text
        missing = _told(bare, text)
        assert "Catalog Error" not in missing or "Function" in missing, text
        assert "Permission Error" not in missing, text

    judge()
    assert min(counted["accepted"], counted["refused"]) > 50, counted


def _told(connection: duckdb.DuckDBPyConnection, text: str) -> str:
    """Returns the rows of a statement, or DuckDB's error message."""
    try:
        return str(connection.execute(text).fetchmany(20))
    except duckdb.Error as error:
        return str(error)
