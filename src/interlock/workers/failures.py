"""Failures of an attempt on Spark: one class for each problem that needs a different fix.

TaskFailed
├── BadConfig          the job's config is invalid
├── BadOperator        the operator's declaration is invalid
├── WrongInputs        the job's inputs are not those that the operator declares
├── WrongOutputs       the operator returns other outputs than the job has
├── WrongColumns       an output has other columns than declared
├── NullInColumn       a null in a column that is not nullable
├── RowOutsideScope    a row outside the task's range
├── DuplicateKey       two new rows with the same unique key
├── NoScope            an output has no range
├── SchemaMismatch     a dataset lacks requested columns, or does not accept the given ones
├── CorruptFile        a file of an input is not readable
├── FileMissing        a file of an input no longer exists
├── DiskFull           no disk space for the output
├── PrefixSwept        the attempt's own files were deleted while it wrote them
├── ObjectStoreAway    the object store does not answer
├── DataDatabaseAway   the data database does not answer
├── PackageMissing     Spark's executors lack a package of the operator, or of Interlock itself
└── SparkStopped       the session ended during the attempt
"""

from __future__ import annotations

from interlock.workers.context import TaskFailed


def failure(error_class: str, message: str) -> TaskFailed:
    """Recreates a failure that another process reported, from the name of its class."""
    ours = {kind.__name__: kind for kind in TaskFailed.__subclasses__() if kind.__module__ == __name__}
    return ours.get(error_class, TaskFailed)(message, error_class)


class BadConfig(TaskFailed):
    """The job's config is invalid: a retry would not help."""


class BadOperator(TaskFailed):
    """The operator's declaration is invalid."""


class WrongInputs(TaskFailed):
    """The job's inputs are not those that the operator declares."""


class WrongOutputs(TaskFailed):
    """The operator returns other outputs than the job has."""


class WrongColumns(TaskFailed):
    """An output has other columns than declared."""


class NullInColumn(TaskFailed):
    """A null in a column that is not nullable."""


class RowOutsideScope(TaskFailed):
    """A row outside the task's range."""


class DuplicateKey(TaskFailed):
    """Two new rows with the same unique key."""


class NoScope(TaskFailed):
    """An output has no range."""


class SchemaMismatch(TaskFailed):
    """A dataset lacks requested columns, or does not accept the given ones."""


class CorruptFile(TaskFailed):
    """A file of an input is not readable."""


class FileMissing(TaskFailed):
    """A file of an input no longer exists."""


class DiskFull(TaskFailed):
    """No disk space for the output."""


class ObjectStoreAway(TaskFailed):
    """The object store does not answer. A retry may succeed."""


class PrefixSwept(TaskFailed):
    """The attempt's own files were deleted while it wrote them: it has lost its lease."""


class DataDatabaseAway(TaskFailed):
    """The data database does not answer. A retry may succeed."""


class PackageMissing(TaskFailed):
    """Spark's executors lack a package of the operator, or of Interlock itself."""


class SparkStopped(TaskFailed):
    """The session ended during the attempt. The next attempt gets a new session."""
