"""How an attempt on Spark fails: one class for each thing that somebody can do something about.

TaskFailed
├── BadConfig          the job's config is wrong
├── BadOperator        what the operator declares cannot be
├── WrongInputs        the job's inputs are not those that the operator takes
├── WrongOutputs       the operator does not give what the job's outputs are
├── WrongColumns       an output has other columns than declared
├── NullInColumn       a null where the schema says there is none
├── RowOutsideScope    a row that belongs to another task
├── DuplicateKey       two new rows with one unique key
├── NoScope            nothing says which range an output is about
├── SchemaMismatch     a dataset has not the columns that are wanted, or cannot take those that are given
├── CorruptFile        a file of an input cannot be read
├── FileMissing        a file of an input is gone
├── DiskFull           no room for the output
├── PrefixSwept        the attempt's own files were taken away while it wrote them
├── ObjectStoreAway    the store of objects does not answer
├── DataDatabaseAway   the data database does not answer
├── PackageMissing     Spark's executors lack what the operator, or Interlock itself, is made of
└── SparkStopped       the session has ended under the attempt
"""

from __future__ import annotations

from interlock.workers.context import TaskFailed


def failure(error_class: str, message: str) -> TaskFailed:
    """What was told of from another process, by the name of its class."""
    ours = {kind.__name__: kind for kind in TaskFailed.__subclasses__() if kind.__module__ == __name__}
    return ours.get(error_class, TaskFailed)(message, error_class)


class BadConfig(TaskFailed):
    """The job's config is wrong: a retry would not help."""


class BadOperator(TaskFailed):
    """What the operator declares cannot be."""


class WrongInputs(TaskFailed):
    """The job's inputs are not those that the operator takes."""


class WrongOutputs(TaskFailed):
    """The operator does not give what the job's outputs are."""


class WrongColumns(TaskFailed):
    """An output has other columns than declared."""


class NullInColumn(TaskFailed):
    """A null where the schema says there is none."""


class RowOutsideScope(TaskFailed):
    """A row that belongs to another task."""


class DuplicateKey(TaskFailed):
    """Two new rows with one unique key."""


class NoScope(TaskFailed):
    """Nothing says which range an output is about."""


class SchemaMismatch(TaskFailed):
    """A dataset has not the columns that are wanted, or cannot take those that are given."""


class CorruptFile(TaskFailed):
    """A file of an input cannot be read."""


class FileMissing(TaskFailed):
    """A file of an input is gone."""


class DiskFull(TaskFailed):
    """No room for the output."""


class ObjectStoreAway(TaskFailed):
    """The store of objects does not answer: another attempt may find it again."""


class PrefixSwept(TaskFailed):
    """The attempt's own files were taken away while it wrote them: it has lost its task."""


class DataDatabaseAway(TaskFailed):
    """The data database does not answer: another attempt may find it again."""


class PackageMissing(TaskFailed):
    """Spark's executors lack what the operator, or Interlock itself, is made of."""


class SparkStopped(TaskFailed):
    """The session has ended under the attempt: the next one gets a new session."""
