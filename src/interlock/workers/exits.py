"""How child processes end: exit codes, signals, and the likely cause."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from interlock.wire import Crash

_cgroup_line = re.compile(r"^\d+:(?P<controllers>[^:]*):(?P<path>.*)$", re.MULTILINE)
_killed = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)

ROOT = Path("/sys/fs/cgroup")


def oom_kills() -> int | None:
    """Returns the number of OOM kills in this process's control group; None if the kernel has no counter."""
    for path in _counters():
        try:
            found = _killed.search(path.read_text())
        except OSError:
            continue
        if found:
            return int(found[1])
    return None


def _counters() -> list[Path]:
    """Returns possible files of the counter: `memory.events` with cgroup v2, `memory.oom_control` with v1."""
    try:
        lines = _cgroup_line.findall(Path("/proc/self/cgroup").read_text())
    except OSError:
        return []
    unified = [ROOT / path.lstrip("/") / "memory.events" for controllers, path in lines if not controllers]
    legacy = [
        ROOT / "memory" / path.lstrip("/") / "memory.oom_control"
        for controllers, path in lines
        if "memory" in controllers.split(",")
    ]
    return unified + legacy


class KernelKills:
    """Attributes OOM kills to children. The kernel only counts them, so each count explains one death."""

    def __init__(self) -> None:
        self._explained = oom_kills()

    def explain(self) -> bool:
        """Returns True if an OOM kill explains the child that was just killed."""
        kills = oom_kills()
        if kills is None or self._explained is None or kills <= self._explained:
            return False
        self._explained += 1
        return True


def crash_of(returncode: int, kernel_kills: KernelKills) -> Crash:
    """Describes an exit. `returncode` has the meaning that it has in `subprocess`: negative for a signal."""
    if returncode >= 0:
        return Crash(exit_code=returncode, oom=returncode == EXIT_OUT_OF_MEMORY)
    oom = returncode == -signal.SIGKILL and kernel_kills.explain()
    return Crash(signal=signal_name(-returncode), oom=oom)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def sentence(crash: Crash, process: str = "The process that ran this task") -> str:
    if crash.oom:
        return f"{process} ran out of memory: give the runtime more memory, or split the task."
    how = f"was killed by {crash.signal}" if crash.signal else f"ended with exit code {crash.exit_code}"
    return f"{process} {how}."


EXIT_ORPHANED = 75
"""The wrapper is gone."""
EXIT_OUT_OF_MEMORY = 76
"""The child's own code ran out of memory, outside an operator."""
EXIT_SPARK_DIED = 77
"""The JVM of the driver has ended."""
