"""What a dispatcher starts from: the newest snapshot, if all about it is right. If not, it asks the registry."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

import msgspec
import structlog

from interlock.access import compact
from interlock.access.compact import PublicKeys
from interlock.adapters.objects import Objects
from interlock.bus import metrics
from interlock.bus.secrets import Seal
from interlock.bus.snapshot import (
    AUDIENCE,
    LATEST,
    MOST_SECONDS,
    POINTER_LIMIT,
    SKEW_SECONDS,
    BadSnapshot,
    Claims,
    OrgEntries,
    OrgSnapshot,
    Pointer,
    document_uri,
    entries_of,
    read_document,
)
from interlock.clock import Clock
from interlock.errors import InterlockError, TooLarge
from interlock.settings import Settings

log = structlog.get_logger()

_AGAIN: Final = timedelta(seconds=30)
"""A snapshot that could not be used is looked for again after this, and not with every org that comes."""


class Snapshots:
    """Kept while it is young enough to be used, and looked for again by the first org that comes after that."""

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
        """None: ask the registry. That is always right, and only slower."""
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
            # Whatever a snapshot holds, a command must not fail because of it.
            self._fail("unexpected", type(error).__name__)
            log.exception("bus.snapshot_broke_its_reader")
        return None

    def _fail(self, reason: str, detail: str) -> None:
        metrics.SNAPSHOT_LOAD_FAILURES.labels(reason).inc()
        log.warning("bus.snapshot_not_used", reason=reason, detail=detail)

    async def _look(self) -> None:
        now = self._clock.now()
        if self._as_of is not None and now - self._as_of < timedelta(seconds=MOST_SECONDS):
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
        """Of the pointer, if one of the platform's keys has signed them."""
        try:
            data = await self._objects.read(self._objects.uri(LATEST), POINTER_LIMIT)
            pointer = None if data is None else msgspec.json.decode(data, type=Pointer)
        except (TooLarge, msgspec.MsgspecError, ValueError) as error:
            raise BadSnapshot("malformed", f"The pointer cannot be read: {error}") from None
        if pointer is None:
            raise BadSnapshot("missing", "There is no snapshot.")
        kid = compact.kid_of(pointer.token)
        key = None if kid is None else await self._keys.public(kid)
        payload = None if key is None else compact.payload_of(pointer.token, key)
        try:
            claims = msgspec.convert(payload, Claims)
        except msgspec.ValidationError:
            raise BadSnapshot("unsigned", "The pointer was not signed by the platform.") from None
        if claims.aud != AUDIENCE or claims.iss != self._settings.token_issuer:
            raise BadSnapshot("unsigned", "What was signed is no snapshot of this platform.")
        return claims

    def _check_age(self, claims: Claims, now: datetime) -> None:
        age = now - claims.generated_at
        if age >= timedelta(seconds=MOST_SECONDS):
            raise BadSnapshot("expired", f"The snapshot is {age.total_seconds():.0f} s old.")
        if age < -timedelta(seconds=SKEW_SECONDS):
            raise BadSnapshot("future", "The snapshot is from a time to come.")

    async def _document(self, claims: Claims) -> bytes:
        try:
            uri = self._objects.uri(document_uri(claims.version_id))
            data = await self._objects.read(uri, claims.size_bytes)
        except TooLarge:
            raise BadSnapshot("corrupted", "The document is larger than the one that was signed.") from None
        if data is None:
            raise BadSnapshot("missing", "The document is not there.")
        return data
