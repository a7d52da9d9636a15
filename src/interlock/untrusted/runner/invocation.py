"""One invocation: a slot, the bundle, a confined process, and the report."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import structlog

import interlock
from interlock.errors import ConfigurationError, TooManyRequests, Unavailable
from interlock.untrusted.runner.bundles import BundleAway, BundleError, Bundles
from interlock.untrusted.runner.cgroups import Group, Hits, Parents, sweep
from interlock.untrusted.runner.confinement import (
    STRONGEST_FIRST,
    Interpreter,
    Machine,
    Walls,
    copy_programs,
    unavailable,
)
from interlock.untrusted.runner.contract import Endpoints, Invocation, Limits
from interlock.untrusted.runner.forwarder import open_routes
from interlock.untrusted.runner.in_sandbox.job import (
    EXIT_BAD_BUNDLE,
    EXIT_DISK_FULL,
    EXIT_NOT_REPORTED,
    EXIT_OUT_OF_MEMORY,
    EXIT_PROCESS_LIMIT,
    EXIT_WALLS,
    PROBE,
    Ending,
)
from interlock.untrusted.runner.sandbox import LEFT_BEHIND, Ended, Sandbox, run
from interlock.wire.bundles import RunnerReport

Outcome = Literal["exited", "signaled", "timeout", "oom", "refused", "bad_bundle"]

_NEARLY_FULL: Final = 1 << 16
_NO_HITS: Final = Hits(memory=False, processes=False)


def of(ended: Ended, limits: Limits, hits: Hits | None) -> RunnerReport:
    report = _of(ended, limits, hits or _NO_HITS)
    return RunnerReport(
        outcome=report.outcome,
        exit_code=ended.ending.exit_code if ended.ending else None,
        signal=_signal_of(ended.ending),
        cause=report.cause,
        detail=report.detail,
        stderr_tail=ended.tail,
    )


def timed_out(limits: Limits) -> RunnerReport:
    detail = f"The code exceeded its timeout of {limits.timeout_seconds:g} s and was killed."
    return RunnerReport(outcome="timeout", cause="timeout", detail=detail)


def refused(cause: str, detail: str) -> RunnerReport:
    return RunnerReport(outcome="refused", cause=cause, detail=detail)


def bad_bundle(detail: str) -> RunnerReport:
    return RunnerReport(outcome="bad_bundle", cause="bad_bundle", detail=detail)


def _of(ended: Ended, limits: Limits, hits: Hits) -> RunnerReport:
    if ended.overdrawn:
        return _disk_full(limits, "signaled")
    if ended.ending is None:
        return _without_ending(ended, limits, hits)
    if ended.ending.signal is not None:
        return _signaled(ended.ending.signal, limits, hits)
    return _exited(ended.ending, limits, hits)


def _without_ending(ended: Ended, limits: Limits, hits: Hits) -> RunnerReport:
    """The keeper sent no report: the walls could not be built, or it was killed with all other processes."""
    if hits.memory:
        return _out_of_memory(limits)
    if ended.code in (EXIT_WALLS, 1):
        return refused("no_confinement", "The walls around the code could not be built: see the runner's log.")
    detail = "The process that supervised the code was killed from outside."
    return RunnerReport(outcome="signaled", cause="signal", detail=detail)


def _signaled(number: int, limits: Limits, hits: Hits) -> RunnerReport:
    if number == signal.SIGKILL and hits.memory:
        return _out_of_memory(limits)
    if number == signal.SIGXCPU:
        return _ended("signaled", "cpu_limit", f"The code exceeded its limit of {limits.cpu_seconds} s of CPU time.")
    if number == signal.SIGXFSZ:
        return _disk_full(limits, "signaled")
    return _ended("signaled", "signal", f"The code was killed by {_name(number)}.")


def _exited(ending: Ending, limits: Limits, hits: Hits) -> RunnerReport:
    code = ending.exit_code or 0
    known: dict[int, Callable[[Limits], RunnerReport]] = {
        EXIT_OUT_OF_MEMORY: _out_of_memory,
        EXIT_DISK_FULL: _disk_full,
        EXIT_PROCESS_LIMIT: _too_many_processes,
    }
    if code in known:
        return known[code](limits)
    if code == EXIT_WALLS:
        return refused("no_confinement", "The code's privileges could not be dropped before it ran: see the output.")
    if code == EXIT_BAD_BUNDLE:
        return bad_bundle("The bundle lacks what its job refers to: see the output.")
    if code == EXIT_NOT_REPORTED:
        return _ended("exited", "not_reported", "The code ended, but the dispatcher did not accept its outcome.")
    return _plain_exit(code, ending, limits, hits)


def _plain_exit(code: int, ending: Ending, limits: Limits, hits: Hits) -> RunnerReport:
    """Uses the kernel's counters: a program that fails rarely reports why."""
    if code and hits.memory:
        return _out_of_memory(limits)
    if code and hits.processes:
        return _too_many_processes(limits)
    if code and min(ending.disk_free, ending.files_free * _NEARLY_FULL) < _NEARLY_FULL:
        return _disk_full(limits)
    return _ended("exited", "exit_code", f"The code ended with exit code {code}.")


def _out_of_memory(limits: Limits) -> RunnerReport:
    return _ended("oom", "out_of_memory", f"The code exceeded its memory limit of {limits.memory_mb} MiB.")


def _disk_full(limits: Limits, outcome: Outcome = "exited") -> RunnerReport:
    return _ended(outcome, "disk_full", f"The code exceeded its disk limit of {limits.disk_mb} MiB.")


def _too_many_processes(limits: Limits) -> RunnerReport:
    detail = f"The code exceeded its limit of {limits.processes} processes and threads."
    return _ended("exited", "fork_limit", detail)


def _ended(outcome: Outcome, cause: str, detail: str) -> RunnerReport:
    return RunnerReport(outcome=outcome, cause=cause, detail=detail)


def _signal_of(ending: Ending | None) -> str | None:
    return None if ending is None or ending.signal is None else _name(ending.signal)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


log = structlog.get_logger()

_TRIAL_SECONDS: Final = 20.0
_TRIAL: Final = Invocation(
    task_id=PROBE,
    attempt=1,
    capability_token=PROBE,
    bundle_url="http://127.0.0.1:9",
    bundle_sha256="0" * 64,
    entrypoint="",
    language="bootstrap",
    endpoints=Endpoints(dispatcher_url="http://127.0.0.1:9"),
    limits=Limits(memory_mb=512, cpu_seconds=10, timeout_seconds=_TRIAL_SECONDS, processes=8, disk_mb=4),
)


@dataclass
class Invoker:
    bundles: Bundles
    places: Places
    sandbox: Sandbox
    groups: Parents | None

    async def invoke(self, invocation: Invocation, event: dict[str, Any]) -> RunnerReport:
        """Raises TooManyRequests if no slot is free and Unavailable if the bundle cannot be fetched now; in both cases
        no code has run. Cancelling this call kills the code.
        """
        with self.places.one() as user, self.bundles.in_use(invocation.bundle_sha256):
            try:
                bundle = await self.bundles.fetch(invocation.bundle_url, invocation.bundle_sha256)
            except BundleAway as error:
                raise Unavailable(error.detail) from None
            except BundleError as error:
                return bad_bundle(error.detail)
            return await self._run(invocation, event, bundle, user)

    async def _run(self, invocation: Invocation, event: dict[str, Any], bundle: Path, user: int) -> RunnerReport:
        machine = self.sandbox.machine
        if invocation.language == "node" and machine.node is None:
            return refused("no_node", "Node is not available on this runner: install `node` on its machine.")
        with (
            open_routes(invocation.endpoints, own_network=machine.walls.own_network) as routes,
            self._group(invocation.limits) as group,
        ):
            with_urls = event | {"endpoints": event["endpoints"] | routes.urls}
            job = machine.job(invocation, with_urls, bundle, user, routes)
            try:
                async with asyncio.timeout(invocation.limits.timeout_seconds):
                    ended = await run(self.sandbox, job, routes, group)
            except TimeoutError:
                return timed_out(invocation.limits)
            finally:
                self.sandbox.stock_up()
            report = of(ended, invocation.limits, group.hits() if group else None)
        if report.cause == "no_confinement":
            log.error("runner.no_walls", walls=machine.walls, said=ended.tail)
        return report

    @contextmanager
    def _group(self, limits: Limits) -> Iterator[Group | None]:
        if self.groups is None:
            yield None
            return
        # Files of the private file system are in memory, too.
        group = Group.make(self.groups, (limits.memory_mb + limits.disk_mb) << 20, limits.processes)
        try:
            yield group
        finally:
            group.remove()


# The machine


def find_groups() -> Parents | None:
    found = Parents.find()
    if found is not None:
        sweep(found)
    return found


async def find_machine(
    folder: Path, wanted: str, interpreter: Interpreter, authorities: Path | None, user: int
) -> Machine:
    """Returns the strongest walls that pass a trial here, or the requested ones."""
    candidates = STRONGEST_FIRST if wanted == "auto" else (Walls(wanted),)
    reasons = list[str]()
    for walls in candidates:
        reason = unavailable(walls)
        if reason is None:
            machine = await asyncio.to_thread(_equip, folder, walls, interpreter, authorities)
            reason = await _trial(machine, user)
            if reason is None:
                return machine
            clear(machine)
        reasons.append(f"{walls}: {reason}")
    closed = any(interpreter.prefix in reason for reason in reasons)
    python = "Set runner_python to a Python that every user can access. " if closed else ""
    raise ConfigurationError(
        f"This machine cannot confine user code ({'; '.join(reasons)}). {python}Install bubblewrap or allow user "
        "namespaces; or, for code that you trust, set runner_confinement = none."
    )


def _equip(folder: Path, walls: Walls, interpreter: Interpreter, authorities: Path | None) -> Machine:
    """Copies the programs at each start: another release of Interlock may have run here."""
    home = home_of(folder, walls)
    root = home / "root"
    root.mkdir(exist_ok=True)
    _sweep(home)
    programs = Path(tempfile.mkdtemp(prefix=f"{LEFT_BEHIND[0]}{os.getpid()}-", dir=home))
    copy_programs(Path(interlock.__file__).parent, programs)
    compiling = [interpreter.executable, "-I", "-S", "-m", "compileall", "-q", str(programs)]
    subprocess.run(compiling, check=True, env={})
    for path in (programs, *programs.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    node = shutil.which("node")
    return Machine(walls, interpreter, programs, root, str(Path(node).resolve()) if node else None, authorities)


def _sweep(home: Path) -> None:
    """Removes leftovers of runners that were killed."""
    for prefix in LEFT_BEHIND:
        for left in home.glob(f"{prefix}*"):
            pid = left.name.removeprefix(prefix).partition("-")[0]
            if not Path(f"/proc/{pid}").exists():
                shutil.rmtree(left, ignore_errors=True)


def home_of(folder: Path, walls: Walls) -> Path:
    """Returns a folder for bundles. If user code runs as another user without its own file tree, every parent folder
    must be accessible to that user.
    """
    walks = os.getuid() == 0 and not walls.own_files
    home = Path(tempfile.gettempdir()) / f"interlock-runner-{os.getuid()}" if walks else folder.absolute()
    home.mkdir(parents=True, exist_ok=True, mode=0o755)
    if home.is_symlink() or home.stat().st_uid != os.getuid():
        raise ConfigurationError(f"{home} belongs to another user: remove it, or choose another folder with --dir.")
    home.chmod(0o755)
    return home


def clear(machine: Machine) -> None:
    shutil.rmtree(machine.programs, ignore_errors=True)


async def _trial(machine: Machine, user: int) -> str | None:
    """Returns the reason why the walls do not work, or None if a process ran and ended inside them."""
    sandbox = Sandbox(machine)
    bundle = machine.programs
    ended = None
    with suppress(TimeoutError), open_routes(_TRIAL.endpoints, own_network=machine.walls.own_network) as routes:
        job = replace(machine.job(_TRIAL, {}, bundle, user, routes), language=PROBE)
        async with asyncio.timeout(_TRIAL_SECONDS):
            ended = await run(sandbox, job, routes, None)
    if ended is not None and ended.ending is not None and ended.ending.exit_code == 0:
        return None
    lines = ended.tail.strip().splitlines() if ended is not None else []
    return lines[-1] if lines else "the trial process failed"


RETRY_SECONDS: Final = 1.0
MAX_USERS: Final = 180
"""Counted from the first user; beyond them begin the users that systemd allocates."""
_LOCKS: Final = Path("/run/interlock-runner")


class Places:
    def __init__(self, users: list[int]) -> None:
        """Creates one slot per user; 0 for slots without their own user."""
        self._free = users
        self._total = len(users)

    @property
    def taken(self) -> int:
        return self._total - len(self._free)

    @contextmanager
    def one(self) -> Iterator[int]:
        if not self._free:
            raise TooManyRequests(f"All {self._total} slots of this runner are in use.", retry_after=RETRY_SECONDS)
        user = self._free.pop()
        try:
            yield user
        finally:
            self._free.append(user)


def users_for(places: int, first: int) -> list[int]:
    """Locks one user per slot until this process ends, for whatever reason."""
    if os.getuid() != 0:
        return [0] * places
    _LOCKS.mkdir(mode=0o700, exist_ok=True)
    found = list[int]()
    for user in range(first, first + MAX_USERS):
        if len(found) == places:
            break
        if _take(user):
            found.append(user)
    if len(found) < places:
        raise ConfigurationError(
            f"Other runners on this machine use all but {len(found)} of the users {first} to {first + MAX_USERS - 1}: "
            f"set runner_concurrency to at most {len(found)}, or choose another runner_first_user."
        )
    return found


def _take(user: int) -> bool:
    handle = os.open(_LOCKS / str(user), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return False
    return True
