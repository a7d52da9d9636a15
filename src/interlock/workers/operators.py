"""Operators: plain functions `f(payload, ctx)` that do a job's work, found by name.

A name is one given with `@operator`, or `module:function` of anything importable where the worker runs. What the
function returns, if JSON can say it, is the task's result; what it raises fails the task.
"""

from __future__ import annotations

import importlib
import inspect
import os
import signal
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar, overload

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

_registered: dict[str, Operator] = {}
_imported: dict[str, Operator] = {}

SLEEP_STEP_SECONDS = 0.1


class OperatorNotFound(Exception):
    """There is no such operator here; the message says what is missing."""


@overload
def operator(function: F, /) -> F: ...


@overload
def operator(name: str, /) -> Callable[[F], F]: ...


def operator(function_or_name: Any, /) -> Any:
    """Register a function as an operator: `@operator` under its own name, `@operator("name")` under another."""
    if isinstance(function_or_name, str):
        return lambda function: _register(function_or_name, function)
    return _register(function_or_name.__name__, function_or_name)


def _register(name: str, function: F) -> F:
    _refuse_coroutines(name, function)
    if name in PLATFORM or _registered.setdefault(name, function) is not function:
        raise ValueError(f"operator {name!r} exists already: give this one another name")
    return function


def registered() -> dict[str, Operator]:
    """By name, as far as their modules are loaded."""
    return dict(_registered)


def _refuse_coroutines(name: str, function: object) -> None:
    if inspect.iscoroutinefunction(function):
        raise OperatorNotFound(f"operator {name!r} is a coroutine function: make it a plain function")


def resolve(name: str) -> Operator:
    """The function behind a name. Raises OperatorNotFound."""
    found = _registered.get(name) or _imported.get(name)
    if found is not None:
        return found
    if name in PLATFORM:
        return _imported.setdefault(name, _import(PLATFORM[name]))
    if ":" not in name:
        known = ", ".join(sorted({*_registered, *PLATFORM}))
        raise OperatorNotFound(
            f"no operator {name!r} in this worker: it knows {known}; name a function as module:function, "
            "or let the worker import the module that registers it"
        )
    return _imported.setdefault(name, _import(name))


def _import(name: str) -> Operator:
    module_name, _, attribute = name.partition(":")
    try:
        found: object = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise OperatorNotFound(
            f"cannot load operator {name!r} ({type(error).__name__}: {error}): check the name, and that its module "
            "can be imported where the worker runs"
        ) from error
    if not callable(found):
        raise OperatorNotFound(f"operator {name!r} is no function but a {type(found).__name__}")
    _refuse_coroutines(name, found)
    return found


# Built in


@operator("echo")
def echo(payload: Any, ctx: TaskContext) -> Any:  # noqa: ARG001 - an operator takes both
    """Returns its payload."""
    return payload


@operator("sleep")
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


@operator("fail")
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


@operator("python")
def python(payload: Any, ctx: TaskContext) -> Any:
    """Calls the function that the job's config names: `{"function": "module:function"}`."""
    name = ctx.config.get("function")
    if not isinstance(name, str) or ":" not in name:
        raise OperatorNotFound('operator python needs a config like {"function": "module:function"}')
    return resolve(name)(payload, ctx)
