"""The measurements, their order, and the table with each figure's bar."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import uvloop
from rich.console import Console
from rich.table import Table

from bench.bus.decisions import decisions
from bench.bus.ingest import bare, bare_latencies, batches, latencies, saturation
from bench.bus.registry import register
from bench.bus.sender import Sender
from bench.bus.shared_limit import DISPATCHERS, competing
from bench.bus.soak import prepare, soak
from bench.harness import Installation, installation, machine, percentile, spread
from interlock.telemetry import configure

DECISIONS_BAR: Final = 20_000
BATCH_BAR: Final = 0.6
P99_BAR: Final = 15.0
USED_BAR: Final = 0.95
FEW, MANY = 10, 100_000
console = Console(stderr=True)


@dataclass(frozen=True)
class Size:
    decisions: int
    commands: int
    singles: int
    seconds: float
    limit: int
    rounds: int
    soak: float
    lanes: int = 16
    calm_seconds: int = 60
    """Maximum wait until the work of earlier measurements, or of the start, is finished."""


FULL: Final = Size(decisions=20_000, commands=100_000, singles=8_000, seconds=10, limit=5_000, rounds=3, soak=180)
SMALL: Final = Size(decisions=500, commands=400, singles=100, seconds=1, limit=60, rounds=1, soak=15, calm_seconds=0)
PARTS: Final = ("decisions", "ingest", "limit", "soak")


def say(line: str) -> None:
    console.print(f"  {line}", style="dim")


async def run(size: Size, parts: Sequence[str]) -> dict[str, Any]:
    figures: dict[str, Any] = {"machine": machine()}
    if "decisions" in parts:
        figures["decisions"] = {str(n): decisions(n, size.decisions, size.rounds) for n in (FEW, MANY)}
        say("decided")
    if not set(parts) - {"decisions"}:
        return figures
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(installation(requests_per_second="0"))
        await here.settle(size.calm_seconds)
        connection = await here.connect()
        stack.push_async_callback(connection.close)
        client = await stack.enter_async_context(here.client())
        registered = await register(connection, client, here.directory, routes=FEW)
        sender = Sender(here.info["gateway"], registered)
        stack.callback(sender.close)
        if "ingest" in parts:
            figures["ingest"] = await _ingest(here, sender, size)
        if "limit" in parts:
            figures["limit"] = await competing(here, connection, registered.org_id, size.limit)
        if "soak" in parts:
            await prepare(connection, registered.org_id)
            rate = await saturation(sender, size.singles, 16) / 2
            figures["soak"] = await soak(connection, sender, rate=rate, seconds=size.soak)
            say("soaked")
    return figures


async def _ingest(here: Installation, sender: Sender, size: Size) -> dict[str, Any]:
    """Both sides are warmed up, then alternate. Single commands are timed once all others are archived."""
    url = here.info["state_url"]
    await batches(sender, size.commands // 4, size.lanes)
    found: dict[str, Any] = {"bare": [], "batches": []}
    for _ in range(size.rounds):
        found["bare"].append(await bare(url, size.commands))
        found["batches"].append(await batches(sender, size.commands, size.lanes))
    say("batches sent")
    found["saturation"] = await saturation(sender, size.singles, 16)
    rate = found["saturation"] / 2
    found |= {"latencies": [], "bare_latencies": []}
    for _ in range(size.rounds):
        await here.settle(size.calm_seconds)
        found["latencies"].append(_percentiles(await latencies(sender.send, rate, size.seconds)))
        await here.settle(size.calm_seconds)
        found["bare_latencies"].append(_percentiles(await bare_latencies(url, rate, size.seconds)))
    say("single commands sent")
    return found


def _percentiles(times: Sequence[float]) -> dict[str, float]:
    return {"p50": percentile(times, 0.5), "p99": percentile(times, 0.99)}


# Table


def report(figures: dict[str, Any]) -> None:
    table = Table(title=f"bench/bus; {figures['machine']}")
    for column in ("measure", "figure", "vs limit", "bar"):
        table.add_column(column)
    for part, add in (
        ("decisions", _add_decisions),
        ("ingest", _add_ingest),
        ("limit", _add_limit),
        ("soak", _add_soak),
    ):
        if part in figures:
            add(table, figures[part])
    Console().print(table)


def _add_decisions(table: Table, found: dict[str, list[float]]) -> None:
    few, many = found[str(FEW)], found[str(MANY)]
    table.add_row(f"decisions/s of a core, {FEW} routes", spread(few), "", f"{DECISIONS_BAR:,}")
    table.add_row(f"decisions/s of a core, {MANY:,} routes", spread(many), _ratio(many, few), "flat")


def _add_ingest(table: Table, found: dict[str, Any]) -> None:
    table.add_row("bare inserts, 100 a statement, rows/s", spread(found["bare"]), "1.00", "")
    ratio = _ratio(found["batches"], found["bare"])
    table.add_row("commands over HTTP, 100 a batch, commands/s", spread(found["batches"]), ratio, f"{BATCH_BAR:.2f}")
    table.add_row("single commands at saturation, commands/s", f"{found['saturation']:,.0f}", "", "")
    table.add_row("single commands at half of it, ms", _times(found["latencies"]), "", f"p99 {P99_BAR:g}")
    table.add_row("bare inserts of one row at the same rate, ms", _times(found["bare_latencies"]), "", "")


def _times(rounds: Sequence[dict[str, float]]) -> str:
    """Formats the median of the rounds, and the p99 of each round, which mostly reflects the disk."""
    p50, p99 = (statistics.median(one[which] for one in rounds) for which in ("p50", "p99"))
    each = ", ".join(f"{one['p99']:.1f}" for one in rounds)
    return f"p50 {p50:.1f}, p99 {p99:.1f} ({each})"


def _add_limit(table: Table, found: dict[str, int]) -> None:
    over = max(0, found["delivered"] - found["limit"])
    share = min(found["delivered"], found["limit"]) / found["limit"]
    of = f"strict limit of {found['limit']:,}, {DISPATCHERS} dispatchers, {found['commands']:,} commands"
    table.add_row(f"{of}: over", str(over), "", "0")
    table.add_row(f"{of}: used", f"{share:.3f}", "", f"{USED_BAR:.2f}")


def _add_soak(table: Table, found: dict[str, Any]) -> None:
    of = f"{found['accepted']:,} accepted in {found['seconds']:g} s, {found['kills']} kills"
    for name in ("untold", "strict_doubles", "over_limit"):
        table.add_row(f"{of}: {name}", str(found[name]), "", "0")
    table.add_row(f"{of}: MiB of gateway and bus", " ".join(map(str, found["memory_mb"])), "", "flat")


def _ratio(one: Sequence[float], other: Sequence[float]) -> str:
    return f"{statistics.median(one) / statistics.median(other):.2f}"


def main() -> None:
    description = "Cost of a command, compared with what it could cost."
    parser = argparse.ArgumentParser(prog="bench.bus", description=description)
    parser.add_argument("--rounds", type=int, default=FULL.rounds)
    parser.add_argument("--small", action="store_true", help="run a small version, to check that everything works")
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=[*PARTS], help="parts to run (default: all)")
    arguments = parser.parse_args()
    configure("warning", process="bench")
    size = SMALL if arguments.small else replace(FULL, rounds=arguments.rounds)
    figures = uvloop.run(run(size, arguments.parts))
    report(figures)
    target = Path("bench/results/bus.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
