"""Files of relations: those that DuckDB opens itself, and those that the engine reads for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import obstore
from obstore.exceptions import BaseError, NotFoundError

from interlock.errors import ConfigurationError, Unavailable
from interlock.query.engine.jobs import DataFile
from interlock.query.sql_pushdown import Filter, folded

_GLOB: Final = re.compile(r"[*?\[\]{}]")
"""DuckDB would interpret such a path as a pattern."""
_REMOTE: Final = re.compile(r"(?P<root>[a-z][a-z0-9+.-]*://[^/]+)/(?P<key>.+)")

Store = Any
"""Any obstore store; its type stubs have no common base class."""
OpenStore = Callable[[str], Store]


def local_path(location: str) -> str | None:
    """Returns the local path, or None for a location in an object store."""
    if location.startswith("file://"):
        return unquote(location.removeprefix("file://"))
    return location if location.startswith("/") else None


def opened_by_duckdb(location: str, *, confined: bool) -> str | None:
    """Returns the path if DuckDB may open it. Without Landlock, COPY could write wherever DuckDB can read."""
    path = local_path(location)
    return path if confined and path is not None and not _GLOB.search(path) else None


@dataclass(slots=True)
class Reading:
    """Reads objects for lanes."""

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
            raise ConfigurationError(f"Queries cannot read from a store with the scheme {location.split(':', 1)[0]!r}.")
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
    return Unavailable(f"A data file cannot be read ({type(error).__name__}); retry later.")


def pruned(files: Iterable[DataFile], filters: Sequence[Filter]) -> list[DataFile]:
    wanted = [one for one in filters if one.operator != "is not null"]
    return [file for file in files if all(_may_match(file, one) for one in wanted)]


def _may_match(file: DataFile, condition: Filter) -> bool:
    bounds = {folded(name): values for name, values in file.bounds.items()}.get(folded(condition.column))
    if bounds is None:
        return True
    if condition.operator == "is null":
        return False
    low, high = bounds
    numbers = [value for value in condition.values if isinstance(value, int)]
    if len(numbers) < len(condition.values):
        return True
    return any(_overlaps(condition.operator, number, low, high) for number in numbers)


def _overlaps(operator: str, number: int, low: int, high: int) -> bool:
    match operator:
        case "=" | "in":
            return low <= number <= high
        case "<":
            return low < number
        case "<=":
            return low <= number
        case ">":
            return high > number
        case ">=":
            return high >= number
        case _:
            return True
