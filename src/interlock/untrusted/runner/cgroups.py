"""Control groups, where available: limits on all processes of an invocation together, and counts of limit hits.

Supports versions 1 and 2. Without permission to create a group, limits apply to each process separately.
"""

from __future__ import annotations

import itertools
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path("/sys/fs/cgroup")
_LINE: Final = re.compile(r"^\d+:(?P<controllers>[^:]*):(?P<path>.*)$", re.MULTILINE)
_NAME: Final = "interlock-runner-"
_RUNNERS_OWN_BYTES: Final = 48 << 20
"""Allowance for the launcher and the keeper, which are counted, too."""
_RUNNERS_OWN_PROCESSES: Final = 4
_REMOVALS: Final = 50

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Hits:
    """Limits that the kernel has enforced in a group."""

    memory: bool
    processes: bool


@dataclass(frozen=True)
class Parents:
    """The parent folders of groups: one folder with version 2, one per controller with version 1."""

    memory: Path
    pids: Path

    @property
    def unified(self) -> bool:
        return self.memory == self.pids

    @classmethod
    def find(cls) -> Parents | None:
        """Returns None if this process cannot create groups, or only groups that limit nothing."""
        for parents in _candidates():
            with suppress(OSError):
                Group.make(parents, 1 << 30, 64).remove()
                return parents
        return None


def _candidates() -> list[Parents]:
    try:
        lines = _LINE.findall(Path("/proc/self/cgroup").read_text())
    except OSError:
        return []
    own = {name: path.lstrip("/") for controllers, path in lines for name in (controllers.split(",") or [""])}
    found = []
    if "memory" in own and "pids" in own:
        found.append(Parents(ROOT / "memory" / own["memory"], ROOT / "pids" / own["pids"]))
    if "" in own:
        unified = ROOT / own[""]
        found.append(Parents(unified, unified))
    return found


@dataclass(frozen=True)
class Group:
    memory: Path
    pids: Path

    @classmethod
    def make(cls, parents: Parents, memory_bytes: int, processes: int) -> Group:
        name = f"{_NAME}{os.getpid()}-{next(_numbers)}"
        group = cls(parents.memory / name, parents.pids / name)
        for folder in {group.memory, group.pids}:
            folder.mkdir()
        try:
            group._limit(memory_bytes + _RUNNERS_OWN_BYTES, processes + _RUNNERS_OWN_PROCESSES)
        except OSError:
            group.remove()
            raise
        return group

    def _limit(self, memory_bytes: int, processes: int) -> None:
        memory = "memory.max" if self.unified else "memory.limit_in_bytes"
        _write(self.memory / memory, str(memory_bytes))
        _write(self.pids / "pids.max", str(processes))
        if self.unified:
            with suppress(OSError):  # a machine without swap has no such file
                _write(self.memory / "memory.swap.max", "0")

    @property
    def unified(self) -> bool:
        return self.memory == self.pids

    def add(self, pid: int) -> None:
        """Adds a process and its existing children. Processes that they start later join the group automatically."""
        for folder in {self.memory, self.pids}:
            _write(folder / "cgroup.procs", str(pid))
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            self.add(int(child))

    def hits(self) -> Hits:
        memory = "memory.events" if self.unified else "memory.oom_control"
        return Hits(_counted(self.memory / memory, "oom_kill"), _counted(self.pids / "pids.events", "max"))

    def remove(self) -> None:
        """Removes the group of dead processes; the kernel may take a moment to notice.

        A leftover group holds nothing.
        """
        for folder in {self.memory, self.pids}:
            for _ in range(_REMOVALS):
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    continue
                break


def sweep(parents: Parents) -> None:
    """Removes groups of runners that were killed."""
    for folder in {parents.memory, parents.pids}:
        for left in folder.glob(f"{_NAME}*"):
            pid = left.name.removeprefix(_NAME).split("-")[0]
            if not Path(f"/proc/{pid}").exists():
                with suppress(OSError):
                    left.rmdir()


def _write(file: Path, value: str) -> None:
    # Never creates a file: a missing file means a missing controller, and open() would create a plain file instead.
    descriptor = os.open(file, os.O_WRONLY)
    try:
        os.write(descriptor, value.encode())
    finally:
        os.close(descriptor)


def _counted(file: Path, name: str) -> bool:
    try:
        found = re.search(rf"^{name} (\d+)$", file.read_text(), re.MULTILINE)
    except OSError:
        return False
    return found is not None and int(found[1]) > 0
