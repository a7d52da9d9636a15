"""Requests for replays, by operators. sender.py carries them out."""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec
import structlog

from interlock.access.principals import Principal
from interlock.errors import BadRequest, Conflict, NotFound
from interlock.stores.postgres import Database, Row, queries
from interlock.wire.bus_replays import (
    ReplayFilters,
    ReplayOrigin,
    ReplayPage,
    ReplayRequest,
    ReplayState,
    ReplayView,
)

log = structlog.get_logger()
_sql = queries("bus", "replays")
_filters = msgspec.json.Decoder(ReplayFilters)

_LAST: Final = UUID(int=2**128 - 1)


class Replays:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def ask(self, request: ReplayRequest, caller: Principal) -> ReplayView:
        _check(request)
        async with self._database.transaction() as connection:
            row = await _sql.insert_replay(
                connection,
                org_id=caller.org_id,
                origin=request.origin.value,
                filters=msgspec.json.encode(request.filters).decode(),
                reason=request.reason,
                operator=caller.user,
                dry_run=request.dry_run,
                rate=request.rate,
                limit=request.limit,
            )
        log.info(
            "replay.asked",
            replay_id=str(row["replay_id"]),
            org=caller.org,
            operator=caller.user,
            reason=request.reason,
            dry_run=request.dry_run,
        )
        return view(row)

    async def page(self, caller: Principal, cursor: str | None, limit: int) -> ReplayPage:
        before = _LAST if cursor is None else _cursor(cursor)
        async with self._database.connection() as connection:
            rows = await _sql.list_replays(connection, org_id=caller.org_id, before=before, limit=limit)
        next_cursor = str(rows[-1]["replay_id"]) if len(rows) == limit else None
        return ReplayPage(replays=[view(row) for row in rows], next_cursor=next_cursor)

    async def replay(self, replay_id: UUID, caller: Principal) -> ReplayView:
        async with self._database.connection() as connection:
            row = await _sql.find_replay(connection, org_id=caller.org_id, replay_id=replay_id)
        if row is None:
            raise NotFound(f"There is no replay {replay_id} in this org.")
        return view(row)

    async def cancel(self, replay_id: UUID, caller: Principal) -> ReplayView:
        """Cancels a replay. Commands that were sent already are not affected."""
        async with self._database.transaction() as connection:
            row = await _sql.cancel_replay(connection, org_id=caller.org_id, replay_id=replay_id)
        if row is None:
            ended = await self.replay(replay_id, caller)
            raise Conflict(f"Replay {replay_id} is {ended.state} already.", code="replay_ended")
        return view(row)


def _check(request: ReplayRequest) -> None:
    filters = request.filters
    if (request.origin is ReplayOrigin.DEAD_LETTERS) != (filters.queue is not None):
        raise BadRequest(
            "`filters.queue` names the queue of the dead letters: origin dead-letters requires it, origin archive does "
            "not allow it.",
            code="bad_replay",
        )
    if any(moment is not None and moment.tzinfo is None for moment in (filters.since, filters.until)):
        raise BadRequest("`since` and `until` need a time zone, such as 2026-01-31T12:00:00Z.", code="bad_replay")
    if not request.reason.isprintable():
        raise BadRequest("`reason` must be one line of printable text.", code="bad_replay")


def _cursor(cursor: str) -> UUID:
    try:
        return UUID(cursor)
    except ValueError:
        raise BadRequest(
            "`cursor` is not one this server gave out; start again without it.", code="bad_cursor"
        ) from None


def filters_of(row: Row) -> ReplayFilters:
    return _filters.decode(row["filters"])


def view(row: Row) -> ReplayView:
    return ReplayView(
        replay_id=row["replay_id"],
        origin=ReplayOrigin(row["origin"]),
        filters=filters_of(row),
        reason=row["reason"],
        operator=row["operator"],
        dry_run=row["dry_run"],
        rate=row["rate"],
        limit=row["most"],
        state=ReplayState(row["state"]),
        task_id=row["task_id"],
        selected=row["selected"],
        sent=row["sent"],
        failed=row["failed"],
        detail=row["detail"],
        created_at=row["created_at"],
        ended_at=row["ended_at"],
    )
