"""The protocol between the wrapper and a child process, over three pipes.

    wrapper ── work ────► child     Assign, EmitAnswered: frames
    wrapper ── control ─► child     cancel, recall, pause: 9-byte records, followed by SIGUSR1
    wrapper ◄─ reports ── child     everything else: frames, each written immediately, so that a crash loses none

A frame is a length of four bytes and a msgpack message. Payloads, configs and results are passed on as the JSON bytes
received from the wire; the wrapper never parses them. A `slot` is the number of an assignment. A child runs its slots
in order, so the wrapper knows that the running one is the first unanswered one.
"""

from __future__ import annotations

import struct
from typing import Generic, TypeVar
from uuid import UUID

import msgspec
from msgspec import Struct

from interlock.wire.access import TaskSecret
from interlock.wire.attempts import Event, Output, WriteGrant


class Outbound(Struct, array_like=True, frozen=True):
    """Settings of the installation for the platform's operators that send requests to other servers."""

    allow: list[str] = []
    """Addresses, networks and hosts that are allowed although they are not public."""
    ports: list[int] = []
    """Allowed ports. Empty: all."""
    proxy: str | None = None
    result_limit: int = 1 << 20
    """Most bytes of a result, as JSON."""


class Work(Struct, array_like=True, frozen=True):
    """The data that assignments share and that operator code may see: neither lease token nor capability token."""

    operator: str
    job: tuple[str | None, str | None]
    run_id: UUID | None
    attempt: int
    config: bytes
    inputs: list[bytes]
    outputs: list[WriteGrant]
    data_url: str | None = None
    """URL of the data database. Only for the platform's own operators."""
    data: bytes | None = None
    """A `TaskData`: the files and tables that a task on Spark reads and writes."""
    outbound: Outbound | None = None
    """For the platform's operators that send requests to other servers."""
    state_url: str | None = None
    """URL of the state database. Only for the operator that loads staged lists into it."""
    secrets: list[TaskSecret] = []
    """Secrets of the task's org that the config refers to."""
    environment: dict[str, str] = {}
    """Variables that the worker passes to tasks of this org."""
    partition: str | None = None
    """For a job with time partitions: their length and time zone."""

    def __repr__(self) -> str:
        return f"Work({self.operator!r}, {self.job!r}, attempt={self.attempt})"


class Assignment(Struct, array_like=True, frozen=True):
    """An attempt to run."""

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
    """The child handles signals from now on."""


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
    """Slots that the child had not started when the wrapper recalled them."""

    slots: list[int]


class Progressed(Struct, array_like=True, tag=8, frozen=True):
    slot: int
    fraction: float | None
    """None if only the text changed."""
    text: str | None


class Emit(Struct, array_like=True, tag=9, frozen=True):
    slot: int
    events: list[Event]


class Printed(Struct, array_like=True, tag=10, frozen=True):
    slot: int
    stream: str
    line: str


class Traced(Struct, array_like=True, tag=16, frozen=True):
    """The traceback of the exception with which a task fails."""

    slot: int
    frames: str
    """Without the error's text."""
    text: str


class Outdated(Struct, array_like=True, tag=17, frozen=True):
    """Slots that the process has not started because its code was edited. It starts no others."""

    slots: list[int]


# Only for the driver of a Spark session. Unlike a child, it runs its slots concurrently and answers them in any order.
# Its main thread does nothing but read, so control messages need no separate pipe and no signal.


class SparkOptions(Struct, array_like=True, tag=11, frozen=True):
    """Options of the session, sent as the first frame. Other users could read them on the command line."""

    master: str
    remote: str | None
    memory: str
    conf: dict[str, str]
    tasks: int
    """Most concurrent tasks."""
    objects_root: str


class Stop(Struct, array_like=True, tag=12, frozen=True):
    slot: int


class Hold(Struct, array_like=True, tag=13, frozen=True):
    """Pauses or resumes a source."""

    slot: int
    paused: bool


class Spent(Struct, array_like=True, tag=14, frozen=True):
    """The driver cannot start more tasks: its session did not start or was stopped. Running tasks continue."""

    reason: str


class SparkDied(Struct, array_like=True, tag=15, frozen=True):
    """The JVM has ended. This is the last report. `returncode` has the meaning that it has in `subprocess`."""

    returncode: int


ToChild = Assign | EmitAnswered
ToDriver = Assign | EmitAnswered | SparkOptions | Stop | Hold
ToWrapper = (
    Ready
    | Finished
    | Raised
    | Stopped
    | GivenBack
    | Progressed
    | Emit
    | Printed
    | Traced
    | Outdated
    | Spent
    | SparkDied
)

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder(uuid_format="bytes")
_length = struct.Struct(">I")
HEAD = _length.size


def frame(message: ToChild | ToDriver | ToWrapper) -> bytes:
    body = _encoder.encode(message)
    return _length.pack(len(body)) + body


class Frames(Generic[T]):
    """Decodes frames from a byte stream. An incomplete frame is kept until the rest arrives."""

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


# Control records name the slot: when the signal arrives, the next task may already be running.

CANCEL = 1
RECALL = 2
PAUSE = 3
RESUME = 4
CONTROL = struct.Struct(">BQ")
