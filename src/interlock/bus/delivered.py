"""A command as its target gets it, and what else is written of every one that is accepted.

These are made for each command, so they are written as text: all that stands between quotes here was let in by patterns
that know no character which JSON would escape. Tests hold them against the structs that readers use.
"""

from __future__ import annotations

from typing import Final

from msgspec import Raw, Struct
from msgspec.json import Decoder, Encoder

from interlock.bus.envelope import Envelope, Metadata
from interlock.wire.bus_events import CommandDelivered


class DeliveredCommand(Struct, frozen=True, gc=False):
    source: str
    """`org/service`."""
    target: str
    name: str
    payload: Raw


class Delivered(Struct, frozen=True, gc=False):
    metadata: Metadata
    command: DeliveredCommand


_encoder: Final = Encoder()
_decoder: Final = Decoder(Delivered)


def body(envelope: Envelope, source: str) -> str:
    metadata, command = envelope.metadata, envelope.command
    if metadata.speaks_of_replay:
        sent = DeliveredCommand(source, command.target, command.name, Raw(envelope.payload))
        return _encoder.encode(Delivered(metadata, sent)).decode()
    return (
        f'{{"metadata":{{"id":"{metadata.id}","timestamp":"{metadata.timestamp}","type":"{metadata.type}",'
        f'"version_id":"{metadata.version_id}","hmac":"{metadata.hmac}"}},"command":{{"source":"{source}",'
        f'"target":"{command.target}","name":"{command.name}","payload":{envelope.payload.decode()}}}}}'
    )


def told(sent: Delivered, latency_ms: float) -> str:
    """`snavio.command.delivered`, of the fast stage, for a command that is no replay."""
    metadata, command = sent.metadata, sent.command
    return (
        f'{{"event":"{_DELIVERED}","command_id":"{metadata.id}","source":"{command.source}","target":"{command.target}",'
        f'"command.name":"{command.name}","timestamp":"{metadata.timestamp}","path":"fast",'
        f'"dispatch_latency_ms":{latency_ms}}}'
    )


_DELIVERED: Final = str(CommandDelivered.__struct_config__.tag)


def delivered(text: str) -> Delivered:
    return _decoder.decode(text)
