"""Random statements: no statement that the gate accepts touches anything except the granted views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock.errors import InvalidQuery
from interlock.query import sql_gate
from tests.support.random_statements import Dialect, Writer

MARK = "planted value"
GRANTED = ("logs", "blocks")


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

    @settings(max_examples=600, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
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
    assert min(counted["accepted"], counted["refused"]) > 100, counted


def _told(connection: duckdb.DuckDBPyConnection, text: str) -> str:
    """Returns the rows of a statement, or DuckDB's error message."""
    try:
        return str(connection.execute(text).fetchmany(20))
    except duckdb.Error as error:
        return str(error)
