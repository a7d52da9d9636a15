"""Hostile user code: tries everything it can and returns what worked."""

# ruff: noqa: B023, PTH208, S310, S606, SIM115 - hostile on purpose

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from interlock.client.task import Task

libc = ctypes.CDLL(None, use_errno=True)
X86_64 = os.uname().machine == "x86_64"


def handler(event: dict[str, Any], task: Task) -> dict[str, Any]:
    """Returns outcomes by name: `no: …` for a refused attempt, anything else for a successful one."""
    targets, inherited = event["payload"], descriptors()
    attempts = chain(files(targets), processes(targets), network(targets), privileges(), platform(event, targets))
    outcomes = {name: tried(attempt) for name, attempt in attempts}
    return {
        "outcomes": outcomes,
        "environment": dict(os.environ),
        "descriptors": inherited,
        "canaries": list(canaries(targets["canary"])),
        "user": os.getuid(),
        "alive": task.heartbeat(),
    }


def tried(attempt: Callable[[], Any]) -> str:
    try:
        return f"yes: {str(attempt())[:200]}"
    except (OSError, ValueError, RuntimeError, subprocess.SubprocessError) as error:
        return f"no: {type(error).__name__} {error}"[:200]


Attempts = Iterator[tuple[str, Callable[[], Any]]]


# Files


def files(targets: dict[str, Any]) -> Attempts:
    for name, path in targets["secrets"].items():
        yield f"read {name}", lambda: Path(path).read_bytes()
        yield f"read {name} through a link", lambda: through_a_link(path)
        yield f"read {name} through /proc", lambda: Path(f"/proc/self/root{path}").read_bytes()
        yield f"read {name} through the first process", lambda: Path(f"/proc/1/root{path}").read_bytes()
    for name, path in targets["folders"].items():
        yield f"list {name}", lambda: os.listdir(path)
        yield f"write into {name}", lambda: Path(path, "mine").write_text("mine")
    for path in (
        "/etc",
        "/usr",
        "/opt",
        "/",
        str(Path(__file__).parent),
        str(Path(sys.modules["interlock"].__file__ or "").parent),
    ):
        yield f"write into {path}", lambda: Path(path, "mine").write_text("mine")
    yield "change the bundle", lambda: Path(__file__).write_text("mine")
    yield "change its mode", lambda: Path(__file__).chmod(0o777)
    yield "remove the bundle", lambda: Path(__file__).unlink()
    yield "read shadow", lambda: Path("/etc/shadow").read_bytes()
    yield "open the disk", lambda: Path("/dev/vda").open("rb")
    yield "open memory", lambda: Path("/dev/mem").open("rb")
    yield "make a device", lambda: os.mknod("null", 0o666 | 0o020000, os.makedev(1, 5))
    yield "see the machine's devices", lambda: os.listdir("/sys")
    for file in ("sys/kernel/core_pattern", "sys/vm/overcommit_memory", "sysrq-trigger", "kcore", "kmsg"):
        # Only opened: if this ever works, the machine must survive.
        yield f"open {file}", lambda: os.close(os.open(f"/proc/{file}", os.O_WRONLY))


def through_a_link(path: str) -> bytes:
    link = Path(f"link-{len(os.listdir())}")
    link.symlink_to(path)
    return link.read_bytes()


# Processes


def processes(targets: dict[str, Any]) -> Attempts:
    for name, pid in targets["pids"].items():
        for file in ("environ", "maps", "mem", "cmdline"):
            yield f"read {file} of the {name}", lambda: nonempty(Path(f"/proc/{pid}/{file}"))
        yield f"list descriptors of the {name}", lambda: os.listdir(f"/proc/{pid}/fd")
        yield f"enter the root of the {name}", lambda: os.listdir(f"/proc/{pid}/root/")
        yield f"signal the {name}", lambda: os.kill(pid, 0)
        yield f"signal the group of the {name}", lambda: os.killpg(pid, 0)
        yield f"trace the {name}", lambda: call("ptrace", 16, pid, 0, 0)
        yield f"limit the {name}", lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (8, 8))
        yield f"get hold of the {name}", lambda: hold(pid)
    yield "trace the first process", lambda: call("ptrace", 16, 1, 0, 0)
    yield "trace its parent", lambda: call("ptrace", 16, os.getppid(), 0, 0)
    yield "kill its parent", lambda: other_than_itself(os.getppid())
    yield "attach shared memory", lambda: call("shmat", call("shmget", targets["shm_key"], 0, 0), None, 0)


def hold(pid: int) -> None:
    handle = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(handle, 0)
    finally:
        os.close(handle)


def nonempty(path: Path) -> bytes:
    with path.open("rb") as file:
        if not (read := file.read(4096)):
            raise OSError("nothing in it")
        return read


def other_than_itself(pid: int) -> str:
    """The first process of a namespace cannot be killed from inside, and kill reports no error for it."""
    os.kill(pid, signal.SIGKILL)
    os.kill(pid, 0)
    raise OSError("it lives on")


def call(name: str, *arguments: Any) -> int:
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    function = getattr(libc, name)
    function.restype = ctypes.c_long
    if (outcome := function(*words)) in (-1, 0xFFFF_FFFF):  # 0xFFFF_FFFF if the function returns an int
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(outcome)


def descriptors() -> list[int]:
    found = []
    for number in range(1024):
        try:
            os.fstat(number)
        except OSError:
            continue
        found.append(number)
    return found


def canaries(canary: str) -> Iterator[str]:
    """Yields the places where the secret of another process can be read: environments, command lines, files."""
    if any(canary in value for value in os.environ.values()):
        yield "environment"
    for process in Path("/proc").glob("[0-9]*") if os.access("/proc", os.R_OK) else ():
        for file in ("environ", "cmdline"):
            try:
                if canary.encode() in (process / file).read_bytes():
                    yield f"{process}/{file}"
            except OSError:
                continue


# Network


def network(targets: dict[str, Any]) -> Attempts:
    for name, port in targets["ports"].items():
        for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "127.0.0.2"), (socket.AF_INET6, "::1")):
            yield f"connect to the {name} at {host}", lambda: connect(family, (host, port))
        yield f"connect quickly to the {name}", lambda: quickly(port)
        yield f"send a datagram to the {name}", lambda: answered_datagram(port)
    for name, address in targets["sockets"].items():
        # A name that starts with @ is an abstract socket.
        yield f"connect to the socket {name}", lambda: connect(socket.AF_UNIX, address.replace("@", "\0", 1))
    yield "speak MPTCP", lambda: connect(socket.AF_INET, ("127.0.0.1", next(iter(targets["ports"].values()))), 262)
    yield "make a raw socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    yield "make a packet socket", lambda: socket.socket(17, socket.SOCK_RAW)
    yield "make a socket of virtual machines", lambda: socket.socket(40, socket.SOCK_STREAM)


def connect(family: int, address: Any, protocol: int = 0) -> str:
    with socket.socket(family, socket.SOCK_STREAM, protocol) as connection:
        connection.settimeout(1)
        connection.connect(address)
        return "connected"


def quickly(port: int) -> int:
    """Connects with TCP Fast Open, which sends data during the handshake."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        return connection.sendto(b"hello", 0x20000000, ("127.0.0.1", port))


def answered_datagram(port: int) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        connection.settimeout(0.05)
        connection.connect(("127.0.0.1", port))
        connection.send(b"hello")
        return connection.recv(10)


# Privileges


def privileges() -> Attempts:
    yield "become root", lambda: os.setuid(0)
    yield "become root by saved id", lambda: os.setresuid(0, 0, 0)
    yield "join the group of root", lambda: os.setgid(0)
    yield "take groups", lambda: os.setgroups([0])
    yield "make a user namespace", lambda: call("unshare", 0x10000000)
    yield (
        "make a user namespace in a child",
        lambda: call("syscall", 56 if X86_64 else 220, 0x10000000 | 17, 0, 0, 0, 0),
    )
    yield "mount", lambda: call("mount", b"tmpfs", b"/tmp", b"tmpfs", 0, None)
    yield "change the root", lambda: os.chroot("/tmp")
    yield "raise the limit of processes", lambda: raised(resource.RLIMIT_NPROC)
    yield "raise the limit of memory", lambda: raised(resource.RLIMIT_AS)
    yield "read the kernel's log", lambda: call("klogctl", 3, ctypes.create_string_buffer(100), 100)
    yield "load BPF", lambda: call("syscall", 321 if X86_64 else 280, 0, 0, 0)
    yield "use io_uring", lambda: call("syscall", 425, 1, 0)
    yield "look into the keyring", lambda: call("syscall", 250 if X86_64 else 219, 0, -3, 0)
    yield "open by handle", lambda: call("syscall", 304 if X86_64 else 265, -100, 0, 0)
    yield "set the clock", lambda: call("settimeofday", ctypes.create_string_buffer(16), None)


def raised(kind: int) -> None:
    resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


# The platform


def platform(event: dict[str, Any], targets: dict[str, Any]) -> Attempts:
    token, own = os.environ["TRACE_TASK_CAPABILITY_TOKEN"], {k: event[k] for k in ("task_id", "attempt", "lease_token")}
    other, url = targets["other"], os.environ["TRACE_DISPATCHER_URL"]
    claim = {"task_id": other["task_id"], "worker_id": "mine"}
    yield "claim a task", lambda: post(f"{url}/internal/task-claim", token, claim)
    yield "claim with the token as a worker's", lambda: post(f"{url}/internal/task-claim", token, claim, worker=token)
    yield (
        "receive from a queue",
        lambda: post(f"{url}/internal/queue/receive", token, {"queue": "platform"}, worker=token),
    )
    yield (
        "complete the task of another",
        lambda: post(f"{url}/v1/task/complete", token, other | {"status": "Completed"}),
    )
    yield "use an earlier attempt's token", lambda: post(f"{url}/v1/task/heartbeat", targets["old_token"], own)
    yield "use the token as a user's key", lambda: ask(f"{os.environ['TRACE_OBJECTS_URL']}/v1/tasks", token)
    yield "list objects", lambda: ask(f"{os.environ['TRACE_OBJECTS_URL']}/v1/objects?prefix=", token)
    yield from beyond_tasks(url, os.environ["TRACE_OBJECTS_URL"])


def beyond_tasks(dispatcher: str, gateway: str) -> Attempts:
    """Requests endpoints that the platform serves publicly; they must not be reachable from inside."""
    for base in (dispatcher, gateway):
        for path in ("/metrics", "/healthz", "/openapi.json", "/internal/jwks/task", "/v1/task/../../healthz"):
            yield f"read {base}{path}", partial(answer, urllib.request.Request(base + path))
        for path in ("//healthz", "/v1/task/%2e%2e/%2e%2e/healthz", "/v1/objects/..%2f..%2fhealthz"):
            yield f"read {base}{path}", partial(answer, urllib.request.Request(base + path))


def post(url: str, token: str, body: Any, worker: str = "") -> str:
    headers = {"X-Trace-Task-Capability": token, "Content-Type": "application/json"}
    if worker:
        headers["X-Trace-Worker-Token"] = worker
    return answer(urllib.request.Request(url, json.dumps(body).encode(), headers))


def ask(url: str, token: str) -> str:
    return answer(urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"}))


def answer(request: urllib.request.Request) -> str:
    with urllib.request.urlopen(request, timeout=5) as reply:
        return str(reply.status)


# Run one at a time, because they may kill their own process


def kill_everything(event: dict[str, Any], task: Task) -> str:
    with contextlib.suppress(ProcessLookupError):  # there may be no other process
        os.kill(-1, signal.SIGKILL)
    return "still here"


def leave_daemons(event: dict[str, Any], task: Task) -> str:
    """Starts fully detached processes: in new sessions, orphaned, ignoring signals."""
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                    signal.signal(number, signal.SIG_IGN)
                os.execv("/bin/sleep", ["sleep", event["payload"]["nonce"]])
            os._exit(0)
    return "left"


def hang_with_children(event: dict[str, Any], task: Task) -> None:
    leave_daemons(event, task)
    urllib.request.urlopen(
        f"{os.environ['TRACE_QUERY_URL']}/v1/task/tell/{event['payload']['nonce']}", timeout=5
    ).close()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Event().wait()
