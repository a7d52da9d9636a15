"""Publishes snapshots of the registry of all orgs, periodically."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

import msgspec
import structlog

from interlock.access import jwt
from interlock.access.keyring import Keyring
from interlock.bus import metrics
from interlock.bus.registry.entries import ACL, LIMIT, ROUTE, SERVICE, Org
from interlock.bus.registry.snapshot import (
    AUDIENCE,
    FOLDER,
    LATEST,
    POINTER_LIMIT,
    Claims,
    OrgSnapshot,
    Pointer,
    SealedKey,
    Snapshot,
    document_uri,
    read_document,
    ttl_policy,
)
from interlock.failpoints import failpoint
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.objects import Objects
from interlock.stores.postgres import Connection, Database, Row, queries

log = structlog.get_logger()
_sql = queries("bus", "snapshots")

_ORGS_AT_ONCE: Final = 200
_KEEP: Final = timedelta(minutes=10)
"""Documents are kept this long: a dispatcher reads the document soon after the pointer."""
_FIRST: Final = UUID(int=0)


class SnapshotPublishing(Periodic):
    name = "snapshots"

    def __init__(self, database: Database, settings: Settings, objects: Objects, keyring: Keyring) -> None:
        self.seconds = settings.bus_snapshot_seconds
        self._database = database
        self._settings = settings
        self._objects = objects
        self._keyring = keyring

    async def run_once(self) -> int:
        """Returns 1 if it published a snapshot. It does nothing if another process has just published one."""
        if not self._settings.bus_snapshots or await self._is_recent():
            return 0
        started = time.perf_counter()
        snapshot = await self._taken()
        if not snapshot.orgs:
            return 0
        document = msgspec.json.encode(snapshot)
        metrics.SNAPSHOT_SIZE.set(len(document))
        if len(document) > self._settings.bus_snapshot_limit_bytes:
            metrics.SNAPSHOTS_TOO_LARGE.inc()
            log.error("snavio.snapshot.too_large", size_bytes=len(document))
            return 0
        await self._publish(snapshot, document)
        metrics.SNAPSHOTS_GENERATED.inc()
        metrics.SNAPSHOT_WRITE_DURATION.observe(time.perf_counter() - started)
        await self._forget(snapshot.version_id)
        return 1

    async def _is_recent(self) -> bool:
        data = await self._objects.read(self._objects.uri(LATEST), POINTER_LIMIT)
        if data is None:
            return False
        try:
            pointer = msgspec.json.decode(data, type=Pointer)
        except (msgspec.MsgspecError, ValueError):
            return False
        age = self._database.clock.now() - pointer.generated_at
        return timedelta() <= age < timedelta(seconds=self.seconds / 2)

    async def _taken(self) -> Snapshot:
        """Reads the registry in one repeatable-read transaction."""
        now = self._database.clock.now()
        orgs: list[OrgSnapshot] = []
        async with (
            self._database.connection() as connection,
            connection.transaction(isolation="repeatable_read", readonly=True),
        ):
            after = _FIRST
            while rows := await _sql.snapshot_orgs(connection, after=after, limit=_ORGS_AT_ONCE):
                orgs += await _orgs(connection, rows, now)
                after = rows[-1]["org_id"]
        version_id = f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(6)}"
        return Snapshot(version_id=version_id, generated_at=now, ttl_policy=ttl_policy(), orgs=orgs)

    async def _publish(self, snapshot: Snapshot, document: bytes) -> None:
        """Writes the document, reads it back, and then writes the pointer to it."""
        claims = Claims(
            iss=self._settings.token_issuer,
            aud=AUDIENCE,
            version_id=snapshot.version_id,
            generated_at=snapshot.generated_at,
            sha256=hashlib.sha256(document).hexdigest(),
            size_bytes=len(document),
        )
        uri = self._objects.uri(document_uri(snapshot.version_id))
        await self._objects.put(uri, document, create=True)
        written = await self._objects.read(uri, self._settings.bus_snapshot_limit_bytes)
        read_document(written or b"", claims)
        await failpoint("snapshot.written")
        key = await self._keyring.active()
        token = await jwt.signed(msgspec.json.encode(claims), key["kid"], self._keyring)
        pointer = Pointer(version_id=snapshot.version_id, generated_at=snapshot.generated_at, token=token)
        await self._objects.put(self._objects.uri(LATEST), msgspec.json.encode(pointer))

    async def _forget(self, version_id: str) -> None:
        before = self._database.clock.now() - _KEEP
        kept = {self._objects.uri(LATEST), self._objects.uri(document_uri(version_id))}
        async for found in self._objects.list_under(self._objects.uri(f"{FOLDER}/")):
            if found.uri not in kept and found.modified_at < before:
                await self._objects.delete(found.uri)


async def _orgs(connection: Connection, orgs: list[Row], now: datetime) -> list[OrgSnapshot]:
    ids = [row["org_id"] for row in orgs]
    versions = _by_org(await _sql.snapshot_versions(connection, org_ids=ids))
    services = _by_org(await _sql.snapshot_services(connection, org_ids=ids))
    routes = _by_org(await _sql.snapshot_routes(connection, org_ids=ids))
    acls = _by_org(await _sql.snapshot_acls(connection, org_ids=ids))
    limits = _by_org(await _sql.snapshot_limits(connection, org_ids=ids))
    keys = _by_org(await _sql.snapshot_keys(connection, org_ids=ids))
    found = []
    for row in orgs:
        org = Org(row["org_id"], row["name"], now)
        found.append(
            OrgSnapshot(
                org_id=org.org_id,
                org=org.name,
                versions={each["kind"]: each["version"] for each in versions[org.org_id]},
                services=[SERVICE.document(each, org) for each in services[org.org_id]],
                routes=[ROUTE.document(each, org) for each in routes[org.org_id]],
                acls=[ACL.document(each, org) for each in acls[org.org_id]],
                limits=[LIMIT.document(each, org) for each in limits[org.org_id]],
                keys=[_key(each) for each in keys[org.org_id]],
            )
        )
    return found


def _by_org(rows: Iterable[Row]) -> defaultdict[UUID, list[Any]]:
    grouped: defaultdict[UUID, list[Any]] = defaultdict(list)
    for row in rows:
        grouped[row["org_id"]].append(row)
    return grouped


def _key(row: Row) -> SealedKey:
    return SealedKey(
        service=row["service"],
        number=row["number"],
        sealed=row["sealed"],
        expires_at=row["expires_at"],
        polled_at=row["polled_at"],
    )
