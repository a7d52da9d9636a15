"""Detects that loaded modules of operators were edited, so that the next task runs in a new process."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import cache_from_source
from pathlib import Path
from typing import Final

from interlock.workers.catalogue import Source, is_own_module

_SLACK_NS: Final = 10_000_000
"""The file system's clock may be this far behind the process's."""


class LoadedCode:
    """The modules of some sources that this process has loaded since its start.

    A file counts as edited if its inode changed after the process started, which a copied modification time cannot
    hide. A file that was edited between the start and its import costs an unneeded restart.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._folders = sorted({source.search_path for source in sources})
        self._since = time.time_ns() - _SLACK_NS
        self._files: list[str] = []
        self._modules = 0

    def edited(self) -> bool:
        """Returns True if a loaded file was changed or deleted. Deletes the bytecode of changed files.

        Python recognizes bytecode by size and whole seconds, so an edit within a second could go unnoticed.
        """
        if len(sys.modules) != self._modules:
            self._collect()
        changed = [file for file in self._files if self._is_changed(file)]
        for file in changed:
            with suppress(OSError):
                Path(cache_from_source(file)).unlink()
        return bool(changed)

    def _collect(self) -> None:
        self._modules = len(sys.modules)
        files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        self._files = [
            file
            for file in files
            if isinstance(file, str) and any(is_own_module(Path(file), folder) for folder in self._folders)
        ]

    def _is_changed(self, file: str) -> bool:
        try:
            return Path(file).stat().st_ctime_ns >= self._since
        except OSError:
            return True
