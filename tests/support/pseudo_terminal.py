"""A terminal of 80 columns in which a test types like a person: a shell in a pseudo-tty."""

from __future__ import annotations

import os
import pty
import re
import select
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from fcntl import ioctl
from pathlib import Path
from typing import Final, NamedTuple

_ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b[=>]")
_SIZE: Final = struct.pack("HHHH", 50, 80, 0, 0)


class Typed(NamedTuple):
    code: int
    text: str
    """What the terminal showed, without colours and cursor movements."""

    @property
    def words(self) -> str:
        """The text on one line, for sentences that the terminal has folded."""
        return " ".join(self.text.split())


class PseudoTerminal:
    """A program in a pseudo-tty. Its output is read all the time, as a terminal does."""

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._end, theirs = pty.openpty()
        ioctl(theirs, termios.TIOCSWINSZ, _SIZE)
        self.process = subprocess.Popen(
            command, cwd=folder, env=dict(environment) | {"TERM": "xterm"}, stdin=theirs, stdout=theirs, stderr=theirs,
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self._shown = ""
        self._more = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                select.select([self._end], [], [])
                data = os.read(self._end, 65_536)
            except OSError:  # the program has ended
                data = b""
            with self._more:
                self._shown += data.decode(errors="replace")
                self._more.notify_all()
            if not data:
                return

    def type(self, line: str) -> None:
        os.write(self._end, line.encode() + b"\n")

    def until(self, pattern: str, *, start: int = 0, seconds: float = 90.0) -> re.Match[str]:
        """Waits until the terminal shows a match after position `start`."""
        end = time.monotonic() + seconds
        with self._more:
            while (found := re.compile(pattern).search(self._shown, start)) is None:
                left = end - time.monotonic()
                assert left > 0, f"{pattern!r} was not shown within {seconds:g} s:\n{self._shown[start:]}"
                self._more.wait(left)
        return found

    @property
    def shown(self) -> str:
        return self._shown

    def close(self) -> None:
        self.process.wait()
        os.close(self._end)


class Shell:
    """A shell in a pseudo-tty."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        command = ["bash", "--norc", "--noprofile", "--noediting"]
        self._terminal = PseudoTerminal(command, folder, environment)
        self._count = 0
        self._terminal.type("stty -echo; PS1= PS2=")

    def type(self, line: str, *, expect: int | None = 0, seconds: float = 90.0) -> Typed:
        """Types a line, and returns what the terminal shows until its command has ended."""
        self._count += 1
        start = len(self._terminal.shown)
        self._terminal.type(f"{line}\nprintf '\\nended-%d-%d.' {self._count} $?")
        found = self._terminal.until(rf"ended-{self._count}-(\d+)\.", start=start, seconds=seconds)
        typed = Typed(int(found[1]), _ANSI.sub("", self._terminal.shown[start : found.start()]).replace("\r", ""))
        assert expect is None or typed.code == expect, f"{line}\n{typed.text}"
        return typed

    def close(self) -> None:
        self._terminal.type("exit")
        self._terminal.close()
