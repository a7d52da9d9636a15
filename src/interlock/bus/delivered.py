"""A command as its target gets it: the message as it was sent, with the source that its credentials have proven."""

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
    command = envelope.command
    sent = DeliveredCommand(source, command.target, command.name, Raw(envelope.payload))
    return _encoder.encode(Delivered(envelope.metadata, sent)).decode()


def delivered(text: str) -> Delivered:
    return _decoder.decode(text)
