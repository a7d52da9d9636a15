"""Capability tokens for development: HS256, with one secret that all processes of a machine read from a file.

Whoever can verify such a token can make one. That is why settings allow it on loopback alone, why the secret is in no
database and no JWK Set, and why only capability tokens are signed with it: object tokens, URLs and receipts are not.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Final

from interlock.errors import ConfigurationError

FILE: Final = "development.hs256"
_BYTES: Final = 32


class SharedSecret:
    """In the folder of signing keys. Made by whoever needs it first."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE

    @cached_property
    def kid(self) -> str:
        """Names the secret without giving it away. No ES256 key has such a name."""
        return f"development-{hashlib.sha256(b'kid of ' + self._secret).hexdigest()[:32]}"

    def sign(self, message: bytes) -> bytes:
        return hmac.digest(self._secret, message, "sha256")

    def verifies(self, message: bytes, signature: bytes) -> bool:
        return hmac.compare_digest(self.sign(message), signature)

    @cached_property
    def _secret(self) -> bytes:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self._path.exists():
            self._make()
        return self._read()

    def _make(self) -> None:
        """Complete from the moment that it is there: of two processes that make one, the first one's counts."""
        draft = self._path.with_name(f".{FILE}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_BYTES))
            with suppress(FileExistsError):
                os.link(draft, self._path)
        finally:
            draft.unlink()

    def _read(self) -> bytes:
        if stat.S_IMODE(self._path.stat().st_mode) & 0o077:
            raise ConfigurationError(f"{self._path} can be read by others than its owner: run `chmod 600` on it.")
        secret = self._path.read_bytes()
        if len(secret) != _BYTES:
            raise ConfigurationError(f"{self._path} does not hold {_BYTES} bytes: delete it, and another one is made.")
        return secret
