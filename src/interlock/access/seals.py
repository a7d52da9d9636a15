"""Encryption of service secrets: the database alone does not allow anybody to sign.

The encryption key is a file in the folder of the signing keys, shared by all processes of the platform. Each process
that seals or opens secrets calls `require_seal` when it starts: on a second host without the file, it would create
another key and seal secrets that no other process can open.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from interlock.errors import ConfigurationError
from interlock.stores.postgres import Connection, Database, queries

SECRET_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_CHECK: Final = b"interlock"
_CHECK_PURPOSE: Final = "seal-check"

_sql = queries(__name__, "seals")


class Seal:
    """AES-256-GCM. The purpose of a secret is authenticated with it: a secret that was moved to another row does not
    open."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "bus-seal.key"
        self._cipher: AESGCM | None = None

    def seal(self, secret: bytes, purpose: str) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._opened().encrypt(nonce, secret, purpose.encode())

    def open(self, sealed: bytes, purpose: str) -> bytes:
        if self._cipher is None and not self._file.exists():
            raise ConfigurationError(f"{self._file} does not exist, and the database has secrets. {self._remedy}")
        try:
            return self._opened().decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], purpose.encode())
        except InvalidTag:
            raise ConfigurationError(
                f"A secret in the database was not sealed with {self._file}. {self._remedy}"
            ) from None

    @property
    def _remedy(self) -> str:
        return (
            f"Copy {self._file.name} there from the keys_dir of the host that was started first (mode 0600). If no "
            "host has it any more, the sealed secrets are lost: docs/bus.md explains how to start with a new one."
        )

    def _opened(self) -> AESGCM:
        if self._cipher is None:
            self._cipher = AESGCM(self._read() if self._file.exists() else self._make())
        return self._cipher

    def _make(self) -> bytes:
        """Writes a temporary file and links it, which fails if the key exists: of two processes, one creates it for
        both."""
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
            raise ConfigurationError(
                f"{self._file} must have {SECRET_BYTES} bytes, but has {len(key)}; restore it from a copy."
            )
        return key


async def require_seal(database: Database, seal: Seal) -> None:
    """Raises ConfigurationError unless `seal` opens the secrets of this database.

    The first start writes a check value. It creates the key file before that row: after a crash in between, the next
    start uses the file. Of several first starts, one writes the row, and a host with another file is refused.
    """

    async def work(connection: Connection) -> None:
        stored = await _sql.check_value(connection)
        if stored is None:
            first = await _sql.first_key(connection)
            if first is not None:
                seal.open(first["sealed"], purpose(first["org_id"], first["service"], first["number"]))
            await _sql.keep_check_value(connection, sealed=seal.seal(_CHECK, _CHECK_PURPOSE))
            stored = await _sql.check_value(connection)
        seal.open(stored, _CHECK_PURPOSE)

    await database.run(work)


def purpose(org_id: object, service: str, number: int) -> str:
    """Returns the purpose of one version of a service's secret."""
    return f"bus-key/{org_id}/{service}/{number}"
