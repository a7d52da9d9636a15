"""Completeness receipts of runs, and single results.

The digests are defined in `receipt_verification.py` and computed in Postgres, block by block.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

import msgspec

from interlock.access import jwt
from interlock.access.keyring import Keyring
from interlock.access.signed_urls import SignedUrls
from interlock.errors import Conflict, NotFound
from interlock.failpoints import failpoint
from interlock.jobs.receipt_verification import AUDIENCE, BLOCK, START, chained
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.reads import Reads
from interlock.tasks.result_packs import Packs
from interlock.tasks.shards import Shards
from interlock.wire.base import RunState, TaskStatus
from interlock.wire.jobs import ReceiptKeys, ReceiptReply, RunReceipt
from interlock.wire.tasks import TaskView

_sql = queries(__name__, "receipts")

_BLOCKS_AT_ONCE: Final = 20
"""Blocks per request. A larger run takes several requests, each of which continues where the last one ended."""


class Receipts:
    def __init__(self, database: Database, keyring: Keyring, reads: Reads, *, issuer: str) -> None:
        self._database = database
        self._keyring = keyring
        self._reads = reads
        self._issuer = issuer

    async def receipt(self, job: str, run_id: str | None, org_id: UUID) -> ReceiptReply:
        """Returns the receipt of an ended run. Once signed, it never changes."""
        run = await self._reads.run_of_job(job, run_id, org_id)
        if run["ended_at"] is None:
            raise Conflict(
                f"Run {run['run_id']} is {run['state']}: a receipt is available once it has ended.",
                code="run_not_ended",
            )
        return await self._database.run(lambda connection: self._further(connection, run["run_id"], org_id))

    async def keys(self) -> ReceiptKeys:
        return ReceiptKeys(keys=await self._keyring.jwks())

    async def _further(self, connection: Connection, run_id: UUID, org_id: UUID) -> ReceiptReply:
        await _sql.begin_receipt(connection, run_id=run_id, org_id=org_id, start=START)
        so_far = await _sql.receipt_so_far(connection, run_id=run_id, org_id=org_id)
        if so_far is None or not so_far["current"]:
            raise Conflict(f"Run {run_id} was just reopened; try again later.", code="run_not_ended")
        if so_far["signed"] is None:
            so_far = await self._walk(connection, dict(so_far))
            await failpoint("receipt.before_commit")
        done, total = so_far["next_index"], so_far["last_index"] + 1
        if so_far["signed"] is None:
            return ReceiptReply(run_id=run_id, state="Pending", walked=done, of=total)
        return ReceiptReply(
            run_id=run_id,
            state="Signed",
            walked=total,
            of=total,
            receipt=_receipt(so_far),
            signed=so_far["signed"],
            key=msgspec.json.decode(so_far["key"]),
        )

    async def _walk(self, connection: Connection, at: dict[str, Any]) -> dict[str, Any]:
        for _ in range(_BLOCKS_AT_ONCE):
            if at["next_index"] > at["last_index"]:
                break
            first = at["next_index"]
            block = await _sql.receipt_block(
                connection, shard=at["shard"], run_id=at["run_id"], first=first, last=first + BLOCK - 1
            )
            _add(at, block)
        if at["next_index"] > at["last_index"]:
            _require_settled(at)
            signed, key = await self._signed(_receipt(at))
            at |= {"signed": signed, "key": key.decode()}
        kept = ("run_id", "org_id", "next_index", "completed", "failed", "canceled", "ids", "outcomes", "signed", "key")
        await _sql.keep_receipt(connection, **{name: at[name] for name in kept})
        return at

    async def _signed(self, receipt: RunReceipt) -> tuple[str, bytes]:
        claims = {"iss": self._issuer, "aud": AUDIENCE} | msgspec.to_builtins(receipt)
        key = await self._keyring.active()
        return await jwt.signed(msgspec.json.encode(claims), key["kid"], self._keyring), msgspec.json.encode(key)


def _require_settled(at: dict[str, Any]) -> None:
    """Rejects a run whose counters lag behind its tasks: a retry or a late report changed a task after the run ended. A
    signed receipt must agree with the counters. A run that retention is deleting has fewer tasks than its total."""
    walked = at["completed"], at["failed"], at["canceled"]
    if sum(walked) == at["total"] and walked != (at["run_completed"], at["run_failed"], at["run_canceled"]):
        raise Conflict(f"A task of run {at['run_id']} has just changed; try again.", code="run_not_ended")


def _add(at: dict[str, Any], block: Row) -> None:
    at["next_index"] = min(at["next_index"] + BLOCK, at["last_index"] + 1)
    for count in ("completed", "failed", "canceled"):
        at[count] += block[count]
    for digest in ("ids", "outcomes"):
        at[digest] = chained(bytes(at[digest]), bytes(block[digest]))


def _receipt(row: Any) -> RunReceipt:
    walked = row["completed"] + row["failed"] + row["canceled"]
    return RunReceipt(
        org_id=row["org_id"],
        job_id=row["job_id"],
        run_id=row["run_id"],
        state=RunState(row["state"]),
        total=row["total"],
        indexes=row["last_index"] + 1,
        completed=row["completed"],
        failed=row["failed"],
        canceled=row["canceled"],
        complete=walked == row["total"],
        ids=bytes(row["ids"]).hex(),
        outcomes=bytes(row["outcomes"]).hex(),
        created_at=row["created_at"],
        ended_at=row["ended_at"],
    )


URL_SECONDS: Final = 24 * 3600.0


class Results:
    def __init__(self, database: Database, reads: Reads, packs: Packs, urls: SignedUrls) -> None:
        self._database = database
        self._reads = reads
        self._packs = packs
        self._shards = Shards(database)
        self.urls = urls

    async def task(self, job: str, index: int, run_id: str | None, org_id: UUID) -> TaskView:
        """Returns a task with its result, and a signed URL of the result alone."""
        run = await self._reads.run_of_job(job, run_id, org_id)
        view = await self._reads.task_of_run(run, index, org_id)
        if view.status is not TaskStatus.COMPLETED:
            return view
        url = await self.urls.sign("GET", result_key(run["run_id"], index), URL_SECONDS, [("org", str(org_id))])
        return msgspec.structs.replace(view, result_url=url)

    async def body(self, run_id: UUID, index: int, org_id: UUID) -> bytes:
        """Returns the operator's result as JSON, byte for byte."""
        for shard in (await self._shards.of_runs([run_id])).values():
            async with self._database.connection() as connection:
                row = await _sql.result_place(connection, shard=shard, run_id=run_id, index=index, org_id=org_id)
            body = None if row is None else await self._packs.result_of(row)
            if body is not None:
                return body
        raise NotFound(f"Task {index} of run {run_id} has no result, or its result was deleted after its retention.")


def result_key(run_id: UUID, index: int) -> str:
    return f"{run_id}/{index}"
