"""The walls that this machine supports, and what is inside them.

`bubblewrap`   the bwrap program creates the namespaces and the file tree
`namespaces`   the runner's launcher creates the same ones itself
`landlock`     no namespaces: Landlock restricts files, TCP ports and signals, and a seccomp filter the rest
`none`         limits, another user if the runner is root, an empty environment; nothing hides the machine

bwrap comes first because it is widely reviewed. It is a system package that pip cannot install, hence the launcher's
own namespaces: Landlock alone would give user code no network and no process tree of its own.

`write` packages the code of the Lambda function as a zip: the few modules that it needs, without dependencies.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Final

import interlock
from interlock.archives import pack
from interlock.errors import ConfigurationError
from interlock.processes import landlock, seccomp
from interlock.untrusted.runner.contract import Invocation
from interlock.untrusted.runner.forwarder import Routes
from interlock.untrusted.runner.in_sandbox import namespaces
from interlock.untrusted.runner.in_sandbox.job import BUNDLE, PROGRAMS, SANDBOX, WORK, Job

_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_FROM_ETC: Final = (
    "/etc/ld.so.cache",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/etc/pki/tls/certs",
    "/etc/pki/ca-trust/extracted",
    "/etc/ca-certificates",
    "/etc/alternatives",
    "/etc/localtime",
)
_NAMES: Final = ("/etc/hosts", "/etc/nsswitch.conf", "/etc/host.conf", "/etc/passwd", "/etc/group")
"""Files for host and user lookups, needed if there is no separate file tree."""
_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_FILES_PER_MB: Final = 256
_AUTHORITIES: Final = "/etc/interlock-authorities.pem"
_CAPABILITIES: Final = ("CAP_SETUID", "CAP_SETGID", "CAP_CHOWN", "CAP_NET_ADMIN", "CAP_NET_BIND_SERVICE")
"""For the keeper inside bubblewrap; user code has none."""


class Walls(StrEnum):
    BUBBLEWRAP = "bubblewrap"
    NAMESPACES = "namespaces"
    LANDLOCK = "landlock"
    NONE = "none"

    @property
    def own_network(self) -> bool:
        return self in (Walls.BUBBLEWRAP, Walls.NAMESPACES)

    @property
    def own_files(self) -> bool:
        """True if there is a separate file tree, and with it PID and IPC namespaces."""
        return self.own_network


STRONGEST_FIRST: Final = (Walls.BUBBLEWRAP, Walls.NAMESPACES, Walls.LANDLOCK)


@dataclass(frozen=True)
class Interpreter:
    """The Python that runs handlers, with only its standard library."""

    executable: str
    prefix: str

    @classmethod
    def find(cls, executable: str | None) -> Interpreter:
        asked = executable or str(Path(sys.executable).resolve())
        script = "import json, sys; print(json.dumps([sys.executable, sys.base_prefix, sys.version_info[:2]]))"
        try:
            output = subprocess.run([asked, "-I", "-S", "-c", script], capture_output=True, check=True, env={}).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            raise ConfigurationError(f"runner_python: {asked} could not be started as Python ({error}).") from None
        found, prefix, version = json.loads(output)
        if tuple(version) < (3, 11):
            raise ConfigurationError(
                f"runner_python: {asked} is Python {version[0]}.{version[1]}; 3.11 or newer is required."
            )
        return cls(found, prefix)


@dataclass(frozen=True)
class Machine:
    """Properties that all invocations on this machine share."""

    walls: Walls
    interpreter: Interpreter
    programs: Path
    """A copy of the code inside the walls and of the task SDK."""
    root: Path
    """An empty folder on which file trees are built."""
    node: str | None
    authorities: Path | None = None
    """Certificates to trust instead of the system's."""

    @cached_property
    def tls(self) -> ssl.SSLContext:
        """The context for connections to the platform."""
        return ssl.create_default_context(cafile=self.authorities)

    def job(self, invocation: Invocation, event: dict[str, object], bundle: Path, user: int, routes: Routes) -> Job:
        limits = invocation.limits
        job = Job(
            language=invocation.language,
            entrypoint=invocation.entrypoint,
            event=event,
            environment=self._environment(invocation, routes.urls),
            python=self.interpreter.executable,
            node=self.node,
            user=user,
            own_network=self.walls.own_network,
            landlock=self.walls is Walls.LANDLOCK,
            places=routes.places,
            memory_bytes=limits.memory_mb << 20,
            cpu_seconds=limits.cpu_seconds,
            processes=limits.processes + (0 if user else _LAUNCHER_AND_KEEPER),
            disk_bytes=limits.disk_mb << 20,
            most_files=max(1024, limits.disk_mb * _FILES_PER_MB),
        )
        return self._with_tree(job, bundle, routes.hosts)

    def _with_tree(self, job: Job, bundle: Path, names: Mapping[str, str]) -> Job:
        links, read_only = _system(self.interpreter, self.node)
        if not self.walls.own_files:
            seen = read_only | {path: path for path in _NAMES}
            return replace(job, read_only=seen, devices=list(_DEVICES), bundle=str(bundle), programs=str(self.programs))
        read_only |= {BUNDLE: str(bundle), PROGRAMS: str(self.programs)}
        if self.authorities is not None:
            read_only[_AUTHORITIES] = str(self.authorities)
        return replace(
            job,
            namespaces=self.walls is Walls.NAMESPACES,
            root=str(self.root),
            links=links,
            read_only=read_only,
            devices=list(_DEVICES),
            files=_files(names, job.user or os.getuid()),
        )

    def _environment(self, invocation: Invocation, urls: Mapping[str, str]) -> dict[str, str]:
        # For a bucket. The forwarder handles TLS to the platform.
        trusts = self.authorities is not None and self.walls.own_network
        return {
            "TRACE_TASK_CAPABILITY_TOKEN": invocation.capability_token,
            **{f"TRACE_{name.upper()}": url for name, url in urls.items()},
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": WORK,
            "TMPDIR": WORK,
            "LANG": "C.UTF-8",
            **({"SSL_CERT_FILE": _AUTHORITIES} if trusts else {}),
        }

    def launcher(self, control: int) -> list[str]:
        """Returns the command of a process that receives its job and then builds the walls."""
        return self._python(str(self.programs), "main", control)

    def bubblewrap(self, control: int, job: Job, files: Mapping[str, int]) -> list[str]:
        """Returns the command of a process that needs the file tree at its start.

        `files` are descriptors of new files.
        """
        return [*_bubblewrap(job, files), "--", *self._python(PROGRAMS, "inside", control)]

    def _python(self, programs: str, function: str, control: int) -> list[str]:
        script = (
            f"import sys; sys.path.insert(0, {programs!r}); from interlock.untrusted.runner.in_sandbox import launch; "
        )
        return [self.interpreter.executable, "-I", "-S", "-B", "-c", f"{script}launch.{function}({control})"]


_LAUNCHER_AND_KEEPER: Final = 2
"""They count for the same user if the runner is not root."""


def _system(interpreter: Interpreter, node: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """Returns links and folders of the system that user code may read, by their path inside."""
    links = {path: str(Path(path).readlink()) for path in _SYSTEM if Path(path).is_symlink()}
    present = [path for path in (*_SYSTEM, *_FROM_ETC) if path not in links and Path(path).exists()]
    more = [path for path in (interpreter.prefix, node) if path and not _covered(path, present)]
    return links, {path: path for path in [*present, *more]}


def _covered(path: str, folders: Iterable[str]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


def _files(names: Mapping[str, str], user: int) -> dict[str, str]:
    return {
        "/etc/hosts": "\n".join(namespaces.hosts(names)) + "\n",
        "/etc/nsswitch.conf": "hosts: files\n",
        "/etc/resolv.conf": "",
        "/etc/passwd": f"{SANDBOX}:x:{user}:{user}::{WORK}:/bin/sh\n",
        "/etc/group": f"{SANDBOX}:x:{user}:\n",
    }


def _bubblewrap(job: Job, files: Mapping[str, int]) -> list[str]:
    words = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if os.getuid() != 0:
        words += ["--unshare-user", "--uid", str(os.getuid()), "--gid", str(os.getgid())]
    words += ["--die-with-parent", "--new-session", "--as-pid-1", "--hostname", SANDBOX, "--clearenv"]
    words += ["--cap-drop", "ALL", *(word for name in _CAPABILITIES for word in ("--cap-add", name))]
    for folder in _folders_above([*job.read_only, *job.devices, *job.files]):
        words += ["--perms", "0755", "--dir", folder]  # by default bwrap makes them accessible only to root
    for link, target in job.links.items():
        words += ["--symlink", target, link]
    for inside, outside in job.read_only.items():
        words += ["--ro-bind", outside, inside]
    for device in job.devices:
        words += ["--dev-bind", device, device]
    words += ["--proc", "/proc", "--perms", "0700", "--size", str(job.disk_bytes), "--tmpfs", WORK]
    words += ["--symlink", WORK, "/dev/shm"]  # noqa: S108 - counts against the same quota
    for path, descriptor in files.items():
        words += ["--perms", "0444", "--ro-bind-data", str(descriptor), path]
    return [*words, "--remount-ro", "/", "--chdir", "/"]


def _folders_above(paths: Iterable[str]) -> list[str]:
    above = {str(parent) for path in paths for parent in Path(path).parents}
    return sorted(above - {"/", *paths})


def copy_programs(source: Path, into: Path) -> None:
    """Copies the few files that run inside: no other module of Interlock is visible there."""
    inside = Path("untrusted", "runner", "in_sandbox")
    shutil.copytree(source / inside, into / "interlock" / inside, ignore=_caches)
    for package in ("client", "processes"):
        (into / "interlock" / package).mkdir()
    for name in ("processes/landlock.py", "processes/linux.py", "processes/seccomp.py", "client/task.py"):
        shutil.copyfile(source / name, into / "interlock" / name)
    for package in ("", "client", "processes", "untrusted", "untrusted/runner"):
        (into / "interlock" / package / "__init__.py").write_text("")


_caches = shutil.ignore_patterns("__pycache__")


def unavailable(walls: Walls) -> str | None:
    """Returns why these walls are not available, as far as that is known without a trial; None if they may be."""
    if sys.platform != "linux":
        return "they need Linux"
    if walls is Walls.BUBBLEWRAP and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    if walls is Walls.LANDLOCK:
        known = landlock.version()
        if known < landlock.TCP_VERSION:
            return f"the kernel's Landlock has version {known}, but {landlock.TCP_VERSION} is required (Linux 6.7)"
        if os.getuid() != 0 and known < landlock.SCOPE_VERSION:
            return "a runner that is not root needs Landlock version 6, which restricts signals (Linux 6.12)"
        if not seccomp.supported():
            return "the seccomp filter supports only x86_64 and aarch64"
    return None


HANDLER: Final = "interlock.untrusted.runner.lambda_function.handler"
_OURS: Final = ("archives.py", "errors.py", "http/fetch.py", "untrusted/runner/lambda_function.py")


def write(out: Path) -> int:
    """Writes the zip and returns the number of files. Reproducible, so that deploying the same code changes nothing."""
    source = Path(interlock.__file__).parent
    with tempfile.TemporaryDirectory(prefix="interlock-package-") as folder:
        copy_programs(source, Path(folder))
        for name in _OURS:
            target = Path(folder) / "interlock" / name
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, target)
        return pack(Path(folder), out)
