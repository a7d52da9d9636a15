"""Carries out replays: sends commands from the archive, which Spark reads, or from dead letters again.

Selecting ─┬─ archive: a batch query on Spark ─► its result, row by row ─┬─► Completed, if it is a dry run
           └─ dead letters: one statement ───────────────────────────────┴─► Sending, at a rate ─► Completed

Each command is signed again, with the current key of its service and the current time, and passes every check like any
other command. Its metadata and its telemetry mark it as a replay. It leaves the list in the transaction that decides
about it, so that none is sent twice, even after a crash or if several processes work on the same replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import structlog

from interlock.bus.model import Key, Outcome, Registry
from interlock.bus.path.delivery import Delivered, delivered, target_queue
from interlock.bus.path.ingress import Ingress
from interlock.bus.path.persistence import Batch, Written
from interlock.bus.replay.requests import ArchiveSelection, DidNotComplete, NotYet, Result, filters_of, source_of
from interlock.failpoints import failpoint
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.postgres import CONTENT_ERRORS, Connection, Database, Row, queries, set_aside
from interlock.wire.bus_messages import MAX_COMMANDS, ReplayFilters, ReplayOrigin
from interlock.wire.commands import compose

log = structlog.get_logger()
_sql = queries(__name__, "replays")

_LEASE_SECONDS: Final = 120.0
_LOOK_SECONDS: Final = 2.0
_BATCH: Final = 200
_PAGE: Final = 1000
"""Dead letters per query."""
_GOOD: Final = frozenset({Outcome.DELIVERED, Outcome.ESCALATED, Outcome.DUPLICATE})


class _Taken(Exception):
    """Raised if another process has sent the commands, or the replay was cancelled."""


class ReplaySender(Periodic):
    name = "replays"

    def __init__(
        self,
        database: Database,
        settings: Settings,
        selection: ArchiveSelection,
        registry: Registry,
        ingress: Ingress,
    ) -> None:
        self.seconds = settings.relay_seconds
        self._database = database
        self._selection = selection
        self._registry = registry
        self._ingress = ingress

    async def run_once(self) -> int:
        """Carries out one step of one replay."""
        async with self._database.connection() as connection:
            row: Row | None = await _sql.take_replay(connection, lease_seconds=_LEASE_SECONDS)
        if row is None:
            return 0
        if row["state"] == "Sending":
            await self._send(row)
        elif row["origin"] == ReplayOrigin.DEAD_LETTERS:
            await self._select_dead(row)
        elif row["task_id"] is None:
            await self._start_selection(row)
        else:
            await self._read_selection(row)
        return 1

    # Selecting

    async def _select_dead(self, row: Row) -> None:
        filters = filters_of(row)
        async with self._database.transaction() as connection:
            source = await source_of(connection, row["org_id"], filters)
            await _sql.clear_items(connection, replay_id=row["replay_id"])
            selected = await self._keep_dead(connection, row, lambda letter: _matches(letter, filters, source))
            await _sql.set_selected(connection, replay_id=row["replay_id"], selected=selected)
            await failpoint("replay.selected")

    async def _keep_dead(self, connection: Connection, row: Row, wanted: Callable[[Delivered], bool]) -> int:
        """Writes the list of dead letters to send, oldest first, and returns their number. It reads at most
        `MAX_COMMANDS` of them. One that cannot be decoded stays a dead letter."""
        queue = target_queue(row["org_id"], filters_of(row).queue or "")
        selected, examined, after = 0, 0, 0
        while selected < row["most"] and examined < MAX_COMMANDS:
            rows = await _sql.dead_letters(connection, queue=queue, after=after, limit=_PAGE)
            if not rows:
                break
            examined, after = examined + len(rows), rows[-1]["message_id"]
            letters = [(each["message_id"], self._read(each)) for each in rows]
            kept = [(n, letter) for n, letter in letters if letter is not None and wanted(letter)]
            kept = kept[: row["most"] - selected]
            selected += len(kept)
            if kept and not row["dry_run"]:
                await _sql.insert_letters(connection, replay_id=row["replay_id"], **_columns(kept))
        return selected

    def _read(self, letter: Row) -> Delivered | None:
        try:
            found = delivered(letter["body"])
            UUID(found.metadata.id)
            datetime.fromisoformat(found.metadata.timestamp)
        except CONTENT_ERRORS as error:
            set_aside(self.name, error, message_id=str(letter["message_id"]))
            return None
        return found

    async def _start_selection(self, row: Row) -> None:
        try:
            task_id = await self._selection.submit(row)
        except NotYet:
            await self._look_later(row, _LOOK_SECONDS)
            return
        if task_id is None:
            await self._end(row, "Completed", "The org has no archive yet: none of its commands was ever accepted.")
            return
        async with self._database.connection() as connection:
            await _sql.set_task(connection, replay_id=row["replay_id"], task_id=task_id, pause=_LOOK_SECONDS)

    async def _read_selection(self, row: Row) -> None:
        try:
            result = await self._selection.result(row)
            if result is None:
                await self._look_later(row, _LOOK_SECONDS)
            else:
                await self._keep(row, result)
        except DidNotComplete as error:
            await self._end(row, "Failed", f"The task that reads the archive did not complete: {error}."[:500])

    async def _keep(self, row: Row, result: Result) -> None:
        async with self._database.transaction() as connection:
            await _sql.clear_items(connection, replay_id=row["replay_id"])
            if not row["dry_run"]:
                await self._selection.keep(connection, row, result)
            await _sql.set_selected(connection, replay_id=row["replay_id"], selected=result.row_count)
            await failpoint("replay.selected")

    # Sending

    async def _send(self, row: Row) -> None:
        room = min(_BATCH, max(1, round(row["rate"])))
        async with self._database.connection() as connection:
            items: list[Row] = await _sql.next_items(connection, replay_id=row["replay_id"], limit=room)
        if not items:
            await self._end(row, "Completed", None)
            return
        try:
            await self._send_again(row, items)
        except _Taken:
            log.warning("replay.taken", replay_id=str(row["replay_id"]))
            return
        await self._look_later(row, len(items) / row["rate"])

    async def _send_again(self, row: Row, items: Sequence[Row]) -> None:
        """Sends the commands of each source separately. A source without a key fails: nothing can be signed for it."""
        keys = {key.source: key for key in await self._registry.keys(row["org_id"]) if key.current}
        for source, of_source in _by_source(items).items():
            if source not in keys:
                log.warning("replay.no_key", replay_id=str(row["replay_id"]), source=source)
                async with self._database.transaction() as connection:
                    await self._settle(connection, row, of_source, [])
                continue
            now = self._database.clock.now()
            signed = [(item, self._signed(item, keys[source], row, now)) for item in of_source]
            messages = [message for _, message in signed if message is not None]
            unfit = [item for item, message in signed if message is None]
            if unfit:
                async with self._database.transaction() as connection:
                    await self._settle(connection, row, unfit, [])
            if not messages:
                continue
            fit = [item for item, message in signed if message is not None]

            await self._accept(row, fit, await self._ingress.decide(row["org_id"], source, messages, replays=True))

    async def _accept(self, row: Row, items: Sequence[Row], batch: Batch) -> None:
        """Writes the decisions and removes the items from the list, in one transaction."""

        async def work(connection: Connection) -> Written:
            written = await self._ingress.write(connection, batch)
            decided = zip(items, written.decisions, strict=True)
            taken = [item for item, decision in decided if decision.outcome in _GOOD]
            await self._settle(connection, row, items, taken)
            await failpoint("replay.sent")
            return written

        self._ingress.committed(await self._database.run(work))

    def _signed(self, item: Row, key: Key, row: Row, now: datetime) -> bytes | None:
        """Returns None for a command that cannot be signed: it counts as failed, and the others are sent."""
        try:
            return _signed(item, key, row, now)
        except CONTENT_ERRORS as error:
            set_aside(self.name, error, replay_id=str(row["replay_id"]))
            return None

    async def _settle(self, connection: Connection, row: Row, items: Sequence[Row], taken: Sequence[Row]) -> None:
        """Removes items from the list in the transaction that sends them, so that none is sent twice or lost."""
        there = await _sql.settle_items(
            connection,
            replay_id=row["replay_id"],
            positions=[item["position"] for item in items],
            letters=[item["message_id"] for item in taken if item["message_id"]],
            queue=target_queue(row["org_id"], filters_of(row).queue or ""),
            sent=len(taken),
            failed=len(items) - len(taken),
        )
        if there != len(items):
            raise _Taken

    async def _look_later(self, row: Row, pause: float) -> None:
        async with self._database.connection() as connection:
            await _sql.look_later(connection, replay_id=row["replay_id"], pause=pause)

    async def _end(self, row: Row, state: str, detail: str | None) -> None:
        async with self._database.connection() as connection:
            await _sql.end_replay(connection, replay_id=row["replay_id"], state=state, detail=detail)
        log.info("replay.ended", replay_id=str(row["replay_id"]), state=state)


def _by_source(items: Sequence[Row]) -> Mapping[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for item in items:
        found.setdefault(item["source"], []).append(item)
    return found


def _signed(item: Row, key: Key, row: Row, now: datetime) -> bytes:
    return compose(
        key.secret,
        command_id=str(item["command_id"]),
        timestamp=now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        version_id=key.version_id,
        target=item["target"],
        name=item["name"],
        payload=item["payload"].encode(),
        replay=(str(row["replay_id"]), row["reason"]),
    )


def _matches(letter: Delivered, filters: ReplayFilters, source: str | None) -> bool:
    command, metadata = letter.command, letter.metadata
    filtered = ((source, command.source), (filters.target, command.target), (filters.name, command.name))
    if any(wanted is not None and wanted != found for wanted, found in filtered):
        return False
    if filters.since is not None or filters.until is not None:
        moment = datetime.fromisoformat(metadata.timestamp)
        if filters.since is not None and moment < filters.since:
            return False
        if filters.until is not None and moment >= filters.until:
            return False
    return filters.command_ids is None or UUID(metadata.id) in filters.command_ids


def _columns(letters: Sequence[tuple[int, Delivered]]) -> dict[str, Any]:
    return {
        "message_ids": [message_id for message_id, _ in letters],
        "command_ids": [UUID(letter.metadata.id) for _, letter in letters],
        "sources": [letter.command.source for _, letter in letters],
        "targets": [letter.command.target for _, letter in letters],
        "names": [letter.command.name for _, letter in letters],
        "payloads": [bytes(letter.command.payload).decode() for _, letter in letters],
    }
