"""A command as its target gets it.

It is made for each command, so it is written as text: all that stands between quotes here was let in by patterns that
know no character which JSON would escape. Tests hold it against the structs that readers use.
"""

from __future__ import annotations

from typing import Final

from msgspec import Raw, Struct
from msgspec.json import Decoder, Encoder

from interlock.bus.envelope import Envelope, Metadata


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


def delivered(text: str) -> Delivered:
    return _decoder.decode(text)
