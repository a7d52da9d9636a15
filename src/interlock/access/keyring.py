"""The keys behind capability tokens: private halves as PEM files, public halves in Postgres for every verifier."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from interlock.adapters.postgres import Database, Row, queries
from interlock.errors import ConfigurationError, Conflict
from interlock.failpoints import failpoint
from interlock.wire import SigningKeyView

_sql = queries("principals")
_REFRESH_SECONDS = 1.0
"""Unknown kids cause a look at the database at most this often, however many forged tokens arrive."""
_TRUST_SECONDS = 60.0
"""How long known keys are taken for granted, at most: a process must learn of a retirement before it takes effect."""


class Keyring:
    def __init__(self, database: Database, directory: Path, *, verify_seconds: float) -> None:
        self._database = database
        self._directory = directory
        self._verify_seconds = verify_seconds
        self._trust = timedelta(seconds=min(_TRUST_SECONDS, verify_seconds / 2))
        self._private: dict[str, ec.EllipticCurvePrivateKey] = {}
        self._public: dict[str, ec.EllipticCurvePublicKey] = {}
        self._jwks: list[dict[str, Any]] = []
        self._looked_at = float("-inf")
        self._trusted_until = datetime.min.replace(tzinfo=UTC)
        self._looking = asyncio.Lock()

    async def rotate(self) -> SigningKeyView:
        """New tokens are signed with the new key at once: every claim reads which key is active."""
        key = ec.generate_private_key(ec.SECP256R1())
        jwk = _jwk(key.public_key())
        kid = jwk["kid"]
        self._write(kid, key)
        try:
            async with self._database.transaction() as connection:
                await _sql.retire_signing_keys(connection, seconds=self._verify_seconds)
                row = await _sql.insert_signing_key(connection, kid=kid, public_jwk=msgspec.json.encode(jwk).decode())
                await failpoint("rotate.before_commit")
        except asyncpg.UniqueViolationError:
            self._path(kid).unlink()
            raise Conflict(
                "Another rotation made a new signing key at this very moment; rotate again if you need one more.",
                code="rotated_meanwhile",
            ) from None
        self._looked_at = float("-inf")
        return _view(row)

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

    def private(self, kid: str) -> ec.EllipticCurvePrivateKey:
        if kid not in self._private:
            self._private[kid] = self._read(kid)
            self._public[kid] = self._private[kid].public_key()
        return self._private[kid]

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
        self._public = {jwk["kid"]: _public_key(jwk) for jwk in self._jwks}

    async def forget_expired(self) -> int:
        """Drops keys whose last token has expired, their PEM files included."""
        async with self._database.connection() as connection:
            rows = await _sql.delete_dead_signing_keys(connection)
        for row in rows:
            self._path(row["kid"]).unlink(missing_ok=True)
            self._private.pop(row["kid"], None)
        return len(rows)

    def _path(self, kid: str) -> Path:
        return self._directory / f"{kid}.pem"

    def _write(self, kid: str, key: ec.EllipticCurvePrivateKey) -> None:
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self._path(kid), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())

    def _read(self, kid: str) -> ec.EllipticCurvePrivateKey:
        try:
            key = serialization.load_pem_private_key(self._path(kid).read_bytes(), password=None)
        except FileNotFoundError:
            raise ConfigurationError(
                f"The active signing key {kid} is not in {self._directory}. Copy its PEM file there (all dispatchers "
                "share keys_dir), or make a new one with `interlock keys rotate`."
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigurationError(f"{self._path(kid)} is not an elliptic-curve private key.")
        return key


def _jwk(key: ec.EllipticCurvePublicKey) -> dict[str, str]:
    numbers = key.public_numbers()
    x, y = (base64.urlsafe_b64encode(n.to_bytes(32, "big")).rstrip(b"=").decode() for n in (numbers.x, numbers.y))
    # RFC 7638: the thumbprint names the key by what it is.
    thumbprint = hashlib.sha256(f'{{"crv":"P-256","kty":"EC","x":"{x}","y":"{y}"}}'.encode()).digest()
    kid = base64.urlsafe_b64encode(thumbprint).rstrip(b"=").decode()
    return {"kty": "EC", "crv": "P-256", "x": x, "y": y, "kid": kid, "alg": "ES256", "use": "sig"}


def _public_key(jwk: dict[str, Any]) -> ec.EllipticCurvePublicKey:
    x, y = (int.from_bytes(base64.urlsafe_b64decode(jwk[part] + "=="), "big") for part in ("x", "y"))
    return ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key()


def _view(row: Row) -> SigningKeyView:
    return SigningKeyView(
        kid=row["kid"],
        created_at=row["created_at"],
        retired_at=row["retired_at"],
        verify_until=row["verify_until"],
    )
