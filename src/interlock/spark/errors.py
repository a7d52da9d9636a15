"""Turns Spark's exceptions into readable error messages for the owner of the job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import dropwhile
from typing import Final
from urllib.parse import unquote

from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException, PythonException

from interlock.wire.attempts import TaskData
from interlock.workers.context import TaskFailed
from interlock.workers.failures import (
    CorruptFile,
    DiskFull,
    FileMissing,
    PackageMissing,
    SchemaMismatch,
    SparkStopped,
    failure,
)

_CONDITION: Final = re.compile(r"\[([A-Z][A-Z0-9_]+(?:\.[A-Z0-9_]+)?)\]")
_FILE: Final = re.compile(r"reading file (\S+?)\.?(?:\s|$)")
_JAVA_SAYS: Final = re.compile(r"^: (?:[\w.$]+: )?", re.MULTILINE)
"""Start of Java's own message, after the lines that py4j puts before it."""
_NO_PROGRAM: Final = re.compile(r'Cannot run program "([^"]+)"')
_RAISED: Final = re.compile(r"(?:[A-Za-z_][\w.<>]*\.)?([A-Za-z_]\w*)(?:: |$)", re.MULTILINE)
_SQLSTATE: Final = re.compile(r"\s*SQLSTATE: \w+\s*$")
_STOPPED: Final = (
    "stopped SparkContext",
    "SparkContext was shut down",
    "SparkContext has been shutdown",
    "SESSION_CLOSED",
    "SESSION_NOT_FOUND",
    "StatusCode.UNAVAILABLE",
)
_FULL: Final = "No space left on device"
_RECOMPUTE: Final = "recompute its range (interlock dataset invalidate)"
_LENGTH: Final = 2_000


@contextmanager
def explained(data: TaskData) -> Iterator[None]:
    """Raises a TaskFailed in place of Spark's exceptions. Exceptions of the operator itself pass through."""
    try:
        yield
    except TaskFailed:
        raise
    except PythonException as error:
        raise _from_python(error) from error
    except (PySparkException, Py4JError) as error:
        raise _from_spark(error, data) from error
    except (ConnectionError, EOFError, AttributeError) as error:
        # The Java process is gone, or `stop` was called and PySpark lacks the attributes that it removed.
        if _within_pyspark(error):
            raise _stopped() from error
        raise


def _from_python(error: PythonException) -> TaskFailed:
    """Returns the failure for an exception that a Python function raised in an executor, with its class and message."""
    trace = str((error.getMessageParameters() or {}).get("traceback") or error)
    error_class, message = raised_in(trace)
    if found := _CONDITION.match(message):
        return TaskFailed(_short(message[found.end() :].strip()), _camel(found[1]))
    if error_class == ModuleNotFoundError.__name__:
        return PackageMissing(
            f"{message} on Spark's executors. Install interlock-dispatch and the packages that the operator imports in "
            "their Python (spark.pyspark.python in spark_conf), in the same versions as here, or ship them with "
            "spark.archives or spark.submit.pyFiles."
        )
    return failure(error_class, _short(message))


def raised_in(trace: str) -> tuple[str, str]:
    """Returns the class and the message, possibly of many lines, of the exception at the end of a Python traceback."""
    frames = trace.rpartition("Traceback (most recent call last):\n")[2].splitlines()
    text = _SQLSTATE.sub("", "\n".join(dropwhile(lambda line: line.startswith(" "), frames))).strip()
    found = _RAISED.match(text)
    if found is None:
        return "PythonException", text
    return found[1], text[found.end() :] or found[1]


def _from_spark(error: Exception, data: TaskData) -> TaskFailed:
    text = str(error)
    condition = _condition(error, text)
    if any(words in text for words in _STOPPED) or _gateway_is_gone(error):
        return _stopped()
    if program := _NO_PROGRAM.search(text):
        return PackageMissing(
            f"Spark's executors have no Python at {program[1]!r}: set spark.pyspark.python in spark_conf to the path "
            "of theirs."
        )
    if _FULL in text:
        return DiskFull("The disk of Spark's local files is full: free space in spark.local.dir of the executors.")
    if condition in ("PATH_NOT_FOUND", "FAILED_READ_FILE.FILE_NOT_EXIST"):
        return FileMissing(f"{_file(error, data)} is committed but no longer exists: {_RECOMPUTE}.")
    if condition == "FAILED_READ_FILE.PARQUET_COLUMN_DATA_TYPE_MISMATCH" or "SchemaColumnConvertNotSupported" in text:
        return SchemaMismatch(
            f"{_file(error, data)} has a column of another type than its dataset: {_sentence(text)} To fix it, "
            f"{_RECOMPUTE}."
        )
    if condition is not None and condition.startswith(("FAILED_READ_FILE", "CANNOT_READ_FILE_FOOTER")):
        return CorruptFile(f"{_file(error, data)} is not readable: {_cause(text)} To fix it, {_RECOMPUTE}.")
    return TaskFailed(_short(_sentence(text)), _error_class(error, condition))


def _stopped() -> SparkStopped:
    return SparkStopped(
        "The shared Spark session ended during this attempt; the next attempt gets a new one. If an operator calls "
        "spark.stop(), remove that call."
    )


def _gateway_is_gone(error: Exception) -> bool:
    return isinstance(error, Py4JError) and not isinstance(error, Py4JJavaError)


def _condition(error: Exception, text: str) -> str | None:
    named = error.getCondition() if isinstance(error, PySparkException) else None
    if named is not None:
        return named
    found = _CONDITION.search(text)
    return found[1] if found else None


def _error_class(error: Exception, condition: str | None) -> str:
    if condition is not None:
        return _camel(condition)
    return "SparkFailed" if isinstance(error, Py4JJavaError) else type(error).__name__


def _camel(condition: str) -> str:
    return "".join(part.capitalize() for part in re.split(r"[_.]", condition))


def _file(error: Exception, data: TaskData) -> str:
    """Returns the location of the failed file as the dispatcher gave it, since Spark writes paths differently."""
    named = (error.getMessageParameters() or {}).get("path") if isinstance(error, PySparkException) else None
    found = _FILE.search(str(error))
    if named is None and found is None:
        return "A file of an input"
    shown = named or unquote(found[1] if found else "")
    name = shown.rsplit("/", 1)[-1]
    known = [file.location for one in data.inputs for file in one.files if file.location.endswith(f"/{name}")]
    return known[0] if len(known) == 1 else shown


def _sentence(text: str) -> str:
    """Returns the line with the actual message, without the text that Java and Spark add around it."""
    prefix = _CONDITION.search(text) or _JAVA_SAYS.search(text)
    start = prefix.end() if prefix else 0
    line = text[start:].strip().splitlines()[0] if text[start:].strip() else text
    return _SQLSTATE.sub("", line).strip()


def _cause(text: str) -> str:
    causes = re.findall(r"^Caused by: (?:[\w.$]+: )?(.*)$", text, re.MULTILINE)
    return f"{causes[-1].strip().rstrip('.')}." if causes else _sentence(text)


def _short(text: str) -> str:
    return text if len(text) <= _LENGTH else text[: _LENGTH - 1] + "…"


def _within_pyspark(error: Exception) -> bool:
    """Checks that the exception was raised in PySpark, and not in the operator's own code."""
    trace = error.__traceback__
    module = ""
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    return module.partition(".")[0] in ("pyspark", "py4j", "socket")
