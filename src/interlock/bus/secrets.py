"""Secrets of services, sealed: the database has nothing that a signature could be made with.

The key they are sealed with is a file beside the signing keys, shared by all processes of the platform.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from interlock.errors import ConfigurationError

SECRET_BYTES: Final = 32
_NONCE_BYTES: Final = 12


class Seal:
    """AES-256-GCM. What a secret is for is bound to it: a row that was exchanged for another does not open."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "bus-seal.key"
        self._cipher: AESGCM | None = None

    def seal(self, secret: bytes, purpose: str) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._opened().encrypt(nonce, secret, purpose.encode())

    def open(self, sealed: bytes, purpose: str) -> bytes:
        try:
            return self._opened().decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], purpose.encode())
        except InvalidTag:
            raise ConfigurationError(
                f"A secret in the database was not sealed with {self._file}. Put the file of this installation there; "
                "if it is lost, give every service a new key with `interlock key rotate`."
            ) from None

    def _opened(self) -> AESGCM:
        if self._cipher is None:
            self._cipher = AESGCM(self._read() if self._file.exists() else self._make())
        return self._cipher

    def _make(self) -> bytes:
        """Under another name first, and never over one that is there: of two processes, one makes it for both."""
        self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = self._file.with_name(f".{self._file.name}.{secrets.token_hex(8)}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, secrets.token_bytes(SECRET_BYTES))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        try:
            os.link(fresh, self._file)
        except FileExistsError:
            return self._read()
        finally:
            fresh.unlink()
        return self._read()

    def _read(self) -> bytes:
        key = self._file.read_bytes()
        if len(key) != SECRET_BYTES:
            raise ConfigurationError(f"{self._file} must have {SECRET_BYTES} bytes; restore it from a copy.")
        return key


def purpose(org_id: object, service: str, number: int) -> str:
    """What a version of a service's secret is sealed for."""
    return f"bus-key/{org_id}/{service}/{number}"
