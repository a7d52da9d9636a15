"""Accepted commands on their way to telemetry and archive: what their targets get, written once for both.

    [[latency, [body, …]], …]      a part for each request; the latency, in ms, of what the fast stage has delivered, or
                                   null: those were handed on, and are told of when they are decided

Longer texts are compressed. They are there for seconds, and would cost the database more than the commands themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.json import Decoder
from zstandard import ZstdCompressor, ZstdDecompressor

from interlock.bus import telling
from interlock.bus.archived import ArchivedCommand
from interlock.bus.delivered import Delivered, told
from interlock.wire.bus_events import encoded

Part = tuple[float | None, Sequence[str]]

_INLINE: Final = 2_000
"""Bytes: up to here PostgreSQL keeps a value beside its row, and compressing it would gain nothing."""
_MAGIC: Final = b"\x28\xb5\x2f\xfd"
"""What compressed text begins with, and no JSON."""


class _Metadata(Struct, frozen=True, gc=False):
    id: UUID
    timestamp: datetime
    version_id: str
    replay_id: UUID | UnsetType = UNSET
    replay_reason: str | UnsetType = UNSET


class _Command(Struct, frozen=True, gc=False):
    source: str
    target: str
    name: str
    payload: Raw


class _Accepted(Struct, frozen=True, gc=False):
    """A delivered body, as the archive reads it."""

    metadata: _Metadata
    command: _Command


_told: Final = Decoder(list[tuple[float | None, list[Delivered]]])
_kept: Final = Decoder(list[tuple[float | None, list[_Accepted]]])
_compressor: Final = ZstdCompressor(level=1)
_decompressor: Final = ZstdDecompressor()


def packed(parts: Sequence[Part]) -> bytes:
    text = ",".join([f"[{'null' if latency is None else latency},[{','.join(bodies)}]]" for latency, bodies in parts])
    whole = f"[{text}]".encode()
    return whole if len(whole) <= _INLINE else _compressor.compress(whole)


def _unpacked(pack: bytes) -> bytes:
    return _decompressor.decompress(pack) if pack.startswith(_MAGIC) else pack


def events_of(pack: bytes) -> Iterator[bytes]:
    """What telemetry says of those that were delivered."""
    for latency, commands in _told.decode(_unpacked(pack)):
        if latency is not None:
            for each in commands:
                yield _event(each, latency)


def _event(sent: Delivered, latency: float) -> bytes:
    metadata, command = sent.metadata, sent.command
    if metadata.replayed is UNSET:
        return told(sent, latency).encode()
    said = metadata, command.source, command.target, command.name
    return encoded(telling.delivered(*said, path="fast", latency_seconds=latency / 1000))


def commands_of(pack: bytes, accepted_at: datetime) -> Iterator[ArchivedCommand]:
    """All of them, as the archive keeps them."""
    for _, commands in _kept.decode(_unpacked(pack)):
        for each in commands:
            metadata, command = each.metadata, each.command
            yield ArchivedCommand(
                command_id=metadata.id,
                source=command.source,
                target=command.target,
                name=command.name,
                timestamp=metadata.timestamp,
                version_id=metadata.version_id,
                accepted_at=accepted_at,
                payload=command.payload,
                replay_id=metadata.replay_id,
                replay_reason=metadata.replay_reason,
            )
