"""Changes of the registry: made, tried as a dry run, recorded in the changelog, and reverted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar
from uuid import UUID

import asyncpg
import msgspec

from interlock.bus.registry.changelog import Change, Registrar, change_view, record
from interlock.bus.registry.entries import ENTRIES, SERVICE, Entry, Org
from interlock.bus.registry.keys import ServiceKeys
from interlock.errors import BadRequest, Conflict, NotFound
from interlock.failpoints import failpoint
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.wire.bus_registry import ChangePage, RegistryAction, RegistryChange, RegistryKind

_sql = queries(__name__, "writes")
_LAST: Final = 2**62

R = TypeVar("R", bound=msgspec.Struct)


class _Undone(Exception):
    """Raised to roll back the transaction: in a dry run, or if nothing changes."""

    def __init__(self, change: RegistryChange) -> None:
        super().__init__()
        self.change = change


class Registry:
    def __init__(self, database: Database, keys: ServiceKeys) -> None:
        self._database = database
        self._keys = keys

    async def put(self, entry: Entry[R], request: R, by: Registrar, *, dry_run: bool = False) -> RegistryChange:
        """Creates or replaces an entry."""

        async def work(connection: Connection) -> RegistryChange:
            return await self._put(connection, entry, request, by, dry_run=dry_run)

        return await self._changed(work)

    async def drop(self, entry: Entry[R], request: R, by: Registrar, *, dry_run: bool = False) -> RegistryChange:
        """Removes the entry with the key of the request."""

        async def work(connection: Connection) -> RegistryChange:
            return await self._drop(connection, entry, request, by, dry_run=dry_run)

        return await self._changed(work)

    async def revert(self, change_id: int, by: Registrar, *, dry_run: bool = False) -> RegistryChange:
        """Restores the entry from before a change, with the same validation as any other change."""

        async def work(connection: Connection) -> RegistryChange:
            row = await self._reversible(connection, change_id, by)
            entry = ENTRIES[RegistryKind(row["kind"])]
            document = row["before"] if row["before"] is not None else row["after"]
            request = msgspec.json.decode(document, type=entry.request)
            restore = self._drop if row["before"] is None else self._put
            return await restore(connection, entry, request, by, dry_run=dry_run, reverts=change_id)

        return await self._changed(work)

    async def _reversible(self, connection: Connection, change_id: int, by: Registrar) -> Row:
        row: Row | None = await _sql.find_change(connection, org_id=by.org_id, change_id=change_id)
        if row is None:
            raise _no_change(change_id)
        if row["kind"] not in ENTRIES:
            raise Conflict(
                "A change of a key cannot be reverted; create a new version of the key instead.",
                code="not_reversible",
            )
        # Raising the version locks its row: no other request changes the entry between this check and the revert.
        await _sql.raise_version(connection, org_id=by.org_id, kind=row["kind"])
        newest = await _sql.newest_change(connection, org_id=by.org_id, kind=row["kind"], subject=row["subject"])
        if newest != change_id:
            raise Conflict(
                f"{row['subject']} was changed again by change {newest}: revert that one first, or write the entry.",
                code="changed_since",
            )
        return row

    async def _changed(self, work: Callable[[Connection], Awaitable[RegistryChange]]) -> RegistryChange:
        try:
            return await self._database.run(work)
        except _Undone as undone:
            return undone.change
        except asyncpg.ForeignKeyViolationError:
            raise Conflict(
                "Another request has just created an entry that refers to this one; check and retry."
            ) from None

    async def _put(
        self,
        connection: Connection,
        entry: Entry[R],
        request: R,
        by: Registrar,
        *,
        dry_run: bool,
        reverts: int | None = None,
    ) -> RegistryChange:
        org = self._org(by)
        version = await _sql.raise_version(connection, org_id=by.org_id, kind=entry.kind)
        key = entry.key(request, org)
        row = await getattr(_sql, entry.find)(connection, org_id=by.org_id, **key)
        await entry.check(connection, request, org)
        before = None if row is None else entry.document(row, org)
        columns = entry.columns(request)
        await getattr(_sql, entry.put)(
            connection, org_id=by.org_id, version=version, changed_by=by.user, **key, **columns
        )
        if entry is SERVICE and before is None:
            await self._first_key(connection, str(key["name"]), by)
        # Read back from the database: the changelog shows the full name of a source.
        after = entry.document(await getattr(_sql, entry.find)(connection, org_id=by.org_id, **key), org)
        action = RegistryAction.CREATE if before is None else RegistryAction.UPDATE
        if before == after:
            action = RegistryAction.NONE
        what = Change(entry.kind, action, entry.subject(request, org), before, after, version, reverts)
        return await self._record(connection, what, by, dry_run=dry_run)

    async def _first_key(self, connection: Connection, service: str, by: Registrar) -> None:
        """Creates the first key together with the service, so that it can sign immediately."""
        version = await _sql.raise_version(connection, org_id=by.org_id, kind=RegistryKind.KEYS)
        await self._keys.make_next(connection, service, by, version)

    async def _drop(
        self,
        connection: Connection,
        entry: Entry[R],
        request: R,
        by: Registrar,
        *,
        dry_run: bool,
        reverts: int | None = None,
    ) -> RegistryChange:
        org = self._org(by)
        version = await _sql.raise_version(connection, org_id=by.org_id, kind=entry.kind)
        key = entry.key(request, org)
        row = await getattr(_sql, entry.find)(connection, org_id=by.org_id, **key)
        subject = entry.subject(request, org)
        if row is None:
            raise NotFound(f"There is no {subject!r} in the {entry.kind} of this org.")
        if entry is SERVICE:
            await _release_service(connection, by.org_id, row["name"])
        await getattr(_sql, entry.drop)(connection, org_id=by.org_id, **key)
        before = entry.document(row, org)
        what = Change(entry.kind, RegistryAction.DELETE, subject, before, None, version, reverts)
        return await self._record(connection, what, by, dry_run=dry_run)

    async def _record(self, connection: Connection, what: Change, by: Registrar, *, dry_run: bool) -> RegistryChange:
        change = what.told(by, self._database.clock.now(), dry_run=dry_run)
        if dry_run or what.action is RegistryAction.NONE:
            raise _Undone(change)
        row = await record(connection, what, by)
        await failpoint("registry.before_commit")
        return msgspec.structs.replace(change, change_id=row["change_id"], changed_at=row["changed_at"])

    def _org(self, by: Registrar) -> Org:
        return Org(by.org_id, by.org, self._database.clock.now())

    # The changelog

    async def change(self, change_id: int, by: Registrar) -> RegistryChange:
        if change_id > _LAST:
            raise _no_change(change_id)
        async with self._database.connection() as connection:
            row = await _sql.find_change(connection, org_id=by.org_id, change_id=change_id)
        if row is None:
            raise _no_change(change_id)
        return change_view(row)

    async def changes(self, by: Registrar, kind: RegistryKind | None, cursor: str | None, limit: int) -> ChangePage:
        """Newest first."""
        page: dict[str, Any] = {"org_id": by.org_id, "before": _before(cursor), "limit": limit}
        async with self._database.connection() as connection:
            if kind is None:
                rows = await _sql.list_changes(connection, **page)
            else:
                rows = await _sql.list_changes_of_kind(connection, kind=kind, **page)
        return ChangePage(
            changes=[change_view(row) for row in rows],
            next_cursor=str(rows[-1]["change_id"]) if len(rows) == limit else None,
        )


async def _release_service(connection: Connection, org_id: UUID, name: str) -> None:
    held = await _sql.holds_service(connection, org_id=org_id, name=name)
    if kinds := [kind for kind in ("routes", "acls", "limits") if held[kind]]:
        raise Conflict(f"{' and '.join(kinds)} still refer to {name!r}; remove those first.", code="service_in_use")
    await _sql.revoke_api_keys(connection, org_id=org_id, name=name)
    await _sql.drop_secrets(connection, org_id=org_id, name=name)


def _before(cursor: str | None) -> int:
    if cursor is None:
        return _LAST
    if not cursor.isascii() or not cursor.isdigit() or len(cursor) > 18:
        raise BadRequest("`cursor` is not one this server gave out; start again without it.", code="bad_cursor")
    return int(cursor)


def _no_change(change_id: int) -> NotFound:
    return NotFound(f"There is no change {change_id} in this org.")
