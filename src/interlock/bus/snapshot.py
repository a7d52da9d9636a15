"""A snapshot of the registry: one signed JSON document from which a dispatcher starts without asking for every org.

    {root}/snavio/registry/snapshot/{version_id}.json   the document, never written twice
    {root}/snavio/registry/snapshot/latest.json         which of them counts, with its digest and size, signed

It is published in two phases: the document first, read back and judged as a dispatcher would, then the pointer. Whoever
loads it trusts nothing but the signature, and reads the entries by the types and rules of the registry itself.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Struct

from interlock.bus.caches import ACL_TTLS, TTLS
from interlock.bus.entries import check_limit, check_route
from interlock.bus.model import Acl, Fairness, Key, Kind, Limit, Route, Service
from interlock.bus.secrets import Seal, purpose
from interlock.errors import BadRequest, ConfigurationError
from interlock.wire import AclRequest, LimitRequest, RouteRequest, ServiceRequest

FOLDER: Final = "snavio/registry/snapshot"
LATEST: Final = f"{FOLDER}/latest.json"
AUDIENCE: Final = "interlock.bus.snapshot"
POINTER_LIMIT: Final = 16_384
SKEW_SECONDS: Final = 5.0
MOST_SECONDS: Final = TTLS[Kind.KEYS].stale
"""A document that is older tells nothing that could still be used."""


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
    """`latest.json`. What counts is in the token; the rest is for people."""

    version_id: str
    generated_at: datetime
    token: str


class Claims(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is signed."""

    iss: str
    aud: str
    version_id: str
    generated_at: datetime
    sha256: str
    size_bytes: int


class BadSnapshot(Exception):
    """It is not used. `reason` is a short code for the metric."""

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
    """The document that was signed, if every entry in it is one that the registry would take."""
    if len(data) != claims.size_bytes or hashlib.sha256(data).hexdigest() != claims.sha256:
        raise BadSnapshot("corrupted", "The document is not the one that was signed.")
    try:
        found = _documents.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadSnapshot("malformed", f"The document cannot be read: {error}") from None
    if (found.version_id, found.generated_at) != (claims.version_id, claims.generated_at):
        raise BadSnapshot("corrupted", "The document is another one than its pointer says.")
    for org in found.orgs:
        _judge(org, found.generated_at)
    return found


def _judge(org: OrgSnapshot, generated_at: datetime) -> None:
    """By the rules of the registry. What refers to something must have it in the same document."""
    services = {service.name for service in org.services}
    try:
        for route in org.routes:
            check_route(route, generated_at)
        for limit in org.limits:
            check_limit(limit)
    except BadRequest as error:
        raise BadSnapshot("invalid", f"A route or limit of {org.org} is none: {error.detail}") from None
    targets = {entry.target for kind in (org.routes, org.acls, org.limits) for entry in _entries(kind)} - {None}
    sources = {acl.source for acl in org.acls} | {limit.source for limit in org.limits if limit.source is not None}
    named = targets | {key.service for key in org.keys} | {_service(org, source) for source in sources}
    if not named <= services:
        raise BadSnapshot("invalid", f"The document names services of {org.org} that it does not have.")


def _entries(entries: Iterable[Any]) -> Iterable[Any]:
    """Any: routes, ACLs and limits have a target each, and nothing else in common."""
    return entries


def _service(org: OrgSnapshot, source: str) -> str:
    owner, _, service = source.partition("/")
    if owner != org.org:
        raise BadSnapshot("invalid", f"A source of {org.org} is another org's.")
    return service


class OrgEntries(Struct, frozen=True):
    """The registry of one org, as caches keep it, and as of when."""

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
        raise BadSnapshot("sealed", f"A key of {org.org} does not open.") from None
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
