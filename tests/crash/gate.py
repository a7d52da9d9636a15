"""A named pipe that operators wait at until the test lets them go."""

from __future__ import annotations

import os
from pathlib import Path

from tests.patience import eventually


class Gate:
    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path

    async def open(self) -> None:
        """Lets go whoever has come; waits for the first."""
        await eventually(self._opened)

    def _opened(self) -> bool:
        try:
            os.close(os.open(self.path, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # nobody is there
            return False
        return True
