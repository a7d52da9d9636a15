"""Runs what the job names, in the user's process, and reports its outcome with the attempt's own token.

Python is called in this very process. Node and a `bootstrap` program are started from it: they find the event on their
standard input and in `event.json`, and leave a result in `result.json` or report by themselves.
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

from interlock.runner.inside.drop import clean_modules
from interlock.runner.inside.job import (
    EXIT_BAD_BUNDLE,
    EXIT_DISK_FULL,
    EXIT_NOT_REPORTED,
    EXIT_OUT_OF_MEMORY,
    EXIT_PROCESS_LIMIT,
    PROBE,
    Job,
)

EVENT: Final = "event.json"
RESULT: Final = "result.json"
ERROR: Final = "error.json"
"""Written by Node's entry code for a handler that threw."""
DONE, FAILED = 0, 1
_MOST_RESULT_BYTES: Final = 1 << 20
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NODE_ENTRY: Final = "node_entry.cjs"
_SDK: Final = "interlock.client.task"


class BadBundle(Exception):
    """The bundle does not have what the job names."""


class NotReported(Exception):
    """The dispatcher did not take the outcome: the attempt is over, or the platform away."""


def run(job: Job) -> int:
    """The process's exit code."""
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
        _say(str(error))
        return EXIT_BAD_BUNDLE
    except NotReported as error:
        _say(f"The outcome was not taken: {error}")
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
    """`module.handler`, of the bundle."""
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
    """Too little of something is for the runner to report, which knows the limit; all else is the handler's own."""
    traceback.print_exception(error.with_traceback(_own_frames(error)))
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return EXIT_DISK_FULL
    if isinstance(error, BlockingIOError | RuntimeError) and _cannot_fork():
        return EXIT_PROCESS_LIMIT
    _fail(task, type(error).__name__, str(error))
    return FAILED


def _own_frames(error: Exception) -> Any:
    """Without the entry code's, which says nothing to the author of a handler."""
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
            raise BadBundle(f"{command[0]} cannot be started: {error.strerror}.") from None
    if code < 0:
        _die_by(-code)
    if code == DONE:
        _complete(task, _left(RESULT))
    elif (said := _left(ERROR)) is not None:
        _fail(task, str(said.get("class")), str(said.get("message")))
    return code


def _command(job: Job) -> list[str]:
    if job.language == "bootstrap":
        return [f"{job.bundle}/bootstrap"]
    if job.node is None:
        raise BadBundle("This runner has no Node: install `node`, or write the handler in another language.")
    name, _, attribute = job.entrypoint.rpartition(".")
    heap = max(16, job.memory_bytes * 3 // 4 >> 20)
    entry = f"{job.programs}/interlock/runner/inside/{_NODE_ENTRY}"
    return [job.node, f"--max-old-space-size={heap}", entry, job.bundle, name.replace(".", "/"), attribute]


def _left(name: str) -> Any:
    file = Path(name)
    if file.is_symlink() or not file.is_file():
        return None
    if file.stat().st_size > _MOST_RESULT_BYTES:
        raise BadBundle(f"{name} has more than {_MOST_RESULT_BYTES} bytes.")
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise BadBundle(f"{name} is not JSON: {error}.") from None


def _die_by(number: int) -> None:
    """As the program did, so that the keeper sees it."""
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


# Reports


def _task(job: Job) -> Any:
    """The SDK's, which keeps the token fresh meanwhile. Any: it is loaded where user code finds it, by name."""
    return importlib.import_module(_SDK).Task(job.event)


def _complete(task: Any, result: Any) -> None:
    if not task.ended:
        _told(task.complete, result)


def _fail(task: Any, name: str, message: str) -> None:
    if not task.ended:
        _told(task.fail, name, message)


def _told(report: Callable[..., None], *what: Any) -> None:
    try:
        report(*what)
    except importlib.import_module(_SDK).TaskError as error:
        raise NotReported(error) from None


def _say(sentence: str) -> None:
    sys.stderr.write(sentence + "\n")
