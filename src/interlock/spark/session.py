"""The Spark session of a driver process, shared by all its tasks and started with the first.

Each task gets its own session over the same Spark application, with its own temporary views and SQL settings, and a
name by which its work can be canceled. With a master the name is a job group; with Spark Connect it is a tag.
"""

from __future__ import annotations

import logging
import os
import shlex
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast
from urllib.parse import urlsplit

from interlock.spark import java
from interlock.workers.context import TaskFailed
from interlock.workers.failures import SparkStopped
from interlock.workers.protocol import SparkOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)

CONNECT_PORT: Final = 15002
_CONNECT_SECONDS: Final = 10.0
_INTERRUPT_SECONDS: Final = 0.25
_LONGEST_INTERRUPT_SECONDS: Final = 2.0
"""Pauses between two interrupts of a group that does not end: the first one, doubled up to the longest."""
_S3_CLASS: Final = "org.apache.hadoop.fs.s3a.S3AFileSystem"

DEFAULTS: Final = {
    "spark.app.name": "interlock",
    "spark.log.level": "WARN",
    # For many small jobs in one long-lived session: no web server, little history, no progress bars in the log.
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.ui.retainedJobs": "100",
    "spark.ui.retainedStages": "200",
    "spark.ui.retainedTasks": "2000",
    "spark.sql.ui.retainedExecutions": "20",
    # A small task gets its share of the cores immediately, even while a large one runs.
    "spark.scheduler.mode": "FAIR",
    # Two copies of the task that writes a file could leave other bytes than its marker describes.
    "spark.speculation": "false",
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.pythonUDF.arrow.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    # Otherwise the parser would replace `${…}` in user text with settings and environment variables of its process.
    "spark.sql.variable.substitute": "false",
    # Otherwise the parser would evaluate rows of VALUES in user text before the gate of `sql` has checked them.
    "spark.sql.parser.eagerEvalOfUnresolvedInlineTable": "false",
    "spark.sql.parquet.compression.codec": "zstd",
}
FEW_PARTITIONS: Final = 16
"""Most partitions of a shuffle on one machine. Fewer cores mean fewer partitions."""


class SparkUnavailable(TaskFailed):
    """The session could not be started. A retry may succeed."""


class Session(ABC):
    """The operations of the driver on Spark, the same for a master and for Spark Connect."""

    @abstractmethod
    def for_task(self, group: str, pool: str, about: str) -> SparkSession:
        """Returns a session for one task. Must be called in the task's thread, whose jobs then belong to `group`."""

    def release(self, group: str) -> None:  # noqa: B027 - only Spark Connect needs it
        """Releases the session of a task that has ended, in the task's thread. Harmless if it has none."""

    @abstractmethod
    def cancel(self, group: str) -> None:
        """Cancels the work of one group only. May be called from any thread."""

    @abstractmethod
    def stage(self, group: str) -> str | None:
        """Describes the progress of the group's running work; None if nothing runs."""

    @abstractmethod
    def usable(self) -> bool:
        """Returns True if the session can start another job."""

    @abstractmethod
    def wait_for_death(self) -> int:
        """Waits for Spark's process to end and returns its exit code. Waits forever if there is no local process."""

    @abstractmethod
    def stop(self) -> None: ...


def start(options: SparkOptions, scratch: Path) -> Session:
    """Starts the session. Raises JavaMissing or SparkUnavailable."""
    return ConnectSession(options) if options.remote else ClassicSession(options, scratch)


# With a master


def properties(options: SparkOptions, scratch: Path) -> dict[str, str]:
    """Returns Spark's properties: our defaults, then our settings, then `spark_conf`, which overrides both.

    Hadoop reads a file:// URL literally. A percent-encoded URL would name another file, so paths are not encoded.
    """
    local = options.master.startswith("local")
    chosen = DEFAULTS | {
        "spark.master": options.master,
        "spark.driver.memory": options.memory,
        "spark.sql.warehouse.dir": f"file://{scratch}/warehouse",
        "spark.scheduler.allocation.file": f"file://{scratch}/pools.xml",
    }
    if local:
        partitions = min(max(os.cpu_count() or 1, 2), FEW_PARTITIONS)
        chosen |= {
            "spark.sql.shuffle.partitions": str(partitions),
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.python.daemon.module": "interlock.spark.python_workers",
        }
    if options.objects_root.startswith("s3://"):
        chosen["spark.hadoop.fs.s3.impl"] = _S3_CLASS
    chosen |= options.conf
    java_options = options.conf.get("spark.driver.extraJavaOptions", "")
    chosen["spark.driver.extraJavaOptions"] = f'"-Djava.io.tmpdir={scratch}" {java_options}'.rstrip()
    return chosen


def _variables(options: SparkOptions, scratch: Path) -> dict[str, str]:
    """Returns Spark's environment variables. The machines of a cluster have their own Python, which is left alone."""
    given = options.conf
    variables = {} if "spark.local.dir" in given else {"SPARK_LOCAL_DIRS": str(scratch)}
    if options.master.startswith("local"):
        variables["SPARK_LOCAL_IP"] = os.environ.get("SPARK_LOCAL_IP", "127.0.0.1")
        variables["PYSPARK_PYTHON"] = sys.executable
    if python := given.get("spark.pyspark.python"):
        variables["PYSPARK_PYTHON"] = python
    return variables


def pool_names(tasks: int) -> list[str]:
    return [f"interlock-{number}" for number in range(tasks)]


def _pools(tasks: int) -> str:
    """Returns Spark's pool file: one pool per concurrent task. Pools are reused, since Spark never forgets a name."""
    alike = "<schedulingMode>FAIR</schedulingMode><weight>1</weight><minShare>0</minShare>"
    pools = "".join(f'<pool name="{name}">{alike}</pool>' for name in pool_names(tasks))
    return f'<?xml version="1.0"?><allocations>{pools}</allocations>'


def _written(chosen: dict[str, str]) -> str:
    """Formats properties as a Java properties file."""

    def escaped(text: str) -> str:
        plain = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
        return "\\" + plain if plain.startswith(" ") else plain

    def name(text: str) -> str:
        return escaped(text).replace(" ", "\\ ").replace(":", "\\:").replace("=", "\\=")

    return "".join(f"{name(key)}={escaped(value)}\n" for key, value in sorted(chosen.items()))


class ClassicSession(Session):
    """A session in our own JVM, which is the driver of `local[*]` or of a cluster."""

    def __init__(self, options: SparkOptions, scratch: Path) -> None:
        self._prepare(options, scratch)
        from pyspark.sql import SparkSession  # noqa: PLC0415 - loaded with the first task

        try:
            self._spark = SparkSession.builder.getOrCreate()
            self._context = cast("Any", self._spark.sparkContext)  # its private attributes have no types
            self._jvm: Popen[bytes] = self._context._gateway.proc
            if options.objects_root.startswith("s3://"):
                self._require_s3()
        except SparkUnavailable:
            raise
        except Exception as error:
            raise SparkUnavailable(
                f"Spark did not start with master {options.master!r} ({_first_line(error)}): look for the cause in the "
                "worker's log (operator.output), and check the settings that start with spark_."
            ) from error
        _forbid_stop()
        _keep_queries_out_of_logs()

    @staticmethod
    def _prepare(options: SparkOptions, scratch: Path) -> None:
        """Prepares the environment and files of Spark's launcher, which is a separate program."""
        found = java.find().environment(os.environ)
        if "JAVA_HOME" in found:
            os.environ["JAVA_HOME"] = found["JAVA_HOME"]
        else:
            os.environ.pop("JAVA_HOME", None)
        chosen = properties(options, scratch)
        os.environ |= _variables(options, scratch)
        (scratch / "pools.xml").write_text(_pools(options.tasks))
        file = scratch / "spark.properties"
        file.touch(mode=0o600)
        file.write_text(_written(chosen))
        # Properties may contain credentials, and every user of the machine can read a command line.
        os.environ["PYSPARK_SUBMIT_ARGS"] = (
            f"--load-spark-defaults --properties-file {shlex.quote(str(file))} pyspark-shell"
        )

    def _require_s3(self) -> None:
        jvm: Any = self._context._jvm
        loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
        try:
            loader.loadClass(_S3_CLASS)
        except Exception as error:
            artifact = f"org.apache.hadoop:hadoop-aws:{jvm.org.apache.hadoop.util.VersionInfo.getVersion()}"
            raise SparkUnavailable(
                f"The objects are on S3, but {artifact} is not on Spark's class path. Let Spark download it with "
                f'spark_conf = {{ "spark.jars.packages" = "{artifact}" }}, or list its jars in "spark.jars". '
                "The version must match exactly."
            ) from error

    def for_task(self, group: str, pool: str, about: str) -> SparkSession:
        self._context.setJobGroup(group, about, interruptOnCancel=True)
        self._context.setLocalProperty("spark.scheduler.pool", pool)
        return self._spark.newSession()

    def cancel(self, group: str) -> None:
        self._context._jsc.sc().cancelJobGroupAndFutureJobs(group)

    def stage(self, group: str) -> str | None:
        tracker = self._context.statusTracker()
        for job_id in tracker.getJobIdsForGroup(group):
            job = tracker.getJobInfo(job_id)
            if job is None or job.status != "RUNNING":
                continue
            for stage_id in sorted(job.stageIds):
                stage = tracker.getStageInfo(stage_id)
                if stage is not None and stage.numActiveTasks:
                    return f"stage {stage_id}: {stage.numCompletedTasks} of {stage.numTasks} tasks"
        return None

    def usable(self) -> bool:
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # noqa: PLC0415 - with the first task

        try:
            return not self._context._jsc.sc().isStopped()
        except (Py4JError, OSError, AttributeError):  # the JVM does not answer, or the context is closed
            return False

    def wait_for_death(self) -> int:
        return self._jvm.wait()

    def stop(self) -> None:
        self._context._jsc.stop()


# With Spark Connect


class ConnectSession(Session):
    """A session on a remote Spark over gRPC. It needs no Java here, and has a separate session for each task."""

    def __init__(self, options: SparkOptions) -> None:
        self._url = options.remote or ""
        self._conf = {
            name: value
            for name, value in (DEFAULTS | options.conf).items()
            if name in options.conf or (name.startswith("spark.sql.") and name not in _OF_THE_SERVER)
        }
        self._sessions: dict[str, Any] = {}
        os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
        _require_answer(self._url)
        try:
            self._first = self._connected()
            self._version = self._first.version
        except ImportError as error:
            raise SparkUnavailable(
                f"Spark Connect needs packages that are not installed ({_first_line(error)}): run "
                "pip install 'interlock-dispatch[connect]' on the worker's machine."
            ) from error
        except Exception as error:
            raise SparkUnavailable(
                f"The Spark Connect server in spark_remote refused a session ({_first_line(error)}): check the log of "
                "the server."
            ) from error
        self._really_stop = _forbid_stop_of_connect()
        _keep_queries_out_of_logs()

    def _connected(self) -> Any:
        from pyspark.sql.connect.session import SparkSession  # noqa: PLC0415 - its packages are optional

        return SparkSession.builder.config(map={"spark.remote": self._url, **self._conf}).create()

    def for_task(self, group: str, pool: str, about: str) -> SparkSession:  # noqa: ARG002 - a server has its own pools
        spark = self._sessions[group] = self._connected()
        spark.addTag(_tag(group))
        made: SparkSession = spark
        return made

    def release(self, group: str) -> None:
        spark = self._sessions.get(group)
        if spark is not None:
            self._really_stop(spark)
            self._sessions.pop(group, None)

    def cancel(self, group: str) -> None:
        """Interrupts the group repeatedly until its session is stopped.

        One interrupt is not enough, since it misses an operation that is being requested at the same moment. On a busy
        server an interrupt may also fail, or PySpark may retry it for minutes, so each runs in its own thread.
        """
        pause = _INTERRUPT_SECONDS
        while (spark := self._sessions.get(group)) is not None and not spark.is_stopped:
            threading.Thread(target=_interrupt, args=(spark, _tag(group)), name="interrupt", daemon=True).start()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_INTERRUPT_SECONDS)

    def stage(self, group: str) -> str | None:  # noqa: ARG002 - the server does not report it
        return None

    def usable(self) -> bool:
        return not self._first.is_stopped

    def wait_for_death(self) -> int:
        threading.Event().wait()
        raise AssertionError("the event is never set")

    def stop(self) -> None:
        for spark in (*self._sessions.values(), self._first):
            self._really_stop(spark)


_OF_THE_SERVER: Final = frozenset({"spark.sql.ui.retainedExecutions"})
"""Settings that only the start of the server can set."""


def _keep_queries_out_of_logs() -> None:
    """Disables PySpark's loggers that log the text of every failed query. The attempt reports the error anyway."""
    from pyspark.logger import PySparkLogger  # noqa: PLC0415 - with the first task

    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        PySparkLogger.getLogger(name).disabled = True


def _interrupt(spark: Any, tag: str) -> None:
    try:
        spark.interruptTag(tag)
    except Exception as error:  # whatever PySpark raises: the next interrupt follows soon
        _log.debug("Spark Connect has not interrupted %s: %s", tag, _first_line(error))


def _tag(group: str) -> str:
    return group.replace(",", "-")


def _require_answer(url: str) -> None:
    """Fails fast if nothing listens, since gRPC would retry for minutes."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or CONNECT_PORT
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise SparkUnavailable(
            f"No Spark Connect server answers at {host}:{port}, the address in spark_remote ({error}): start the "
            "server, or correct the setting."
        ) from error


# Operators and the session


def _forbid_stop() -> None:
    from pyspark import SparkContext  # noqa: PLC0415 - loaded with the first task
    from pyspark.sql import SparkSession  # noqa: PLC0415

    for kind in (SparkSession, SparkContext):
        setattr(kind, "stop", _refuse_to_stop)  # noqa: B010 - a method is replaced


def _forbid_stop_of_connect() -> Callable[[Any], None]:
    """Replaces `stop` and returns the original."""
    from pyspark.sql.connect.session import SparkSession  # noqa: PLC0415 - its packages are optional

    before = SparkSession.stop
    setattr(SparkSession, "stop", _refuse_to_stop)  # noqa: B010 - a method is replaced
    return before


def _refuse_to_stop(_self: object) -> NoReturn:
    raise SparkStopped(
        "The operator called stop() on the Spark session, which the worker shares between tasks: remove the call."
    )


def _first_line(error: BaseException) -> str:
    """Returns Java's message, which follows Python's on a line that starts with a colon; else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    java_line = next((line.removeprefix(": ") for line in lines if line.startswith(": ")), None)
    return (java_line or (lines[0] if lines else type(error).__name__))[:500]
