"""Parses queue messages, which name waiting tasks. A message is only a wake-up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from uuid import UUID

import msgspec
from msgspec import Struct

from interlock.wire import QueueMessage


class _Body(Struct, frozen=True):
    task_id: UUID | None = None
    job_id: UUID | None = None
    run_id: UUID | None = None
    start: int = 0
    end: int = 0


_decoder = msgspec.json.Decoder(_Body)


@dataclass(slots=True)
class Span:
    """An inclusive range of a run's tasks."""

    job_id: UUID | None
    run_id: UUID
    start: int
    end: int
    message: QueueMessage

    @property
    def tasks(self) -> int:
        return self.end - self.start + 1


@dataclass(slots=True)
class WakeUps:
    """The messages of one receive, by type."""

    tasks: dict[UUID, QueueMessage] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    unreadable: list[QueueMessage] = field(default_factory=list)


def sort(messages: Iterable[QueueMessage]) -> WakeUps:
    found = WakeUps()
    for message in messages:
        body = _read(message)
        if body.task_id is not None:
            found.tasks[body.task_id] = message
        elif body.run_id is not None:
            found.spans.append(Span(body.job_id, body.run_id, body.start, body.end, message))
        else:
            found.unreadable.append(message)
    return found


def _read(message: QueueMessage) -> _Body:
    try:
        return _decoder.decode(message.body)
    except msgspec.MsgspecError:
        return _Body()
