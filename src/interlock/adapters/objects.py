"""Objects: files of datasets and batches, in a directory or in S3, by their full URI.

{root}/dataset/{dataset_uuid}/version/{dataset_version}/_attempts/{task_id}/{attempt}/…
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import LocalStore, ObjectStore, from_url

from interlock.errors import Unavailable

_DIRECTORY: Final = "file://"
_DELETED_AT_ONCE: Final = 1000


class Objects:
    """What lies under one root. A URI outside of it is a mistake of the caller's."""

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self._store: ObjectStore | None = None

    def key(self, uri: str) -> str:
        if not uri.startswith(f"{self.root}/"):
            raise ValueError(f"{uri} does not lie under {self.root}")
        return uri[len(self.root) + 1 :]

    async def read(self, uri: str) -> bytes | None:
        """None when there is no such object."""
        try:
            found = await obstore.get_async(self._opened(), self.key(uri))
            return bytes(await found.bytes_async())
        except (FileNotFoundError, NotFoundError):
            return None
        except (BaseError, OSError) as error:
            raise _away(error) from error

    async def delete(self, uri: str) -> None:
        """Harmless when it is gone already."""
        try:
            await obstore.delete_async(self._opened(), self.key(uri))
        except (FileNotFoundError, NotFoundError):
            return
        except (BaseError, OSError) as error:
            raise _away(error) from error

    async def delete_under(self, prefix: str) -> int:
        """How many objects there were. `prefix` ends with a slash, so that it is not the beginning of another name."""
        if not prefix.endswith("/"):
            raise ValueError(f"{prefix} is no prefix: it must end with a slash")
        deleted = 0
        try:
            async for found in obstore.list(self._opened(), self.key(prefix), chunk_size=_DELETED_AT_ONCE):
                paths = [meta["path"] for meta in found]
                await obstore.delete_async(self._opened(), paths)
                deleted += len(paths)
        except (FileNotFoundError, NotFoundError):
            return deleted
        except (BaseError, OSError) as error:
            raise _away(error) from error
        return deleted

    def _opened(self) -> ObjectStore:
        if self._store is None:
            self._store = open_store(self.root)
        return self._store


def open_store(root: str) -> ObjectStore:
    if root.startswith(_DIRECTORY):
        # A folder that is left empty goes with its last file.
        return LocalStore(Path(root.removeprefix(_DIRECTORY)), automatic_cleanup=True, mkdir=True)
    return from_url(root)


def _away(error: Exception) -> Unavailable:
    why = type(error).__name__
    return Unavailable(f"The object store does not answer ({why}): check objects_url and its credentials.")
