"""Bundles by SHA-256, unpacked once, in a folder that user code cannot write to."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import tempfile
import urllib.error
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from interlock import archives
from interlock.errors import InterlockError
from interlock.http import fetch

log = structlog.get_logger()

_SOCKET_SECONDS: Final = 30.0
_WHOLE_SECONDS: Final = 300.0
_COMING: Final = ".coming-"
_LIMIT_ENTRIES: Final = 10_000


class BundleError(InterlockError):
    """The bundle cannot be fetched, or does not match its digest or limits."""

    default_code = "bad_bundle"


class BundleAway(BundleError):
    """The bundle could not be fetched now; a retry may succeed."""


@dataclass
class Bundles:
    """Keeps up to `most_kept` bundles; beyond that, removes the least recently used one that is not in use."""

    folder: Path
    limit_bytes: int
    unpacked_bytes: int
    most_kept: int = 50
    verify: ssl.SSLContext | None = None
    _locks: dict[str, asyncio.Lock] = field(default_factory=dict)
    _used: Counter[str] = field(default_factory=Counter)

    def prepare(self) -> None:
        """Removes incomplete downloads of a runner that was killed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        for left in self.folder.glob(f"{_COMING}*"):
            shutil.rmtree(left, ignore_errors=True)

    async def fetch(self, url: str, sha256: str) -> Path:
        """Returns the folder with the bundle's files. Concurrent calls download it once."""
        lock = self._locks.setdefault(sha256, asyncio.Lock())
        try:
            async with lock:
                place = self.folder / sha256
                if not place.is_dir():
                    await asyncio.to_thread(self._bring, url, sha256, place)
                os.utime(place)
                return place
        finally:
            if not lock.locked():
                self._locks.pop(sha256, None)

    @contextmanager
    def in_use(self, sha256: str) -> Iterator[None]:
        self._used[sha256] += 1
        try:
            yield
        finally:
            self._used[sha256] -= 1
            if not self._used[sha256]:
                del self._used[sha256]

    def _bring(self, url: str, sha256: str, place: Path) -> None:
        """Unpacks under a temporary name: a folder with the final name is always complete."""
        self._make_room()
        coming = Path(tempfile.mkdtemp(prefix=_COMING, dir=self.folder))
        try:
            archive = coming / "bundle.zip"
            self._download(url, sha256, archive)
            limits = archives.Limits(entries=_LIMIT_ENTRIES, unpacked_bytes=self.unpacked_bytes)
            try:
                archives.unpack(archive, coming / "files", limits)
            except InterlockError as error:
                raise BundleError(error.detail) from None
            _open_for_reading(coming / "files")
            _put(coming / "files", place)
        except OSError as error:
            # Mostly a full disk. The caller needs to know only that this runner cannot provide the bundle now.
            raise BundleAway(f"The bundle could not be unpacked: {_reason(error)}.") from error
        finally:
            shutil.rmtree(coming, ignore_errors=True)

    def _download(self, url: str, sha256: str, archive: Path) -> None:
        try:
            # No proxies: the dispatcher signed exactly this URL.
            found = fetch.download(
                url,
                archive,
                limit=self.limit_bytes,
                seconds=_SOCKET_SECONDS,
                deadline=_WHOLE_SECONDS,
                tls=self.verify,
                proxies=False,
            )
        except fetch.TooLarge:
            raise BundleError(f"The bundle exceeds the limit of {self.limit_bytes} bytes.") from None
        except fetch.TooSlow:
            raise BundleAway(f"The download of the bundle took longer than {_WHOLE_SECONDS:.0f} s.") from None
        except urllib.error.HTTPError as error:
            raise (BundleAway if error.code >= 500 else BundleError)(
                f"The bundle could not be downloaded: the object store answered {error.code}."
            ) from None
        except fetch.FAILURES as error:
            raise BundleAway(f"The bundle could not be downloaded: {_reason(error)}.") from None
        if found != sha256:
            raise BundleError(f"The bundle has the SHA-256 {found}, expected {sha256}.")

    def _make_room(self) -> None:
        kept = [place for place in self.folder.iterdir() if not place.name.startswith(_COMING)]
        idle = sorted((p for p in kept if p.name not in self._used), key=lambda place: place.stat().st_mtime)
        for place in idle[: max(0, len(kept) - self.most_kept + 1)]:
            log.info("bundle.forgotten", sha256=place.name)
            shutil.rmtree(place, ignore_errors=True)


def _put(files: Path, place: Path) -> None:
    """Tolerates an existing folder: a download whose dispatcher disconnected may have finished.

    Its content is the same.
    """
    try:
        files.rename(place)
    except OSError:
        if not place.is_dir():
            raise


def _reason(error: Exception) -> str:
    """Describes an error without the URL, whose signature is a credential."""
    reason = getattr(error, "reason", error)
    return str(getattr(reason, "strerror", None) or type(reason).__name__)


def _open_for_reading(folder: Path) -> None:
    """Makes files readable to all users regardless of the umask: user code may run as another user."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
