"""The runner as an AWS Lambda function: the event is one invocation, the return value is the report.

Lambda is the wall here: each function has its own machine, and its role has no permissions. User code still runs in a
separate process with an empty environment and limits. Before the function returns, this process and all its descendants
are killed, because Lambda reuses the machine for the next invocation, which may belong to another org.

Uses only the standard library and the files next to it: see `write` in confinement.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from interlock.archives import Limits, unpack
from interlock.errors import BadRequest
from interlock.http import fetch
from interlock.processes import linux
from interlock.untrusted.runner.in_sandbox import entry
from interlock.untrusted.runner.in_sandbox.job import (
    EXIT_BAD_BUNDLE,
    EXIT_DISK_FULL,
    EXIT_OUT_OF_MEMORY,
    EXIT_PROCESS_LIMIT,
    Job,
)

PROGRAMS: Final = Path(__file__).resolve().parents[3]
_MAX_BUNDLE_BYTES: Final = 512 << 20
_DOWNLOAD_SECONDS: Final = 60
_TAIL_BYTES: Final = 8_192
_SPARE_SECONDS: Final = 2.0
"""Time reserved for the report before the function's own timeout."""
_CHILD: Final = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from interlock.untrusted.runner import lambda_function as f; f.child()"
)
_CAUSES: Final = {
    EXIT_OUT_OF_MEMORY: ("oom", "memory_limit"),
    EXIT_DISK_FULL: ("exited", "disk_full"),
    EXIT_PROCESS_LIMIT: ("exited", "fork_limit"),
    EXIT_BAD_BUNDLE: ("bad_bundle", "bad_bundle"),
}

Report = dict[str, Any]


def handler(event: dict[str, Any], context: Any) -> Report:
    """Any: the types that Lambda passes."""
    _hide()
    with tempfile.TemporaryDirectory(prefix="invocation-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        try:
            _fetch(event, place / "bundle.zip")
            unpack(place / "bundle.zip", place / "bundle", Limits(unpacked_bytes=_MAX_BUNDLE_BYTES))
        except (BadRequest, OSError) as error:
            return {"outcome": "bad_bundle", "cause": "bad_bundle", "detail": str(error)[:1000]}
        (place / "work").mkdir()
        return _run(_job(event, place), _seconds(event, context), place)


def _hide() -> None:
    """Makes this process non-dumpable: user code runs as the same user and must not read the function's credentials."""
    with contextlib.suppress(OSError):
        linux.prctl(linux.PR_SET_DUMPABLE, 0)


def _fetch(event: dict[str, Any], file: Path) -> None:
    try:
        found = fetch.download(event["bundle_url"], file, limit=_MAX_BUNDLE_BYTES, seconds=_DOWNLOAD_SECONDS)
    except fetch.TooLarge:
        raise BadRequest(f"The bundle exceeds this runner's limit of {_MAX_BUNDLE_BYTES} bytes.") from None
    if found != event["bundle_sha256"]:
        raise BadRequest("The bundle does not match the SHA-256 of its job.")


def _job(event: dict[str, Any], place: Path) -> Job:
    limits, endpoints = event["limits"], event["endpoints"]
    urls = {f"TRACE_{name.upper()}": url for name, url in endpoints.items() if url and name.endswith("_url")}
    kept = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(place / "work"), "TMPDIR": str(place / "work")}
    return Job(
        language=event["language"],
        entrypoint=event["entrypoint"],
        event={name: value for name, value in event.items() if name != "bundle_url"},
        environment=kept | urls | {"TRACE_TASK_CAPABILITY_TOKEN": event["capability_token"]},
        python=sys.executable,
        node=shutil.which("node"),
        bundle=str(place / "bundle"),
        work=str(place / "work"),
        programs=str(PROGRAMS),
        memory_bytes=limits["memory_mb"] << 20,
        cpu_seconds=limits["cpu_seconds"],
        processes=limits["processes"],
        disk_bytes=limits["disk_mb"] << 20,
    )


def _seconds(event: dict[str, Any], context: Any) -> float:
    own = context.get_remaining_time_in_millis() / 1000 - _SPARE_SECONDS if context is not None else float("inf")
    return max(1.0, min(float(event["limits"]["timeout_seconds"]), own))


def _run(job: Job, seconds: float, place: Path) -> Report:
    # This process adopts processes that detach themselves, so that they are found.
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    before = _descendants()
    with (place / "output").open("wb") as output:
        # Not with `processes.child`: there is no event loop, and processes that left the group must be found as well.
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", _CHILD, str(PROGRAMS)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={},
            cwd=job.work,
            start_new_session=True,
        )
        report: Report
        try:
            process.communicate(json.dumps(asdict(job)).encode(), timeout=seconds)
            report = _ended(process.returncode)
        except subprocess.TimeoutExpired:
            report = {"outcome": "timeout", "cause": "timeout", "detail": f"The code did not end within {seconds:g} s."}
        finally:
            _kill_all(process, before)
    return report | {"stderr_tail": _tail(place / "output")}


def _kill_all(process: subprocess.Popen[bytes], before: set[int]) -> None:
    """Kills the process and its descendants, even detached ones, but no process that existed before."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while found := _descendants() - before:
        _freeze(found, before)
        for left in _descendants() - before:
            _signal(left, signal.SIGKILL)
        for left in found:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(left, 0)


def _freeze(found: set[int], before: set[int]) -> None:
    """Stops all processes before the first one is killed: a stopped process cannot fork."""
    frozen: set[int] = set()
    while new := found - frozen:
        for process in new:
            _signal(process, signal.SIGSTOP)
        frozen |= new
        found = _descendants() - before


def _signal(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _descendants() -> set[int]:
    """Finds descendants by each process's parent: Lambda's kernel may not list children."""
    parents = dict[int, int]()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    found, new = set[int](), {os.getpid()}
    while new := {process for process, parent in parents.items() if parent in new}:
        found |= new
    return found


def _ended(code: int) -> Report:
    if code < 0:
        name = signal.Signals(-code).name
        return {"outcome": "signaled", "signal": name, "cause": "cpu_limit" if name == "SIGXCPU" else "signal"}
    outcome, cause = _CAUSES.get(code, ("exited", "exit_code"))
    return {"outcome": outcome, "exit_code": code, "cause": cause}


def _tail(output: Path) -> str:
    with output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def child() -> None:
    """Runs in the process of user code before that code: reads the job and applies its limits."""
    job = Job(**json.loads(sys.stdin.buffer.read()))
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, job.cpu_seconds),
        (resource.RLIMIT_FSIZE, job.disk_bytes),
        (resource.RLIMIT_AS, job.memory_bytes),
    ):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    sys.exit(entry.run(job))
