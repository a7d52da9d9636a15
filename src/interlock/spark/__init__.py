"""Spark: operators, and the code that reads their inputs and writes their outputs.

    operators   declaring the inputs and outputs of an operator, and finding it by name
    context     the context object that an operator receives next to its inputs
    reader      the granted scope of an input as a DataFrame
    writer      a DataFrame as one file under the attempt's own prefix, with its marker
    attempt     one attempt: read, call, check, write
    testing     running an operator in a test, without a platform
    built_in    operators that ship with the platform

The command line and the wrapper also import this package, so it loads PySpark only when a task needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlock.spark.context import Scope, TaskContext
    from interlock.spark.operators import operator
    from interlock.workers.context import TaskCanceled, TaskFailed

PUBLIC: tuple[str, ...] = ()
"""Modules that other capabilities may import: none. A worker's child process imports `driver` by name."""

__all__ = ["Scope", "TaskCanceled", "TaskContext", "TaskFailed", "operator"]

_HOMES = {
    "Scope": "interlock.spark.context",
    "TaskCanceled": "interlock.workers.context",
    "TaskContext": "interlock.spark.context",
    "TaskFailed": "interlock.workers.context",
    "operator": "interlock.spark.operators",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
