"""Many messages read at once: what can be asked of all of them together is asked in C, once.

Only a batch in which every message is plainly one is read here. Anything out of the ordinary, an escape, a mark of a
replay, a number that needs care or a field that is wrong, and the whole batch is left to `envelope.read`, which can say
what is wrong with which. Tests hold the two against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec
from msgspec import Raw

from interlock.bus.canonical import all_canonical
from interlock.bus.envelope import COMMAND_SENT, FIELDS, Envelope, Message, well_named

_COLONS: Final = 12
"""In a message without its payload: after its ten keys, and two in its timestamp. One more belongs to a key that comes
twice, since no other field may hold any."""
_HEX: Final = bytes(b"x"[0] if chr(byte) in "0123456789abcdef" else byte for byte in range(256))
"""Every hexadecimal digit an x, so that ids and signatures all look like these: compared at once, faster than by any
pattern. No x is left alone: it is none of what they may hold, and nothing else becomes one."""
_ID, _HMAC = b"xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx", b"x" * 64
_TIMESTAMP: Final = FIELDS["metadata.timestamp"][0]
_decoder: Final = msgspec.json.Decoder(list[Message])


def read_all(messages: Sequence[bytes | Raw], *, limit: int) -> list[Envelope] | None:
    """The messages, as `read` gives each; None where one of them needs a closer look.

    `Raw` was found to be one JSON value by whoever cut it out; bytes that nobody has looked at could be something that
    is a message only between its neighbours, and are not read here.
    """
    if any(kind is not Raw for kind in set(map(type, messages))):
        return None
    text = b"[%b]" % b",".join(messages)
    if len(text) > limit and max(map(len, messages)) > limit:
        return None
    if b"\\" in text or b'"replay' in text:
        return None
    try:
        found = _decoder.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    forms = all_canonical([message.command.payload for message in found])
    if forms is None or text.count(b":") != _COLONS * len(found) + b"".join(forms).count(b":"):
        return None
    return _envelopes(found, forms) if _well_marked(found) else None


def _well_marked(messages: Sequence[Message]) -> bool:
    """Whether all ids and signatures are spelt as they must be."""
    marks = "\n".join([f"{message.metadata.id}\n{message.metadata.hmac}" for message in messages]).encode()
    return b"x" not in marks and marks.translate(_HEX) == b"\n".join([_ID, _HMAC] * len(messages))


def _envelopes(messages: Sequence[Message], payloads: Sequence[bytes]) -> list[Envelope] | None:
    """None if one is not well formed. What many messages share is looked at once."""
    named: set[tuple[str, str, str]] = set()
    moments: dict[str, float] = {}
    envelopes = []
    for message, payload in zip(messages, payloads, strict=True):
        metadata, command = message.metadata, message.command
        target, name, version_id, timestamp = command.target, command.name, metadata.version_id, metadata.timestamp
        if (target, name, version_id) not in named:
            if not well_named(target, name, version_id):
                return None
            named.add((target, name, version_id))
        if timestamp not in moments:
            moment = _moment(timestamp)
            if moment is None:
                return None
            moments[timestamp] = moment
        if metadata.type != COMMAND_SENT:
            return None
        signed = (
            f'{{"command":{{"name":"{name}","payload":{payload.decode()},"target":"{target}"}},"metadata":{{'
            f'"id":"{metadata.id}","timestamp":"{timestamp}","type":"{COMMAND_SENT}","version_id":"{version_id}"}}}}'
        )
        envelopes.append(Envelope(metadata, command, payload, signed.encode(), moments[timestamp]))
    return envelopes


def _moment(timestamp: str) -> float | None:
    if _TIMESTAMP.fullmatch(timestamp) is None:
        return None
    try:
        return datetime.fromisoformat(timestamp).timestamp()
    except (ValueError, OverflowError):
        return None
