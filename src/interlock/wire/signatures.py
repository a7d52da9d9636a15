"""How a webhook's call proves itself.

    X-Interlock-Signature: t=<unix seconds>,v1=<hex of HMAC-SHA256 over "{t}.{body}">[,v1=…]

While one secret takes over from another, there is a v1 for each.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from typing import Final

SIGNATURE: Final = "X-Interlock-Signature"
DELIVERY: Final = "X-Interlock-Delivery"
EVENT: Final = "X-Interlock-Event"
KEY_VERSION: Final = "X-Interlock-Key-Version"

_WRITTEN: Final = re.compile(r"t=([0-9]{1,12})((?:,v1=[0-9a-fA-F]{64}){1,5})", re.ASCII)


def signed(secrets: Sequence[str], moment: int, body: bytes) -> str:
    return f"t={moment}" + "".join(f",v1={_digest(secret, str(moment), body)}" for secret in secrets)


def signed_at(secrets: Sequence[str], signature: str, body: bytes) -> int | None:
    """When it was signed, in unix seconds; None if it was by none of the secrets. Every pair is compared, in the time
    that it takes: nothing tells how much of one was right."""
    written = _WRITTEN.fullmatch(signature)
    if written is None:
        return None
    given, right = written[2].lower().split(",v1=")[1:], False
    for secret in secrets:
        expected = _digest(secret, written[1], body)
        for one in given:
            right |= hmac.compare_digest(expected, one)
    return int(written[1]) if right else None


def _digest(secret: str, moment: str, body: bytes) -> str:
    return hmac.new(secret.encode(), f"{moment}.".encode() + body, hashlib.sha256).hexdigest()
