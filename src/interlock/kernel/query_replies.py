"""Rows of a result as one JSON document that is no longer than it may be."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

_encoder = msgspec.json.Encoder()
_AROUND = len(b"[]")


class Rows:
    """Collects rows until the next one would be too much."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._rows: list[bytes] = []
        self.bytes = _AROUND
        self.full = False

    @property
    def count(self) -> int:
        return len(self._rows)

    def add(self, rows: Iterable[object]) -> bool:
        """False once there is no more room."""
        for row in rows:
            encoded = _encoder.encode(row)
            if self.bytes + len(encoded) + 1 > self._most:
                self.full = True
                return False
            self._rows.append(encoded)
            self.bytes += len(encoded) + 1
        return True

    def document(self) -> bytes:
        return b"[" + b",".join(self._rows) + b"]"
