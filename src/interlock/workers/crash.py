"""How a child process died, as far as this machine tells."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from interlock.wire import Crash
from interlock.workers.exits import EXIT_OUT_OF_MEMORY

_cgroup_line = re.compile(r"^\d+:(?P<controllers>[^:]*):(?P<path>.*)$", re.MULTILINE)
_killed = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)

ROOT = Path("/sys/fs/cgroup")


def oom_kills() -> int | None:
    """How often the kernel has killed for memory in this process's control group; None where it does not say."""
    for path in _counters():
        try:
            found = _killed.search(path.read_text())
        except OSError:
            continue
        if found:
            return int(found[1])
    return None


def _counters() -> list[Path]:
    """Where the counter is: `memory.events` with cgroup v2, `memory.oom_control` with v1."""
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
    """The kernel counts its kills for memory and names nobody: each explains one death, and no later one."""

    def __init__(self) -> None:
        self._explained = oom_kills()

    def explain(self) -> bool:
        """Whether a child that was just killed can be put down to one."""
        kills = oom_kills()
        if kills is None or self._explained is None or kills <= self._explained:
            return False
        self._explained += 1
        return True


def crash_of(returncode: int, kernel_kills: KernelKills) -> Crash:
    """`returncode` as `subprocess` gives it: negative for a signal."""
    if returncode >= 0:
        return Crash(exit_code=returncode, oom=returncode == EXIT_OUT_OF_MEMORY)
    oom = returncode == -signal.SIGKILL and kernel_kills.explain()
    return Crash(signal=signal_name(-returncode), oom=oom)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def sentence(crash: Crash, who: str = "The process that ran this task") -> str:
    if crash.oom:
        return f"{who} was out of memory: give the runtime more, or the task less to do."
    how = f"was killed by {crash.signal}" if crash.signal else f"ended with exit code {crash.exit_code}"
    return f"{who} {how}."
