"""Operators: plain functions `f(payload, ctx)` that do a job's work, found by name.

A name is that of a built-in operator, or of a function that is declared with `@operator` in a module that the worker
was given: `module:function`, or the name that the decorator registers. Nothing else is ever imported or called.
The value that the function returns, if JSON can say it, is the task's result; what it raises fails the task.
"""

from __future__ import annotations

import importlib
import inspect
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, overload

from interlock.workers import catalogue
from interlock.workers.catalogue import Catalogue, Kind, OperatorNotFound, Source
from interlock.workers.context import TaskCanceled, TaskContext, TaskFailed

Operator = Callable[[Any, TaskContext], Any]
F = TypeVar("F", bound=Operator)

PLATFORM: Final = {
    "block_follower": "interlock.pipeline.follower.operator:block_follower",
    "http_fetch": "interlock.pipeline.http_fetch.operator:http_fetch",
}
"""Operators of the platform that are loaded when a task names them."""
SPARK_MAP: Final = "spark_map"
"""Takes all tasks of a claim at once, on Spark."""
ON_DATA: Final = frozenset({"block_follower"})
"""Those that are told where the data database is."""
ON_SERVERS: Final = frozenset({"block_follower", "block_ingest", "http_fetch", "integrity_check"})
"""Those that ask other servers, and are told which they may."""
ON_STATE: Final = frozenset({"list_load"})
"""Those that are told where the state database is, on Spark. They have a driver of their own."""

DECLARED: Final = "__interlock_platform_operator__"
"""The attribute of a declared function; its value is the name that the decorator registers."""

_built_in: dict[str, Operator] = {}
_loaded: dict[str, Operator] = {}
_given = Catalogue((), Kind.PLATFORM)

SLEEP_STEP_SECONDS = 0.1


@overload
def operator(function: F, /) -> F: ...


@overload
def operator(name: str, /) -> Callable[[F], F]: ...


def operator(function_or_name: Any, /) -> Any:
    """Declare a function as an operator: `@operator` under its own name, `@operator("name")` under another."""
    if isinstance(function_or_name, str):
        return lambda function: _declare(function_or_name, function)
    return _declare(function_or_name.__name__, function_or_name)


def _declare(name: str, function: F) -> F:
    if inspect.iscoroutinefunction(function):
        raise OperatorNotFound(f"operator {name!r} is a coroutine function: make it a plain function")
    if not inspect.isfunction(function):
        raise OperatorNotFound(f"operator {name!r} is no function but a {type(function).__name__}")
    if name in PLATFORM or name in _built_in:
        raise ValueError(f"operator {name!r} exists already: give this one another name")
    vars(function)[DECLARED] = name
    return function


def _build_in(function: F) -> F:
    _built_in[function.__name__] = function
    return function


def built_in() -> dict[str, Operator]:
    """By name, without those that are loaded when a task names them."""
    return dict(_built_in)


def give(sources: Sequence[Source]) -> Catalogue:
    """Sets the folders and modules whose operators this process may run."""
    global _given  # noqa: PLW0603 - a process that runs operators is given them once, at its start
    _given = catalogue_of(sources, spark=False)
    _loaded.clear()
    return _given


def catalogue_of(sources: Sequence[Source], *, spark: bool) -> Catalogue:
    """Finds the operators of a worker, on Spark or not."""
    return Catalogue(sources, Kind.SPARK) if spark else Catalogue(sources, Kind.PLATFORM, reserved())


def reserved() -> frozenset[str]:
    """Names of the platform, which no function of a user can take."""
    return frozenset({*_built_in, *PLATFORM})


def resolve(name: str) -> Operator:
    """Returns the function behind a name. Raises OperatorNotFound."""
    found = _built_in.get(name) or _loaded.get(name)
    if found is not None:
        return found
    return _loaded.setdefault(name, _platform(name) if name in PLATFORM else declared(name))


def declared(name: str) -> Operator:
    """Returns the declared function behind a name, which is not one of the platform. Raises OperatorNotFound."""
    found = catalogue.load(_given.find(name))
    if not callable(found) or not isinstance(getattr(found, DECLARED, None), str):
        raise OperatorNotFound(
            f"{name!r} is not declared: import `operator` from interlock.workers, and write @operator above the "
            "function"
        )
    return found


def _platform(name: str) -> Operator:
    module, _, function = PLATFORM[name].partition(":")
    found: Operator = getattr(importlib.import_module(module), function)
    return found


# Built in


@_build_in
def echo(payload: Any, ctx: TaskContext) -> Any:  # noqa: ARG001 - an operator takes both
    """Returns its payload."""
    return payload


@_build_in
def sleep(payload: Any, ctx: TaskContext) -> Any:
    """Takes `seconds` of time, in steps, and shows progress."""
    seconds = payload.get("seconds") if isinstance(payload, dict) else None
    if not isinstance(seconds, int | float):
        raise TaskFailed('sleep needs a payload like {"seconds": 1.5}', "BadPayload")
    start = time.monotonic()
    while (left := start + seconds - time.monotonic()) > 0:
        if ctx.canceled:
            raise TaskCanceled
        time.sleep(min(left, SLEEP_STEP_SECONDS))
        ctx.progress((time.monotonic() - start) / seconds)
    return {"seconds": seconds}


@_build_in
def fail(payload: Any, ctx: TaskContext) -> Any:
    """Fails as told: with `error_class` and `message`, by `exit_code` or by `signal`; `times` bounds how often."""
    asked = payload if isinstance(payload, dict) else {}
    if ctx.attempt > asked.get("times", ctx.attempt):
        return {"attempt": ctx.attempt}
    if "exit_code" in asked:
        os._exit(asked["exit_code"])
    if "signal" in asked:
        _die_of(signal.Signals[asked["signal"]])
    raise TaskFailed(asked.get("message", "told to fail"), asked.get("error_class"))


def _die_of(number: signal.Signals) -> None:
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@_build_in
def python(payload: Any, ctx: TaskContext) -> Any:
    """Calls the declared function that the job's config names: `{"function": "module:function"}`."""
    name = ctx.config.get("function")
    if not isinstance(name, str) or ":" not in name:
        raise OperatorNotFound('operator python needs a config like {"function": "module:function"}')
    return declared(name)(payload, ctx)
