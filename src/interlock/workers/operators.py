"""Operators: plain functions `f(payload, ctx)` that do a job's work, found by name.

The name is that of a built-in operator, or of a function with the decorator `@operator` in a module that was given to
the worker: `module:function`, or the name that the decorator registers. Nothing else is ever imported or called.
The value that the function returns is the task's result and must be encodable as JSON. An exception fails the task.
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
    "block_follower": "interlock.workers.block_follower.operator:block_follower",
    "http_fetch": "interlock.workers.http_fetch:http_fetch",
}
"""The platform's own operators that are loaded when a task names them."""
SPARK_MAP: Final = "spark_map"
"""Takes all tasks of a claim as one batch, on Spark."""
ON_DATA: Final = frozenset({"block_follower"})
"""Operators that get the URL of the data database."""
ON_SERVERS: Final = frozenset({"block_follower", "block_ingest", "http_fetch", "integrity_check"})
"""Operators that send requests to other servers, and get the outbound settings."""
ON_STATE: Final = frozenset({"list_load"})
"""Operators on Spark that get the URL of the state database. They run in a separate driver."""

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
    """Declares a function as an operator: `@operator` under its own name, `@operator("name")` under another."""
    if isinstance(function_or_name, str):
        return lambda function: _declare(function_or_name, function)
    return _declare(function_or_name.__name__, function_or_name)


def _declare(name: str, function: F) -> F:
    if inspect.iscoroutinefunction(function):
        raise OperatorNotFound(f"operator {name!r} is a coroutine function: make it a plain function")
    if not inspect.isfunction(function):
        raise OperatorNotFound(f"operator {name!r} must be a plain function, got a {type(function).__name__}")
    if name in PLATFORM or name in _built_in:
        raise ValueError(f"{name!r} is the name of a built-in operator: give this one another name")
    vars(function)[DECLARED] = name
    return function


def _build_in(function: F) -> F:
    _built_in[function.__name__] = function
    return function


def built_in() -> dict[str, Operator]:
    """Returns the built-in operators by name, without those that are loaded on demand."""
    return dict(_built_in)


def give(sources: Sequence[Source]) -> Catalogue:
    """Sets the folders and modules whose operators this process may run."""
    global _given  # noqa: PLW0603 - set once, when a process that runs operators starts
    _given = catalogue_of(sources, spark=False)
    _loaded.clear()
    return _given


def catalogue_of(sources: Sequence[Source], *, spark: bool) -> Catalogue:
    """Returns the catalogue of a worker's operators, of those for Spark or of the others."""
    return Catalogue(sources, Kind.SPARK) if spark else Catalogue(sources, Kind.PLATFORM, reserved())


def reserved() -> frozenset[str]:
    """Returns the names of the platform's operators, which a user's function cannot take."""
    return frozenset({*_built_in, *PLATFORM})


def runs_users_code(name: str) -> bool:
    """Returns False for an operator that consists of the platform's own code only."""
    return name == python.__name__ or name not in reserved()


def resolve(name: str) -> Operator:
    """Returns the function behind a name. Raises OperatorNotFound."""
    found = _built_in.get(name) or _loaded.get(name)
    if found is not None:
        return found
    return _loaded.setdefault(name, _platform(name) if name in PLATFORM else declared(name))


def declared(name: str) -> Operator:
    """Returns the declared function behind a name that is not the platform's. Raises OperatorNotFound."""
    found = catalogue.load(_given.find(name))
    if not callable(found) or not isinstance(getattr(found, DECLARED, None), str):
        raise OperatorNotFound(
            f"{name!r} is not declared as an operator: import `operator` from interlock.workers, and write @operator "
            "above the function."
        )
    return found


def _platform(name: str) -> Operator:
    module, _, function = PLATFORM[name].partition(":")
    found: Operator = getattr(importlib.import_module(module), function)
    return found


# Built in


@_build_in
def echo(payload: Any, ctx: TaskContext) -> Any:  # noqa: ARG001 - the signature of operators
    """Returns its payload."""
    return payload


@_build_in
def sleep(payload: Any, ctx: TaskContext) -> Any:
    """Sleeps for `seconds`, in steps, and reports progress."""
    seconds = payload.get("seconds") if isinstance(payload, dict) else None
    if not isinstance(seconds, int | float):
        raise TaskFailed('sleep needs a payload such as {"seconds": 1.5}.', "BadPayload")
    start = time.monotonic()
    while (left := start + seconds - time.monotonic()) > 0:
        if ctx.canceled:
            raise TaskCanceled
        time.sleep(min(left, SLEEP_STEP_SECONDS))
        ctx.progress((time.monotonic() - start) / seconds)
    return {"seconds": seconds}


@_build_in
def fail(payload: Any, ctx: TaskContext) -> Any:
    """Fails as the payload requests: with `error_class` and `message`, by `exit_code` or by `signal`.

    `times` limits the number of failed attempts.
    """
    asked = payload if isinstance(payload, dict) else {}
    if ctx.attempt > asked.get("times", ctx.attempt):
        return {"attempt": ctx.attempt}
    if "exit_code" in asked:
        os._exit(asked["exit_code"])
    if "signal" in asked:
        _die_of(signal.Signals[asked["signal"]])
    raise TaskFailed(asked.get("message", "The payload requested this failure."), asked.get("error_class"))


def _die_of(number: signal.Signals) -> None:
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@_build_in
def python(payload: Any, ctx: TaskContext) -> Any:
    """Calls the declared function that the job's config names: `{"function": "module:function"}`."""
    name = ctx.config.get("function")
    if not isinstance(name, str) or ":" not in name:
        raise OperatorNotFound('The operator python needs a config such as {"function": "module:function"}.')
    return declared(name)(payload, ctx)
