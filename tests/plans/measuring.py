"""What a statement touches: its cached generic plan, run and rolled back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any

from interlock.adapters.postgres import SHARD, Connection, in_shard, queries

_FOLDER = resources.files("interlock.sql") / "queries"


@dataclass(frozen=True)
class Statement:
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
    """One execution."""

    rows: float
    """Read from tables and indexes, those that a filter then dropped included."""
    pages: int
    """Of tables and indexes, read or written, in the buffer cache or not."""
    scanned: frozenset[str]
    """Tables that were read from end to end."""
    plan: str
    """Its scans, in few words."""


def statements() -> list[Statement]:
    """Every statement of sql/queries."""
    found = []
    for area in sorted(file.name.removesuffix(".sql") for file in _FOLDER.iterdir()):
        loaded = queries(area)
        for name in loaded.available_queries:
            sql = getattr(loaded, name).sql
            names = loaded.driver_adapter.var_sorted.get(name, [])
            if SHARD in names:
                sql, names = in_shard(sql, names, 0)
            found.append(Statement(area, name, sql, tuple(names)))
    return found


async def prepare(connection: Connection, statement: Statement) -> None:
    """Parses and plans it. The plan stays until its tables are analyzed, or the connection is told to plan anew."""
    await connection.execute(f"prepare {statement.area}_{statement.name} as {statement.sql}")
    await connection.execute(f"explain {statement.call(dict.fromkeys(statement.parameters, 'null'))}")


async def touched(connection: Connection, statement: Statement, arguments: dict[str, str]) -> Touched:
    """Twice: the first execution says what was read, the second, with everything looked up before, how many pages."""
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
    """All that this connection has touched so far. Reading it touches none."""
    await connection.fetchval("select pg_stat_force_next_flush()")
    count: int = await connection.fetchval(
        "select sum(hits + reads)::bigint from pg_stat_get_backend_io(pg_backend_pid())"
    )
    return count


async def _literals(connection: Connection, arguments: dict[str, str]) -> dict[str, str]:
    """Evaluated beforehand: what it takes to find the arguments is not the statement's."""
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
