"""The message of a command: what a producer sends, read strictly, and what its signature is over.

The signature is HMAC-SHA256, in hex, over the canonical JSON (RFC 8785) of the whole message without `metadata.hmac`:
nothing in a message can be exchanged without the key, neither its target nor its id. Whoever reads a message otherwise
than its signer did is refused: every name has one spelling, no key comes twice, no field is unknown.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from interlock.bus.canonical import NotCanonical, canonical, refuse_twins

COMMAND_SENT: Final = "snavio.command-sent"
MESSAGE_LIMIT: Final = 262_144
"""Bytes of a whole message: what SQS takes."""

_NAME: Final = r"[a-z0-9]+(?:[._-][a-z0-9]+)*"
_UUID: Final = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_VERSION: Final = r"hmac-v[1-9][0-9]{0,8}"
_NAMED: Final = "must be 1 to 64 lower-case letters and digits, with single `.`, `_` or `-` between them"
FIELDS: Final[dict[str, tuple[re.Pattern[str], str]]] = {
    "metadata.id": (re.compile(_UUID), "must be a UUID in lower case, such as 0192f0c1-7a1b-7c3d-8e4f-5a6b7c8d9e0f"),
    "metadata.timestamp": (
        re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?Z"),
        "must be a time in UTC, such as 2026-01-31T12:00:00.000Z",
    ),
    "metadata.type": (re.compile(r"snavio\.command-sent"), f"must be {COMMAND_SENT!r}"),
    "metadata.version_id": (re.compile(_VERSION), "must name a version of your key, such as hmac-v1"),
    "metadata.hmac": (re.compile(r"[0-9a-f]{64}"), "must be 64 hexadecimal digits in lower case"),
    "command.target": (re.compile(rf"(?=.{{1,64}}(?:\n|\Z)){_NAME}"), _NAMED),
    "command.name": (re.compile(rf"(?=.{{1,64}}(?:\n|\Z)){_NAME}"), _NAMED),
}
"""What each field must look like. Every value has one spelling, so that texts may be compared."""
_ALL: Final = re.compile("\n".join(pattern.pattern for pattern, _ in FIELDS.values()))
"""One match for all of them takes a quarter of the time; no field can hold the line break between two."""
_NAMES: Final = re.compile(
    "\n".join(FIELDS[field][0].pattern for field in ("command.target", "command.name", "metadata.version_id"))
)
_LONGEST_REASON: Final = 200

_KEYS_UNSIGNED: Final = 1
"""`hmac` is in the message and not in what is signed."""


class Metadata(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    id: str
    timestamp: str
    type: str
    version_id: str
    hmac: str
    replayed: bool | UnsetType = UNSET
    """True, with the two below, in what a replay sends, and in nothing else."""
    replay_id: str | UnsetType = UNSET
    replay_reason: str | UnsetType = UNSET

    @property
    def speaks_of_replay(self) -> bool:
        return not (self.replayed is UNSET and self.replay_id is UNSET and self.replay_reason is UNSET)


class Command(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    target: str
    name: str
    payload: Raw


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    metadata: Metadata
    command: Command


class Envelope(Struct, frozen=True, gc=False):
    """A message that is well formed. Nothing is known yet of who sent it, or whether the signature is right."""

    metadata: Metadata
    command: Command
    payload: bytes
    """Canonical."""
    signed: bytes
    """What the signature is over."""
    sent_at: float
    """`metadata.timestamp`, in seconds since 1970."""


class BadMessage(Exception):
    """The message is none. `reason` is a short code for telemetry, the text a sentence for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


MALFORMED: Final = "malformed"
TOO_LARGE: Final = "too_large"
SOURCE_PRESENT: Final = "command_source_present"
MISSING_HMAC: Final = "missing_hmac"
REPLAY_CLAIMED: Final = "replay_claimed"

_decoder: Final = msgspec.json.Decoder(Message)
_any: Final = msgspec.json.Decoder()
_text: Final = msgspec.json.Encoder()


def read(raw: bytes | Raw, *, limit: int = MESSAGE_LIMIT, replays: bool = False) -> Envelope:
    """Reads one message. `replays`: the caller is the platform's own replay, which may say so in the message."""
    text = bytes(raw)
    if len(text) > limit:
        raise BadMessage(TOO_LARGE, f"The message has more than {limit} bytes; store what is large, and send its name.")
    try:
        message = _decoder.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _diagnosis(text, error) from None
    metadata, command = message.metadata, message.command
    sent_at = _check_fields(metadata, command)
    if metadata.speaks_of_replay:
        _check_replay(metadata, allowed=replays)
    try:
        payload = canonical(command.payload)
        signed = signed_bytes(metadata, command, payload)
        _refuse_twins(text, signed)
    except NotCanonical as error:
        raise BadMessage(MALFORMED, f"The message cannot be read: {error}.") from None
    return Envelope(metadata, command, payload, signed, sent_at)


def _check_fields(metadata: Metadata, command: Command) -> float:
    """When the message says it was sent."""
    values = (
        metadata.id,
        metadata.timestamp,
        metadata.type,
        metadata.version_id,
        metadata.hmac,
        command.target,
        command.name,
    )
    if _ALL.fullmatch("\n".join(values)) is None:
        for (field, (pattern, must)), value in zip(FIELDS.items(), values, strict=True):
            if pattern.fullmatch(value) is None:
                raise BadMessage(MALFORMED, f"`{field}` {must}.")
    try:
        return datetime.fromisoformat(metadata.timestamp).timestamp()
    except (ValueError, OverflowError):
        raise BadMessage(MALFORMED, "`metadata.timestamp` is a time that does not exist.") from None


def well_named(target: str, name: str, version_id: str) -> bool:
    return _NAMES.fullmatch(f"{target}\n{name}\n{version_id}") is not None


def _check_replay(metadata: Metadata, *, allowed: bool) -> None:
    if not allowed:
        raise BadMessage(REPLAY_CLAIMED, "Only the platform's replay marks a message as replayed; leave replay_* out.")
    named = isinstance(metadata.replay_id, str) and FIELDS["metadata.id"][0].fullmatch(metadata.replay_id) is not None
    told = isinstance(metadata.replay_reason, str) and 1 <= len(metadata.replay_reason) <= _LONGEST_REASON
    if metadata.replayed is not True or not named or not told:
        raise BadMessage(
            MALFORMED,
            "A replayed message has `replayed: true`, a UUID as `replay_id`, and a `replay_reason` of at most "
            f"{_LONGEST_REASON} characters.",
        )


def _refuse_twins(raw: bytes, signed: bytes) -> None:
    """As `canonical` does it for the payload alone: without escapes, a colon that is missing belonged to a key."""
    if b"\\" in raw:
        refuse_twins(raw)
    elif raw.count(b":") != signed.count(b":") + _KEYS_UNSIGNED:
        raise NotCanonical("an object has the same key twice")


def signed_bytes(metadata: Metadata, command: Command, payload: bytes) -> bytes:
    """The canonical JSON of the message without its signature; `payload` is canonical already.

    All that is written between quotes here is of characters that JSON does not escape.
    """
    return _SIGNED % (
        command.name.encode(),
        payload,
        command.target.encode(),
        metadata.id.encode(),
        _replay(metadata) if metadata.speaks_of_replay else b"",
        metadata.timestamp.encode(),
        metadata.type.encode(),
        metadata.version_id.encode(),
    )


def _replay(metadata: Metadata) -> bytes:
    return b'"replay_id":%b,"replay_reason":%b,"replayed":%b,' % (
        _text.encode(metadata.replay_id),
        _text.encode(metadata.replay_reason),
        _text.encode(metadata.replayed),
    )


def signature(secret: bytes, signed: bytes) -> str:
    return signatures(secret, [signed])[0]


def signatures(secret: bytes, texts: Iterable[bytes]) -> list[str]:
    """HMAC by its definition, as two hashes that have begun with the key: a third of what Python's `hmac` takes."""
    begun_inner, begun_outer = _begun(secret)
    found = []
    for text in texts:
        inner, outer = begun_inner.copy(), begun_outer.copy()
        inner.update(text)
        outer.update(inner.digest())
        found.append(outer.hexdigest())
    return found


@lru_cache(maxsize=4096)
def _begun(secret: bytes) -> tuple[hashlib._Hash, hashlib._Hash]:
    """To be copied."""
    key = (secret if len(secret) <= _BLOCK else hashlib.sha256(secret).digest()).ljust(_BLOCK, b"\0")
    return hashlib.sha256(key.translate(_INNER)), hashlib.sha256(key.translate(_OUTER))


_BLOCK: Final = 64
"""Of SHA-256, in bytes."""
_INNER, _OUTER = (bytes(byte ^ pad for byte in range(256)) for pad in (0x36, 0x5C))


def proves(secret: bytes, envelope: Envelope) -> bool:
    """Whether the message was signed with this secret; takes as long for a wrong guess as for a right one."""
    return hmac.compare_digest(signature(secret, envelope.signed), envelope.metadata.hmac)


def proves_all(secret: bytes, envelopes: Sequence[Envelope]) -> bool:
    """The same of all of them together; which of them was not, it does not say."""
    wanted = "".join(signatures(secret, [envelope.signed for envelope in envelopes]))
    return hmac.compare_digest(wanted, "".join([envelope.metadata.hmac for envelope in envelopes]))


def compose(
    secret: bytes,
    *,
    command_id: str,
    timestamp: str,
    version_id: str,
    target: str,
    name: str,
    payload: bytes,
    replay: tuple[str, str] | None = None,
) -> bytes:
    """A signed message, ready to be sent. `payload` is any JSON text; `replay` is the replay's id and reason."""
    marks = {} if replay is None else {"replayed": True, "replay_id": replay[0], "replay_reason": replay[1]}
    metadata = Metadata(
        id=command_id,
        timestamp=timestamp,
        type=COMMAND_SENT,
        version_id=version_id,
        hmac="",
        **marks,  # type: ignore[arg-type]
    )
    command = Command(target=target, name=name, payload=Raw(canonical(payload)))
    signed = signed_bytes(metadata, command, bytes(command.payload))
    proof = msgspec.structs.replace(metadata, hmac=signature(secret, signed))
    return _text.encode(Message(metadata=proof, command=command))


def _diagnosis(raw: bytes, error: BaseException) -> BadMessage:
    """What is wrong with a message that is none, as precisely as its sender needs it."""
    found = salvage(raw)
    if "command.source" in found:
        return BadMessage(
            SOURCE_PRESENT, "`command.source` is set by the platform, from who sent the message; leave it out."
        )
    if found and "metadata.hmac" not in found:
        return BadMessage(MISSING_HMAC, "`metadata.hmac` is missing: sign the message with the key of your service.")
    detail = "it is nested too deeply" if isinstance(error, RecursionError) else str(error) or type(error).__name__
    return BadMessage(MALFORMED, f"The message is no command: {detail}.")


def salvage(raw: bytes) -> dict[str, str]:
    """Fields of a message that is none, by their dotted names, for the telemetry that tells of it; {} if it is no JSON.

    What is longer than any valid value is cut.
    """
    try:
        whole = _any.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}
    found: dict[str, str] = {}
    for block in ("metadata", "command"):
        fields: Any = whole.get(block) if isinstance(whole, dict) else None
        if isinstance(fields, dict):
            found |= {f"{block}.{key}": str(value)[:_LONGEST] for key, value in fields.items() if key in _TOLD}
    return found


_LONGEST: Final = 200
_TOLD: Final = frozenset({"id", "timestamp", "type", "version_id", "hmac", "target", "name", "source"})
_SIGNED: Final = (
    b'{"command":{"name":"%b","payload":%b,"target":"%b"},'
    b'"metadata":{"id":"%b",%b"timestamp":"%b","type":"%b","version_id":"%b"}}'
)
