"""Many messages read at once: what can be asked of all of them together is asked in C, once.

Only a batch in which every message is plainly one is read here. Anything out of the ordinary, an escape, a mark of a
replay, a number that needs care or a field that is wrong, and the whole batch is left to `envelope.read`, which can say
what is wrong with which. Tests hold the two against each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Final

import msgspec
from msgspec import Raw

from interlock.bus.canonical import all_canonical
from interlock.bus.envelope import COMMAND_SENT, FIELDS, Envelope, Message, well_named

_COLONS: Final = 12
"""In a message without its payload: after its ten keys, and two in its timestamp. One more belongs to a key that comes
twice, since no other field may hold any."""
_OWN: Final = re.compile("\n".join(FIELDS[f"metadata.{each}"][0].pattern for each in ("id", "timestamp", "hmac")))
"""What is another in each message."""
_decoder: Final = msgspec.json.Decoder(list[Message])


def read_all(messages: Sequence[bytes | Raw], *, limit: int) -> list[Envelope] | None:
    """The messages, as `read` gives each; None where one of them needs a closer look.

    `Raw` was found to be one JSON value by whoever cut it out; bytes that nobody has looked at could be something that
    is a message only between its neighbours, and are not read here.
    """
    if any(type(message) is not Raw or len(message) > limit for message in messages):
        return None
    text = b"[%b]" % b",".join(messages)
    if b"\\" in text or b'"replay' in text:
        return None
    try:
        found = _decoder.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    forms = all_canonical([message.command.payload for message in found])
    if forms is None or text.count(b":") != _COLONS * len(found) + sum(form.count(b":") for form in forms):
        return None
    envelopes = [*_envelopes(found, forms)]
    return envelopes if len(envelopes) == len(messages) else None


def _envelopes(messages: Sequence[Message], payloads: Sequence[bytes]) -> Iterator[Envelope]:
    """Ends at the first that is not well formed."""
    named: set[tuple[str, str, str]] = set()
    for message, payload in zip(messages, payloads, strict=True):
        metadata, command = message.metadata, message.command
        target, name, version_id, timestamp = command.target, command.name, metadata.version_id, metadata.timestamp
        if _OWN.fullmatch(f"{metadata.id}\n{timestamp}\n{metadata.hmac}") is None or metadata.type != COMMAND_SENT:
            return
        if (target, name, version_id) not in named:
            if not well_named(target, name, version_id):
                return
            named.add((target, name, version_id))
        try:
            sent_at = datetime.fromisoformat(timestamp).timestamp()
        except (ValueError, OverflowError):
            return
        signed = (
            f'{{"command":{{"name":"{name}","payload":{payload.decode()},"target":"{target}"}},"metadata":{{'
            f'"id":"{metadata.id}","timestamp":"{timestamp}","type":"{COMMAND_SENT}","version_id":"{version_id}"}}}}'
        )
        yield Envelope(metadata, command, payload, signed.encode(), sent_at)
