"""The changelog of the registry: every change with its author, its time, and the entry before and after."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import msgspec
from msgspec import Raw

from interlock.stores.postgres import Connection, Row, queries
from interlock.wire.bus_registry import RegistryAction, RegistryChange, RegistryKind

_sql = queries(__name__, "writes")


@dataclass(frozen=True)
class Registrar:
    """The author of a change, and the org of the registry."""

    org_id: UUID
    org: str
    user: str


@dataclass(frozen=True)
class Change:
    kind: RegistryKind
    action: RegistryAction
    subject: str
    before: object | None
    after: object | None
    version: int
    reverts: int | None = None

    def view(self, by: Registrar, now: datetime, *, dry_run: bool) -> RegistryChange:
        return RegistryChange(
            change_id=None,
            kind=self.kind,
            action=self.action,
            subject=self.subject,
            before=_raw(self.before),
            after=_raw(self.after),
            dry_run=dry_run,
            changed_at=now,
            changed_by=by.user,
            reverts=self.reverts,
        )


async def record(connection: Connection, what: Change, by: Registrar) -> Row:
    """Writes the changelog and notifies dispatchers, in the transaction of the change."""
    row: Row = await _sql.record_change(
        connection,
        org_id=by.org_id,
        kind=what.kind,
        action=what.action,
        subject=what.subject,
        before=_text(what.before),
        after=_text(what.after),
        version=what.version,
        changed_by=by.user,
        reverts=what.reverts,
    )
    await _sql.announce(connection)
    return row


def change_view(row: Row) -> RegistryChange:
    return RegistryChange(
        change_id=row["change_id"],
        kind=RegistryKind(row["kind"]),
        action=RegistryAction(row["action"]),
        subject=row["subject"],
        before=Raw((row["before"] or "null").encode()),
        after=Raw((row["after"] or "null").encode()),
        dry_run=False,
        changed_at=row["changed_at"],
        changed_by=row["changed_by"],
        reverts=row["reverts"],
    )


def _text(document: object | None) -> str | None:
    return None if document is None else msgspec.json.encode(document).decode()


def _raw(document: object | None) -> Raw:
    return Raw(msgspec.json.encode(document))
