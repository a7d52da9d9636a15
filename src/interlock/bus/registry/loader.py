"""Loads the registry of an org into the caches."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Final
from uuid import UUID

import msgspec

from interlock.access.secrets import Seal, purpose
from interlock.bus.model import Acl, Ban, BanKind, Fairness, Key, Kind, Limit, Route, Service
from interlock.stores.postgres import Database, Row, queries
from interlock.wire.bus_registry import DedupeMode, DispatchMode, Enforcement, Sensitivity

_sql = queries(__name__, "registry")
_path_sql = queries(__name__, "path")
_fairness_sql = queries(__name__, "fairness")

_fairness: Final = msgspec.json.Decoder(Fairness)
_KINDS: Final = frozenset(kind.value for kind in Kind)


class RegistryReads:
    def __init__(self, database: Database, seal: Seal) -> None:
        self._database = database
        self._seal = seal
        self._names: dict[UUID, str] = {}

    async def versions(self, org_id: UUID) -> Mapping[Kind, int]:
        async with self._database.connection() as connection:
            rows = await _sql.read_versions(connection, org_id=org_id)
        return {Kind(row["kind"]): row["version"] for row in rows if row["kind"] in _KINDS}

    async def services(self, org_id: UUID) -> list[Service]:
        org = await self._org(org_id)
        async with self._database.connection() as connection:
            rows = await _sql.read_services(connection, org_id=org_id)
        return [
            Service(f"{org}/{row['name']}", DispatchMode(row["dispatch_mode"]) if row["dispatch_mode"] else None)
            for row in rows
        ]

    async def keys(self, org_id: UUID) -> list[Key]:
        org = await self._org(org_id)
        async with self._database.connection() as connection:
            rows = await _sql.read_keys(connection, org_id=org_id)
        return [self._key(org_id, org, row) for row in rows]

    def _key(self, org_id: UUID, org: str, row: Row) -> Key:
        service, number = row["service"], row["number"]
        return Key(
            source=f"{org}/{service}",
            version_id=f"hmac-v{number}",
            secret=self._seal.open(row["sealed"], purpose(org_id, service, number)),
            current=row["expires_at"] is None,
            expires_at=_seconds(row["expires_at"]),
            polled_at=_seconds(row["polled_at"]),
        )

    async def routes(self, org_id: UUID) -> list[Route]:
        async with self._database.connection() as connection:
            rows = await _sql.read_routes(connection, org_id=org_id)
        return [
            Route(
                target=row["target"],
                name=row["name"],
                queue=row["queue"],
                dag=row["dag_name"],
                job=row["job_name"],
                dedupe_mode=DedupeMode(row["dedupe_mode"]),
                dedupe_seconds=row["dedupe_seconds"],
                fairness=_fairness.decode(row["fairness"]),
                expires_at=_seconds(row["expires_at"]),
            )
            for row in rows
        ]

    async def acls(self, org_id: UUID) -> list[Acl]:
        org = await self._org(org_id)
        async with self._database.connection() as connection:
            rows = await _sql.read_acls(connection, org_id=org_id)
        return [
            Acl(
                f"{org}/{row['source']}",
                row["target"],
                row["name"],
                Sensitivity(row["sensitivity"]),
                _seconds(row["expires_at"]),
            )
            for row in rows
        ]

    async def limits(self, org_id: UUID) -> list[Limit]:
        async with self._database.connection() as connection:
            rows = await _sql.read_limits(connection, org_id=org_id)
        return [
            Limit(
                target=row["target"],
                name=row["name"],
                rate=row["rate"],
                window_seconds=row["window_seconds"],
                burst=row["burst"],
                cooldown_seconds=row["cooldown_seconds"],
                enforcement=Enforcement(row["enforcement"]),
                source=row["source"],
            )
            for row in rows
        ]

    async def bans(self, org_id: UUID) -> list[Ban]:
        async with self._database.connection() as connection:
            rows = await _fairness_sql.read_bans(connection, org_id=org_id)
        return [Ban(**dict(row) | {"kind": BanKind(row["kind"])}) for row in rows]

    async def _org(self, org_id: UUID) -> str:
        """Returns the name of an org, cached for good: an org cannot be renamed."""
        if org_id not in self._names:
            async with self._database.connection() as connection:
                self._names[org_id] = await _path_sql.org_name(connection, org_id=org_id)
        return self._names[org_id]


def _seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()
