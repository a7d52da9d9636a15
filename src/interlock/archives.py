"""Zip archives of user code: packed the same way every time, and never trusted on the way in.

A zip is checked when it is uploaded and once more by whoever unpacks it: nothing between the two has to be believed.
"""

from __future__ import annotations

import hashlib
import os
import stat
import unicodedata
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

from interlock.errors import BadRequest

Language = Literal["python", "node", "bootstrap"]

BOOTSTRAP: Final = "bootstrap"
"""A program at the top of a bundle that is started as it is."""
_BEGINNING: Final = b"PK\x03\x04"
_LOCAL_HEADER: Final = 30
_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED: Final = 0x1
_LONGEST_NAME: Final = 500
_LONGEST_PART: Final = 255
"""Bytes between two slashes: what file systems take."""
_DIRECTORY_BYTES: Final = 256
"""Of the central directory, per entry that an archive may have: 46 bytes, the name and what a packer adds."""
_end_record: Final[Callable[[BinaryIO], Sequence[Any] | None]] = zipfile._EndRecData  # type: ignore[attr-defined]
_ENTRIES, _DIRECTORY_SIZE = 4, 5
_CHUNK: Final = 1 << 20
_NO_BOMB_BYTES: Final = 1 << 20
"""However well something this small was packed, it is no bomb."""
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
_LEFT_OUT: Final = frozenset({"__pycache__", ".git", ".venv", ".DS_Store"})
_LANGUAGES: Final[tuple[tuple[Language, tuple[str, ...]], ...]] = (
    ("node", ("/index.js", ".js", ".mjs", ".cjs")),
    ("python", ("/__init__.py", ".py")),
)
"""Endings of modules, the longest first; Python wins where both have one of a name."""


@dataclass(frozen=True, slots=True)
class Limits:
    entries: int = 10_000
    unpacked_bytes: int = 512 << 20
    ratio: int = 200
    """Most bytes that one byte of the archive may become."""


@dataclass(frozen=True, slots=True)
class Archive:
    """What a sound archive has."""

    files: tuple[str, ...]
    unpacked_bytes: int


DEFAULT: Final = Limits()


def bad(why: str) -> BadRequest:
    return BadRequest(f"This is no bundle: {why}.", code="bad_bundle")


def check(path: Path, limits: Limits = DEFAULT) -> Archive:
    """Reads all of it: a size or a checksum that lies is found here, not when a task runs."""
    with _opened(path, limits) as archive:
        entries = _sound(archive, path.stat().st_size, limits)
        for entry in entries:
            for _ in _content(archive, entry):
                continue
    return _archive(entries)


def unpack(path: Path, into: Path, limits: Limits = DEFAULT) -> Archive:
    """`into` is a new folder that nobody else writes to. Of permissions, only that to execute is taken over."""
    with _opened(path, limits) as archive:
        entries = _sound(archive, path.stat().st_size, limits)
        into.mkdir(mode=0o755)
        for entry in entries:
            _write(archive, entry, into)
    return _archive(entries)


def pack(folder: Path, out: Path) -> int:
    """How many files. The same folder gives the same bytes on every machine: sorted, without times, not compressed."""
    files = sorted(_packable(folder), key=lambda file: file.relative_to(folder).as_posix())
    if not files:
        raise bad(f"{folder} has no files")
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for file in files:
            entry = zipfile.ZipInfo(file.relative_to(folder).as_posix(), _EPOCH)
            entry.create_system = 3
            entry.external_attr = (stat.S_IFREG | (0o755 if os.access(file, os.X_OK) else 0o644)) << 16
            archive.writestr(entry, file.read_bytes())
    return len(files)


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def modules(files: Sequence[str]) -> dict[str, Language]:
    """What an entrypoint may name before its last dot, with its language; and `bootstrap`, which it names alone."""
    found: dict[str, Language] = {}
    for language, endings in _LANGUAGES:
        for name in files:
            stem = next((name.removesuffix(ending) for ending in endings if name.endswith(ending)), "")
            if stem and all(part.isidentifier() for part in stem.split("/")):
                found[stem.replace("/", ".")] = language
    if BOOTSTRAP in files:
        found[BOOTSTRAP] = "bootstrap"
    return found


# Checks


def _opened(path: Path, limits: Limits) -> zipfile.ZipFile:
    try:
        with path.open("rb") as file:
            if file.read(len(_BEGINNING)) != _BEGINNING:
                raise bad("it is not a zip archive with at least one file")
            _check_directory(file, limits)
        return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError) as error:
        raise bad(f"its directory cannot be read ({_told(error)})") from None


def _check_directory(file: BinaryIO, limits: Limits) -> None:
    """Bounds the central directory before `ZipFile` makes an object of each entry.

    Its size is what counts: `ZipFile` reads as many entries as fit into that, whatever the count says. The end record
    is read by the function that `ZipFile` uses, so both see the same one, also in an archive that has two.
    """
    end = _end_record(file)
    if not end:
        raise bad("it has no directory")
    entries, size = end[_ENTRIES], end[_DIRECTORY_SIZE]
    if entries > limits.entries:
        raise bad(f"it has {entries} entries, and may have {limits.entries}")
    if size > limits.entries * _DIRECTORY_BYTES:
        raise bad(f"its directory has {size} bytes, and may have {limits.entries * _DIRECTORY_BYTES}")


def _sound(archive: zipfile.ZipFile, size: int, limits: Limits) -> list[zipfile.ZipInfo]:
    entries = archive.infolist()
    if len(entries) > limits.entries:
        raise bad(f"it has {len(entries)} entries, and may have {limits.entries}")
    for entry in entries:
        if why := _wrong(entry):
            raise bad(f"{why} ({entry.filename[:100]!r})")
    _check_names(entries)
    _check_sizes(entries, size, limits)
    _check_places(entries, archive.start_dir)
    return entries


def _wrong(entry: zipfile.ZipInfo) -> str | None:
    """What is wrong with an entry by itself. Kinds are those of Unix, which every zip program writes there."""
    if not entry.filename:  # one that begins with a NUL, which ends a name
        return "an entry has no name"
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR) or (kind == stat.S_IFDIR) > entry.is_dir():
        return "an entry is a link or a device, not a file or a folder"
    if entry.flag_bits & _ENCRYPTED:
        return "an entry is encrypted"
    if entry.compress_type not in _METHODS:
        return "an entry is neither stored nor deflated"
    if entry.is_dir() and entry.file_size:
        return "a folder has content"
    return _wrong_name(entry.orig_filename)


def _wrong_name(name: str) -> str | None:
    path = name.removesuffix("/")
    if not path or len(name) > _LONGEST_NAME:
        return "an entry has no name, or one that is too long"
    if any(len(part.encode(errors="replace")) > _LONGEST_PART for part in path.split("/")):
        return f"an entry's name is too long: what is between two slashes has at most {_LONGEST_PART} bytes"
    if not path.isprintable() or "\\" in path or ":" in path:
        return "an entry's name has a character that does not belong there"
    if path.startswith("/") or any(part in ("", ".", "..") for part in path.split("/")):
        return "an entry leads out of the archive"
    return None


def _check_names(entries: Sequence[zipfile.ZipInfo]) -> None:
    """Every name once, however it spells its accents; and no file where another entry needs a folder."""
    names = [unicodedata.normalize("NFC", entry.filename.removesuffix("/")) for entry in entries]
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise bad(f"an entry is there twice ({twice[:100]!r})")
    files = {name for name, entry in zip(names, entries, strict=True) if not entry.is_dir()}
    if not files:
        raise bad("it has no files")
    for name in names:
        if inside := next((name[:at] for at, one in enumerate(name) if one == "/" and name[:at] in files), None):
            raise bad(f"an entry lies inside of a file ({inside[:100]!r})")


def _check_sizes(entries: Sequence[zipfile.ZipInfo], size: int, limits: Limits) -> None:
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > limits.unpacked_bytes:
        raise bad(f"it unpacks to {unpacked} bytes, and may to {limits.unpacked_bytes}")
    if unpacked > max(_NO_BOMB_BYTES, limits.ratio * size):
        raise bad(f"it unpacks to more than {limits.ratio} times its size")


def _check_places(entries: Sequence[zipfile.ZipInfo], end: int) -> None:
    """Entries that share bytes unpack to far more than the archive could hold."""
    ordered = sorted(entries, key=lambda entry: entry.header_offset)
    starts = [entry.header_offset for entry in ordered[1:]] + [end]
    for entry, following in zip(ordered, starts, strict=True):
        if entry.header_offset < 0 or entry.header_offset + _LOCAL_HEADER + entry.compress_size > following:
            raise bad(f"entries overlap ({entry.filename[:100]!r})")


# Contents


def _content(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Iterator[bytes]:
    """No more than the directory says there is: the reader stops there, and compares the checksum."""
    try:
        with archive.open(entry) as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise bad(f"an entry cannot be read: {_told(error)} ({entry.filename[:100]!r})") from None


def _write(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, into: Path) -> None:
    target = into / entry.filename
    folder = target if entry.is_dir() else target.parent
    folder.mkdir(parents=True, exist_ok=True)
    if entry.is_dir():
        return
    mode = 0o755 if entry.external_attr >> 16 & stat.S_IXUSR else 0o644
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        for chunk in _content(archive, entry):
            file.write(chunk)


def _archive(entries: Sequence[zipfile.ZipInfo]) -> Archive:
    files = tuple(sorted(entry.filename for entry in entries if not entry.is_dir()))
    return Archive(files, sum(entry.file_size for entry in entries))


def _packable(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name in _LEFT_OUT or path.suffix == ".pyc":
            continue
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise bad(f"{path} is a link or a device; put a copy there instead")
        if path.is_dir():
            yield from _packable(path)
        else:
            yield path


def _told(error: Exception) -> str:
    return str(error)[:200] or type(error).__name__
