"""What the archive keeps of an accepted command, and how it is owed: with the decision, like telemetry.

Accepted is what was answered 202: delivered at once, or handed on to be. What became of it afterwards is telemetry.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Final, NamedTuple
from uuid import UUID

from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.json import Decoder, Encoder

from interlock.adapters.postgres import Connection, queries

_sql = queries("bus_archive")


class ArchivedCommand(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    command_id: UUID
    source: str
    """`org/service`."""
    target: str
    name: str
    timestamp: datetime
    """As it was signed."""
    version_id: str
    """Of the key that it was signed with."""
    accepted_at: datetime
    payload: Raw
    replay_id: UUID | UnsetType = UNSET
    replay_reason: str | UnsetType = UNSET


class OwedArchive(NamedTuple):
    """Columns of `bus_archive`, a row per tenant."""

    org_ids: list[UUID]
    commands: list[str]
    """JSON arrays."""
    commands_in: list[int]


_encoder: Final = Encoder()
_decoder: Final = Decoder(list[ArchivedCommand])


def owed_archive(commands: Iterable[tuple[UUID, ArchivedCommand]]) -> OwedArchive:
    """`commands` with the org of each: the one whose service has sent it."""
    by_org: dict[UUID, list[ArchivedCommand]] = {}
    for org_id, command in commands:
        by_org.setdefault(org_id, []).append(command)
    bodies = [_encoder.encode(each).decode() for each in by_org.values()]
    return OwedArchive(list(by_org), bodies, [len(each) for each in by_org.values()])


async def keep(connection: Connection, commands: Iterable[tuple[UUID, ArchivedCommand]]) -> None:
    """In the caller's transaction."""
    rows = owed_archive(commands)
    if rows.org_ids:
        await _sql.keep(connection, org_ids=rows.org_ids, commands=rows.commands, commands_in=rows.commands_in)


def archived(commands: str) -> list[ArchivedCommand]:
    return _decoder.decode(commands)
