"""Workers: the API for authors of operators, and the process that runs operators.

The names that operator code needs are light and imported immediately. The wrapper is loaded only on access, since every
child process imports this package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from interlock.workers.catalogue import OperatorNotFound
from interlock.workers.context import TaskCanceled, TaskContext, TaskFailed
from interlock.workers.operators import operator

if TYPE_CHECKING:
    from interlock.workers.wrapper import Worker, main

PUBLIC = (
    "block_follower.config",
    "block_follower.chain",
    "block_follower.rpc",
    "catalogue",
    "child_runtime",
    "confinement",
    "context",
    "edits",
    "failures",
    "operator_requests",
    "operators",
    "process",
    "protocol",
)
"""Modules that other capabilities may import. tests/docs checks it."""

__all__ = ["OperatorNotFound", "TaskCanceled", "TaskContext", "TaskFailed", "Worker", "main", "operator"]


def __getattr__(name: str) -> Any:
    if name in ("Worker", "main"):
        return getattr(import_module("interlock.workers.wrapper"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
