"""A named pipe at which operators block until the test opens it."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.polls import eventually


class Gate:
    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path

    async def open(self) -> None:
        """Waits for the first operator and releases all that have arrived."""
        await eventually(self._opened)

    def _opened(self) -> bool:
        try:
            os.close(os.open(self.path, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # no reader yet
            return False
        return True
