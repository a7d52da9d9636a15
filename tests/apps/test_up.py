"""`interlock up` as a process: start, crashes of its children, and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from interlock.apps.up.supervisor import WORKER_RUNTIMES
from interlock.client import Client, QueryClient
from interlock.wire.base import RunState, TaskStatus
from interlock.wire.jobs import Policy
from interlock.wire.tasks import TaskView
from tests.support.system import until

# One xdist worker for all: they share an installation, and each start uses all cores.
pytestmark = pytest.mark.xdist_group("up")

EXAMPLES = Path(__file__).parents[2] / "examples" / "operators"
PATIENCE = 60
SUPERVISED = {"gateway", "dispatcher", "scheduler", "query", "sink", "ingest", "bus", "runner"}
"""Supervised processes, without servers and workers."""
LONG_LEASE = Policy(lease_seconds=600, backoff_seconds=0)


def environment(**settings: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INTERLOCK_")}
    return kept | {f"INTERLOCK_{name.upper()}": text for name, text in settings.items()}


def interlock(*line: str, patience: float = PATIENCE, **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs a command until it exits."""
    command = [sys.executable, "-m", "interlock.cli", *line]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=patience, check=False, env=environment(**settings)
    )


class Up:
    """An `interlock up` on a folder, which a test can restart any number of times."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.errors = folder.with_name(f"{folder.name}.stderr")
        self.process: subprocess.Popen[str] | None = None
        self.ready: dict[str, Any] = {}

    def launch(self, *options: str, **settings: str) -> subprocess.Popen[str]:
        """Starts it without waiting."""
        anywhere = ("--gateway", "127.0.0.1:0", "--internal", "127.0.0.1:0", "--query", "127.0.0.1:0")
        command = [
            sys.executable,
            "-m",
            "interlock.cli",
            "up",
            "--dir",
            str(self.folder),
            *anywhere,
            *options,
            "--json",
        ]
        with self.errors.open("a") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment(**settings), cwd="/"
            )
        return self.process

    def start(self, *options: str, **settings: str) -> dict[str, Any]:
        """Starts it and waits until it is ready."""
        process = self.launch(*options, **settings)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, self.errors.read_text()
        self.ready = json.loads(line)
        return self.ready

    def children(self) -> dict[str, psutil.Process]:
        """Returns child processes by command, without those that are being restarted."""
        assert self.process is not None
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                if "serve" in words:
                    found[words[words.index("serve") + 1]] = child
        return found

    def postmaster(self) -> int:
        return int((self.folder / "state" / "data" / "postmaster.pid").read_text().splitlines()[0])

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def client(self, patience: float = 30) -> Client:
        return Client(self.ready["gateway"], self.ready["admin_key"], patience=patience)


@contextlib.contextmanager
def installation() -> Iterator[Up]:
    # Not under pytest's folder, which is closed to the other user that root's servers run as.
    place = Path(tempfile.mkdtemp(prefix="interlock-up-"))
    up = Up(place / "state folder")
    try:
        yield up
        if up.process is not None and up.process.poll() is None:
            assert up.end() == 0, up.errors.read_text()
    finally:
        if up.process is not None and up.process.poll() is None:
            up.end(signal.SIGKILL)
        _end_stray_servers(up.folder)
        shutil.rmtree(place)


def _end_stray_servers(folder: Path) -> None:
    strays = [process for process in psutil.process_iter() if str(folder) in " ".join(_command(process))]
    for process in strays:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(strays, timeout=PATIENCE)


async def _runs(up: Up, names: set[str]) -> bool:
    return set(await asyncio.to_thread(up.children)) == names


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


@pytest.fixture
def fresh() -> Iterator[Up]:
    with installation() as up:
        yield up


@pytest.fixture(scope="module")
def shared() -> Iterator[Up]:
    """Shared by all tests that leave it unchanged."""
    with installation() as up:
        up.start("--operators", str(EXAMPLES))
        yield up


@pytest.fixture
async def client(shared: Up) -> AsyncIterator[Client]:
    async with shared.client() as client:
        yield client


async def task_when(client: Client, run_id: Any, status: TaskStatus) -> TaskView:
    """Waits until the run's only task has that status."""

    async def look() -> TaskView | None:
        task = (await client.task_page(run=run_id)).tasks[0]
        return task if task.status is status else None

    found: TaskView = await until(look, seconds=PATIENCE)
    return found


# Ready


def test_ready_line_is_json_with_all_addresses(shared: Up) -> None:
    names = "gateway internal query dir admin_key worker_token state_url data_url valkey_url sign_in_url"
    assert list(shared.ready) == names.split()
    assert len({shared.ready[name] for name in ("gateway", "internal", "query")}) == 3
    assert shared.ready["dir"] == str(shared.folder)
    assert shared.ready["gateway"] != shared.ready["internal"]
    assert shared.ready["state_url"] != shared.ready["data_url"]


async def test_its_query_service_answers(shared: Up) -> None:
    async with QueryClient(shared.ready["query"], shared.ready["admin_key"], patience=PATIENCE) as queries:
        assert bytes((await queries.ask("select 6 * 7")).rows) == b"[[42]]"


def test_secrets_are_readable_by_the_owner_only(shared: Up) -> None:
    credentials = shared.folder / "credentials.json"
    assert stat.S_IMODE(credentials.stat().st_mode) == 0o600
    assert stat.S_IMODE((shared.folder / "endpoints.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(shared.folder.stat().st_mode) & 0o066 == 0
    kept = json.loads(credentials.read_text())
    assert kept["admin_key"] == shared.ready["admin_key"]
    assert kept["worker_token"] == shared.ready["worker_token"]


async def test_no_secret_is_on_a_command_line_or_in_an_environment(shared: Up, client: Client) -> None:
    await client.wait((await client.submit([1], operator="echo")).run_id)  # all processes have started
    passwords = [shared.ready[name].split("@")[0].rsplit(":", 1)[1] for name in ("state_url", "data_url", "valkey_url")]
    link = shared.ready["sign_in_url"].rpartition("=")[2]
    secrets = [shared.ready["admin_key"], shared.ready["worker_token"], link, *passwords]
    assert shared.process is not None
    for process in psutil.Process(shared.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # short-lived processes
            seen = " ".join([*process.cmdline(), *_environment(process)])
            assert not [secret for secret in secrets if secret in seen], process


def _environment(process: psutil.Process) -> list[str]:
    """Returns the visible environment. A worker hides its memory, so even its own user sees nothing."""
    with contextlib.suppress(psutil.AccessDenied):
        return list(process.environ().values())
    return []


async def test_each_process_has_a_log_without_secrets(shared: Up, client: Client) -> None:
    await client.wait((await client.submit([1], operator="echo")).run_id)  # the worker has started
    logs = {file.name: file.read_text() for file in (shared.folder / "logs").iterdir()}
    assert {"up.log", "gateway.log", "dispatcher.log", "worker-platform.log"} <= set(logs)
    assert '"event": "listening"' in logs["gateway.log"]
    everything = "".join(logs.values()) + shared.errors.read_text()
    assert shared.ready["admin_key"] not in everything
    assert shared.ready["worker_token"] not in everything
    assert shared.ready["state_url"] not in everything


def test_second_one_on_the_same_folder_is_refused(shared: Up) -> None:
    assert shared.process is not None
    done = interlock("up", "--dir", str(shared.folder))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"Error: Another `interlock up` (pid {shared.process.pid}) is running in {shared.folder}; use it, stop it, "
        "or choose another folder with --dir.\n"
    )


def test_doctor_reports_no_failure_for_a_running_installation(shared: Up) -> None:
    done = interlock("doctor", "--dir", str(shared.folder), "--output", "json")
    found = {row["check"]: row for row in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert f"pid {shared.process.pid}" in found["gateway"]["detail"] if shared.process else False
    assert found["state database schema"]["result"] == "ok"
    assert found["valkey"] == {"check": "valkey", "result": "ok", "detail": "answers", "advice": None}


@pytest.mark.parametrize(
    ("operator", "payload", "result"),
    [
        ("words:count", '{"text": "to be or not to be"}', {"words": 6, "most_common": "to"}),
        ("shout", '{"text": "all aboard"}', "ALL ABOARD!!!"),
    ],
)
async def test_example_operators_run(operator: str, payload: str, result: Any, shared: Up, client: Client) -> None:
    line = ("--dir", str(shared.folder), "--operator", operator, "--task", payload, "--config", '{"mark": "!!!"}')
    done = interlock("job", "submit", *line, "--watch", "--output", "json")
    assert done.returncode == 0, done.stderr
    task = (await client.task_page(run=json.loads(done.stdout)["run_id"])).tasks[0]
    assert task.result is not None
    assert json.loads(bytes(task.result)) == result


# Restarts after a crash


@pytest.mark.parametrize("name", ["gateway", "dispatcher"])
async def test_killed_listener_is_restarted_on_its_port(name: str, shared: Up, client: Client) -> None:
    killed = shared.children()[name]
    killed.kill()
    listener = "gateway" if name == "gateway" else "internal"
    async with Client(shared.ready[listener], shared.ready["admin_key"], patience=PATIENCE) as other:
        assert (await other.health()).status == "ok"
    assert shared.children()[name].pid != killed.pid
    accepted = await client.submit([1], operator="echo")
    assert (await client.wait(accepted.run_id)).state is RunState.COMPLETED


async def test_killed_database_server_is_restarted_with_its_data(shared: Up, client: Client) -> None:
    accepted = await client.submit([1], operator="echo")
    killed = shared.postmaster()
    psutil.Process(killed).kill()
    assert (await client.wait(accepted.run_id)).state is RunState.COMPLETED

    async def revived() -> bool:
        with contextlib.suppress(FileNotFoundError, IndexError, ValueError):
            return shared.postmaster() != killed
        return False

    assert await until(revived, seconds=PATIENCE)


async def test_killed_worker_is_replaced(shared: Up, client: Client) -> None:
    await client.wait((await client.submit([1], operator="echo")).run_id)
    killed = shared.children()["worker"]
    killed.kill()

    async def another_asks_for_work() -> bool:
        pids = {int(worker.worker_id.split("/")[-2]) for worker in (await client.workers()).workers}
        return bool((pids - {killed.pid}) & {child.pid for child in shared.children().values()})

    assert await until(another_asks_for_work, seconds=PATIENCE)


# Stop and restart


async def test_hurried_drain_releases_tasks_and_restart_resumes_them(fresh: Up) -> None:
    before = fresh.start(drain_seconds="600")
    async with fresh.client() as client:
        accepted = await client.submit([{"seconds": 600}], operator="sleep", policy=LONG_LEASE)
        await task_when(client, accepted.run_id, TaskStatus.RUNNING)
    assert fresh.process is not None
    processes = psutil.Process(fresh.process.pid).children(recursive=True)
    fresh.process.send_signal(signal.SIGINT)

    async def workers_drain() -> bool:
        return fresh.errors.read_text().count("worker.draining") == len(WORKER_RUNTIMES)

    await until(workers_drain)
    assert fresh.end(signal.SIGINT) == 0, fresh.errors.read_text()
    gone, alive = psutil.wait_procs(processes, timeout=PATIENCE)  # a zombie waits for its adopted parent
    assert (len(gone), alive) == (len(processes), [])
    assert not (fresh.folder / "endpoints.json").exists()
    after = fresh.start("--no-workers")
    assert (after["admin_key"], after["worker_token"]) == (before["admin_key"], before["worker_token"])
    assert (after["state_url"], after["data_url"]) == (before["state_url"], before["data_url"])
    await until(lambda: _runs(fresh, SUPERVISED))
    async with fresh.client() as client:
        task = (await client.task_page(run=accepted.run_id)).tasks[0]
        attempts = (await client.attempts(task.task_id)).attempts
    assert task.status is TaskStatus.QUEUED
    assert [one.outcome for one in attempts if one.outcome != "Released"] == []


async def test_start_after_a_kill_resumes_everything(fresh: Up) -> None:
    before = fresh.start("--no-workers")
    async with fresh.client() as client:
        accepted = await client.submit([1, 2, 3], operator="echo")
    children, server = list(fresh.children().values()), fresh.postmaster()
    assert fresh.end(signal.SIGKILL) == -signal.SIGKILL
    gone, alive = psutil.wait_procs(children, timeout=PATIENCE)
    assert (len(gone), alive) == (len(children), [])
    assert len(children) == len(SUPERVISED)
    assert psutil.pid_exists(server)
    fresh.folder.joinpath("credentials.json").chmod(0o644)
    after = fresh.start()
    new = {name: after[name] for name in ("gateway", "internal", "query", "sign_in_url")}
    assert after == before | new
    assert fresh.postmaster() == server
    assert stat.S_IMODE((fresh.folder / "credentials.json").stat().st_mode) == 0o600
    async with fresh.client() as client:
        run = await client.wait(accepted.run_id)
    assert (run.state, run.counts.Completed) == (RunState.COMPLETED, 3)


async def test_kill_or_drain_during_start_is_harmless_and_lost_credentials_are_recreated(fresh: Up) -> None:
    fresh.launch("--no-workers")
    assert fresh.process is not None
    lock = fresh.folder / "lock"

    async def begun() -> bool:
        return lock.is_file() and bool(lock.read_text())

    await until(begun)
    assert fresh.end(signal.SIGKILL) == -signal.SIGKILL
    fresh.launch("--no-workers")
    made = fresh.folder / "credentials.json"

    async def credentials_made() -> bool:
        return made.is_file()

    await until(credentials_made, seconds=PATIENCE)
    assert fresh.end() == 0, fresh.errors.read_text()
    earlier = json.loads(made.read_text())
    made.unlink()
    after = fresh.start("--no-workers")
    assert after["admin_key"] != earlier["admin_key"]
    assert "the file was missing" in fresh.errors.read_text()
    async with Client(after["gateway"], earlier["admin_key"]) as client:
        assert len((await client.keys()).keys) == 2


# Refusals


def test_listener_beyond_this_machine_needs_tls(tmp_path: Path) -> None:
    done = interlock("up", "--dir", str(tmp_path / "d"), "--internal", "0.0.0.0:0", gateway="127.0.0.1:0")
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        "Error: 0.0.0.0:0 is not a loopback address, and TLS is not configured. Set tls_cert and tls_key" in done.stderr
    )
    assert not (tmp_path / "d" / "state").exists()


def test_port_in_use_or_missing_certificate_stops_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = interlock("up", "--dir", str(tmp_path / "d"), "--gateway", address)
    assert done.returncode == 1
    assert (
        f"Error: Cannot listen on {address}: Address already in use. Choose another address with --gateway"
        in done.stderr
    )
    done = interlock("up", "--dir", str(tmp_path / "d"), tls_cert="/absent.pem", tls_key="/absent.key")
    assert done.returncode == 1
    assert "tls_cert and tls_key cannot be loaded" in done.stderr


def test_invalid_setting_or_folder_stops_the_start(tmp_path: Path) -> None:
    done = interlock("up", "--dir", str(tmp_path / "d"), gateway="7070")
    assert done.returncode == 1
    assert (
        "Setting 'gateway' (INTERLOCK_GATEWAY) is invalid: write host:port, for example 127.0.0.1:7070." in done.stderr
    )
    assert not (tmp_path / "d").exists()
    (tmp_path / "file").write_text("")
    done = interlock("up", "--dir", str(tmp_path / "file"))
    assert done.returncode == 1
    assert f"Error: Cannot store state in {tmp_path}/file (File exists); choose another folder" in done.stderr


# The demo


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("what", "end", "checks"), [("tasks", "All counts are right.", 6), ("pipeline", "The result is correct.", 11)]
)
def test_demo_succeeds_and_leaves_nothing_behind(what: str, end: str, checks: int) -> None:
    before = _demo_folders()
    done = interlock("demo", what, patience=300, state_url="postgresql://somebody@elsewhere/else")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert end in done.stdout
    assert done.stdout.count(" ok\n") >= checks
    assert "\x1b" not in done.stdout
    assert _demo_folders() <= before


def _demo_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("interlock-demo-*"))
