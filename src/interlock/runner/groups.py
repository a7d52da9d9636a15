"""Control groups, where they can be had: limits over all processes of an invocation together, and counts of who hit
them. Versions 1 and 2; without the right to make one, limits are those of each single process."""

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
"""For the launcher and the keeper, which are counted, too."""
_RUNNERS_OWN_PROCESSES: Final = 4
_REMOVALS: Final = 50

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Hits:
    """What the kernel has refused or ended in a group."""

    memory: bool
    processes: bool


@dataclass(frozen=True)
class Parents:
    """Where groups are made: one folder with version 2, one per controller with version 1."""

    memory: Path
    pids: Path

    @property
    def unified(self) -> bool:
        return self.memory == self.pids

    @classmethod
    def find(cls) -> Parents | None:
        """None where this process may make none, or none that limit anything."""
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
        """With what it has started already: what it starts from now on is born into the group."""
        for folder in {self.memory, self.pids}:
            _write(folder / "cgroup.procs", str(pid))
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            self.add(int(child))

    def hits(self) -> Hits:
        memory = "memory.events" if self.unified else "memory.oom_control"
        return Hits(_counted(self.memory / memory, "oom_kill"), _counted(self.pids / "pids.events", "max"))

    def remove(self) -> None:
        """Its processes are dead, and the kernel may need a moment to notice; one that stays behind holds nothing."""
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
    # Never creates one: a file that is not there is a controller that is not, and open would make a plain file of it.
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
