"""The demo's alerts: untrusted code reads transfers, and its published rows are loaded into a table.

A row refers to one log of one block, by the block's hash. So rows on blocks that a reorg replaced are not wrong about
the new blocks. A row is valid if its transfer still exists.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias
from uuid import UUID

import msgspec

from interlock.cli.demos.chain import Place, drawn, example
from interlock.cli.output import console, table
from interlock.client import Client, QueryClient
from interlock.errors import InterlockError
from interlock.wire.base import TaskStatus
from interlock.wire.datasets import BufferView, PublishStatus

DAG: Final = "alerts"
JOB: Final = f"{DAG}/large_transfers"
_SHOWN: Final = 3
_SHORT: Final = 10
_PAGE: Final = 1_000
_ROWS: Final = """
    select block_hash, log_index, block_number, token, from_address, to_address, value, severity
    from alert_events order by block_number desc, log_index desc
"""
_ALL: Final = """
    select a.block_hash, a.log_index, a.value, t.block_hash is not null
    from alert_events a left join transfers t on a.block_hash = t.block_hash and a.log_index = t.log_index
"""

Alerts: TypeAlias = Mapping[Place, int | None]
"""The amount of each alert, by its position in the chain."""


class BatchNotLoaded(InterlockError):
    """A batch that the code published was refused."""


class _Scope(msgspec.Struct):
    start: int
    end: int


@dataclass
class AlertWatch:
    """Tracks the ranges that the job has processed, and shows the resulting alerts."""

    client: Client
    queries: QueryClient
    _batches: set[UUID] = field(default_factory=set)
    _known: set[Place] = field(default_factory=set)

    async def deploy(self, first: int) -> None:
        content = _packed(example(f"bundles/{DAG}"))
        bundle = await self.client.bundles.upload(content, name=DAG)
        console().print(f"{bundle.size_bytes:,} bytes of Python, identified by their sha256 {bundle.sha256}:")
        text = example(f"dags/{DAG}.yaml").read_text().replace("size: 120 ", f"size: 120, start: {first} ")
        console().print(drawn(text), markup=False)
        await self.client.dags.deploy(text)

    async def look(self) -> Counter[tuple[int, int]]:
        """Returns how often each range was processed with all its alerts loaded into the table."""
        # In this order: a task's batches are published before the task completes.
        page = await self.client.task_page(job=JOB, status=TaskStatus.COMPLETED, limit=_PAGE)
        batches = (await self.client.buffers.page(limit=_PAGE)).buffers
        await self._show(batches)
        waiting = {batch.task_id for batch in batches if batch.status is not PublishStatus.LOADED}
        scopes = [msgspec.json.decode(task.payload, type=_Scope) for task in page.tasks if task.task_id not in waiting]
        return Counter((scope.start, scope.end) for scope in scopes)

    async def _show(self, batches: Sequence[BufferView]) -> None:
        for batch in batches:
            if batch.refusal is not None:
                raise BatchNotLoaded(f"The sink refused a batch of alerts: {batch.refusal.detail}")
        loaded = {batch.publish_id for batch in batches if batch.status is PublishStatus.LOADED}
        if loaded <= self._batches:
            return
        self._batches |= loaded
        rows = await self._ask(_ROWS)
        new = [row for row in rows if (row[0], row[1]) not in self._known]
        self._known |= {(row[0], row[1]) for row in new}
        _print_alerts(new)

    async def found(self) -> tuple[Alerts, Alerts]:
        """Returns all rows of the table: those whose transfer is in the dataset, and those whose block is gone."""
        if not self._batches:
            return {}, {}
        hold: dict[Place, int | None] = {}
        gone: dict[Place, int | None] = {}
        for block_hash, log_index, value, is_there in await self._ask(_ALL):
            (hold if is_there else gone)[block_hash, log_index] = None if value is None else int(value)
        return hold, gone

    async def _ask(self, sql: str) -> list[list[Any]]:
        reply = await self.queries.ask(sql)
        return msgspec.json.decode(reply.rows, type=list[list[Any]])


def _print_alerts(rows: Sequence[Sequence[Any]]) -> None:
    many = f"{len(rows)} new alerts, the latest" if len(rows) > _SHOWN else "New alerts"
    console().print(f"{many}:" if rows else "A new batch contains only known alerts.")
    if rows:
        columns = ("block", "token", "from", "to", "amount", "severity")
        console().print(table(columns, map(_shortened, rows[:_SHOWN]), empty=""))


def _shortened(row: Sequence[Any]) -> list[Any]:
    _, _, block, token, sender, recipient, value, severity = row
    return [block, *(f"{address[:_SHORT]}…" for address in (token, sender, recipient)), value, severity]


def _packed(folder: Path) -> bytes:
    from interlock.archives import pack

    with tempfile.TemporaryDirectory(prefix="interlock-demo-bundle-") as scratch:
        target = Path(scratch) / "bundle.zip"
        pack(folder, target)
        return target.read_bytes()
