"""Parts of a capability token, to take one apart and to forge one that is almost valid."""

from __future__ import annotations

import base64
import json
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature


def b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def raw(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def part(token: str, index: int) -> dict[str, Any]:
    segment = token.split(".")[index]
    decoded: dict[str, Any] = json.loads(base64.urlsafe_b64decode(segment + "=" * (-len(segment) % 4)))
    return decoded


ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""The order of P-256: if (r, s) is a signature, (r, ORDER - s) is one, too."""


def es256(key: ec.EllipticCurvePrivateKey, signed: str) -> str:
    """Signs as the dispatcher does, with the smaller of the two values for `s`."""
    r, s = decode_dss_signature(key.sign(signed.encode(), ec.ECDSA(hashes.SHA256())))
    return b64(r.to_bytes(32, "big") + min(s, ORDER - s).to_bytes(32, "big"))
