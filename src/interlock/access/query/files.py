"""Which of a relation's files are opened by DuckDB itself, and which are read for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import obstore
from obstore.exceptions import BaseError, NotFoundError

from interlock.access.query.jobs import DataFile
from interlock.errors import ConfigurationError, Unavailable

_GLOB: Final = re.compile(r"[*?\[\]{}]")
"""DuckDB would take such a path for a pattern."""
_REMOTE: Final = re.compile(r"(?P<root>[a-z][a-z0-9+.-]*://[^/]+)/(?P<key>.+)")

Store = Any
"""One of obstore's; its stubs name each kind apart."""
OpenStore = Callable[[str], Store]


def local_path(location: str) -> str | None:
    """None for what lies in an object store."""
    if location.startswith("file://"):
        return unquote(location.removeprefix("file://"))
    return location if location.startswith("/") else None


def opened_by_duckdb(location: str, *, confined: bool) -> str | None:
    """The path, if DuckDB may have it: without Landlock, COPY could write wherever it may read."""
    path = local_path(location)
    return path if confined and path is not None and not _GLOB.search(path) else None


@dataclass(slots=True)
class Reading:
    """Opens objects for lanes."""

    open_store: OpenStore | None
    _stores: dict[str, Store] = field(default_factory=dict)

    def size(self, file: DataFile) -> int:
        if file.size is not None:
            return file.size
        path = local_path(file.location)
        try:
            if path is not None:
                return Path(path).stat().st_size
            store, key = self._found(file.location)
            return int(obstore.head(store, key)["size"])
        except (BaseError, OSError, NotFoundError) as error:
            raise _away(error) from error

    def reader(self, file: DataFile) -> Callable[[int, int], bytes]:
        path = local_path(file.location)
        if path is not None:
            return lambda offset, length: _read_local(Path(path), offset, length)
        store, key = self._found(file.location)
        return lambda offset, length: _read_range(store, key, offset, length)

    def _found(self, location: str) -> tuple[Store, str]:
        parts = _REMOTE.fullmatch(location)
        if parts is None or self.open_store is None:
            raise ConfigurationError(f"{location.split(':', 1)[0]}: is no store that queries can read from.")
        root = parts["root"]
        if root not in self._stores:
            self._stores[root] = self.open_store(root)
        return self._stores[root], parts["key"]


def _read_local(path: Path, offset: int, length: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)
    except OSError as error:
        raise _away(error) from error


def _read_range(store: Store, key: str, offset: int, length: int) -> bytes:
    try:
        return bytes(obstore.get_range(store, key, start=offset, length=length))
    except (BaseError, OSError) as error:
        raise _away(error) from error


def _away(error: Exception) -> Unavailable:
    return Unavailable(f"A file of the data cannot be read ({type(error).__name__}): ask again.")
