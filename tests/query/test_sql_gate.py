"""The SQL gate alone: which statements pass, and what they read of each relation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

import duckdb
import pytest

from interlock.errors import InvalidQuery
from interlock.query import sql_gate
from interlock.query.sql_functions import FUNCTIONS
from interlock.query.sql_pushdown import Filter, Typed
from tests.query.corpus import ATTACKS, HONEST, Attack

PLACES: dict[str, object] = {
    "canary": "/data/canary.txt",
    "folder": "/data",
    "granted": "/data/granted.parquet",
    "other": "/data/other.parquet",
    "out": "/data/out",
    "port": 9,
}


@pytest.fixture(scope="module")
def parser() -> Iterator[duckdb.DuckDBPyConnection]:
    with sql_gate.bare_connection() as connection:
        yield connection


@pytest.fixture
def judge(parser: duckdb.DuckDBPyConnection) -> Any:
    def judged(sql: str, relations: Sequence[str] = ("granted", "more"), columns: Sequence[str] = ("a", "b")) -> Any:
        return sql_gate.judge(sql, sql_gate.parse(sql, parser), relations, columns)

    return judged


def test_corpus_is_large_and_documents_each_attack() -> None:
    assert len(ATTACKS) >= 220
    assert len(HONEST) >= 60
    assert len({attack.name for attack in ATTACKS}) == len({attack.sql for attack in ATTACKS}) == len(ATTACKS)
    assert all(attack.why and attack.kind for attack in ATTACKS)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_attack_is_refused_by_the_gate(judge: Any, attack: Attack) -> None:
    with pytest.raises(InvalidQuery) as refused:
        judge(attack.text(PLACES))
    # Refused by a rule, and not by an error during the walk.
    assert refused.value.__cause__ is None
    assert len(refused.value.detail) < 600


@pytest.mark.parametrize("sql", HONEST)
def test_honest_statement_passes(judge: Any, sql: str) -> None:
    assert judge(sql).sql == sql


@pytest.mark.parametrize(
    ("sql", "place", "advice"),
    [
        ("select a\nfrom nowhere", "line 2, column 6", "available: granted, more"),
        ("select\n  version()", "line 2, column 3", "not a function that a query may call"),
        ("from read_text('x')", "", "not files"),
        ("select 'ä', sleep_ms(1)", "line 1, column 13", "is not a function"),
        ("copy granted to 'x'", "", "only SELECT is allowed"),
        ("pivot granted on b using sum(a)", "", "PIVOT needs IN"),
        ("select 1; select 2", "", "exactly one SELECT"),
        ("select ?", "", "write the value itself"),
        ("describe granted", "", "lists the columns"),
        ("select * from main.granted", "line 1, column 15", "without schema and catalog"),
        ("selec 1", "", "syntax error"),
        ("   ", "", "write one SELECT"),
        ("select 1" + " " * sql_gate.MAX_LENGTH, "", "shorter"),
    ],
)
def test_refusal_names_the_position_and_the_correction(judge: Any, sql: str, place: str, advice: str) -> None:
    with pytest.raises(InvalidQuery) as refused:
        judge(sql)
    assert place in refused.value.detail
    assert advice in refused.value.detail


def test_refusal_does_not_repeat_the_statement(judge: Any) -> None:
    with pytest.raises(InvalidQuery) as refused:
        judge("select 'a private number 4711' from nowhere")
    assert "4711" not in refused.value.detail


def test_allowed_functions_have_no_side_effects(
    parser: duckdb.DuckDBPyConnection,
) -> None:
    forbidden = (
        "current_setting getvariable version current_query current_database current_schema txid_current nextval "
        "currval setval sleep_ms pg_sleep write_log setseed error list_aggregate list_aggr aggregate array_aggr "
        "json_serialize_sql json_deserialize_sql json_serialize_plan json_execute_serialized_sql finalize combine "
        "read_text read_blob read_csv read_parquet glob query query_table getenv"
    )
    assert not FUNCTIONS & set(forbidden.split())
    known = {str(row[0]).lower() for row in parser.execute("select function_name from duckdb_functions()").fetchall()}
    # Functions that the parser knows in addition to the catalog.
    syntax = {"coalesce", "ifnull", "current_timestamp", "current_time", "localtime", "localtimestamp", "->", "!", "<>"}
    assert sorted(FUNCTIONS - known - syntax) == []


def test_unknown_tree_field_is_refused_unless_empty() -> None:
    sql = "select a from granted"
    tree = json.loads(sql_gate.parse(sql))
    select = tree["statements"][0]["node"]
    select["into"] = None
    assert sql_gate.judge(sql, json.dumps(tree).encode(), ["granted"]).scans
    select["into"] = {"table": "x"}
    with pytest.raises(InvalidQuery, match="into of SELECT_NODE"):
        sql_gate.judge(sql, json.dumps(tree).encode(), ["granted"])
    del select["into"], select["cte_map"]
    with pytest.raises(InvalidQuery, match="an unknown form"):
        sql_gate.judge(sql, json.dumps(tree).encode(), ["granted"])
    with pytest.raises(InvalidQuery):
        sql_gate.judge(sql, b"[]", ["granted"])


def test_deeply_nested_statement_is_refused(judge: Any) -> None:
    with pytest.raises(InvalidQuery, match="depth"):
        judge("select " + "(" * 400 + "1" + ")" * 400)
    with pytest.raises(InvalidQuery):
        judge("select * from " + "(select * from " * 5000 + "granted" + ")" * 5000)


def test_names_are_compared_like_in_duckdb(judge: Any) -> None:
    assert list(judge("select * from GRANTED").scans) == ["granted"]
    with pytest.raises(InvalidQuery):
        judge("select * from \u212aelvin", relations=("kelvin",))


def test_cte_shadows_a_relation_only_in_scope(judge: Any) -> None:
    assert judge("with granted as (select 1) select * from granted").scans == {}
    assert set(judge("with granted as (select * from granted) select * from granted").scans) == {"granted"}
    assert set(judge("select * from (with more as (select 1) select * from more) x, more").scans) == {"more"}
    assert set(judge("with recursive more as (select a from more union all select a from more) from more").scans) == {
        "more"
    }


def test_column_named_like_a_value_function_must_exist(judge: Any) -> None:
    assert judge('select "user" from granted', columns=("user",)).scans
    with pytest.raises(InvalidQuery, match="is not a column"):
        judge("select user from granted")


# Scans


@pytest.mark.parametrize(
    ("sql", "columns"),
    [
        ("select a from granted where b = 'x'", {"a", "b"}),
        ("select g.a from granted g join more using (c)", {"g", "a", "c"}),
        ("select count(*) from granted", set()),
        ("select * from granted", None),
        ("select granted.* from granted", None),
        ("select columns('a.*') from granted", None),
        ("select g from granted g", None),
        ("select * from granted natural join more", None),
        ("select x from granted as g(x, y)", None),
        ("select * from (pivot granted on b in ('x') using sum(a))", None),
        ("select max(a) over (order by c) from granted group by d having max(e) > 1", {"a", "c", "d", "e"}),
    ],
)
def test_only_referenced_columns_are_read(judge: Any, sql: str, columns: set[str] | None) -> None:
    assert judge(sql).scans["granted"].columns == columns


@pytest.mark.parametrize(
    ("where", "filters"),
    [
        ("a = 1", [Filter("a", "=", (1,))]),
        ("1 < a", [Filter("a", ">", (1,))]),
        ("a between -2 and 5 and b is not null", [("a", ">=", -2), ("a", "<=", 5), ("b", "is not null")]),
        ("g.a in (1, 2)", [Filter("a", "in", (1, 2))]),
        ("b >= date '2024-01-31'", [Filter("b", ">=", (Typed("date", "2024-01-31"),))]),
        ("a < 1.5 and b = 'x'", [Filter("a", "<", (Decimal("1.5"),)), Filter("b", "=", ("x",))]),
        ("a = 1 or a = 2", []),
        ("not (a = 1)", []),
        ("a + 1 = 2", []),
        ("a = b", []),
        ("other.a = 1", []),
        ("a = (select 1)", []),
        ("abs(a) = 1", []),
    ],
)
def test_conditions_for_every_row_are_pushed_down(judge: Any, where: str, filters: list[Any]) -> None:
    found = judge(f"select 1 from granted g where {where}").scans["granted"].filters
    wanted = [one if isinstance(one, Filter) else Filter(one[0], one[1], tuple(one[2:])) for one in filters]
    assert sorted(found, key=str) == sorted(wanted, key=str)


@pytest.mark.parametrize(
    "sql",
    [
        "select 1 from granted left join more on true where granted.a = 1",
        "select 1 from granted tablesample 10% where a = 1",
        "select 1 from granted g, more m where a = 1",
        "select 1 from granted where a = 1 union all select 1 from granted",
        "select 1 from granted as g(x, a) where a = 1",
        "with granted as (select 1 as a) select 1 from granted where a = 1 and exists (from more)",
        "select 1 from granted g where exists (select 1 from more where g.a = 1)",
    ],
)
def test_conditions_for_some_rows_are_not_pushed_down(judge: Any, sql: str) -> None:
    assert all(scan.filters == () for scan in judge(sql).scans.values())


def test_conditions_of_inner_joins_are_found_by_qualifier(judge: Any) -> None:
    scans = judge("select 1 from granted g join more m on g.a = m.a where g.a = 1 and m.b = 2 and c = 3").scans
    assert scans["granted"].filters == (Filter("a", "=", (1,)),)
    assert scans["more"].filters == (Filter("b", "=", (2,)),)
