"""The measurements, their order, and the table. Both sides are warmed up, then alternate."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import asyncpg
import uvloop
from rich.console import Console
from rich.table import Table

from bench.access.deployment import AccessBench, dag
from bench.access.query import MEANWHILE, query
from bench.access.sink import LAYOUTS, sink
from bench.access.tokens import tokens
from bench.harness import installation, machine, spread
from interlock.telemetry import configure

QUERY_BAR: Final = 1.3
SINK_BAR: Final = 0.6
console = Console(stderr=True)


@dataclass(frozen=True)
class Size:
    tokens: int
    query_ms: float
    """Approximate duration of the bare query."""
    pairs: int
    rows: int
    rounds: int
    calm_seconds: int = 60


FULL: Final = Size(tokens=5_000, query_ms=100, pairs=60, rows=1_000_000, rounds=3)
SMALL: Final = Size(tokens=200, query_ms=20, pairs=10, rows=20_000, rounds=1, calm_seconds=0)
PARTS: Final = ("tokens", "query", "sink")


def say(line: str) -> None:
    console.print(f"  {line}", style="dim")


async def run(size: Size, parts: Sequence[str]) -> dict[str, Any]:
    figures: dict[str, Any] = {"machine": machine()}
    async with AsyncExitStack() as stack:
        # The benchmark's attempts send no heartbeats, which would renew their tokens.
        here = await stack.enter_async_context(installation(token_ttl_seconds="3600"))  # noqa: S106 - a time
        await here.settle(size.calm_seconds)
        state, data = await here.connect(), await asyncpg.connect(here.info["data_url"])
        stack.push_async_callback(state.close)
        stack.push_async_callback(data.close)
        site = AccessBench(here, state, data, await stack.enter_async_context(here.worker_client()))
        async with here.client() as client:
            await client.dags.deploy(dag([layout.name for layout in LAYOUTS]))
        say("the DAG is deployed")
        if "tokens" in parts:
            figures["tokens"] = await tokens(site.settings, size.tokens, size.rounds)
        if "query" in parts:
            figures["query"] = await query(site, size.query_ms, size.pairs, say)
        if "sink" in parts:
            figures["sink"] = await sink(site, size.rows, size.rounds, say)
    return figures


# Table


def report(figures: dict[str, Any]) -> None:
    table = Table(title=f"bench/access; {figures['machine']}")
    for column in ("measure", "figure", "vs limit", "bar"):
        table.add_column(column)
    for part, add in (("tokens", _add_tokens), ("query", _add_query), ("sink", _add_sink)):
        if part in figures:
            add(table, figures[part])
    Console().print(table)


def _add_tokens(table: Table, found: dict[str, Any]) -> None:
    of = f"of {found['bytes']} bytes, per second"
    table.add_row("bare ES256, signatures per second", spread(found["bare_sign"]), "1.00", "")
    table.add_row(f"tokens {of}, issued", spread(found["issued"]), _ratio(found["issued"], found["bare_sign"]), "")
    table.add_row("bare ES256, verifications per second", spread(found["bare_verify"]), "1.00", "")
    for name, how in (("verified", "first verification"), ("verified_again", "repeated verification")):
        table.add_row(f"tokens {of}, {how}", spread(found[name]), _ratio(found[name], found["bare_verify"]), "")


def _add_query(table: Table, found: dict[str, Any]) -> None:
    of = f"query of {found['rows']:,} rows in {found['files']} files"
    _add_sides(table, of, found["large"], found["steps"]["large"], f"{QUERY_BAR:.2f}")
    _add_sides(table, "query of nothing", found["trivial"], found["steps"]["trivial"], "")


def _add_sides(table: Table, of: str, sides: dict[str, list[float]], steps: dict[str, float], bar: str) -> None:
    bare, service = sides["bare"], sides["service"]
    table.add_row(f"{of}, bare DuckDB, p50 ms", _middle(bare), "1.00", "")
    table.add_row(f"{of}, HTTP, p50 ms", _middle(service), _ratio(service, bare), bar)
    whole = steps["whole"]
    for name, each in steps.items():
        if name != "whole":
            table.add_row(f"  of which {name}, ms", f"{each:.1f}", "", "")
    named = sum(each for name, each in steps.items() if name not in ("whole", MEANWHILE))
    table.add_row("  of which between these steps, ms", f"{whole - named:.1f}", "", "")
    table.add_row("  total in one process, without HTTP, ms", f"{whole:.1f}", "", "")


def _add_sink(table: Table, found: dict[str, Any]) -> None:
    for layout in LAYOUTS:
        each = found[layout.name]
        kind = "Parquet" if layout.parquet else "JSON lines"
        of = f"{found['rows']:,} rows, {kind}, {layout.rows:,} a batch, rows/s"
        bare, sunk = _rates(each["bare"], found["rows"]), _rates(each["sink"], found["rows"])
        table.add_row(f"{of}, bare COPY and INSERT", spread(bare), "1.00", "")
        table.add_row(f"{of}, sink", spread(sunk), _ratio(sunk, bare), f"{SINK_BAR:.2f}")
        for name, seconds in each["steps"].items():
            table.add_row(f"  {name}, s", f"{seconds:.2f}", "", "")


def _rates(seconds: Sequence[float], rows: int) -> list[float]:
    return [rows / each for each in seconds]


def _middle(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.1f} ({min(values):,.1f}-{max(values):,.1f})"


def _ratio(one: Sequence[float], other: Sequence[float]) -> str:
    return f"{statistics.median(one) / statistics.median(other):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.access", description="Cost of access control, compared with limits.")
    parser.add_argument("--rounds", type=int, default=FULL.rounds)
    parser.add_argument("--small", action="store_true", help="run a small version, to check that everything works")
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=[*PARTS], help="parts to run (default: all)")
    arguments = parser.parse_args()
    configure("warning", process="bench")
    size = SMALL if arguments.small else replace(FULL, rounds=arguments.rounds)
    figures = uvloop.run(run(size, arguments.parts))
    report(figures)
    target = Path("bench/results/access.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
