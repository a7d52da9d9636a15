"""Receipts, checked without the platform: by the public key that one trusts, and by the list of what came out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from interlock.access import compact
from interlock.adapters.signers import jwk_of, public_key
from interlock.bulk.digests import AUDIENCE, digests
from interlock.errors import BadRequest
from interlock.wire import ReceiptReply, RunReceipt

_CLAIMS: Final = {"iss", "aud"}


@dataclass(frozen=True)
class Verdict:
    receipt: RunReceipt
    kid: str
    proven: list[str]
    """What was checked, beside the signature, in a sentence each."""


def verify(
    document: bytes,
    *,
    keys: Sequence[dict[str, Any]] = (),
    kid: str | None = None,
    tasks: Iterable[tuple[int, str]] | None = None,
) -> Verdict:
    """Raises BadRequest with a sentence that says what is wrong. `tasks` are indexes and statuses, by index."""
    reply = _read(document)
    signer, key = _trusted(reply, keys, kid)
    payload = compact.payload_of(reply.signed or "", public_key(key))
    if payload is None or payload.get("aud") != AUDIENCE:
        raise _bad(f"The signature is not one of key {signer}, or not that of a receipt.")
    receipt = _said(payload)
    if receipt != reply.receipt:
        raise _bad("What the file shows is not what was signed; somebody has changed it.")
    proven = [_complete(receipt)]
    if receipt.indexes == receipt.total:
        proven.append(_ids(receipt))
    if tasks is not None:
        proven.append(_tasks(receipt, tasks))
    return Verdict(receipt, signer, proven)


def _read(document: bytes) -> ReceiptReply:
    try:
        return msgspec.json.decode(document, type=ReceiptReply)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _bad(f"This is no receipt as `interlock job receipt` saves it: {error}.") from None


def _trusted(reply: ReceiptReply, keys: Sequence[dict[str, Any]], kid: str | None) -> tuple[str, dict[str, Any]]:
    """The key that has signed, if it is one of those that are trusted: by itself, or by its thumbprint."""
    signer = compact.kid_of(reply.signed or "")
    if signer is None:
        raise _bad("The receipt is not signed, or its signature is cut off.")
    for key in keys:
        if key.get("kid") == signer:
            return signer, key
    if kid == signer and reply.key is not None and _thumbprint(reply.key) == kid:
        return signer, reply.key
    raise _bad(f"It is signed by key {signer}, which is not among those that you trust.")


def _thumbprint(key: dict[str, Any]) -> str | None:
    """Computed anew: what the file says of its own key proves nothing."""
    try:
        return str(jwk_of(public_key(key))["kid"])
    except (KeyError, ValueError, TypeError):
        return None


def _said(payload: dict[str, Any]) -> RunReceipt:
    try:
        return msgspec.convert({name: payload[name] for name in payload.keys() - _CLAIMS}, RunReceipt, strict=False)
    except msgspec.ValidationError as error:
        raise _bad(f"What was signed is no receipt of a run: {error}.") from None


def _complete(receipt: RunReceipt) -> str:
    ended = receipt.completed + receipt.failed + receipt.canceled
    if not receipt.complete or ended != receipt.total:
        raise _bad(f"The run was to have {receipt.total} tasks, and {ended} have ended.")
    return f"all {receipt.total} tasks have ended"


def _ids(receipt: RunReceipt) -> str:
    """Without a gap among the indexes, the ids follow from the run alone."""
    ids, _ = digests(receipt.run_id, receipt.indexes, ((index, "") for index in range(receipt.total)))
    if ids != receipt.ids:
        raise _bad(f"The ids are not those of tasks 0 to {receipt.total - 1} of run {receipt.run_id}.")
    return f"their ids are those of run {receipt.run_id}"


def _tasks(receipt: RunReceipt, tasks: Iterable[tuple[int, str]]) -> str:
    counted = {"Completed": 0, "Failed": 0, "Canceled": 0}

    def counting() -> Iterable[tuple[int, str]]:
        last = -1
        for index, status in tasks:
            if index <= last or index >= receipt.indexes or status not in counted:
                raise _bad(f"Task {index} of the list is out of order, twice there, or has not ended ({status}).")
            last = index
            counted[status] += 1
            yield index, status

    found = digests(receipt.run_id, receipt.indexes, counting())
    if found != (receipt.ids, receipt.outcomes):
        raise _bad(f"The list has other tasks or outcomes than those of the receipt; it has {counted}.")
    return "the list has exactly these tasks, each with the outcome that was signed"


def _bad(sentence: str) -> BadRequest:
    return BadRequest(sentence)
