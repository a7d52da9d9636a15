"""Snapshots of the registry: one signed JSON document from which a dispatcher starts without a query per org.

    {root}/snavio/registry/snapshot/{version_id}.json   the document, written once
    {root}/snavio/registry/snapshot/latest.json         the pointer: current version, digest and size, signed

Publication has two phases: the document, read back and validated as a dispatcher would; then the pointer. The loader
trusts only the signature, and validates the entries by the rules of the registry. If a snapshot cannot be used, the
dispatcher reads the registry.
"""

from __future__ import annotations

import base64
import binascii
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
from msgspec import Struct

from interlock.access import jwt
from interlock.access.jwt import PublicKeys
from interlock.access.keyring import Keyring
from interlock.access.secrets import Seal, purpose
from interlock.bus import metrics
from interlock.bus.model import Acl, Fairness, Key, Kind, Limit, Route, Service
from interlock.bus.path.caches import ACL_TTLS, TTLS
from interlock.bus.registry.entries import ACL, LIMIT, ROUTE, SERVICE, Org, check_limit, check_route
from interlock.clock import Clock
from interlock.errors import BadRequest, ConfigurationError, InterlockError, TooLarge
from interlock.failpoints import failpoint
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.objects import Objects
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.wire.bus_registry import AclRequest, LimitRequest, RouteRequest, ServiceRequest

FOLDER: Final = "snavio/registry/snapshot"
LATEST: Final = f"{FOLDER}/latest.json"
AUDIENCE: Final = "interlock.bus.snapshot"
POINTER_LIMIT: Final = 16_384
SKEW_SECONDS: Final = 5.0
MAX_SECONDS: Final = TTLS[Kind.KEYS].stale
"""Maximum age of a document: by then all its entries have expired."""


class Ttl(Struct, frozen=True, forbid_unknown_fields=True):
    fresh_ttl: float
    stale_ttl: float


class SealedKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    service: str
    number: int
    sealed: str
    expires_at: datetime | None
    polled_at: datetime | None


class OrgSnapshot(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    org_id: UUID
    org: str
    versions: dict[str, int]
    services: list[ServiceRequest]
    routes: list[RouteRequest]
    acls: list[AclRequest]
    limits: list[LimitRequest]
    keys: list[SealedKey]


class Snapshot(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version_id: str
    generated_at: datetime
    ttl_policy: dict[str, Ttl]
    orgs: list[OrgSnapshot]


class Pointer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`latest.json`. Only the token is trusted; the other fields are for people."""

    version_id: str
    generated_at: datetime
    token: str


class Claims(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The signed content of the token."""

    iss: str
    aud: str
    version_id: str
    generated_at: datetime
    sha256: str
    size_bytes: int


class BadSnapshot(Exception):
    """Raised for a snapshot that cannot be used. `reason` is a short code for the metric."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def ttl_policy() -> dict[str, Ttl]:
    named = {"routing": TTLS[Kind.ROUTES], "hmac": TTLS[Kind.KEYS]}
    named |= {f"acl.{level.value}": ttl for level, ttl in ACL_TTLS.items()}
    return {name: Ttl(ttl.fresh, ttl.stale) for name, ttl in named.items()}


def document_uri(version_id: str) -> str:
    return f"{FOLDER}/{version_id}.json"


_documents: Final = msgspec.json.Decoder(Snapshot)


def read_document(data: bytes, claims: Claims) -> Snapshot:
    """Returns the signed document, or raises `BadSnapshot` if the registry would refuse one of its entries."""
    if len(data) != claims.size_bytes or hashlib.sha256(data).hexdigest() != claims.sha256:
        raise BadSnapshot("corrupted", "The document is not the one that was signed.")
    try:
        found = _documents.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadSnapshot("malformed", f"The document cannot be read: {error}") from None
    if (found.version_id, found.generated_at) != (claims.version_id, claims.generated_at):
        raise BadSnapshot("corrupted", "The document is not the one that its pointer names.")
    for org in found.orgs:
        _judge(org, found.generated_at)
    return found


def _judge(org: OrgSnapshot, generated_at: datetime) -> None:
    """Validates an org by the rules of the registry. References must resolve within the document."""
    services = {service.name for service in org.services}
    try:
        for route in org.routes:
            check_route(route, generated_at)
        for limit in org.limits:
            check_limit(limit)
    except BadRequest as error:
        raise BadSnapshot("invalid", f"A route or limit of {org.org} is invalid: {error.detail}") from None
    targets = {entry.target for kind in (org.routes, org.acls, org.limits) for entry in _entries(kind)} - {None}
    sources = {acl.source for acl in org.acls} | {limit.source for limit in org.limits if limit.source is not None}
    named = targets | {key.service for key in org.keys} | {_service(org, source) for source in sources}
    if not named <= services:
        raise BadSnapshot("invalid", f"The document refers to services of {org.org} that it does not contain.")


def _entries(entries: Iterable[Any]) -> Iterable[Any]:
    """Any: routes, ACLs and limits have only `target` in common."""
    return entries


def _service(org: OrgSnapshot, source: str) -> str:
    owner, _, service = source.partition("/")
    if owner != org.org:
        raise BadSnapshot("invalid", f"A source of {org.org} belongs to another org.")
    return service


class OrgEntries(Struct, frozen=True):
    """The registry of one org in the form of the caches, with its time."""

    as_of: float
    versions: dict[Kind, int]
    entries: dict[Kind, list[Any]]


def entries_of(org: OrgSnapshot, as_of: datetime, seal: Seal) -> OrgEntries:
    known = {kind.value for kind in Kind}
    return OrgEntries(
        as_of.timestamp(),
        {Kind(kind): version for kind, version in org.versions.items() if kind in known},
        {
            Kind.SERVICES: [Service(f"{org.org}/{each.name}", each.dispatch_mode) for each in org.services],
            Kind.KEYS: [_key(org, key, seal) for key in org.keys],
            Kind.ROUTES: [_route(route) for route in org.routes],
            Kind.ACLS: [
                Acl(acl.source, acl.target, acl.name, acl.sensitivity, _seconds(acl.expires_at)) for acl in org.acls
            ],
            Kind.LIMITS: [_limit(limit) for limit in org.limits],
        },
    )


def _key(org: OrgSnapshot, key: SealedKey, seal: Seal) -> Key:
    try:
        sealed = base64.b64decode(key.sealed)
        secret = seal.open(sealed, purpose(org.org_id, key.service, key.number))
    except (binascii.Error, ValueError, ConfigurationError):
        raise BadSnapshot("sealed", f"A key of {org.org} cannot be decrypted.") from None
    return Key(
        source=f"{org.org}/{key.service}",
        version_id=f"hmac-v{key.number}",
        secret=secret,
        current=key.expires_at is None,
        expires_at=_seconds(key.expires_at),
        polled_at=_seconds(key.polled_at),
    )


def _route(route: RouteRequest) -> Route:
    return Route(
        target=route.target,
        name=route.name,
        queue=route.queue,
        dag=route.dag,
        job=route.job,
        dedupe_mode=route.dedupe_mode,
        dedupe_seconds=route.dedupe_seconds,
        fairness=Fairness(**msgspec.structs.asdict(route.fairness)),
        expires_at=_seconds(route.expires_at),
    )


def _limit(limit: LimitRequest) -> Limit:
    return Limit(
        target=limit.target or "",
        name=limit.name or "",
        rate=limit.rate,
        window_seconds=limit.window_seconds,
        burst=limit.burst,
        cooldown_seconds=limit.cooldown_seconds,
        enforcement=limit.enforcement,
        source=None if limit.source is None else limit.source.partition("/")[2],
    )


def _seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()


# The loader

log = structlog.get_logger()

_AGAIN: Final = timedelta(seconds=30)
"""Pause after a snapshot that could not be used, so that not every org causes another attempt."""


class Snapshots:
    """Loads the latest snapshot, and keeps it until it is too old; the next org then loads a new one."""

    def __init__(self, objects: Objects, keys: PublicKeys, seal: Seal, clock: Clock, settings: Settings) -> None:
        self._objects = objects
        self._keys = keys
        self._seal = seal
        self._clock = clock
        self._settings = settings
        self._orgs: dict[UUID, OrgSnapshot] = {}
        self._as_of: datetime | None = None
        self._tried_at: datetime | None = None

    async def org(self, org_id: UUID) -> OrgEntries | None:
        """Returns None if the caller should read the registry, which is always correct, only slower."""
        try:
            await self._look()
            found = self._orgs.get(org_id)
            if found is None or self._as_of is None:
                return None
            return entries_of(found, self._as_of, self._seal)
        except BadSnapshot as error:
            self._fail(error.reason, str(error))
        except (InterlockError, OSError) as error:
            self._fail("unavailable", str(error))
        except Exception as error:
            # No content of a snapshot may make a command fail.
            self._fail("unexpected", type(error).__name__)
            log.exception("bus.snapshot_broke_its_reader")
        return None

    def _fail(self, reason: str, detail: str) -> None:
        metrics.SNAPSHOT_LOAD_FAILURES.labels(reason).inc()
        log.warning("bus.snapshot_not_used", reason=reason, detail=detail)

    async def _look(self) -> None:
        now = self._clock.now()
        if self._as_of is not None and now - self._as_of < timedelta(seconds=MAX_SECONDS):
            return
        self._orgs, self._as_of = {}, None
        if self._tried_at is not None and now - self._tried_at < _AGAIN:
            return
        self._tried_at = now
        claims = await self._claims()
        self._check_age(claims, now)
        if claims.size_bytes > self._settings.bus_snapshot_limit_bytes:
            raise BadSnapshot("too_large", f"The snapshot has {claims.size_bytes} bytes.")
        snapshot = read_document(await self._document(claims), claims)
        self._orgs = {org.org_id: org for org in snapshot.orgs}
        self._as_of = snapshot.generated_at

    async def _claims(self) -> Claims:
        """Returns the claims of the pointer, if a key of the platform has signed them."""
        try:
            data = await self._objects.read(self._objects.uri(LATEST), POINTER_LIMIT)
            pointer = None if data is None else msgspec.json.decode(data, type=Pointer)
        except (TooLarge, msgspec.MsgspecError, ValueError) as error:
            raise BadSnapshot("malformed", f"The pointer cannot be read: {error}") from None
        if pointer is None:
            raise BadSnapshot("missing", "There is no snapshot.")
        kid = jwt.kid_of(pointer.token)
        key = None if kid is None else await self._keys.public(kid)
        payload = None if key is None else jwt.payload_of(pointer.token, key)
        try:
            claims = msgspec.convert(payload, Claims)
        except msgspec.ValidationError:
            raise BadSnapshot("unsigned", "The pointer was not signed by the platform.") from None
        if claims.aud != AUDIENCE or claims.iss != self._settings.token_issuer:
            raise BadSnapshot("unsigned", "The signed content is not a snapshot of this platform.")
        return claims

    def _check_age(self, claims: Claims, now: datetime) -> None:
        age = now - claims.generated_at
        if age >= timedelta(seconds=MAX_SECONDS):
            raise BadSnapshot("expired", f"The snapshot is {age.total_seconds():.0f} s old.")
        if age < -timedelta(seconds=SKEW_SECONDS):
            raise BadSnapshot("future", "The snapshot is from the future.")

    async def _document(self, claims: Claims) -> bytes:
        try:
            uri = self._objects.uri(document_uri(claims.version_id))
            data = await self._objects.read(uri, claims.size_bytes)
        except TooLarge:
            raise BadSnapshot("corrupted", "The document is larger than the one that was signed.") from None
        if data is None:
            raise BadSnapshot("missing", "The document does not exist.")
        return data


_sql = queries(__name__, "snapshots")

_ORGS_AT_ONCE: Final = 200
_KEEP: Final = timedelta(minutes=10)
"""Documents are kept this long: a dispatcher reads the document soon after the pointer."""
_FIRST: Final = UUID(int=0)


class SnapshotPublisher(Periodic):
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
                keys=[_sealed_key(each) for each in keys[org.org_id]],
            )
        )
    return found


def _by_org(rows: Iterable[Row]) -> defaultdict[UUID, list[Any]]:
    grouped: defaultdict[UUID, list[Any]] = defaultdict(list)
    for row in rows:
        grouped[row["org_id"]].append(row)
    return grouped


def _sealed_key(row: Row) -> SealedKey:
    return SealedKey(
        service=row["service"],
        number=row["number"],
        sealed=row["sealed"],
        expires_at=row["expires_at"],
        polled_at=row["polled_at"],
    )
