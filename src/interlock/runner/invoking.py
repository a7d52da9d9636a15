"""One invocation: a place, the bundle, a confined process, a verdict."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import structlog

import interlock
from interlock.errors import ConfigurationError, Unavailable
from interlock.runner import verdict
from interlock.runner.bundles import BundleAway, BundleError, Bundles
from interlock.runner.confinement import (
    STRONGEST_FIRST,
    Interpreter,
    Machine,
    Walls,
    copy_programs,
    unavailable,
)
from interlock.runner.contract import Endpoints, Invocation, Limits
from interlock.runner.groups import Group, Parents, sweep
from interlock.runner.inside.job import PROBE
from interlock.runner.places import Places
from interlock.runner.sandbox import LEFT_BEHIND, Sandbox, run
from interlock.wire import RunnerReport

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
        """Raises TooManyRequests when all places are taken, Unavailable when the bundle cannot be had for now: no code
        has run then. Cancelling it kills the code."""
        with self.places.one() as user, self.bundles.in_use(invocation.bundle_sha256):
            try:
                bundle = await self.bundles.fetch(invocation.bundle_url, invocation.bundle_sha256)
            except BundleAway as error:
                raise Unavailable(error.detail) from None
            except BundleError as error:
                return verdict.bad_bundle(error.detail)
            return await self._run(invocation, event, bundle, user)

    async def _run(self, invocation: Invocation, event: dict[str, Any], bundle: Path, user: int) -> RunnerReport:
        machine = self.sandbox.machine
        if invocation.language == "node" and machine.node is None:
            return verdict.refused("no_node", "This runner has no Node: install `node` where it runs.")
        job = machine.job(invocation, event, bundle, user)
        with self._group(invocation.limits) as group:
            try:
                async with asyncio.timeout(invocation.limits.timeout_seconds):
                    ended = await run(self.sandbox, job, machine.targets(invocation), group)
            except TimeoutError:
                return verdict.timed_out(invocation.limits)
            finally:
                self.sandbox.stock_up()
            report = verdict.of(ended, invocation.limits, group.hits() if group else None)
        if report.cause == "no_confinement":
            log.error("runner.no_walls", walls=machine.walls, said=ended.tail)
        return report

    @contextmanager
    def _group(self, limits: Limits) -> Iterator[Group | None]:
        if self.groups is None:
            yield None
            return
        # Files of its own file system are in memory, too.
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
    """The strongest walls that hold a trial here, or the ones that were asked for by name."""
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
    python = "Set runner_python to a Python that every user can walk to. " if closed else ""
    raise ConfigurationError(
        f"This machine cannot confine users' code ({'; '.join(reasons)}). {python}Install bubblewrap or allow user "
        "namespaces; or, for code that you trust, set runner_confinement = none."
    )


def _equip(folder: Path, walls: Walls, interpreter: Interpreter, authorities: Path | None) -> Machine:
    """Anew at each start: another release of Interlock may have been here."""
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
    """Removes what runners have left behind that were killed."""
    for prefix in LEFT_BEHIND:
        for left in home.glob(f"{prefix}*"):
            pid = left.name.removeprefix(prefix).partition("-")[0]
            if not Path(f"/proc/{pid}").exists():
                shutil.rmtree(left, ignore_errors=True)


def home_of(folder: Path, walls: Walls) -> Path:
    """Where the code's user must walk to its bundle by itself, not under a folder that is closed to others."""
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
    """Why the walls do not hold; None when a process has lived and ended inside of them."""
    sandbox = Sandbox(machine)
    bundle = machine.programs
    job = replace(machine.job(_TRIAL, {}, bundle, user), language=PROBE)
    ended = None
    with suppress(TimeoutError):
        async with asyncio.timeout(_TRIAL_SECONDS):
            ended = await run(sandbox, job, machine.targets(_TRIAL), None)
    if ended is not None and ended.ending is not None and ended.ending.exit_code == 0:
        return None
    said = ended.tail.strip().splitlines() if ended is not None else []
    return said[-1] if said else "a trial did not end well"
