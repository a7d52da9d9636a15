"""Code shared by all processes that run operators: reporting results, errors and printed lines, and their own exit."""

from __future__ import annotations

import io
import logging
import sys
from typing import Protocol

import msgspec

from interlock.workers import protocol, tracebacks
from interlock.workers.catalogue import OperatorNotFound
from interlock.workers.context import TaskFailed, plain

ERROR_CLASS = 200
ERROR_MESSAGE = 10_000
LINE = 2_000

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
            f"The result has {len(result)} bytes, and result_limit_bytes is {limit}: return less, write the data to an "
            "output of the job, or raise the setting, for workers and dispatchers.",
            "ResultTooLarge",
        )
    return result


def raised(sink: LineSink, slot: int, seconds: float, error: BaseException) -> protocol.Raised:
    """Returns the report of a failure, after the traceback is sent."""
    error_class = str(getattr(error, "error_class", None) or type(error).__name__)
    trace = tracebacks.text_of(error)
    if trace is not None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # the traceback comes after what the operator printed
        expected = isinstance(error, TaskFailed | OperatorNotFound)
        frames = "" if expected else tracebacks.frames_of(error)
        sink.report(protocol.Traced(slot, plain(frames, ERROR_MESSAGE), plain(trace, 2 * tracebacks.MAX_TEXT)))
    message = plain(str(error) or error_class, ERROR_MESSAGE)
    return protocol.Raised(slot, seconds, plain(error_class, ERROR_CLASS), message)


def keep_logging() -> None:
    """Sends records of `logging` from level INFO on to the log of the task, unless the operator configures logging."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=_Stderr())
    for name in ("py4j", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)


class _Stderr(io.TextIOBase):
    """The current sys.stderr, also if an operator replaces it."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


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
