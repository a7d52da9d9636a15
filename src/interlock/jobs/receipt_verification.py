"""Verification of receipts and exports without the platform, and the digests that they contain.

Each digest is a hash chain over blocks of the run's tasks, ordered by index:

    digest = sha256(previous digest ‖ sha256(record ‖ record ‖ …))

The chain starts from 32 zero bytes. A block covers 10,000 indexes.

A record of `ids` is a task's full id, the 32 bytes of sha256("{run_id}:{index}"). A record of `outcomes` is that id
followed by the name of the task's final status. Both can be computed from an export of the run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Struct

from interlock.access import jwt
from interlock.errors import BadRequest
from interlock.stores.signers import jwk_of, public_key
from interlock.wire.jobs import ExportFormat, ExportManifest, ExportPart, ReceiptReply, RunReceipt

AUDIENCE: Final = "interlock.receipt"
"""Used by no other token, so that a receipt and a token can never be mistaken for each other."""
BLOCK: Final = 10_000
START: Final = bytes(32)


def chained(so_far: bytes, block: bytes) -> bytes:
    return hashlib.sha256(so_far + block).digest()


def full_id(run_id: UUID, index: int) -> bytes:
    return hashlib.sha256(f"{run_id}:{index}".encode()).digest()


def digests(run_id: UUID, indexes: int, tasks: Iterable[tuple[int, str]]) -> tuple[str, str]:
    """Returns the digests of ids and of outcomes. `tasks` has each task's index and status, ordered by index."""
    ids = outcomes = START
    for block in _blocks(indexes, tasks):
        known = [(full_id(run_id, index), status.encode()) for index, status in block]
        ids = chained(ids, hashlib.sha256(b"".join(one for one, _ in known)).digest())
        outcomes = chained(outcomes, hashlib.sha256(b"".join(one + status for one, status in known)).digest())
    return ids.hex(), outcomes.hex()


def _blocks(indexes: int, tasks: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Yields every block of the run, including empty ones."""
    number = 0
    for block, members in groupby(tasks, key=lambda task: task[0] // BLOCK):
        while number < block:
            yield []
            number += 1
        yield list(members)
        number += 1
    while number * BLOCK < indexes:
        yield []
        number += 1


class _Task(Struct):
    index: int
    status: str


_task = msgspec.json.Decoder(_Task)


def tasks_of(folder: Path) -> Iterator[tuple[int, str]]:
    """Yields index and status, ordered by index. Raises BadRequest at the first file that differs from the manifest."""
    manifest = _manifest(folder)
    for part in sorted(manifest.parts, key=lambda part: part.name):
        path = folder / Path(part.name).name
        _check(path, part)
        yield from _READERS[manifest.format](path)


def _manifest(folder: Path) -> ExportManifest:
    try:
        manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=ExportManifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise BadRequest(f"{folder} has no readable manifest.json of an export: {error}.") from None
    if manifest.format not in _READERS:
        raise BadRequest("An export in format zip cannot be verified: export the run as jsonl or parquet.")
    return manifest


def _check(path: Path, part: ExportPart) -> None:
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}.") from None
    if found != part.sha256:
        raise BadRequest(f"{path} does not match the checksum in the manifest: it was changed or truncated.")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                task = _task.decode(line)
            except msgspec.MsgspecError as error:
                raise BadRequest(f"Line {number} of {path} is not an exported task: {error}.") from None
            yield task.index, task.status


def _columns(path: Path) -> Iterator[tuple[int, str]]:
    # Imported here so that no other command pays for Arrow.
    import pyarrow.parquet as pq  # noqa: PLC0415

    for batch in pq.ParquetFile(path).iter_batches(columns=["index", "status"]):
        yield from zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True)


_READERS = {ExportFormat.JSONL: _lines, ExportFormat.PARQUET: _columns}


_CLAIMS: Final = {"iss", "aud"}


@dataclass(frozen=True)
class Verdict:
    receipt: RunReceipt
    kid: str
    proven: list[str]
    """One sentence per successful check, besides the signature."""


def verify(
    document: bytes,
    *,
    keys: Sequence[dict[str, Any]] = (),
    kid: str | None = None,
    tasks: Iterable[tuple[int, str]] | None = None,
) -> Verdict:
    """Verifies a receipt. Raises BadRequest with the reason. `tasks` has indexes and statuses, ordered by index."""
    reply = _read(document)
    signer, key = _trusted(reply, keys, kid)
    payload = jwt.payload_of(reply.signed or "", public_key(key))
    if payload is None or payload.get("aud") != AUDIENCE:
        raise _bad(f"The signature is not a receipt signature of key {signer}.")
    receipt = _signed_receipt(payload)
    if receipt != reply.receipt:
        raise _bad("The receipt in the file differs from the signed one: the file was changed.")
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
        raise _bad(f"This is not a receipt as saved by `interlock job receipt`: {error}.") from None


def _trusted(reply: ReceiptReply, keys: Sequence[dict[str, Any]], kid: str | None) -> tuple[str, dict[str, Any]]:
    """Returns the signing key if it is trusted: given as a key, or by its thumbprint."""
    signer = jwt.kid_of(reply.signed or "")
    if signer is None:
        raise _bad("The receipt is not signed, or its signature is truncated.")
    for key in keys:
        if key.get("kid") == signer:
            return signer, key
    if kid == signer and reply.key is not None and _thumbprint(reply.key) == kid:
        return signer, reply.key
    raise _bad(f"The receipt is signed by key {signer}, which is not among the trusted keys.")


def _thumbprint(key: dict[str, Any]) -> str | None:
    """Computes the thumbprint: the `kid` in the file itself proves nothing."""
    try:
        return str(jwk_of(public_key(key))["kid"])
    except (KeyError, ValueError, TypeError):
        return None


def _signed_receipt(payload: dict[str, Any]) -> RunReceipt:
    try:
        return msgspec.convert({name: payload[name] for name in payload.keys() - _CLAIMS}, RunReceipt, strict=False)
    except msgspec.ValidationError as error:
        raise _bad(f"The signed content is not a receipt of a run: {error}.") from None


def _complete(receipt: RunReceipt) -> str:
    ended = receipt.completed + receipt.failed + receipt.canceled
    if not receipt.complete or ended != receipt.total:
        raise _bad(f"The run has {receipt.total} tasks, but only {ended} have ended.")
    return f"all {receipt.total} tasks have ended"


def _ids(receipt: RunReceipt) -> str:
    """Checks the ids. Without gaps in the indexes, they follow from the run id alone."""
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
                raise _bad(f"Task {index} of the list is out of order, duplicated, or has not ended ({status}).")
            last = index
            counted[status] += 1
            yield index, status

    found = digests(receipt.run_id, receipt.indexes, counting())
    if found != (receipt.ids, receipt.outcomes):
        raise _bad(f"The tasks or outcomes of the list differ from the receipt; the list has {counted}.")
    return "the list has exactly these tasks, each with its signed outcome"


def _bad(sentence: str) -> BadRequest:
    return BadRequest(sentence)
