"""What a session is started with, and how tasks share it."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from uuid import uuid4

import pytest

from interlock.errors import ConfigurationError
from interlock.pipeline import session
from interlock.pipeline.driver import Driver
from interlock.pipeline.running import Pools, Running, job_of
from interlock.settings import load
from interlock.workers.context import TaskCanceled
from interlock.workers.protocol import Assignment, SparkOptions, Work


def options(**given: object) -> SparkOptions:
    usual: dict[str, object] = {
        "master": "local[2]",
        "remote": None,
        "memory": "3g",
        "conf": {},
        "tasks": 4,
        "objects_root": "file:///o",
    }
    return SparkOptions(**usual | given)  # type: ignore[arg-type]


def test_what_the_settings_say_wins_over_the_defaults_and_spark_conf_over_all(tmp_path: Path) -> None:
    chosen = session.properties(options(), tmp_path)
    assert (chosen["spark.driver.memory"], chosen["spark.ui.enabled"]) == ("3g", "false")
    own = {"spark.driver.memory": "5g", "spark.ui.enabled": "true", "spark.driver.extraJavaOptions": "-Xss4m"}
    chosen = session.properties(options(conf=own), tmp_path)
    assert (chosen["spark.driver.memory"], chosen["spark.ui.enabled"]) == ("5g", "true")
    assert chosen["spark.driver.extraJavaOptions"] == f'"-Djava.io.tmpdir={tmp_path}" -Xss4m'


def test_a_cluster_decides_for_itself_how_it_is_reached_and_how_it_shuffles(tmp_path: Path) -> None:
    chosen = session.properties(options(master="spark://far:7077"), tmp_path)
    assert not {"spark.driver.host", "spark.sql.shuffle.partitions"} & set(chosen)


def test_objects_on_s3_are_read_under_the_name_they_have(tmp_path: Path) -> None:
    chosen = session.properties(options(objects_root="s3://bucket/x"), tmp_path)
    assert chosen["spark.hadoop.fs.s3.impl"] == "org.apache.hadoop.fs.s3a.S3AFileSystem"


def test_properties_with_odd_characters_come_out_as_they_went_in() -> None:
    written = session._written({"spark.a b:c=d": " back\\slash\tand\nlines"})
    assert written == "spark.a\\ b\\:c\\=d=\\ back\\\\slash\\tand\\nlines\n"


def test_a_job_has_one_pool_for_all_its_tasks_and_gives_it_back() -> None:
    def work(operator: str) -> Work:
        return Work(operator, ("dag", "job"), None, 1, b"{}", [], [])

    pools = Pools(session.pool_names(2))
    first, second, third = (job_of(work(name)) for name in ("a", "b", "c"))
    assert [pools.enter(first), pools.enter(first), pools.enter(second)] == [
        "interlock-0",
        "interlock-0",
        "interlock-1",
    ]
    assert pools.enter(third) == "default"
    pools.leave(first)
    assert pools.enter(first) == "interlock-0"
    pools.leave(first)
    pools.leave(first)
    assert pools.enter(job_of(Work("a", (None, None), uuid4(), 1, b"{}", [], []))) == "interlock-0"


def test_neither_the_wrapper_nor_an_idle_driver_loads_pyspark() -> None:
    """A worker that has no work on Spark costs next to nothing."""
    modules = "interlock.workers.wrapper, interlock.pipeline.driver, interlock.cli.checks"
    check = f"import sys, {modules}; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.mark.parametrize(
    ("setting", "value", "sentence"),
    [
        ("spark_memory", "4GB", "512m or 4g"),
        ("spark_remote", "http://far", "starts with sc://"),
        ("spark_conf", {"master": "x"}, "names begin with `spark.`"),
    ],
)
def test_a_wrong_setting_of_spark_says_what_to_write(setting: str, value: object, sentence: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load(**{setting: value})
    assert sentence in raised.value.detail


def test_numbers_and_truth_values_are_written_as_spark_reads_them() -> None:
    settings = load(spark_conf={"spark.a": True, "spark.b": 3})
    assert {name: value.get_secret_value() for name, value in settings.spark_conf.items()} == {
        "spark.a": "true",
        "spark.b": "3",
    }
    assert "true" not in repr(settings.spark_conf)


class BusySession:
    """A session of a Connect server that is so busy that the first interrupt hangs and the second one fails."""

    def __init__(self) -> None:
        self.is_stopped = False
        self.interrupts = 0
        self.released = threading.Event()

    def interruptTag(self, tag: str) -> None:  # noqa: N802 - as PySpark calls it
        assert tag == "task/1/1"
        self.interrupts += 1
        if self.interrupts == 1:
            self.released.wait(60)
        elif self.interrupts == 2:
            raise ConnectionError("deadline exceeded")
        else:
            self.stop()

    def stop(self) -> None:
        self.is_stopped = True
        self.released.set()


def connected(spark: object | None = None) -> session.ConnectSession:
    """A session that is connected to nothing."""
    made = session.ConnectSession.__new__(session.ConnectSession)
    made._sessions = {} if spark is None else {"task/1/1": spark}
    made._really_stop = BusySession.stop
    return made


def test_a_cancel_goes_on_when_an_interrupt_hangs_and_the_next_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_INTERRUPT_SECONDS", 0.001)
    busy = BusySession()
    canceling = threading.Thread(target=connected(busy).cancel, args=("task/1/1",), daemon=True)
    canceling.start()
    canceling.join(30)
    assert (canceling.is_alive(), busy.is_stopped) == (False, True)


@pytest.mark.parametrize("moment", ["the session is made", "the session is released"])
def test_a_cancel_at_any_moment_leaves_no_session_behind(
    moment: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spark, found, raised = BusySession(), connected(), list[str]()

    def interrupted(at: str) -> None:
        if at == moment and not raised:
            raised.append(at)
            raise TaskCanceled

    def for_task(group: str, _pool: str, _about: str) -> BusySession:
        found._sessions[group] = spark
        interrupted("the session is made")
        return spark

    def stop(one: BusySession) -> None:
        interrupted("the session is released")
        one.stop()

    monkeypatch.setattr(found, "for_task", for_task)
    monkeypatch.setattr(found, "usable", lambda: True)
    monkeypatch.setattr(found, "_really_stop", stop)
    work = Work("count", (None, "count"), uuid4(), 1, b"{}", [], [])
    running = Running(work, Assignment(1, uuid4(), 0, b"{}"), "default")
    with pytest.raises(TaskCanceled):
        Driver(0, 0, 1000, tmp_path)._in_session(found, running, lambda *_: None)
    assert (spark.is_stopped, found._sessions) == (True, {})
