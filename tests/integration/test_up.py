"""`interlock up` as a process: what it starts, what it survives, and what it leaves behind."""

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

from interlock.client import Client, QueryClient
from interlock.supervisor.run import WORKER_RUNTIMES
from interlock.wire import Policy, RunState, TaskStatus, TaskView
from tests.system import until

# One worker of xdist for all: they share an installation, and each start takes the machine's cores.
pytestmark = pytest.mark.xdist_group("up")

EXAMPLES = Path(__file__).parents[2] / "examples" / "operators"
PATIENCE = 60
SUPERVISED = {"gateway", "dispatcher", "scheduler", "query", "sink", "ingest", "bus", "runner"}
"""What runs beside the servers, without workers."""
LONG_LEASE = Policy(lease_seconds=600, backoff_seconds=0)


def environment(**settings: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INTERLOCK_")}
    return kept | {f"INTERLOCK_{name.upper()}": text for name, text in settings.items()}


def interlock(*line: str, patience: float = PATIENCE, **settings: str) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    command = [sys.executable, "-m", "interlock.cli", *line]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=patience, check=False, env=environment(**settings)
    )


class Up:
    """An `interlock up` on a folder, started anew as often as a test wants."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.errors = folder.with_name(f"{folder.name}.stderr")
        self.process: subprocess.Popen[str] | None = None
        self.ready: dict[str, Any] = {}

    def launch(self, *options: str, **settings: str) -> subprocess.Popen[str]:
        """Starts it and waits for nothing."""
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
        """Processes of ours by the command that each runs, without those between two lives."""
        assert self.process is not None
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                if "interlock.cli" in words:
                    found[words[words.index("interlock.cli") + 1]] = child
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
    # Not one of pytest's folders: the servers of root run as another user, whom those do not let pass.
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
    """One for all tests that leave it as they found it."""
    with installation() as up:
        up.start("--operators", str(EXAMPLES))
        yield up


@pytest.fixture
async def client(shared: Up) -> AsyncIterator[Client]:
    async with shared.client() as client:
        yield client


async def task_when(client: Client, run_id: Any, status: TaskStatus) -> TaskView:
    """The run's only task, once it has that status."""

    async def look() -> TaskView | None:
        task = (await client.task_page(run=run_id)).tasks[0]
        return task if task.status is status else None

    found: TaskView = await until(look, seconds=PATIENCE)
    return found


# Ready


def test_it_says_in_one_line_of_json_where_everything_is(shared: Up) -> None:
    names = "gateway internal query dir admin_key worker_token state_url data_url valkey_url"
    assert list(shared.ready) == names.split()
    assert len({shared.ready[name] for name in ("gateway", "internal", "query")}) == 3
    assert shared.ready["dir"] == str(shared.folder)
    assert shared.ready["gateway"] != shared.ready["internal"]
    assert shared.ready["state_url"] != shared.ready["data_url"]


async def test_its_query_service_answers(shared: Up) -> None:
    async with QueryClient(shared.ready["query"], shared.ready["admin_key"], patience=PATIENCE) as queries:
        assert bytes((await queries.ask("select 6 * 7")).rows) == b"[[42]]"


def test_secrets_are_for_the_owner_alone(shared: Up) -> None:
    credentials = shared.folder / "credentials.json"
    assert stat.S_IMODE(credentials.stat().st_mode) == 0o600
    assert stat.S_IMODE((shared.folder / "endpoints.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(shared.folder.stat().st_mode) & 0o066 == 0
    kept = json.loads(credentials.read_text())
    assert kept["admin_key"] == shared.ready["admin_key"]
    assert kept["worker_token"] == shared.ready["worker_token"]


async def test_no_secret_is_on_a_command_line_or_in_an_environment(shared: Up, client: Client) -> None:
    await client.wait((await client.submit([1], operator="echo")).run_id)  # all of them have started
    passwords = [shared.ready[name].split("@")[0].rsplit(":", 1)[1] for name in ("state_url", "data_url", "valkey_url")]
    secrets = [shared.ready["admin_key"], shared.ready["worker_token"], *passwords]
    assert shared.process is not None
    for process in psutil.Process(shared.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # those that run for a moment only
            seen = " ".join([*process.cmdline(), *_environment(process)])
            assert not [secret for secret in secrets if secret in seen], process


def _environment(process: psutil.Process) -> list[str]:
    """What others may see of it: a worker, which hides its memory, shows nothing to its own user."""
    with contextlib.suppress(psutil.AccessDenied):
        return list(process.environ().values())
    return []


async def test_each_process_has_a_log_without_secrets(shared: Up, client: Client) -> None:
    await client.wait((await client.submit([1], operator="echo")).run_id)  # the worker has started, too
    logs = {file.name: file.read_text() for file in (shared.folder / "logs").iterdir()}
    assert {"up.log", "gateway.log", "dispatcher.log", "worker-platform.log"} <= set(logs)
    assert '"event": "listening"' in logs["gateway.log"]
    everything = "".join(logs.values()) + shared.errors.read_text()
    assert shared.ready["admin_key"] not in everything
    assert shared.ready["worker_token"] not in everything
    assert shared.ready["state_url"] not in everything


def test_a_second_one_on_the_same_folder_is_refused(shared: Up) -> None:
    assert shared.process is not None
    said = interlock("up", "--dir", str(shared.folder))
    assert (said.returncode, said.stdout) == (1, "")
    assert said.stderr == (
        f"Error: Another `interlock up` (pid {shared.process.pid}) runs on {shared.folder}: use it, stop it, "
        "or choose another folder with --dir.\n"
    )


def test_the_doctor_is_content_beside_it(shared: Up) -> None:
    said = interlock("doctor", "--dir", str(shared.folder), "--output", "json")
    found = {row["check"]: row for row in json.loads(said.stdout)}
    assert said.returncode == 0, said.stdout
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
async def test_the_example_operators_run(operator: str, payload: str, result: Any, shared: Up, client: Client) -> None:
    line = ("--dir", str(shared.folder), "--operator", operator, "--task", payload, "--config", '{"mark": "!!!"}')
    said = interlock("job", "submit", *line, "--watch", "--output", "json")
    assert said.returncode == 0, said.stderr
    task = (await client.task_page(run=json.loads(said.stdout)["run_id"])).tasks[0]
    assert task.result is not None
    assert json.loads(bytes(task.result)) == result


# What dies comes back


@pytest.mark.parametrize("name", ["gateway", "dispatcher"])
async def test_a_listener_that_dies_comes_back_on_its_port(name: str, shared: Up, client: Client) -> None:
    killed = shared.children()[name]
    killed.kill()
    listener = "gateway" if name == "gateway" else "internal"
    async with Client(shared.ready[listener], shared.ready["admin_key"], patience=PATIENCE) as other:
        assert (await other.health()).status == "ok"
    assert shared.children()[name].pid != killed.pid
    accepted = await client.submit([1], operator="echo")
    assert (await client.wait(accepted.run_id)).state is RunState.COMPLETED


async def test_a_database_server_that_dies_comes_back_with_all_it_held(shared: Up, client: Client) -> None:
    accepted = await client.submit([1], operator="echo")
    killed = shared.postmaster()
    psutil.Process(killed).kill()
    assert (await client.wait(accepted.run_id)).state is RunState.COMPLETED

    async def revived() -> bool:
        with contextlib.suppress(FileNotFoundError, IndexError, ValueError):
            return shared.postmaster() != killed
        return False

    assert await until(revived, seconds=PATIENCE)


async def test_a_worker_that_dies_is_replaced(shared: Up, client: Client) -> None:
    await client.wait((await client.submit([1], operator="echo")).run_id)
    killed = shared.children()["worker"]
    killed.kill()

    async def another_asks_for_work() -> bool:
        pids = {int(worker.worker_id.split("/")[-2]) for worker in (await client.workers()).workers}
        return bool((pids - {killed.pid}) & {child.pid for child in shared.children().values()})

    assert await until(another_asks_for_work, seconds=PATIENCE)


# Stop, and start again


async def test_a_hurried_drain_gives_work_back_and_a_restart_resumes_it(fresh: Up) -> None:
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
    assert [process for process in processes if process.is_running()] == []
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


async def test_after_a_kill_the_next_start_takes_over_what_was_left(fresh: Up) -> None:
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
    listeners = {name: after[name] for name in ("gateway", "internal", "query")}
    assert after == before | listeners
    assert fresh.postmaster() == server
    assert stat.S_IMODE((fresh.folder / "credentials.json").stat().st_mode) == 0o600
    async with fresh.client() as client:
        run = await client.wait(accepted.run_id)
    assert (run.state, run.counts.Completed) == (RunState.COMPLETED, 3)


async def test_a_kill_or_a_drain_while_it_starts_is_harmless_and_lost_credentials_are_made_anew(fresh: Up) -> None:
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


def test_a_listener_beyond_this_machine_needs_tls(tmp_path: Path) -> None:
    said = interlock("up", "--dir", str(tmp_path / "d"), "--internal", "0.0.0.0:0", gateway="127.0.0.1:0")
    assert (said.returncode, said.stdout) == (1, "")
    assert "Error: 0.0.0.0:0 is not a loopback address, and there is no TLS. Set tls_cert and tls_key" in said.stderr
    assert not (tmp_path / "d" / "state").exists()


def test_a_port_that_is_taken_and_a_missing_certificate_stop_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = interlock("up", "--dir", str(tmp_path / "d"), "--gateway", address)
    assert said.returncode == 1
    assert f"Error: Cannot listen on {address}: Address already in use. Choose another with --gateway" in said.stderr
    said = interlock("up", "--dir", str(tmp_path / "d"), tls_cert="/absent.pem", tls_key="/absent.key")
    assert said.returncode == 1
    assert "tls_cert and tls_key cannot be used" in said.stderr


def test_settings_and_folders_that_cannot_be_used_stop_the_start(tmp_path: Path) -> None:
    said = interlock("up", "--dir", str(tmp_path / "d"), gateway="7070")
    assert said.returncode == 1
    assert "Setting 'gateway' (INTERLOCK_GATEWAY) is wrong: write host:port, for example 127.0.0.1:7070." in said.stderr
    assert not (tmp_path / "d").exists()
    (tmp_path / "file").write_text("")
    said = interlock("up", "--dir", str(tmp_path / "file"))
    assert said.returncode == 1
    assert f"Error: Cannot keep state in {tmp_path}/file (File exists): choose another folder" in said.stderr


# The demo


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("what", "end", "checks"), [("tasks", "All counts are right.", 6), ("pipeline", "It adds up.", 11)]
)
def test_the_demo_plays_to_its_end_and_leaves_nothing_behind(what: str, end: str, checks: int) -> None:
    before = _demo_folders()
    said = interlock("demo", what, patience=300, state_url="postgresql://somebody@elsewhere/else")
    assert said.returncode == 0, said.stdout + said.stderr
    assert said.stderr == ""
    assert end in said.stdout
    assert said.stdout.count(" ok\n") >= checks
    assert "\x1b" not in said.stdout
    assert _demo_folders() <= before


def _demo_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("interlock-demo-*"))
