"""Runs the job's entrypoint in the user process and reports its outcome with the attempt's own token.

Python handlers are called in this process. Node and `bootstrap` programs are started as child processes: they read the
event from standard input or `event.json`, and write a result to `result.json` or report themselves.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from interlock.untrusted.runner.in_sandbox.job import (
    EXIT_BAD_BUNDLE,
    EXIT_DISK_FULL,
    EXIT_NOT_REPORTED,
    EXIT_OUT_OF_MEMORY,
    EXIT_PROCESS_LIMIT,
    PROBE,
    Job,
)
from interlock.untrusted.runner.in_sandbox.privileges import clean_modules

EVENT: Final = "event.json"
RESULT: Final = "result.json"
ERROR: Final = "error.json"
"""Written by the Node entry code if a handler threw an error."""
DONE, FAILED = 0, 1
_MAX_RESULT_BYTES: Final = 1 << 20
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NODE_ENTRY: Final = "node_entry.cjs"
_SDK: Final = "interlock.client.task"


class BadBundle(Exception):
    """The bundle lacks what the job refers to."""


class NotReported(Exception):
    """The dispatcher did not accept the outcome: the attempt is over, or the platform is unreachable."""


def run(job: Job) -> int:
    """Runs the job and returns the exit code of the process."""
    os.environ.clear()
    os.environ.update(job.environment)
    os.chdir(job.work)
    Path(EVENT).write_text(json.dumps(job.event))
    clean_modules(job)
    if job.language == PROBE:
        return DONE
    try:
        return _call_python(job) if job.language == "python" else _start_program(job)
    except BadBundle as error:
        _print_error(str(error))
        return EXIT_BAD_BUNDLE
    except NotReported as error:
        _print_error(f"The outcome was not accepted: {error}")
        return EXIT_NOT_REPORTED
    except MemoryError:
        return EXIT_OUT_OF_MEMORY


# Python


def _call_python(job: Job) -> int:
    task = _task(job)
    try:
        result = _handler(job)(job.event, task)
    except (BadBundle, MemoryError):
        raise
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else DONE if leaving.code is None else FAILED
    except Exception as error:
        return _failed(task, error)
    _complete(task, result)
    return DONE


def _handler(job: Job) -> Any:
    """Imports `module.handler` from the bundle."""
    name, _, attribute = job.entrypoint.rpartition(".")
    if not name or _spec(name) is None:
        raise BadBundle(f"The bundle has no module {name!r}: the entrypoint is {job.entrypoint!r}.")
    handler = getattr(importlib.import_module(name), attribute, None)
    if not callable(handler):
        raise BadBundle(f"Module {name!r} has no function {attribute!r}: the entrypoint is {job.entrypoint!r}.")
    return handler


def _spec(name: str) -> object:
    try:
        return find_spec(name)
    except ModuleNotFoundError:
        return None


def _failed(task: Any, error: Exception) -> int:
    """Reports a failure of the handler. The runner reports exhausted resources, because it knows the limits."""
    traceback.print_exception(error.with_traceback(_own_frames(error)))
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return EXIT_DISK_FULL
    if isinstance(error, BlockingIOError | RuntimeError) and _cannot_fork():
        return EXIT_PROCESS_LIMIT
    _fail(task, type(error).__name__, str(error))
    return FAILED


def _own_frames(error: Exception) -> Any:
    """Removes frames of the entry code, which do not help the author of a handler."""
    frames = error.__traceback__
    while frames and frames.tb_next and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _cannot_fork() -> bool:
    try:
        child = os.fork()
    except BlockingIOError:
        return True
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return False


# Node, and programs


def _start_program(job: Job) -> int:
    command, task = _command(job), _task(job)
    with Path(EVENT).open("rb") as event:
        try:
            code = subprocess.run(command, stdin=event, check=False).returncode
        except BlockingIOError:
            return EXIT_PROCESS_LIMIT
        except OSError as error:
            raise BadBundle(f"{command[0]} cannot be executed: {error.strerror}.") from None
    if code < 0:
        _die_by(-code)
    if code == DONE:
        _complete(task, _left(RESULT))
    elif (failure := _left(ERROR)) is not None:
        _fail(task, str(failure.get("class")), str(failure.get("message")))
    return code


def _command(job: Job) -> list[str]:
    if job.language == "bootstrap":
        return [f"{job.bundle}/bootstrap"]
    if job.node is None:
        raise BadBundle(
            "Node is not available on this runner: install `node`, or write the handler in another language."
        )
    name, _, attribute = job.entrypoint.rpartition(".")
    heap = max(16, job.memory_bytes * 3 // 4 >> 20)
    entry = f"{job.programs}/interlock/untrusted/runner/in_sandbox/{_NODE_ENTRY}"
    return [job.node, f"--max-old-space-size={heap}", entry, job.bundle, name.replace(".", "/"), attribute]


def _left(name: str) -> Any:
    file = Path(name)
    if file.is_symlink() or not file.is_file():
        return None
    if file.stat().st_size > _MAX_RESULT_BYTES:
        raise BadBundle(f"{name} exceeds the limit of {_MAX_RESULT_BYTES} bytes.")
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise BadBundle(f"{name} is not JSON: {error}.") from None


def _die_by(number: int) -> None:
    """Kills this process with the program's signal, so that the keeper sees the same signal."""
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


# Reports


def _task(job: Job) -> Any:
    """Returns the SDK's Task, which keeps the token alive. Any: the module is imported by name, as user code does."""
    return importlib.import_module(_SDK).Task(job.event)


def _complete(task: Any, result: Any) -> None:
    if not task.ended:
        _report(task.complete, result)


def _fail(task: Any, name: str, message: str) -> None:
    if not task.ended:
        _report(task.fail, name, message)


def _report(report: Callable[..., None], *arguments: Any) -> None:
    try:
        report(*arguments)
    except importlib.import_module(_SDK).TaskError as error:
        raise NotReported(error) from None


def _print_error(sentence: str) -> None:
    sys.stderr.write(sentence + "\n")
