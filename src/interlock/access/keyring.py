"""Keys of capability tokens: signers hold the private keys, and Postgres holds the public ones for all verifiers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import msgspec
from cryptography.hazmat.primitives.asymmetric import ec

from interlock.errors import ConfigurationError, Conflict, InterlockError
from interlock.failpoints import failpoint
from interlock.stores.postgres import Database, Row, queries
from interlock.stores.signers import NewKey, Signer, Signers, public_key
from interlock.wire.access import SigningKeyView

_sql = queries(__name__, "principals")
_REFRESH_SECONDS = 1.0
"""Minimum interval between database reads for unknown kids, even if many forged tokens arrive."""
_TRUST_SECONDS = 60.0
"""Maximum age of cached keys: a process must notice that a key was retired before the retirement takes effect."""


@dataclass(frozen=True)
class _Held:
    """The location of a private key."""

    signer: Signer
    handle: str


class Keyring:
    def __init__(self, database: Database, signers: Signers, *, verify_seconds: float) -> None:
        self.signers = signers
        self._database = database
        self._verify_seconds = verify_seconds
        self._trust = timedelta(seconds=min(_TRUST_SECONDS, verify_seconds / 2))
        self._held: dict[str, _Held] = {}
        self._signs = True
        self._public: dict[str, ec.EllipticCurvePublicKey] = {}
        self._jwks: list[dict[str, Any]] = []
        self._refreshed_at = float("-inf")
        self._trusted_until = datetime.min.replace(tzinfo=UTC)
        self._refreshing = asyncio.Lock()

    async def rotate(self) -> SigningKeyView:
        """Creates a key. It signs all new tokens immediately, because every claim reads the active key."""
        signer = self.signers.of_new_keys
        made = await signer.make()
        if not made.made_here:
            await self._require_new(made)
        try:
            row = await self._replace(made)
        except asyncpg.UniqueViolationError:
            if made.made_here:
                await signer.discard(made.handle)
            raise Conflict(
                "Another rotation created a signing key at the same time; rotate again if you need another one.",
                code="rotated_meanwhile",
            ) from None
        self._refreshed_at = float("-inf")
        return _view(row)

    async def _replace(self, made: NewKey) -> Row:
        async with self._database.transaction() as connection:
            await _sql.retire_signing_keys(connection, seconds=self._verify_seconds)
            row: Row = await _sql.insert_signing_key(
                connection,
                kid=made.kid,
                public_jwk=msgspec.json.encode(made.jwk).decode(),
                kms_key=made.kms_key,
                made_here=made.made_here,
            )
            await failpoint("rotate.before_commit")
        return row

    async def _require_new(self, made: NewKey) -> None:
        async with self._database.connection() as connection:
            known = await _sql.signing_key(connection, kid=made.kid)
        if known is not None:
            raise Conflict(
                f"kms_key_id resolves to {made.kms_key}, which is already in use or retired. Point its alias to a "
                "new key and rotate again, or unset kms_key_id to let rotations create keys.",
                code="same_signing_key",
            )

    async def ensure(self) -> None:
        """Creates the first key if there is none. If two processes do so at the same time, the later key signs."""
        if not any(key.retired_at is None for key in await self.keys()):
            try:
                await self.rotate()
            except Conflict:
                await self.refresh()

    async def keys(self) -> list[SigningKeyView]:
        async with self._database.connection() as connection:
            return [_view(row) for row in await _sql.verifying_keys(connection)]

    async def active(self) -> dict[str, Any]:
        """Returns the public key of the active signing key."""
        async with self._database.connection() as connection:
            row = await _sql.active_signing_key(connection)
        if row is None:
            raise ConfigurationError("No signing key exists; create one with `interlock signing-key rotate`.")
        jwk: dict[str, Any] = msgspec.json.decode(row["public_jwk"])
        return jwk

    async def sign(self, kid: str, message: bytes) -> bytes:
        """Returns 64 bytes, r and s, with the smaller of the two valid values of s."""
        held = self._held.get(kid) or await self._find(kid)
        try:
            signature = await held.signer.sign(held.handle, message)
        except InterlockError:
            self._signs = False
            raise
        self._signs = True
        return signature

    async def require_signing(self) -> None:
        """Checks that signing works before work that needs a signature at its end.

        Skipped if the last signature worked.
        """
        if not self._signs:
            active = [key.kid for key in await self.keys() if key.retired_at is None]
            await self.sign(active[0], b"whether it signs again")

    async def signs_elsewhere(self, kid: str) -> bool:
        """Returns True if signing needs a network request, so that callers should sign concurrently."""
        held = self._held.get(kid) or await self._find(kid)
        return held.signer.elsewhere

    async def _find(self, kid: str) -> _Held:
        async with self._database.connection() as connection:
            row = await _sql.signing_key(connection, kid=kid)
        if row is None:
            raise ConfigurationError(
                f"Signing key {kid} does not exist; create one with `interlock signing-key rotate`."
            )
        held = self._held[kid] = self._place(row)
        # This process also verifies its own tokens; without this, it would wait for the next refresh.
        self._public[kid] = public_key(msgspec.json.decode(row["public_jwk"]))
        return held

    def _place(self, row: Row) -> _Held:
        kms_key = row["kms_key"]
        return _Held(self.signers.pem, row["kid"]) if kms_key is None else _Held(self.signers.kms, kms_key)

    async def public(self, kid: str) -> ec.EllipticCurvePublicKey | None:
        """Returns the public key while its signatures are valid, otherwise None."""
        if not self._knows(kid):
            await self._refresh_for(kid, time.monotonic())
        return self._public.get(kid)

    def _knows(self, kid: str) -> bool:
        return kid in self._public and self._database.clock.now() < self._trusted_until

    async def _refresh_for(self, kid: str, requested_at: float) -> None:
        """Refreshes for an unknown kid.

        One refresh serves all callers that waited for it, so forged kids cost one per second.
        """
        async with self._refreshing:
            if self._knows(kid) or self._refreshed_at >= requested_at:
                return
            await asyncio.sleep(max(0.0, self._refreshed_at + _REFRESH_SECONDS - time.monotonic()))
            await self.refresh()

    async def jwks(self) -> list[dict[str, Any]]:
        await self.refresh()
        return self._jwks

    async def refresh(self) -> None:
        async with self._database.connection() as connection:
            started_at = time.monotonic()
            rows = await _sql.verifying_keys(connection)
        self._refreshed_at = started_at
        ends = [row["verify_until"] for row in rows if row["verify_until"] is not None]
        self._trusted_until = min([self._database.clock.now() + self._trust, *ends])
        self._jwks = [msgspec.json.decode(row["public_jwk"]) for row in rows]
        self._public = {jwk["kid"]: public_key(jwk) for jwk in self._jwks}

    async def forget_expired(self) -> int:
        """Deletes keys whose last token has expired, with the private keys that a rotation created.

        The private keys are deleted before the commit: after a crash in between, the next pass finds the row and
        repeats it.
        """
        async with self._database.transaction() as connection:
            rows = await _sql.delete_dead_signing_keys(connection)
            for row in rows:
                self._held.pop(row["kid"], None)
                if row["made_here"]:
                    held = self._place(row)
                    await held.signer.discard(held.handle)
        return len(rows)


def _view(row: Row) -> SigningKeyView:
    return SigningKeyView(
        kid=row["kid"],
        created_at=row["created_at"],
        retired_at=row["retired_at"],
        verify_until=row["verify_until"],
    )
