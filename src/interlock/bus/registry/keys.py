"""Signing keys of services: versions, rotation, and the configuration of producers.

Only the service itself can read its secret, from its configuration with its API key. Producers sign with the newest
version; the previous one stays valid for a while, so that a rotation does not cut off a producer.
"""

from __future__ import annotations

import re
import secrets
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from interlock.access.secrets import SECRET_BYTES, Seal, purpose
from interlock.bus.registry.entries import Change, Registrar, record
from interlock.errors import Conflict, Forbidden, NotFound
from interlock.failpoints import failpoint
from interlock.http.cursors import next_cursor
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.wire.bus_registry import (
    RegistryAction,
    RegistryKind,
    SecretVersion,
    ServiceKeyPage,
    ServiceKeyView,
    TenantConfig,
)

_sql = queries(__name__, "keys")
_registry_sql = queries(__name__, "writes")
_VERSION: Final = re.compile(r"hmac-v([1-9][0-9]{0,8})")
_DAY: Final = 86_400.0
_KEEP_SECONDS: Final = 90 * _DAY
_CHUNK: Final = 100
PLATFORM: Final = "platform"


class ServiceKeys:
    def __init__(self, database: Database, settings: Settings, seal: Seal) -> None:
        self._database = database
        self._settings = settings
        self._seal = seal

    # Changes

    async def rotate(self, service: str, by: Registrar, *, overlap_seconds: float | None = None) -> ServiceKeyView:
        """Creates the next version, which replaces the current one immediately."""

        async def work(connection: Connection) -> ServiceKeyView:
            version = await self._hold(connection, service, by)
            return await self.make_next(connection, service, by, version, overlap_seconds=overlap_seconds)

        return await self._database.run(work)

    async def make_next(
        self,
        connection: Connection,
        service: str,
        by: Registrar,
        version: int,
        *,
        overlap_seconds: float | None = None,
    ) -> ServiceKeyView:
        """Creates the next version in the caller's transaction, which has raised the version of the registry's keys."""
        settings, which = self._settings, {"org_id": by.org_id, "service": service}
        overlap = settings.bus_key_overlap_days * _DAY if overlap_seconds is None else overlap_seconds
        number = await _sql.next_number(connection, **which)
        await _sql.retire_current(connection, overlap_seconds=overlap, **which)
        await _sql.end_older(connection, number=number, **which)
        secret = secrets.token_bytes(SECRET_BYTES)
        row = await _sql.insert_key(
            connection,
            number=number,
            sealed=self._seal.seal(secret, purpose(by.org_id, service, number)),
            created_by=by.user,
            rotation_seconds=settings.bus_key_rotation_days * _DAY,
            **which,
        )
        view = _view(row)
        await record(
            connection,
            Change(RegistryKind.KEYS, RegistryAction.CREATE, f"{service}/{view.version_id}", None, view, version),
            by,
        )
        await failpoint("service_key.before_commit")
        return view

    async def revoke(self, service: str, version_id: str, by: Registrar) -> ServiceKeyView:
        """Revokes a version immediately. If it was the current one, creates the next."""
        match = _VERSION.fullmatch(version_id)

        async def work(connection: Connection) -> ServiceKeyView:
            version = await self._hold(connection, service, by)
            which = {"org_id": by.org_id, "service": service, "number": int(match[1]) if match else 0}
            row = await _sql.find_key(connection, **which)
            if row is None:
                raise NotFound(f"The key of {service!r} has no version {version_id[:40]!r}.")
            if row["current"]:
                await self.make_next(connection, service, by, version, overlap_seconds=0)
            view = _view(await _sql.revoke_key(connection, **which))
            await record(
                connection,
                Change(RegistryKind.KEYS, RegistryAction.DELETE, f"{service}/{version_id}", view, None, version),
                by,
            )
            return view

        return await self._database.run(work)

    async def _hold(self, connection: Connection, service: str, by: Registrar) -> int:
        version: int = await _registry_sql.raise_version(connection, org_id=by.org_id, kind=RegistryKind.KEYS)
        if not await _registry_sql.known_services(connection, org_id=by.org_id, names=[service]):
            raise NotFound(
                f"There is no service {service!r} in this org; register it: interlock service add NAME",
                code="unknown_service",
            )
        return version

    async def rotate_due(self) -> int:
        """Rotates due keys of all orgs, and deletes old versions; one pass."""
        async with self._database.connection() as connection:
            due = await _sql.due_rotations(connection, limit=_CHUNK)
        for row in due:
            await self._rotate_if_due(Registrar(row["org_id"], row["org"], PLATFORM), row["service"])
        async with self._database.connection() as connection:
            gone = await _sql.forget_keys(connection, keep_seconds=_KEEP_SECONDS, limit=_CHUNK)
        return len(due) + len(gone)

    async def _rotate_if_due(self, by: Registrar, service: str) -> None:
        async def work(connection: Connection) -> None:
            version = await _registry_sql.raise_version(connection, org_id=by.org_id, kind=RegistryKind.KEYS)
            if await _sql.still_due(connection, org_id=by.org_id, service=service):
                await self.make_next(connection, service, by, version)

        await self._database.run(work)

    # Reads

    async def page(self, by: Registrar, service: str | None, cursor: str | None, limit: int) -> ServiceKeyPage:
        after_service, after_number = _after(cursor)
        async with self._database.connection() as connection:
            if service is None:
                rows = await _sql.list_keys(
                    connection, org_id=by.org_id, after_service=after_service, after_number=after_number, limit=limit
                )
            else:
                rows = await _sql.list_keys_of_service(
                    connection, org_id=by.org_id, service=service, after_number=after_number, limit=limit
                )
        return ServiceKeyPage(
            keys=[_view(row) for row in rows],
            next_cursor=next_cursor(rows, limit, "service", "number"),
        )

    async def tenant_config(self, org_id: UUID, org: str, service: str | None) -> TenantConfig:
        """Returns the configuration of the service of the API key, and stores the time: a service that does not fetch
        its new key gets a warning."""
        if service is None:
            raise Forbidden(
                "This API key belongs to no service; create one that does: "
                "interlock users create NAME --service SERVICE",
                code="no_service",
            )

        async def work(connection: Connection) -> list[Row]:
            found: list[Row] = await _sql.good_keys(connection, org_id=org_id, service=service)
            if not found or found[0]["expires_at"] is not None:
                raise Conflict(
                    f"{service!r} has no current key; create one: interlock service-key rotate {service}",
                    code="no_current_key",
                )
            asked_before = await _sql.note_poll(connection, org_id=org_id, service=service)
            if asked_before is None or asked_before < found[0]["created_at"]:
                # Dispatchers cache with each key whether its service has fetched the newest version: it has now.
                await _registry_sql.raise_version(connection, org_id=org_id, kind=RegistryKind.KEYS)
                await _registry_sql.announce(connection)
            return found

        current, *older = await self._database.run(work)
        return TenantConfig(
            tenant=org,
            service=service,
            source=f"{org}/{service}",
            active=self._secret(org_id, service, current),
            previous=self._secret(org_id, service, older[0]) if older else None,
            rotates_at=current["rotates_at"],
            poll_seconds=self._poll_seconds(current["rotates_at"]),
            replay_window_seconds=self._settings.command_window_seconds,
        )

    def _poll_seconds(self, rotates_at: datetime) -> float:
        """Returns the interval to the next request, at most until the rotation: the producer then gets the new key."""
        usual = timedelta(hours=self._settings.bus_config_poll_hours)
        left = rotates_at - self._database.clock.now()
        return min(usual, left).total_seconds() if left > timedelta(minutes=1) else 60.0

    def _secret(self, org_id: UUID, service: str, row: Row) -> SecretVersion:
        secret = self._seal.open(row["sealed"], purpose(org_id, service, row["number"]))
        return SecretVersion(version_id=f"hmac-v{row['number']}", secret=secret.hex(), expires_at=row["expires_at"])


class KeyRotation(Periodic):
    """Rotates due keys."""

    name = "key-rotation"
    seconds = 30.0

    def __init__(self, keys: ServiceKeys) -> None:
        self._keys = keys

    async def run_once(self) -> int:
        return await self._keys.rotate_due()


def _view(row: Row) -> ServiceKeyView:
    return ServiceKeyView(
        service=row["service"],
        version_id=f"hmac-v{row['number']}",
        state=row["state"],
        created_at=row["created_at"],
        created_by=row["created_by"],
        rotates_at=row["rotates_at"],
        expires_at=row["expires_at"],
    )


def _after(cursor: str | None) -> tuple[str, int]:
    service, _, number = (cursor or "/0").rpartition("/")
    return service, int(number) if number.isascii() and number.isdigit() and len(number) < 10 else 0
