"""Accepted commands on their way to the archive: what their targets get, all of a write together.

Longer texts are compressed. They are there for seconds, and would cost the database more than the commands themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Raw, Struct
from msgspec.json import Decoder
from zstandard import ZstdCompressor, ZstdDecompressor

_INLINE: Final = 2_000
"""Bytes: up to here PostgreSQL keeps a value beside its row, and compressing it would gain nothing."""
_MAGIC: Final = b"\x28\xb5\x2f\xfd"
"""What compressed text begins with, and no JSON."""


class AcceptedMetadata(Struct, frozen=True, gc=False):
    id: str
    timestamp: str
    version_id: str
    replay_id: str | None = None
    replay_reason: str | None = None


class AcceptedCommand(Struct, frozen=True, gc=False):
    source: str
    target: str
    name: str
    payload: Raw


class Accepted(Struct, frozen=True, gc=False):
    """What was answered 202: delivered at once, or handed on to be. What became of it afterwards is telemetry."""

    metadata: AcceptedMetadata
    command: AcceptedCommand


_decoder: Final = Decoder(list[Accepted])
_compressor: Final = ZstdCompressor(level=1)
_decompressor: Final = ZstdDecompressor()


def packed(bodies: Sequence[str]) -> bytes:
    whole = f"[{','.join(bodies)}]".encode()
    return whole if len(whole) <= _INLINE else _compressor.compress(whole)


def unpacked(pack: bytes) -> list[Accepted]:
    return _decoder.decode(_decompressor.decompress(pack) if pack.startswith(_MAGIC) else pack)
