"""What moves data: operators on Spark, the reader and the writer around them, and the follower of chains.

    operators   how an operator declares what it takes and gives, and how it is found by name
    context     what an operator is given beside its inputs
    reading     the granted scope of an input as a DataFrame
    writing     a DataFrame as one file under the attempt's own prefix, with its marker
    attempt     one attempt: read, call, check, write
    testing     an operator in a test, without a platform around it
    built_in    operators that ship with the platform

Nothing here loads PySpark before it is needed: the command line and the wrapper import this package, too.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlock.pipeline.context import Scope, TaskContext
    from interlock.pipeline.operators import operator
    from interlock.workers.context import TaskCanceled, TaskFailed

__all__ = ["Scope", "TaskCanceled", "TaskContext", "TaskFailed", "operator"]

_HOMES = {
    "Scope": "interlock.pipeline.context",
    "TaskCanceled": "interlock.workers.context",
    "TaskContext": "interlock.pipeline.context",
    "TaskFailed": "interlock.workers.context",
    "operator": "interlock.pipeline.operators",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
