"""Named statements of a file: each is parsed on first use."""

from __future__ import annotations

from typing import Any

import pytest

from interlock.stores.postgres import Statements, queries

TEXT = """-- What the file is about.

-- name: one^
-- A why-line.
select :a::int as a, ':b' as b;

-- name: another
select 'it''s -- no comment', /* nor this */ c from t where x = :x and y = :y and z = :x;
"""


class Recorded:
    """A fake connection whose methods return their own name and arguments."""

    def fetch(self, *asked: Any) -> tuple[Any, ...]:
        return ("fetch", *asked)

    def fetchrow(self, *asked: Any) -> tuple[Any, ...]:
        return ("fetchrow", *asked)


def test_statement_passes_parameters_in_order_and_fetches_by_name() -> None:
    statements = Statements(TEXT)
    assert statements.one(Recorded(), a=7) == ("fetchrow", "select $1::int as a, ':b' as b;", 7)
    how, sql, *arguments = statements.another(Recorded(), y=2, x=1)
    assert (how, arguments) == ("fetch", [1, 2])
    assert "x = $1 and y = $2 and z = $1" in sql


def test_statement_files_are_read_on_demand_and_once() -> None:
    statements = Statements(TEXT)
    assert statements.available_queries == ["one", "another"]
    assert vars(statements).keys().isdisjoint(statements.available_queries)
    assert statements.one is statements.one
    assert "one" in vars(statements)
    assert "another" not in vars(statements)


def test_missing_statement_is_named() -> None:
    with pytest.raises(AttributeError, match="'nobody'"):
        _ = Statements(TEXT).nobody


def test_duplicate_statement_name_is_refused() -> None:
    with pytest.raises(ValueError, match="same name"):
        Statements(TEXT + TEXT)


def test_module_gets_the_statements_of_the_nearest_package_around_it() -> None:
    assert "claim" in " ".join(queries("interlock.tasks.claims", "tasks").available_queries)
    assert queries("interlock.datasets.buffers.store", "buffers") is queries("interlock.datasets.files", "buffers")
    assert "merge" in queries("interlock.datasets.buffers.store", "sink").available_queries


def test_module_gets_no_statements_of_another_capability() -> None:
    with pytest.raises(FileNotFoundError, match=r"interlock\.bus\.path\.delivery has queries/triggers\.sql"):
        queries("interlock.bus.path.delivery", "triggers")
