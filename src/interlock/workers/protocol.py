"""What the wrapper and a child process say to each other, over three pipes.

    wrapper ── work ────► child     Assign, EmitAnswered: frames
    wrapper ── control ─► child     cancel, recall, pause: 9-byte records, followed by SIGUSR1
    wrapper ◄─ reports ── child     everything else: frames, each written at once, so that a crash loses none

A frame is a length of four bytes and a msgpack message. Payloads, configs and results travel as the JSON bytes
that they are on the wire: the wrapper never parses them. A `slot` numbers an assignment; a child runs its slots
in order, so the wrapper knows the running one without being told: it is the first that is unanswered.
"""

from __future__ import annotations

import struct
from typing import Generic, TypeVar
from uuid import UUID

import msgspec
from msgspec import Struct

from interlock.wire import Event, Output, TaskSecret, WriteGrant


class Outbound(Struct, array_like=True, frozen=True):
    """What operators of the platform that ask other servers are told of the installation."""

    allow: list[str] = []
    """Addresses, networks and hosts that may be reached although they are not public."""
    ports: list[int] = []
    """That may be reached; none: all."""
    proxy: str | None = None
    result_limit: int = 65_536
    """Most bytes of a result, as JSON."""


class Work(Struct, array_like=True, frozen=True):
    """What assignments share, as much of it as operator code may see: neither lease token nor capability token."""

    operator: str
    job: tuple[str | None, str | None]
    run_id: UUID | None
    attempt: int
    config: bytes
    inputs: list[bytes]
    outputs: list[WriteGrant]
    data_url: str | None = None
    """Of the data database: for operators of the platform itself."""
    data: bytes | None = None
    """A `TaskData`: what a task on Spark reads and writes."""
    outbound: Outbound | None = None
    """For operators of the platform that ask other servers."""
    state_url: str | None = None
    """Of the state database: for the operator that loads staged lists into it, and no other."""
    secrets: list[TaskSecret] = []
    """Of the task's org: those that the config names."""
    environment: dict[str, str] = {}
    """Variables that the worker passes on to tasks of this org."""

    def __repr__(self) -> str:
        return f"Work({self.operator!r}, {self.job!r}, attempt={self.attempt})"


class Assignment(Struct, array_like=True, frozen=True):
    """One attempt."""

    slot: int
    task_id: UUID
    index: int | None
    payload: bytes


class Assign(Struct, array_like=True, tag=1, frozen=True):
    work: Work
    tasks: list[Assignment]


class EmitAnswered(Struct, array_like=True, tag=2, frozen=True):
    slot: int
    accepted: int
    problem: str | None


class Ready(Struct, array_like=True, tag=3, frozen=True):
    """The child handles signals from here on."""


class Finished(Struct, array_like=True, tag=4, frozen=True):
    slot: int
    seconds: float
    result: bytes
    events: list[Event]
    outputs: list[Output]


class Raised(Struct, array_like=True, tag=5, frozen=True):
    slot: int
    seconds: float
    error_class: str
    message: str


class Stopped(Struct, array_like=True, tag=6, frozen=True):
    """The slot ended, or never started, because it was canceled."""

    slot: int


class GivenBack(Struct, array_like=True, tag=7, frozen=True):
    """Slots that the child had not started when it was asked to return them."""

    slots: list[int]


class Progressed(Struct, array_like=True, tag=8, frozen=True):
    slot: int
    fraction: float | None
    """None when only the text is new."""
    text: str | None


class Emit(Struct, array_like=True, tag=9, frozen=True):
    slot: int
    events: list[Event]


class Printed(Struct, array_like=True, tag=10, frozen=True):
    slot: int
    stream: str
    line: str


# For the driver of a Spark session alone. It is no child that runs one task after the other: its slots run at once and
# are answered in any order, and its main thread does nothing but read, so that control needs no pipe and no signal.


class SparkOptions(Struct, array_like=True, tag=11, frozen=True):
    """What the session is to be: the first frame. Not on the command line, which other users can read."""

    master: str
    remote: str | None
    memory: str
    conf: dict[str, str]
    tasks: int
    """That may run at once."""
    objects_root: str


class Stop(Struct, array_like=True, tag=12, frozen=True):
    slot: int


class Hold(Struct, array_like=True, tag=13, frozen=True):
    """A source is to hold still, or may go on."""

    slot: int
    paused: bool


class Spent(Struct, array_like=True, tag=14, frozen=True):
    """The driver can start no more tasks, since its session did not start or was stopped. Those it has go on."""

    reason: str


class SparkDied(Struct, array_like=True, tag=15, frozen=True):
    """The last report: the JVM is gone. `returncode` is as `subprocess` gives it."""

    returncode: int


ToChild = Assign | EmitAnswered
ToDriver = Assign | EmitAnswered | SparkOptions | Stop | Hold
ToWrapper = Ready | Finished | Raised | Stopped | GivenBack | Progressed | Emit | Printed | Spent | SparkDied

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder(uuid_format="bytes")
_length = struct.Struct(">I")
HEAD = _length.size


def frame(message: ToChild | ToDriver | ToWrapper) -> bytes:
    body = _encoder.encode(message)
    return _length.pack(len(body)) + body


class Frames(Generic[T]):
    """Bytes in, whole messages out; what is left of a frame waits for its rest."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        self._buffer += data
        messages: list[T] = []
        at, end = 0, len(self._buffer)
        with memoryview(self._buffer) as view:
            while at + HEAD <= end:
                stop = at + HEAD + _length.unpack_from(view, at)[0]
                if stop > end:
                    break
                messages.append(self._decoder.decode(view[at + HEAD : stop]))
                at = stop
        del self._buffer[:at]
        return messages


def for_child() -> Frames[ToChild]:
    return Frames(msgspec.msgpack.Decoder(ToChild))


def for_driver() -> Frames[ToDriver]:
    return Frames(msgspec.msgpack.Decoder(ToDriver))


def for_wrapper() -> Frames[ToWrapper]:
    return Frames(msgspec.msgpack.Decoder(ToWrapper))


# Control records: who is meant must be known before the signal arrives, or it would hit the task after.

CANCEL = 1
RECALL = 2
PAUSE = 3
RESUME = 4
CONTROL = struct.Struct(">BQ")
