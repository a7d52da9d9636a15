"""What comes out of a run: receipts, exports, and runs of the same tasks again."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from interlock.wire.base import Reply, RunState


class RunReceipt(Reply, frozen=True, kw_only=True):
    """What became of every task of a run that has ended."""

    org_id: UUID
    job_id: UUID
    run_id: UUID
    state: RunState
    total: int
    """Tasks that the run was to have."""
    indexes: int
    """One more than the highest index; more than `total` where items were left out as duplicates."""
    completed: int
    failed: int
    canceled: int
    complete: bool
    """Each of `total` tasks is there, and has ended."""
    ids: str
    """Digest over the full ids of all tasks, as docs/bulk.md says how."""
    outcomes: str
    """The same over each id and what its task has ended as."""
    created_at: datetime
    ended_at: datetime


class ReceiptReply(Reply, frozen=True, kw_only=True):
    """`Pending` while a large run is being walked: ask again, and it goes on from there."""

    run_id: UUID
    state: Literal["Pending", "Signed"]
    walked: int
    of: int
    receipt: RunReceipt | None = None
    signed: str | None = None
    """The receipt as a JWT, by ES256."""
    key: dict[str, Any] | None = None
    """The public half of the key that has signed it, as a JWK. Its `kid` is the thumbprint of RFC 7638."""


class ReceiptKeys(Reply, frozen=True, kw_only=True):
    """Public keys that sign receipts now, as a JWK set. Keep them: receipts outlive them."""

    keys: list[dict[str, Any]]
