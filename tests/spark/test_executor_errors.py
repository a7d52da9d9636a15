"""Errors for executors that are not set up for Interlock, derived from Spark's messages."""

from __future__ import annotations

from uuid import uuid4

import pytest
from pyspark.errors import PySparkRuntimeError, PythonException

from interlock.spark.errors import explained
from interlock.wire.attempts import TaskData
from interlock.workers.context import TaskFailed
from interlock.workers.failures import PackageMissing

NOTHING = TaskData(task_id=uuid4(), inputs=[], outputs=[])
ABORTED = (
    "An error occurred while calling o80.collectToPython.\n"
    ": org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 failed 4 times, most recent "
    'failure: Lost task 0.3 in stage 0.0: java.io.IOException: Cannot run program "python3.11": error=2\n\tat java'
)
OTHER_PYTHON = (
    "\n  An exception was thrown from the Python worker. Please see the stack trace below.\n"
    "Traceback (most recent call last):\n"
    '  File "pyspark/worker.py", line 1, in main\n    check_python_version(infile)\n'
    "pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has different "
    "version: 3.12 than that in driver: 3.11, PySpark cannot run with different minor versions.\n"
)
NO_PACKAGE = OTHER_PYTHON.rpartition("pyspark.errors")[0] + "ModuleNotFoundError: No module named 'interlock'\n"


def failure_for(error: Exception) -> TaskFailed:
    with pytest.raises(TaskFailed) as raised, explained(NOTHING):
        raise error
    return raised.value


def test_executors_without_python_are_reported_as_package_missing() -> None:
    failed = failure_for(PySparkRuntimeError(ABORTED))
    assert isinstance(failed, PackageMissing)
    assert str(failed).startswith("Spark's executors have no Python at 'python3.11'")


def test_python_version_mismatch_names_the_version() -> None:
    failed = failure_for(PythonException(OTHER_PYTHON))
    assert (failed.error_class, "3.12" in str(failed)) == ("PythonVersionMismatch", True)


def test_missing_package_of_executors_is_named() -> None:
    failed = failure_for(PythonException(NO_PACKAGE))
    assert isinstance(failed, PackageMissing)
    assert "'interlock'" in str(failed)


def test_java_message_is_shown_instead_of_the_py4j_call() -> None:
    failed = failure_for(PySparkRuntimeError(ABORTED.replace("Cannot run program", "Connection reset by")))
    assert str(failed).startswith("Job aborted due to stage failure")
