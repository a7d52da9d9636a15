"""The keys behind capability tokens: private halves with their signers, public ones in Postgres for every verifier."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import msgspec
from cryptography.hazmat.primitives.asymmetric import ec

from interlock.adapters.postgres import Database, Row, queries
from interlock.adapters.signers import NewKey, Signer, Signers, public_key
from interlock.errors import ConfigurationError, Conflict, InterlockError
from interlock.failpoints import failpoint
from interlock.wire import SigningKeyView

_sql = queries("principals")
_REFRESH_SECONDS = 1.0
"""Unknown kids cause a look at the database at most this often, however many forged tokens arrive."""
_TRUST_SECONDS = 60.0
"""How long known keys are taken for granted, at most: a process must learn of a retirement before it takes effect."""


@dataclass(frozen=True)
class _Held:
    """Where the private half of a key is."""

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
        self._looked_at = float("-inf")
        self._trusted_until = datetime.min.replace(tzinfo=UTC)
        self._looking = asyncio.Lock()

    async def rotate(self) -> SigningKeyView:
        """New tokens are signed with the new key at once: every claim reads which key is active."""
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
                "Another rotation made a new signing key at this very moment; rotate again if you need one more.",
                code="rotated_meanwhile",
            ) from None
        self._looked_at = float("-inf")
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
                f"kms_key_id leads to {made.kms_key}, which signs already or has been retired. Point its alias at a "
                "new key and rotate again, or leave kms_key_id unset to have rotations make keys.",
                code="same_signing_key",
            )

    async def ensure(self) -> None:
        """A first key, when there is none. Of two that processes make at the same moment, the later one signs."""
        if not any(key.retired_at is None for key in await self.keys()):
            try:
                await self.rotate()
            except Conflict:
                await self.refresh()

    async def keys(self) -> list[SigningKeyView]:
        async with self._database.connection() as connection:
            return [_view(row) for row in await _sql.verifying_keys(connection)]

    async def active(self) -> dict[str, Any]:
        """The public half of the key that signs now."""
        async with self._database.connection() as connection:
            row = await _sql.active_signing_key(connection)
        if row is None:
            raise ConfigurationError("There is no signing key; make one with `interlock keys rotate`.")
        jwk: dict[str, Any] = msgspec.json.decode(row["public_jwk"])
        return jwk

    async def sign(self, kid: str, message: bytes) -> bytes:
        """64 bytes, r and s, of which the smaller s."""
        held = self._held.get(kid) or await self._find(kid)
        try:
            signature = await held.signer.sign(held.handle, message)
        except InterlockError:
            self._signs = False
            raise
        self._signs = True
        return signature

    async def require_signing(self) -> None:
        """Before something is begun that needs a signature at its end: when the last one failed, whether one works."""
        if not self._signs:
            active = [key.kid for key in await self.keys() if key.retired_at is None]
            await self.sign(active[0], b"whether it signs again")

    async def signs_elsewhere(self, kid: str) -> bool:
        """Whether a signature takes a request to another machine, so that many should be asked for at once."""
        held = self._held.get(kid) or await self._find(kid)
        return held.signer.elsewhere

    async def _find(self, kid: str) -> _Held:
        async with self._database.connection() as connection:
            row = await _sql.signing_key(connection, kid=kid)
        if row is None:
            raise ConfigurationError(f"There is no signing key {kid}; make one with `interlock keys rotate`.")
        held = self._held[kid] = self._place(row)
        # What is signed here will be verified here: nobody should wait for the next look to know the key.
        self._public[kid] = public_key(msgspec.json.decode(row["public_jwk"]))
        return held

    def _place(self, row: Row) -> _Held:
        kms_key = row["kms_key"]
        return _Held(self.signers.pem, row["kid"]) if kms_key is None else _Held(self.signers.kms, kms_key)

    async def public(self, kid: str) -> ec.EllipticCurvePublicKey | None:
        """The key, while its signatures count."""
        if not self._knows(kid):
            await self._look_for(kid, time.monotonic())
        return self._public.get(kid)

    def _knows(self, kid: str) -> bool:
        return kid in self._public and self._database.clock.now() < self._trusted_until

    async def _look_for(self, kid: str, asked_at: float) -> None:
        """One look serves all who asked before it, so forged kids cost no more than one look per second."""
        async with self._looking:
            if self._knows(kid) or self._looked_at >= asked_at:
                return
            await asyncio.sleep(max(0.0, self._looked_at + _REFRESH_SECONDS - time.monotonic()))
            await self.refresh()

    async def jwks(self) -> list[dict[str, Any]]:
        await self.refresh()
        return self._jwks

    async def refresh(self) -> None:
        async with self._database.connection() as connection:
            looked_at = time.monotonic()
            rows = await _sql.verifying_keys(connection)
        self._looked_at = looked_at
        ends = [row["verify_until"] for row in rows if row["verify_until"] is not None]
        self._trusted_until = min([self._database.clock.now() + self._trust, *ends])
        self._jwks = [msgspec.json.decode(row["public_jwk"]) for row in rows]
        self._public = {jwk["kid"]: public_key(jwk) for jwk in self._jwks}

    async def forget_expired(self) -> int:
        """Drops keys whose last token has expired, with their private halves where those were made by a rotation.

        Those go before the commit: after a crash between the two, the next pass finds the row and does it again.
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
