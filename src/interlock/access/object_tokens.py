"""Object tokens: ES256 JWTs that grant one attempt access to objects that the gateway serves from a directory.

A token is valid while its attempt holds the task. Files of other attempts under a readable prefix become visible when
they are committed.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hmac import compare_digest
from typing import Any, Final, Literal
from uuid import UUID, uuid4

import msgspec
from msgspec import Struct

from interlock.access import jwt
from interlock.access.keyring import Keyring
from interlock.access.prefixes import Prefix, canonical, canonical_all
from interlock.access.tokens import SMALL_SHARD, Claims, Time, kept_capability, shard_of
from interlock.clock import Clock
from interlock.errors import Forbidden, Unauthenticated
from interlock.stores.postgres import Database, queries
from interlock.wire.base import Attempt

AUDIENCE: Final = "trace.objects"
LEASE_SECONDS: Final = 2.0
"""Time for which a lease check is cached: a token may still read for this long after its lease ended."""
_CACHED: Final = 10_000
_SKEW_SECONDS: Final = 60

# Matches the part of a URI after the prefix of its dataset version.
_ATTEMPT: Final = re.compile(r"_attempts/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/([1-9][0-9]{0,9})/")

Method = Literal["GET", "HEAD", "LIST", "PUT", "POST", "DELETE"]

_sql = queries(__name__, "credentials")


class ObjectClaims(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Claims of an object token, as strict as those of a capability token."""

    iss: str
    aud: str
    sub: str
    exp: Time
    iat: Time
    jti: str
    org_id: UUID
    task_id: UUID
    attempt: Attempt
    lease: str
    """SHA-256 of the lease token, so that the holder of this token does not learn the lease token."""
    read_prefixes: list[str]
    write_prefixes: list[str]
    capability_id: UUID | None = None
    """Replaces the prefixes if the capability token has one as well."""
    shard: int = SMALL_SHARD
    """The shard of the task, which is otherwise part of the lease token."""


Place = tuple[str, UUID, int]
"""The prefix, task and number of an attempt."""
Uncommitted = Callable[[UUID, Sequence[Place]], Coroutine[Any, Any, set[str]]]


@dataclass(frozen=True)
class ObjectGrant:
    """The access that a valid token grants."""

    org_id: UUID
    task_id: UUID
    attempt: int
    read: Sequence[Prefix]
    write: Sequence[Prefix]
    uncommitted: Uncommitted = field(repr=False)

    def may(self, method: Method, uri: str) -> bool:
        """Checks the prefixes only. `allows` also checks that files under a readable prefix are committed."""
        if method == "LIST":
            return self._may_list(uri)
        if method in ("GET", "HEAD"):
            return any(prefix.has(uri) for prefix in (*self.read, *self.write))
        return method in ("PUT", "POST", "DELETE") and any(prefix.has(uri) for prefix in self.write)

    def _may_list(self, uri: str) -> bool:
        try:
            wanted = str(canonical(uri))
        except Forbidden:
            return False
        return uri == wanted and any(wanted.startswith(str(prefix)) for prefix in (*self.read, *self.write))

    async def allows(self, method: Method, uri: str) -> bool:
        if not self.may(method, uri):
            return False
        return method not in ("GET", "HEAD") or await self.visible([uri]) == [uri]

    async def visible(self, uris: Iterable[str]) -> list[str]:
        """Filters a listing to the files that the attempt may read: its own, and committed ones."""
        places = {uri: self._place(uri) for uri in uris if self.may("GET", uri)}
        others = sorted({place for place in places.values() if place is not None})
        hidden = await self.uncommitted(self.org_id, others) if others else set()
        return [
            uri for uri, place in places.items() if (self._is_own(uri) if place is None else place[0] not in hidden)
        ]

    def _is_own(self, uri: str) -> bool:
        return any(prefix.has(uri) for prefix in self.write)

    def _place(self, uri: str) -> Place | None:
        """Returns the attempt that a file belongs to. None for the attempt's own files and for files of no attempt."""
        if self._is_own(uri):
            return None
        for prefix in self.read:
            if prefix.has(uri) and (found := _ATTEMPT.match(uri, len(str(prefix)))):
                return uri[: found.end()], UUID(found[1]), int(found[2])
        return None


class ObjectTokens:
    def __init__(self, database: Database, keyring: Keyring, clock: Clock, *, issuer: str, root: str) -> None:
        self._database = database
        self._keyring = keyring
        self._clock = clock
        self._issuer = issuer
        self._root = root
        self._verified: OrderedDict[str, tuple[str, ObjectClaims, ObjectGrant]] = OrderedDict()
        self._held: OrderedDict[tuple[UUID, UUID, int, str], float] = OrderedDict()
        self._committed: OrderedDict[str, None] = OrderedDict()

    async def issue(self, capability: Claims, lease_token: UUID, expires_at: datetime, kid: str) -> str:
        """Issues a token for the prefixes of a verified capability token."""
        by_reference = capability.capability_id is not None
        claims = ObjectClaims(
            iss=self._issuer,
            aud=AUDIENCE,
            sub=capability.sub,
            exp=int(expires_at.timestamp()),
            iat=int(self._clock.now().timestamp()),
            jti=str(uuid4()),
            org_id=capability.org_id,
            task_id=capability.task_id,
            attempt=capability.attempt,
            lease=_lease_hash(lease_token),
            read_prefixes=[] if by_reference else capability.s3.read_prefixes,
            write_prefixes=[] if by_reference else capability.s3.write_prefixes,
            capability_id=capability.capability_id,
            shard=shard_of(lease_token),
        )
        return await jwt.signed(msgspec.json.encode(claims), kid, self._keyring)

    async def verify(self, token: str, *, to_write: bool = False) -> ObjectGrant:
        """Raises Unauthenticated, with the same message for every defect unless the token was valid once.

        `to_write` checks the lease again without the cache: an attempt must not replace files after it has committed
        them.
        """
        known = self._verified.get(token)
        if known is None:
            known = self._verified[token] = await self._verify_uncached(token)
            _bound(self._verified)
        kid, claims, grant = known
        if await self._keyring.public(kid) is None:
            raise _refused()
        if claims.exp <= self._clock.now().timestamp():
            raise Unauthenticated(
                "The object token has expired; request another with POST /v1/task/credentials.", code="token_expired"
            )
        if not await self._is_held(claims, believed=0.0 if to_write else LEASE_SECONDS):
            raise Unauthenticated("The attempt of this object token no longer holds its task.", code="token_expired")
        return grant

    async def _verify_uncached(self, token: str) -> tuple[str, ObjectClaims, ObjectGrant]:
        kid = jwt.kid_of(token)
        key = await self._keyring.public(kid) if kid is not None else None
        payload = jwt.payload_of(token, key) if key is not None else None
        if kid is None or payload is None:
            raise _refused()
        claims = self._checked(payload)
        return kid, claims, await self._grant(claims)

    def _checked(self, payload: dict[str, Any]) -> ObjectClaims:
        try:
            claims = msgspec.convert(payload, ObjectClaims, strict=True)
        except msgspec.ValidationError:
            raise _refused() from None
        good = (
            claims.iss == self._issuer
            and claims.aud == AUDIENCE
            and claims.sub == f"task:{claims.task_id}"
            and claims.iat <= self._clock.now().timestamp() + _SKEW_SECONDS
            and claims.iat < claims.exp
        )
        if not good:
            raise _refused()
        return claims

    async def _grant(self, claims: ObjectClaims) -> ObjectGrant:
        read, write = claims.read_prefixes, claims.write_prefixes
        if claims.capability_id is not None:
            kept = await kept_capability(self._database, claims.capability_id, claims.task_id, claims.attempt)
            if kept is None:
                raise _refused()
            read, write = kept.s3.read_prefixes, kept.s3.write_prefixes
        try:
            prefixes = canonical_all(read, self._root), canonical_all(write, self._root)
        except Forbidden:
            raise _refused() from None
        return ObjectGrant(claims.org_id, claims.task_id, claims.attempt, *prefixes, self._uncommitted)

    async def _is_held(self, claims: ObjectClaims, *, believed: float) -> bool:
        """Checks the lease, with a short cache: requests for many parts of a file must not cause a query each."""
        attempt = claims.org_id, claims.task_id, claims.attempt, claims.lease
        now = self._clock.now().timestamp()
        if 0 <= now - self._held.get(attempt, float("-inf")) < believed:
            return True
        async with self._database.connection() as connection:
            lease = await _sql.lease_held(
                connection,
                shard=claims.shard,
                task_id=claims.task_id,
                org_id=claims.org_id,
                attempt=claims.attempt,
            )
        if lease is None or not compare_digest(_lease_hash(lease), claims.lease):
            self._held.pop(attempt, None)
            return False
        self._held[attempt] = now
        _bound(self._held)
        return True

    async def _uncommitted(self, org_id: UUID, places: Sequence[Place]) -> set[str]:
        """Returns the prefixes of uncommitted attempts. Commits are final, so committed prefixes are cached."""
        unknown = [place for place in places if place[0] not in self._committed]
        if not unknown:
            return set()
        async with self._database.connection() as connection:
            rows = await _sql.uncommitted_among(
                connection,
                org_id=org_id,
                places=[place for place, _, _ in unknown],
                task_ids=[task_id for _, task_id, _ in unknown],
                attempts=[min(attempt, 2**31 - 1) for _, _, attempt in unknown],
            )
        hidden = {row["place"] for row in rows}
        self._committed |= {place: None for place, _, _ in unknown if place not in hidden}
        _bound(self._committed)
        return hidden


def _lease_hash(lease_token: UUID) -> str:
    return hashlib.sha256(lease_token.bytes).hexdigest()


def _bound(cache: OrderedDict[Any, Any]) -> None:
    while len(cache) > _CACHED:
        cache.popitem(last=False)


def _refused() -> Unauthenticated:
    return Unauthenticated("The object token is invalid.", code="bad_token")
