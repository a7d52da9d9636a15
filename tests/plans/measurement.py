"""Measures the rows and pages that a statement touches: executes its cached generic plan, and rolls back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from interlock.stores.postgres import SHARD, Connection, in_shard, queries

_PACKAGE = Path(str(resources.files("interlock")))
_OF_THE_STATE_DATABASE = ("access", "bus", "dags", "datasets", "jobs", "query", "tasks", "untrusted", "webhooks")


@dataclass(frozen=True)
class Statement:
    room: str
    area: str
    name: str
    sql: str
    parameters: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.area}.{self.name}"

    def call(self, arguments: dict[str, str]) -> str:
        assert set(arguments) - {SHARD} == set(self.parameters), f"{self.key} takes {self.parameters}"
        values = ", ".join(arguments[name] for name in self.parameters)
        return f"execute {self.area}_{self.name}" + (f"({values})" if values else "")


@dataclass(frozen=True)
class Touched:
    """Measurements of one execution."""

    rows: float
    """Rows read from tables and indexes, including those that a filter then dropped."""
    pages: int
    """Pages of tables and indexes, read or written, in the buffer cache or not."""
    scanned: frozenset[str]
    """Tables that were scanned completely."""
    plan: str
    """A short outline of the scans."""


def area_of(room: str, file: str) -> str:
    return f"bus_{file}" if room == "bus" else file


def statements() -> list[Statement]:
    """Returns every statement of sql/queries."""
    found = []
    files = [file for room in _OF_THE_STATE_DATABASE for file in sorted((_PACKAGE / room / "queries").glob("*.sql"))]
    for file in files:
        room = file.parent.parent.name
        loaded = queries(f"interlock.{room}", file.stem)
        for name in loaded.available_queries:
            sql = getattr(loaded, name).sql
            names = loaded.driver_adapter.var_sorted.get(name, [])
            if SHARD in names:
                sql, names = in_shard(sql, names, 0)
            found.append(Statement(room, area_of(room, file.stem), name, sql, tuple(names)))
    return found


async def prepare(connection: Connection, statement: Statement) -> None:
    """Parses and plans a statement. The plan is kept until its tables are analyzed or the connection discards plans."""
    await connection.execute(f"prepare {statement.area}_{statement.name} as {statement.sql}")
    await connection.execute(f"explain {statement.call(dict.fromkeys(statement.parameters, 'null'))}")


async def touched(connection: Connection, statement: Statement, arguments: dict[str, str]) -> Touched:
    """Executes twice: the first execution gives the rows; the second, with catalog lookups cached, gives the pages."""
    call = statement.call(await _literals(connection, arguments))
    async with _undone(connection):
        answer = await connection.fetchval(f"explain (analyze, timing off, format json) {call}")
    before = await pages(connection)
    async with _undone(connection):
        await connection.execute(call)
    nodes = _nodes(json.loads(answer)[0]["Plan"])
    scans = [node for node in nodes if "Relation Name" in node and node["Node Type"] != "ModifyTable"]
    outline = "\n".join(_outline(node) for node in scans)
    return Touched(
        rows=sum(_read(node) for node in scans),
        pages=await pages(connection) - before,
        scanned=frozenset(n["Relation Name"] for n in scans if n["Node Type"] == "Seq Scan" and n["Actual Loops"]),
        plan=f"{statement.key}\n{outline}",
    )


async def pages(connection: Connection) -> int:
    """Returns all pages that this connection has touched so far. The query itself touches none."""
    await connection.fetchval("select pg_stat_force_next_flush()")
    count: int = await connection.fetchval(
        "select sum(hits + reads)::bigint from pg_stat_get_backend_io(pg_backend_pid())"
    )
    return count


async def _literals(connection: Connection, arguments: dict[str, str]) -> dict[str, str]:
    """Evaluates the arguments separately, so that their cost is not counted for the statement."""
    if not arguments:
        return {}
    expressions = ", ".join(f"quote_nullable(({expression})::text)" for expression in arguments.values())
    return dict(zip(arguments, await connection.fetchrow(f"select {expressions}") or (), strict=True))


@asynccontextmanager
async def _undone(connection: Connection) -> AsyncIterator[None]:
    transaction = connection.transaction()
    await transaction.start()
    try:
        yield
    finally:
        await transaction.rollback()


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from _nodes(child)


def _outline(node: dict[str, Any]) -> str:
    found = f"{node['Node Type']} {node['Relation Name']} {node.get('Index Name', '')} {node.get('Index Cond', '')}"
    return f"{found}: {_read(node):.0f} rows in {node['Actual Loops']} loops"


def _read(node: dict[str, Any]) -> float:
    dropped = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
    return float((node["Actual Rows"] + dropped) * node["Actual Loops"])
