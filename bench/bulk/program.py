"""The measurements, their order, and the table with each figure's limit and bar: `python -m bench.bulk`."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import uvloop
from rich.console import Console
from rich.table import Table

from bench.bulk import ingest, sharded_run
from bench.harness import machine, percentile, spread
from interlock.telemetry import configure

ACCEPTED_BAR: Final = 50.0
COPY_BAR: Final = 0.60
MEMORY_BAR: Final = 1.2
DRAIN_BAR: Final = 20_000
STATUS_BAR: Final = 20.0
PAGE_BAR: Final = 1.2
PARTS: Final = ("accepted", "ingest", "memory", "running")


@dataclass(frozen=True)
class Size:
    lines: int
    submissions: int
    tasks: int
    depth: int
    rounds: int
    factor: int = 10
    calm_seconds: int = 60


FULL: Final = Size(lines=1_000_000, submissions=200, tasks=200_000, depth=1_000_000, rounds=3)
SMALL: Final = Size(lines=30_000, submissions=5, tasks=2_000, depth=4_000, rounds=1, factor=2, calm_seconds=0)


async def run(size: Size, parts: Sequence[str]) -> dict[str, Any]:
    figures: dict[str, Any] = {"machine": machine(), "size": size.__dict__}
    if "accepted" in parts:
        figures["accepted"] = await ingest.accepted(size.lines, size.submissions, size.calm_seconds)
    if "ingest" in parts:
        figures["ingest"] = await ingest.measure(size.lines, size.rounds, 1)
    if "memory" in parts:
        figures["memory"] = await ingest.memory(size.lines, size.factor)
    if "running" in parts:
        figures["running"] = await sharded_run.run(size.tasks, size.rounds, size.depth, size.calm_seconds)
    return figures


def report(figures: dict[str, Any]) -> None:
    table = Table(title=f"bench/bulk: {figures['machine']}")
    for column in ("measure", "figure", "limit", "ratio", "bar"):
        table.add_column(column)
    for part, add in (("accepted", _accepted), ("ingest", _ingest), ("memory", _memory), ("running", _running)):
        if part in figures:
            add(table, figures[part], figures["size"])
    Console().print(table)


def _accepted(table: Table, took: Sequence[float], size: dict[str, int]) -> None:
    figure = f"p50 {statistics.median(took):.1f}, p99 {percentile(took, 0.99):.1f}, max {max(took):.1f}"
    of = f"202 of a list of {size['lines']:,} lines, {len(took)} times, ms"
    table.add_row(of, figure, "", "", f"p99 < {ACCEPTED_BAR:g}")


def _ingest(table: Table, found: dict[str, Any], size: dict[str, int]) -> None:
    share = statistics.median(o / b for o, b in zip(found["ours"], found["bare"], strict=True))
    of = f"{size['lines']:,} lines, staged to claimable, tasks/s; limit: bare COPY"
    table.add_row(of, spread(found["ours"]), spread(found["bare"]), f"{share:.2f}", f"{COPY_BAR:.2f}")


def _memory(table: Table, found: dict[str, float], size: dict[str, int]) -> None:
    of = f"peak of {size['lines'] * size['factor']:,} lines, MiB; limit: of {size['lines']:,}"
    ratio = f"{found['long'] / found['short']:.2f}"
    table.add_row(of, f"{found['long']:,.0f}", f"{found['short']:,.0f}", ratio, f"< {MEMORY_BAR}")


def _running(table: Table, found: dict[str, Any], size: dict[str, int]) -> None:
    rate = statistics.median(found["drain"]) / statistics.median(found["limit"])
    of = f"{size['tasks']:,} no-op tasks in ranges, one worker, tasks/s; limit: bare SQL"
    table.add_row(of, spread(found["drain"]), spread(found["limit"]), f"{rate:.2f}", f"> {DRAIN_BAR:,}")
    took = found["status_ms"]
    figure = f"p50 {statistics.median(took):.1f}, p99 {percentile(took, 0.99):.1f}"
    table.add_row(f"status read meanwhile, {len(took):,} times, ms", figure, "", "", f"p99 < {STATUS_BAR:g}")
    first, last = found["pages_ms"]
    of = f"page at depth {size['depth']:,}, ms; limit: the first page"
    table.add_row(of, f"{last:.1f}", f"{first:.1f}", f"{last / first:.2f}", f"{PAGE_BAR}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.bulk", description="Cost of a large run, compared with what it could cost."
    )
    parser.add_argument("--rounds", type=int, default=FULL.rounds)
    parser.add_argument("--small", action="store_true", help="run a small version, to check that everything works")
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=[*PARTS], help="parts to run (default: all)")
    arguments = parser.parse_args()
    configure("warning", process="bench")
    size = SMALL if arguments.small else replace(FULL, rounds=arguments.rounds)
    figures = uvloop.run(run(size, arguments.parts))
    report(figures)
    target = Path("bench/results/bulk.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
