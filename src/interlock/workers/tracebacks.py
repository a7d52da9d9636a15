"""Tracebacks of operators: the frames of the user's code, with file and line, for the log of the attempt."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Final

from interlock.workers.context import TaskFailed

_PLATFORM: Final = str(Path(__file__).resolve().parents[1])
_EXAMPLES: Final = str(Path(_PLATFORM, "examples"))
_IMPORTS: Final = "<frozen "
MAX_FRAMES: Final = 50
MAX_CHAIN: Final = 10
MAX_TEXT: Final = 20_000
_LOGGED_FRAMES: Final = 10


def text_of(error: BaseException) -> str | None:
    """Returns the traceback, without frames of the platform. None for a failure that user code did not raise."""
    found = traceback.TracebackException.from_exception(error, limit=-MAX_FRAMES)
    if not _keep_user_frames(found) and isinstance(error, TaskFailed):
        return None
    text = "".join(found.format()).rstrip("\n")
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n… {len(text) - MAX_TEXT} characters left out …\n{text[-half:]}"


def frames_of(error: BaseException) -> str:
    """Returns the last frames without the error's message, which may quote the payload."""
    frames = traceback.extract_tb(error.__traceback__)[-_LOGGED_FRAMES:]
    return f"{type(error).__name__} raised\n{''.join(traceback.format_list(frames))}"


def _keep_user_frames(error: traceback.TracebackException) -> bool:
    """Drops the platform's frames from the whole chain. Returns False if no others are left."""
    any_left = False
    one: traceback.TracebackException | None = error
    for _ in range(MAX_CHAIN):
        if one is None:
            return any_left
        one.stack = traceback.StackSummary.from_list([frame for frame in one.stack if not _is_platform(frame.filename)])
        any_left |= bool(one.stack) or isinstance(getattr(one, "lineno", None), str)
        if one.__cause__ is None and not one.__suppress_context__ and one.__context__ is not None:
            one = one.__context__
        else:
            one = one.__cause__
    return any_left


def _is_platform(file: str) -> bool:
    return (file.startswith(_PLATFORM) and not file.startswith(_EXAMPLES)) or file.startswith(_IMPORTS)
