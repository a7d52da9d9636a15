"""Changes of the registry: made, tried as a dry run, recorded in the changelog, and reverted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from uuid import UUID

import asyncpg
import msgspec

from interlock.bus.registry.entries import ENTRIES, SERVICE, Change, Entry, Org, Registrar, change_view, record
from interlock.bus.registry.keys import ServiceKeys
from interlock.errors import Conflict, NotFound
from interlock.failpoints import failpoint
from interlock.http.cursors import HIGHEST, next_cursor, number_cursor
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.wire.bus_registry import ChangePage, RegistryAction, RegistryChange, RegistryKind

_sql = queries(__name__, "writes")

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
        return await self._run(lambda connection: self._change(connection, entry, request, by, dry_run=dry_run))

    async def drop(self, entry: Entry[R], request: R, by: Registrar, *, dry_run: bool = False) -> RegistryChange:
        """Removes the entry with the key of the request."""
        return await self._run(
            lambda connection: self._change(connection, entry, request, by, removes=True, dry_run=dry_run)
        )

    async def revert(self, change_id: int, by: Registrar, *, dry_run: bool = False) -> RegistryChange:
        """Restores the entry from before a change, with the same validation as any other change."""

        async def work(connection: Connection) -> RegistryChange:
            row = await self._reversible(connection, change_id, by)
            entry = ENTRIES[RegistryKind(row["kind"])]
            created = row["before"] is None
            request = msgspec.json.decode(row["after"] if created else row["before"], type=entry.request)
            return await self._change(
                connection, entry, request, by, removes=created, dry_run=dry_run, reverts=change_id
            )

        return await self._run(work)

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

    async def _run(self, work: Callable[[Connection], Awaitable[RegistryChange]]) -> RegistryChange:
        try:
            return await self._database.run(work)
        except _Undone as undone:
            return undone.change
        except asyncpg.ForeignKeyViolationError:
            raise Conflict(
                "Another request has just created an entry that refers to this one; check and retry."
            ) from None

    async def _change(
        self,
        connection: Connection,
        entry: Entry[R],
        request: R,
        by: Registrar,
        *,
        removes: bool = False,
        dry_run: bool,
        reverts: int | None = None,
    ) -> RegistryChange:
        """Writes or removes an entry, and records it with its documents before and after, as the database has them."""
        org = Org(by.org_id, by.org, self._database.clock.now())
        version = await _sql.raise_version(connection, org_id=by.org_id, kind=entry.kind)
        before = await _document(connection, entry, request, org)
        if removes and before is None:
            raise NotFound(f"There is no {entry.subject(request, org)!r} in the {entry.kind} of this org.")
        if removes:
            await self._remove(connection, entry, request, org)
        else:
            await self._write(connection, entry, request, by, org, version)
        if entry is SERVICE and before is None:
            await self._first_key(connection, entry.subject(request, org), by)
        after = await _document(connection, entry, request, org)
        what = Change(entry.kind, _action(before, after), entry.subject(request, org), before, after, version, reverts)
        return await self._record(connection, what, by, dry_run=dry_run)

    async def _write(
        self, connection: Connection, entry: Entry[R], request: R, by: Registrar, org: Org, version: int
    ) -> None:
        await entry.check(connection, request, org)
        await getattr(_sql, entry.put)(
            connection,
            org_id=by.org_id,
            version=version,
            changed_by=by.user,
            **entry.key(request, org),
            **entry.columns(request),
        )

    async def _remove(self, connection: Connection, entry: Entry[R], request: R, org: Org) -> None:
        if entry is SERVICE:
            await _release_service(connection, org.org_id, entry.subject(request, org))
        await getattr(_sql, entry.drop)(connection, org_id=org.org_id, **entry.key(request, org))

    async def _first_key(self, connection: Connection, service: str, by: Registrar) -> None:
        """Creates the first key together with the service, so that it can sign immediately."""
        version = await _sql.raise_version(connection, org_id=by.org_id, kind=RegistryKind.KEYS)
        await self._keys.make_next(connection, service, by, version)

    async def _record(self, connection: Connection, what: Change, by: Registrar, *, dry_run: bool) -> RegistryChange:
        change = what.view(by, self._database.clock.now(), dry_run=dry_run)
        if dry_run or what.action is RegistryAction.NONE:
            raise _Undone(change)
        row = await record(connection, what, by)
        await failpoint("registry.before_commit")
        return msgspec.structs.replace(change, change_id=row["change_id"], changed_at=row["changed_at"])

    # The changelog

    async def change(self, change_id: int, by: Registrar) -> RegistryChange:
        if change_id > HIGHEST:
            raise _no_change(change_id)
        async with self._database.connection() as connection:
            row = await _sql.find_change(connection, org_id=by.org_id, change_id=change_id)
        if row is None:
            raise _no_change(change_id)
        return change_view(row)

    async def changes(self, by: Registrar, kind: RegistryKind | None, cursor: str | None, limit: int) -> ChangePage:
        """Newest first."""
        page: dict[str, Any] = {"org_id": by.org_id, "before": number_cursor(cursor, HIGHEST), "limit": limit}
        async with self._database.connection() as connection:
            if kind is None:
                rows = await _sql.list_changes(connection, **page)
            else:
                rows = await _sql.list_changes_of_kind(connection, kind=kind, **page)
        return ChangePage(
            changes=[change_view(row) for row in rows],
            next_cursor=next_cursor(rows, limit, "change_id"),
        )


async def _document(connection: Connection, entry: Entry[R], request: R, org: Org) -> R | None:
    """Returns the stored entry with the key of the request. It has the full name of a source."""
    row = await getattr(_sql, entry.find)(connection, org_id=org.org_id, **entry.key(request, org))
    return None if row is None else entry.document(row, org)


def _action(before: object | None, after: object | None) -> RegistryAction:
    if before == after:
        return RegistryAction.NONE
    if before is None:
        return RegistryAction.CREATE
    return RegistryAction.DELETE if after is None else RegistryAction.UPDATE


async def _release_service(connection: Connection, org_id: UUID, name: str) -> None:
    uses = await _sql.holds_service(connection, org_id=org_id, name=name)
    if kinds := [kind for kind in ("routes", "acls", "limits") if uses[kind]]:
        raise Conflict(f"{' and '.join(kinds)} still refer to {name!r}; remove those first.", code="service_in_use")
    await _sql.revoke_api_keys(connection, org_id=org_id, name=name)
    await _sql.drop_secrets(connection, org_id=org_id, name=name)


def _no_change(change_id: int) -> NotFound:
    return NotFound(f"There is no change {change_id} in this org.")
