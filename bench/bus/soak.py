"""Soak test: commands at half the gateway's capacity while processes are killed. Each answered one needs telemetry."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

import asyncpg
import msgspec
import psutil

from bench.bus.registry import TARGET, message
from bench.bus.sender import Sender
from interlock.bus.telemetry import expanded as written

LANES: Final = {"plain": "command-0", "strict": "command-1", "limited": "command-2"}
LIMIT: Final = 500
KILLS: Final = 10
"""Few enough that the supervisor restarts a process without backoff."""
_AWAY: Final = (OSError, AssertionError)
"""AssertionError stands for a 503, whose batch is sent again under the same ids."""


@dataclass
class Ledger:
    """The sender's own record, against which everything else is checked."""

    accepted: set[str] = field(default_factory=set)
    answered: int = 0
    kills: int = 0


async def prepare(connection: asyncpg.Connection[Any], org_id: UUID) -> None:
    await connection.execute(
        "update interlock.bus_routes set dedupe_mode = 'strict', queue = 'strict' where org_id = $1 and name = $2",
        org_id,
        LANES["strict"],
    )
    await connection.execute(
        "update interlock.bus_routes set queue = 'limited' where org_id = $1 and name = $2", org_id, LANES["limited"]
    )
    await connection.execute(
        "insert into interlock.bus_limits (org_id, target, name, rate, window_seconds, version, changed_by)"
        " values ($1, $2, $3, $4, 86400, 1, 'bench')",
        org_id,
        TARGET,
        LANES["limited"],
        LIMIT,
    )
    await connection.execute(
        "insert into interlock.bus_versions as v (org_id, kind, version)"
        " select $1, kind::interlock.bus_kind, 2 from unnest(array['routes', 'limits']) kind"
        " on conflict (org_id, kind) do update set version = v.version + 1",
        org_id,
    )


async def soak(connection: asyncpg.Connection[Any], sender: Sender, *, rate: float, seconds: float) -> dict[str, Any]:
    """Sends mixed commands at `rate` in batches of 20, and kills the gateway or the bus now and then."""
    ledger, chance = Ledger(), random.Random(7)
    memory = [_memory()]
    ends = time.monotonic() + seconds
    await asyncio.gather(
        *(_send(sender, ledger, chance, rate / 4, ends) for _ in range(4)),
        _kill(ledger, chance, ends, seconds / KILLS),
        _watch(memory, ends),
    )
    while await connection.fetchval("select exists (select 1 from interlock.bus_handoffs)"):  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return await _account(connection, ledger) | {"kills": ledger.kills, "memory_mb": memory, "seconds": seconds}


async def _send(sender: Sender, ledger: Ledger, chance: random.Random, rate: float, ends: float) -> None:
    due = time.monotonic()
    while (now := time.monotonic()) < ends:
        await asyncio.sleep(max(0.0, due - now))
        due = max(due, now - 1.0) + 20 / rate
        sent = [message(chance.choice(list(LANES.values()))) for _ in range(18)]
        sent += chance.sample(sent, 2)  # duplicates of the same ids
        content = b'{"commands":[' + b",".join(sent) + b"]}"
        while time.monotonic() < ends:
            try:
                results = msgspec.json.decode(await sender.send(content))["results"]
            except _AWAY:
                await asyncio.sleep(0.2)
                continue
            ledger.answered += len(results)
            ledger.accepted |= {r["command_id"] for r in results if r["outcome"] in ("delivered", "pending")}
            break


async def _kill(ledger: Ledger, chance: random.Random, ends: float, pause: float) -> None:
    """Kills processes; the supervisor restarts them."""
    while time.monotonic() < ends - 5:
        await asyncio.sleep(max(3.0, pause * chance.uniform(0.75, 1.25)))
        kind = chance.choice(("gateway", "bus"))
        for victim in [process for process in _processes() if kind in process.cmdline()][:1]:
            os.kill(victim.pid, signal.SIGKILL)
            ledger.kills += 1


def _processes() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _memory() -> int:
    """Returns the MiB of the gateway and the bus together."""
    found = [p for p in _processes() if {"gateway", "bus"} & set(p.cmdline())]
    return int(sum(process.memory_info().rss for process in found) / 2**20)


async def _watch(memory: list[int], ends: float) -> None:
    while time.monotonic() < ends:
        await asyncio.sleep(5)
        memory.append(_memory())


async def _account(connection: asyncpg.Connection[Any], ledger: Ledger) -> dict[str, Any]:
    reported: Counter[str] = Counter()
    for row in await connection.fetch(
        "select json_build_object('events', events)::text as body from interlock.bus_telemetry union all"
        " select body::text from interlock.queue_messages where queue like 'telemetry:%'"
    ):
        events = msgspec.json.decode(written(row["body"]))["events"]
        reported.update(event["command_id"] for event in events if "command_id" in event)
    delivered: dict[str, Counter[str]] = {}
    for lane, queue in (("strict", "strict"), ("limited", "limited")):
        rows = await connection.fetch(
            "select body -> 'metadata' ->> 'id' as id from interlock.queue_messages where queue like 'bus:%:' || $1",
            queue,
        )
        delivered[lane] = Counter(row["id"] for row in rows)
    return {
        "answered": ledger.answered,
        "accepted": len(ledger.accepted),
        "untold": len(ledger.accepted - set(reported)),
        "strict_doubles": sum(count > 1 for count in delivered["strict"].values()),
        "over_limit": max(0, delivered["limited"].total() - LIMIT),
    }
