"""The queue port. Messages are wake-ups: at-least-once, roughly ordered, small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol
from uuid import UUID


@dataclass(frozen=True)
class Outgoing:
    body: str
    """JSON text."""
    priority: int = 0
    """0 normal, 1 bulk."""
    dedupe_key: str | None = None
    """Sending a key that is still in the queue re-arms that message instead of adding one."""
    delay_seconds: float = 0.0
    org_id: UUID | None = None
    share_id: UUID | None = None
    """The run that it is of, or the job: who shares the workers with others. None: it is no task's."""


@dataclass(frozen=True)
class Received:
    message_id: str
    receipt: str
    body: str
    receives: int
    enqueued_at: datetime


@dataclass(frozen=True)
class DeadLetter:
    message_id: str
    body: str
    receives: int
    enqueued_at: datetime
    dead_at: datetime


@dataclass(frozen=True)
class Handle:
    """Names one delivery. A later delivery of the same message makes it worthless."""

    message_id: str
    receipt: str


class Queue(Protocol):
    """Every call that takes handles returns how many of them still counted."""

    async def send(self, queue: str, message: Outgoing) -> None: ...

    async def send_batch(self, queue: str, messages: Sequence[Outgoing]) -> None: ...

    async def receive(
        self, queue: str, *, wait_seconds: float, most: int, visibility_seconds: float
    ) -> list[Received]: ...

    async def extend(self, queue: str, handles: Sequence[Handle], visibility_seconds: float) -> int: ...

    async def ack(self, queue: str, handles: Sequence[Handle]) -> int: ...

    async def nack(self, queue: str, handles: Sequence[Handle], delay_seconds: float) -> int: ...

    async def bury(self, queue: str, handles: Sequence[Handle]) -> int:
        """Makes dead letters of them at once: nobody can do what they ask for."""

    async def replace(self, queue: str, handle: Handle, body: str, *, delay_seconds: float = 0.0) -> int:
        """Settles a message in part: what is left of it goes back, for whoever receives next, or a while later."""

    async def depth(self, queue: str) -> int: ...

    async def in_flight(self, queue: str) -> int: ...

    async def oldest_age(self, queue: str) -> float | None: ...

    async def dead_letters(self, queue: str, most: int) -> list[DeadLetter]: ...

    async def dead_letter_count(self, queue: str) -> int: ...

    async def redrive(self, queue: str, most: int) -> int: ...
