"""Options of a session, and how tasks share it."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from uuid import uuid4

import pytest

from interlock.errors import ConfigurationError
from interlock.settings import load
from interlock.spark import driver, session
from interlock.spark.driver import Pools, Running, job_of
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


def test_settings_override_defaults_and_spark_conf_overrides_both(tmp_path: Path) -> None:
    chosen = session.properties(options(), tmp_path)
    assert (chosen["spark.driver.memory"], chosen["spark.ui.enabled"]) == ("3g", "false")
    own = {"spark.driver.memory": "5g", "spark.ui.enabled": "true", "spark.driver.extraJavaOptions": "-Xss4m"}
    chosen = session.properties(options(conf=own), tmp_path)
    assert (chosen["spark.driver.memory"], chosen["spark.ui.enabled"]) == ("5g", "true")
    assert chosen["spark.driver.extraJavaOptions"] == f'"-Djava.io.tmpdir={tmp_path}" -Xss4m'


def test_cluster_keeps_its_own_addresses_and_shuffle_partitions(tmp_path: Path) -> None:
    chosen = session.properties(options(master="spark://far:7077"), tmp_path)
    assert not {"spark.driver.host", "spark.sql.shuffle.partitions"} & set(chosen)


def test_s3_urls_are_mapped_to_the_s3a_file_system(tmp_path: Path) -> None:
    chosen = session.properties(options(objects_root="s3://bucket/x"), tmp_path)
    assert chosen["spark.hadoop.fs.s3.impl"] == "org.apache.hadoop.fs.s3a.S3AFileSystem"


def test_properties_with_special_characters_round_trip() -> None:
    written = session._written({"spark.a b:c=d": " back\\slash\tand\nlines"})
    assert written == "spark.a\\ b\\:c\\=d=\\ back\\\\slash\\tand\\nlines\n"


def test_job_has_one_pool_for_all_its_tasks_and_releases_it() -> None:
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
    """A Spark worker without tasks needs little memory."""
    modules = "interlock.workers.wrapper, interlock.spark.driver, interlock.apps.doctor_checks"
    check = f"import sys, {modules}; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.mark.parametrize(
    ("setting", "value", "sentence"),
    [
        ("spark_memory", "4GB", "512m or 4g"),
        ("spark_remote", "http://far", "starts with sc://"),
        ("spark_conf", {"master": "x"}, "name that starts with `spark.`"),
    ],
)
def test_invalid_spark_setting_is_refused_with_advice(setting: str, value: object, sentence: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load(**{setting: value})
    assert sentence in raised.value.detail


def test_numbers_and_booleans_of_spark_conf_are_formatted_for_spark() -> None:
    settings = load(spark_conf={"spark.a": True, "spark.b": 3})
    assert {name: value.get_secret_value() for name, value in settings.spark_conf.items()} == {
        "spark.a": "true",
        "spark.b": "3",
    }
    assert "true" not in repr(settings.spark_conf)


class BusySession:
    """A session of a busy Connect server, on which the first interrupt hangs and the second one fails."""

    def __init__(self) -> None:
        self.is_stopped = False
        self.interrupts = 0
        self.released = threading.Event()

    def interruptTag(self, tag: str) -> None:  # noqa: N802 - PySpark's name
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
    """Returns a session without a connection."""
    made = session.ConnectSession.__new__(session.ConnectSession)
    made._sessions = {} if spark is None else {"task/1/1": spark}
    made._really_stop = BusySession.stop
    return made


def test_cancel_continues_after_a_hanging_and_a_failed_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_INTERRUPT_SECONDS", 0.001)
    busy = BusySession()
    canceling = threading.Thread(target=connected(busy).cancel, args=("task/1/1",), daemon=True)
    canceling.start()
    canceling.join(30)
    assert (canceling.is_alive(), busy.is_stopped) == (False, True)


@pytest.mark.parametrize("moment", ["the session is made", "the session is released"])
def test_cancel_at_any_moment_leaves_no_session_open(
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
    monkeypatch.setattr(driver, "_attempt", lambda *_: {})
    with pytest.raises(TaskCanceled):
        driver.Driver(0, 0, 1000, tmp_path)._in_session(found, [running])
    assert (spark.is_stopped, found._sessions) == (True, {})
