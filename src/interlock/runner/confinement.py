"""Which walls this machine has, and what stands inside of them.

`bubblewrap`   its own program makes the namespaces and the file tree
`namespaces`   the runner's launcher makes the same ones by itself
`landlock`     no namespaces: Landlock holds files, TCP ports and signals, and a filter of system calls the rest
`none`         limits, another user where the runner is root, an empty environment; nothing hides the machine
"""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from interlock import landlock
from interlock.errors import ConfigurationError
from interlock.runner.contract import Invocation
from interlock.runner.forward import Target, targets_of
from interlock.runner.inside import network, syscalls
from interlock.runner.inside.job import BUNDLE, PROGRAMS, SANDBOX, WORK, Job, Place

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
_RESOLVING: Final = ("/etc/hosts", "/etc/nsswitch.conf", "/etc/host.conf", "/etc/passwd", "/etc/group")
"""Where there is no file tree of its own, what is needed to find the platform by its name."""
_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_FIRST_NAMED: Final = 10
"""Names of the platform get 127.0.0.10 and so on, inside."""
_FILES_PER_MB: Final = 256
_AUTHORITIES: Final = "/etc/interlock-authorities.pem"
_CAPABILITIES: Final = ("CAP_SETUID", "CAP_SETGID", "CAP_CHOWN", "CAP_NET_ADMIN", "CAP_NET_BIND_SERVICE")
"""For the keeper, inside of bubblewrap; user code has none."""


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
        """And with them PID and IPC namespaces."""
        return self.own_network


STRONGEST_FIRST: Final = (Walls.BUBBLEWRAP, Walls.NAMESPACES, Walls.LANDLOCK)


@dataclass(frozen=True)
class Interpreter:
    """The Python that runs handlers, without what is installed beside its standard library."""

    executable: str
    prefix: str

    @classmethod
    def find(cls, executable: str | None) -> Interpreter:
        asked = executable or str(Path(sys.executable).resolve())
        script = "import json, sys; print(json.dumps([sys.executable, sys.base_prefix, sys.version_info[:2]]))"
        try:
            said = subprocess.run([asked, "-I", "-S", "-c", script], capture_output=True, check=True, env={}).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            raise ConfigurationError(f"runner_python: {asked} is no Python that starts ({error}).") from None
        found, prefix, version = json.loads(said)
        if tuple(version) < (3, 11):
            raise ConfigurationError(f"runner_python: {asked} is Python {version[0]}.{version[1]}; 3.11 is the least.")
        return cls(found, prefix)


@dataclass(frozen=True)
class Machine:
    """What is the same for every invocation on this machine."""

    walls: Walls
    interpreter: Interpreter
    programs: Path
    """A copy of what runs inside, and of the task SDK."""
    root: Path
    """An empty folder to build file trees on."""
    node: str | None
    authorities: Path | None = None
    """Certificates to trust instead of the system's."""

    def job(self, invocation: Invocation, event: dict[str, object], bundle: Path, user: int) -> Job:
        targets, names = self._addresses(invocation)
        limits = invocation.limits
        job = Job(
            language=invocation.language,
            entrypoint=invocation.entrypoint,
            event=event,
            environment=self._environment(invocation),
            python=self.interpreter.executable,
            node=self.node,
            user=user,
            own_network=self.walls.own_network,
            landlock=self.walls is Walls.LANDLOCK,
            places=targets,
            memory_bytes=limits.memory_mb << 20,
            cpu_seconds=limits.cpu_seconds,
            processes=limits.processes + (0 if user else _LAUNCHER_AND_KEEPER),
            disk_bytes=limits.disk_mb << 20,
            most_files=max(1024, limits.disk_mb * _FILES_PER_MB),
        )
        return self._with_tree(job, bundle, names)

    def _with_tree(self, job: Job, bundle: Path, names: Mapping[str, str]) -> Job:
        links, read_only = _system(self.interpreter, self.node)
        if self.authorities is not None:
            read_only[_AUTHORITIES] = str(self.authorities)
        if not self.walls.own_files:
            seen = read_only | {path: path for path in _RESOLVING}
            return replace(job, read_only=seen, devices=list(_DEVICES), bundle=str(bundle), programs=str(self.programs))
        read_only |= {BUNDLE: str(bundle), PROGRAMS: str(self.programs)}
        return replace(
            job,
            namespaces=self.walls is Walls.NAMESPACES,
            root=str(self.root),
            links=links,
            read_only=read_only,
            devices=list(_DEVICES),
            files=_files(names, job.user or os.getuid()),
        )

    def targets(self, invocation: Invocation) -> list[Target]:
        """The platform's addresses, each once, in the order of the sockets inside."""
        return targets_of(invocation.endpoints)

    def _addresses(self, invocation: Invocation) -> tuple[list[Place], dict[str, str]]:
        """Where each target is found inside, under the very URL that it has outside: names get loopback addresses."""
        places, names = list[Place](), dict[str, str]()
        for target in self.targets(invocation):
            if _is_address(target.host):
                places.append(Place(target.host, target.port))
                continue
            # Everybody knows `localhost`, whatever a file of hosts says.
            known = "127.0.0.1" if target.host == "localhost" else f"127.0.0.{_FIRST_NAMED + len(names)}"
            address = names.setdefault(target.host, known)
            places.append(Place(address, target.port))
        return places, names

    def _environment(self, invocation: Invocation) -> dict[str, str]:
        endpoints = invocation.endpoints
        urls = {
            "TRACE_DISPATCHER_URL": endpoints.dispatcher_url,
            "TRACE_QUERY_URL": endpoints.query_url,
            "TRACE_OBJECTS_URL": endpoints.objects_url,
        }
        trusted = {"SSL_CERT_FILE": _AUTHORITIES} if self.authorities is not None else {}
        if trusted and not self.walls.own_files:
            trusted = {"SSL_CERT_FILE": str(self.authorities)}
        return {
            "TRACE_TASK_CAPABILITY_TOKEN": invocation.capability_token,
            **{name: url for name, url in urls.items() if url is not None},
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": WORK,
            "TMPDIR": WORK,
            "LANG": "C.UTF-8",
            **trusted,
        }

    def launcher(self, control: int) -> list[str]:
        """A process that makes the walls once it is told its job."""
        return self._python(str(self.programs), "main", control)

    def bubblewrap(self, control: int, job: Job, files: Mapping[str, int]) -> list[str]:
        """A process that is told of the tree when it starts; `files` names descriptors with what is new in it."""
        return [*_bubblewrap(job, files), "--", *self._python(PROGRAMS, "inside", control)]

    def _python(self, programs: str, function: str, control: int) -> list[str]:
        script = f"import sys; sys.path.insert(0, {programs!r}); from interlock.runner.inside import launch; "
        return [self.interpreter.executable, "-I", "-S", "-B", "-c", f"{script}launch.{function}({control})"]


_LAUNCHER_AND_KEEPER: Final = 2
"""They count as the same user's where the runner is not root."""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _system(interpreter: Interpreter, node: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """Links and folders of the system that user code may read, by where they lie inside."""
    links = {path: str(Path(path).readlink()) for path in _SYSTEM if Path(path).is_symlink()}
    present = [path for path in (*_SYSTEM, *_FROM_ETC) if path not in links and Path(path).exists()]
    more = [path for path in (interpreter.prefix, node) if path and not _covered(path, present)]
    return links, {path: path for path in [*present, *more]}


def _covered(path: str, folders: Iterable[str]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


def _files(names: Mapping[str, str], user: int) -> dict[str, str]:
    return {
        "/etc/hosts": "\n".join(network.hosts(names)) + "\n",
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
        words += ["--perms", "0755", "--dir", folder]  # left to itself, it closes them to all but root
    for link, target in job.links.items():
        words += ["--symlink", target, link]
    for inside, outside in job.read_only.items():
        words += ["--ro-bind", outside, inside]
    for device in job.devices:
        words += ["--dev-bind", device, device]
    words += ["--proc", "/proc", "--perms", "0700", "--size", str(job.disk_bytes), "--tmpfs", WORK]
    words += ["--symlink", WORK, "/dev/shm"]  # noqa: S108 - counts against the same room
    for path, descriptor in files.items():
        words += ["--perms", "0444", "--ro-bind-data", str(descriptor), path]
    return [*words, "--remount-ro", "/", "--chdir", "/"]


def _folders_above(paths: Iterable[str]) -> list[str]:
    above = {str(parent) for path in paths for parent in Path(path).parents}
    return sorted(above - {"/", *paths})


def copy_programs(source: Path, into: Path) -> None:
    """The few files that run inside, by themselves: no other module of Interlock is in sight there."""
    shutil.copytree(source / "runner" / "inside", into / "interlock" / "runner" / "inside", ignore=_caches)
    (into / "interlock" / "client").mkdir()
    for name in ("landlock.py", "client/task.py"):
        shutil.copyfile(source / name, into / "interlock" / name)
    for package in ("", "client", "runner"):
        (into / "interlock" / package / "__init__.py").write_text("")


_caches = shutil.ignore_patterns("__pycache__")


def unavailable(walls: Walls) -> str | None:
    """Why these walls cannot be had here, as far as that shows without trying; None when they may."""
    if sys.platform != "linux":
        return "they are Linux's"
    if walls is Walls.BUBBLEWRAP and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    if walls is Walls.LANDLOCK:
        known = landlock.version()
        if known < landlock.TCP_VERSION:
            return f"the kernel's Landlock has version {known}, and {landlock.TCP_VERSION} is the least (Linux 6.7)"
        if os.getuid() != 0 and known < landlock.SCOPE_VERSION:
            return "without being root, Landlock must hold signals, too: version 6 (Linux 6.12)"
        if not syscalls.supported():
            return "system calls are filtered on x86_64 and aarch64 only"
    return None
