"""Verifies the messages of a plain batch together: one call into C for all of them, instead of several for each.

The result is that of the checks of `verification.py` for each message. An escape, a replay field, a number that needs
care, an invalid field, a ban, a second key or a wrong signature sends the whole batch through those checks, which find
the error. Tests compare the two.

Measured with batches of 100 commands: 5.0 µs of CPU per command instead of 8.5 µs, of about 19 µs that a command costs
the gateway in all. The two tables below are part of that: regular expressions instead would cost 1.7 µs more.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw

from interlock.bus.path.caches import Tenant
from interlock.strict_json import MAX_DEPTH, opened
from interlock.wire import commands
from interlock.wire.commands import COMMAND_SENT, Envelope, Message

_COLONS: Final = 12
"""Colons of a message without its payload: one after each of its ten keys, and two in its timestamp. One more belongs
to a key that appears twice, since no other field may contain any."""
_ZEROS: Final = bytes(48 if 48 <= byte <= 57 else 32 for byte in range(256))
"""Maps digits to 0 and all else to a space, so that a substring search finds long numbers. A regular expression costs
1.0 µs more per command."""
_LONG: Final = b"0" * 16
_HEX: Final = bytes(b"x"[0] if chr(byte) in "0123456789abcdef" else byte for byte in range(256))
"""Maps hexadecimal digits to x, so that one comparison checks all ids and signatures: a regular expression for each
costs 0.7 µs more per command. A literal x is refused first."""
_ID, _HMAC = b"xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx", b"x" * 64
_decoder: Final = msgspec.json.Decoder(list[Message])
_payloads: Final = msgspec.json.Decoder(list[Any], float_hook=commands.number)
_ERRORS: Final = (msgspec.MsgspecError, ValueError, RecursionError)


def verify_together(
    raws: Sequence[bytes | Raw], source: str, tenant: Tenant, now: float, *, limit: int, window: float
) -> list[Envelope] | None:
    """Returns the messages if all of them pass the shield, or None if one may not."""
    envelopes = read_together(raws, limit=limit) if len(raws) > 1 and not tenant.bans else None
    if envelopes is None:
        return None
    moments = {envelope.sent_at for envelope in envelopes}
    versions = {envelope.metadata.version_id for envelope in envelopes}
    if len(versions) != 1 or min(moments) < now - window or max(moments) > now + window:
        return None
    key = tenant.keys.get((source, versions.pop()))
    if key is None or (key.expires_at is not None and key.expires_at <= now):
        return None
    return envelopes if _have_signatures_of(key.secret, envelopes) else None


def _have_signatures_of(secret: bytes, envelopes: Sequence[Envelope]) -> bool:
    """Compares all signatures at once, in constant time."""
    expected = [commands.signature(secret, envelope.signed) for envelope in envelopes]
    return hmac.compare_digest("".join(expected), "".join([envelope.metadata.hmac for envelope in envelopes]))


def read_together(raws: Sequence[bytes | Raw], *, limit: int) -> list[Envelope] | None:
    """Returns None if a message of the batch is not plain.

    A `Raw` is known to be one JSON value. Bytes are not: a piece of text could be a message only together with its
    neighbours.
    """
    if any(kind is not Raw for kind in set(map(type, raws))):
        return None
    text = b"[%b]" % b",".join(raws)
    if len(text) > limit and max(map(len, raws)) > limit:
        return None
    if b"\\" in text or b'"replay' in text:
        return None
    try:
        found = _decoder.decode(text)
    except _ERRORS:
        return None
    forms = _canonical([message.command.payload for message in found])
    if forms is None or text.count(b":") != _COLONS * len(found) + b"".join(forms).count(b":"):
        return None
    if not _has_plain_ids(found):
        return None
    try:
        return _envelopes(found, forms)
    except ValueError:
        return None


def _canonical(raws: Sequence[Raw]) -> list[bytes] | None:
    """Returns the canonical form of each payload, or None if one needs a closer look. The caller finds repeated keys:
    they make the form shorter by a colon."""
    text = b"[%b]" % b",".join(raws)
    try:
        values = _payloads.decode(text)
        form = commands.encoder.encode(values)
    except _ERRORS:
        return None
    if _LONG in form.translate(_ZEROS) or commands.has_astral(form) or any(map(_may_be_deep, raws)):
        return None
    return [bytes(raw) for raw in raws] if form == text else [commands.encoder.encode(value) for value in values]


def _may_be_deep(raw: Raw) -> bool:
    return len(raw) > MAX_DEPTH and opened(bytes(raw)) > MAX_DEPTH


def _has_plain_ids(found: Sequence[Message]) -> bool:
    marks = "\n".join([f"{message.metadata.id}\n{message.metadata.hmac}" for message in found]).encode()
    return b"x" not in marks and marks.translate(_HEX) == b"\n".join([_ID, _HMAC] * len(found))


def _envelopes(found: Sequence[Message], payloads: Sequence[bytes]) -> list[Envelope]:
    """Raises ValueError for an invalid field."""
    envelopes = []
    for message, payload in zip(found, payloads, strict=True):
        metadata, command = message.metadata, message.command
        commands.check_names(command.target, command.name, metadata.version_id)
        if metadata.type != COMMAND_SENT:
            raise ValueError
        signed = commands.signed_bytes(metadata, command, payload)
        envelopes.append(Envelope(metadata, command, payload, signed, commands.seconds(metadata.timestamp)))
    return envelopes
