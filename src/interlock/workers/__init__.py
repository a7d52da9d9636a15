"""Workers: operators for the ones who write them, and the process that runs them.

What operator code needs is imported at once and is light; the wrapper is loaded when asked for, since every child
process imports this package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from interlock.workers.catalogue import OperatorNotFound
from interlock.workers.context import TaskCanceled, TaskContext, TaskFailed
from interlock.workers.operators import operator

if TYPE_CHECKING:
    from interlock.workers.wrapper import Worker, main

__all__ = ["OperatorNotFound", "TaskCanceled", "TaskContext", "TaskFailed", "Worker", "main", "operator"]


def __getattr__(name: str) -> Any:
    if name in ("Worker", "main"):
        return getattr(import_module("interlock.workers.wrapper"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
