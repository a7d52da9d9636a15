"""Signers of tokens: ES256 with PEM files, and the choice between them and AWS KMS."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Final, Literal, Protocol

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from interlock.errors import ConfigurationError

_ALGORITHM: Final = ec.ECDSA(SHA256())
ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Order of the curve P-256."""


@dataclass(frozen=True)
class NewKey:
    """A key that a signer can use from now on."""

    jwk: Mapping[str, str]
    """The public key."""
    kms_key: str | None = None
    """The ARN in KMS; None for a PEM file, which is named after its kid."""
    made_here: bool = True
    """False for a key that an operator created, who also has to delete it."""

    @property
    def kid(self) -> str:
        return self.jwk["kid"]

    @property
    def handle(self) -> str:
        return self.kms_key or self.kid


class Signer(Protocol):
    elsewhere: ClassVar[bool]
    """True if a signature is a network request, so that callers should request many concurrently."""

    async def make(self) -> NewKey: ...
    async def sign(self, handle: str, message: bytes) -> bytes:
        """Returns 64 bytes, r and s, with the smaller of the two valid values of s."""
        ...

    async def discard(self, handle: str) -> None:
        """Deletes a key. Idempotent."""
        ...

    async def close(self) -> None: ...


class PemSigner:
    """Signs with a folder of private keys that all gateways and dispatchers share."""

    elsewhere: ClassVar[bool] = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._private: dict[str, ec.EllipticCurvePrivateKey] = {}

    async def make(self) -> NewKey:
        key = ec.generate_private_key(ec.SECP256R1())
        made = NewKey(jwk_of(key.public_key()))
        self._write(made.kid, key)
        return made

    async def sign(self, handle: str, message: bytes) -> bytes:
        return raw_signature(self.private(handle).sign(message, _ALGORITHM))

    async def discard(self, handle: str) -> None:
        self._path(handle).unlink(missing_ok=True)
        self._private.pop(handle, None)

    async def close(self) -> None:
        self._private.clear()

    def private(self, kid: str) -> ec.EllipticCurvePrivateKey:
        if kid not in self._private:
            self._private[kid] = self._read(kid)
        return self._private[kid]

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
                "share keys_dir), or create a new key with `interlock signing-key rotate`."
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigurationError(f"{self._path(kid)} is not an elliptic-curve private key; restore the file.")
        return key


class Signers:
    """The signers of a process. Both kinds stay usable while an installation switches from one to the other."""

    def __init__(
        self, directory: Path, *, kind: Literal["pem", "kms"], kms_key: str | None, endpoint: str | None
    ) -> None:
        self.pem = PemSigner(directory)
        self._kind = kind
        self._kms_key = kms_key
        self._endpoint = endpoint

    @cached_property
    def kms(self) -> Signer:
        # Costs 0.5 s of imports and needs the extra `aws`, which only installations with keys in KMS pay.
        from interlock.stores.kms import KmsSigner  # noqa: PLC0415

        return KmsSigner(self._kms_key, endpoint=self._endpoint)

    @property
    def of_new_keys(self) -> Signer:
        return self.kms if self._kind == "kms" else self.pem

    async def close(self) -> None:
        if "kms" in self.__dict__:
            await self.kms.close()


def raw_signature(der: bytes) -> bytes:
    """Converts to the format of JWTs, with the smaller `s`, so that nobody can derive a second valid signature."""
    r, s = decode_dss_signature(der)
    return r.to_bytes(32) + min(s, ORDER - s).to_bytes(32)


def jwk_of(key: ec.EllipticCurvePublicKey) -> dict[str, str]:
    numbers = key.public_numbers()
    x, y = (_base64(n.to_bytes(32)) for n in (numbers.x, numbers.y))
    # RFC 7638: the kid is the thumbprint of the key.
    thumbprint = hashlib.sha256(f'{{"crv":"P-256","kty":"EC","x":"{x}","y":"{y}"}}'.encode()).digest()
    return {"kty": "EC", "crv": "P-256", "x": x, "y": y, "kid": _base64(thumbprint), "alg": "ES256", "use": "sig"}


def public_key(jwk: Mapping[str, str]) -> ec.EllipticCurvePublicKey:
    """Parses a JWK. Raises ValueError if it is not a point on the curve."""
    x, y = (int.from_bytes(base64.urlsafe_b64decode(jwk[part] + "==")) for part in ("x", "y"))
    return ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key()


def _base64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
