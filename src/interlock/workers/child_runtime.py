"""Code shared by all processes that run operators: reporting results, errors and printed lines, and their own exit."""

from __future__ import annotations

import io
import sys
import traceback
from typing import Protocol

import msgspec

from interlock.workers import protocol
from interlock.workers.catalogue import OperatorNotFound
from interlock.workers.context import TaskFailed, plain

ERROR_CLASS = 200
ERROR_MESSAGE = 10_000
LINE = 2_000
TRACE_FRAMES = 10

_encode = msgspec.json.Encoder().encode


class LineSink(Protocol):
    """Accepts printed lines."""

    @property
    def slot(self) -> int:
        """The slot of the task that prints."""

    def report(self, message: protocol.ToWrapper) -> None: ...


def encoded(value: object, limit: int) -> bytes:
    """Encodes the result of a task as JSON. Raises TaskFailed."""
    try:
        result = _encode(value)
    except Exception as error:
        raise TaskFailed(
            f"The result cannot be encoded as JSON: {error}. Return only values that JSON has.", "ResultNotJson"
        ) from None
    if len(result) > limit:
        raise TaskFailed(
            f"The result has {len(result)} bytes, the limit is {limit}: return less, or write the data to an output of "
            "the job.",
            "ResultTooLarge",
        )
    return result


def raised(slot: int, seconds: float, error: BaseException) -> protocol.Raised:
    error_class = str(getattr(error, "error_class", None) or type(error).__name__)
    if not isinstance(error, TaskFailed | OperatorNotFound):
        _show_trace(error)
    message = plain(str(error) or error_class, ERROR_MESSAGE)
    return protocol.Raised(slot, seconds, plain(error_class, ERROR_CLASS), message)


def _show_trace(error: BaseException) -> None:
    """Writes the stack trace to the worker's log, without the message, which may quote the payload."""
    frames = traceback.extract_tb(error.__traceback__)[-TRACE_FRAMES:]
    sys.stderr.write(f"{type(error).__name__} raised\n{''.join(traceback.format_list(frames))}")


class Lines(io.TextIOBase):
    """stdout or stderr of operators. Sends whole lines, each with the task that printed it."""

    def __init__(self, sink: LineSink, stream: str) -> None:
        self._sink, self._stream = sink, stream
        self._rest = ""
        self._cut = False

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._show(line)
            self._cut = False
        if len(self._rest) > LINE:
            self.flush()
            self._cut = True
        return len(text)

    def flush(self) -> None:
        if self._rest:
            line, self._rest = self._rest, ""
            self._show(line)

    def _show(self, line: str) -> None:
        if self._cut:
            return
        self._sink.report(protocol.Printed(self._sink.slot, self._stream, plain(line, LINE)))


def wait_for_the_wrapper(_number: int, _frame: object) -> None:
    """Does nothing on a stop signal to the process group: the wrapper handles it and lets running tasks finish.

    This is a handler because programs that operators start would inherit an ignored signal.
    """
