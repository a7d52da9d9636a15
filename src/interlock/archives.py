"""Zip archives of user code: packed reproducibly, and validated before use.

The gateway validates an archive on upload, and the runner validates it again before unpacking. Neither trusts the
storage in between.
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
"""An executable at the top level of a bundle. The runner starts it directly."""
_BEGINNING: Final = b"PK\x03\x04"
_LOCAL_HEADER: Final = 30
_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED: Final = 0x1
_LONGEST_NAME: Final = 500
_LONGEST_PART: Final = 255
"""Maximum bytes of one path component, which is the limit of common file systems."""
_DIRECTORY_BYTES: Final = 256
"""Maximum bytes of the central directory per allowed entry: 46 fixed bytes, the name and the packer's extra fields."""
_end_record: Final[Callable[[BinaryIO], Sequence[Any] | None]] = zipfile._EndRecData  # type: ignore[attr-defined]
_ENTRIES, _DIRECTORY_SIZE = 4, 5
_CHUNK: Final = 1 << 20
_NO_BOMB_BYTES: Final = 1 << 20
"""Archives that unpack to at most this size are exempt from the ratio check; they are too small to be zip bombs."""
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
_LEFT_OUT: Final = frozenset({"__pycache__", ".git", ".venv", ".DS_Store"})
_LANGUAGES: Final[tuple[tuple[Language, tuple[str, ...]], ...]] = (
    ("node", ("/index.js", ".js", ".mjs", ".cjs")),
    ("python", ("/__init__.py", ".py")),
)
"""Suffixes of module files, longest first. If both languages provide a module, Python wins."""


@dataclass(frozen=True, slots=True)
class Limits:
    entries: int = 10_000
    unpacked_bytes: int = 512 << 20
    ratio: int = 200
    """Maximum compression ratio."""


@dataclass(frozen=True, slots=True)
class Archive:
    """The contents of a valid archive."""

    files: tuple[str, ...]
    unpacked_bytes: int


DEFAULT: Final = Limits()


def bad(why: str) -> BadRequest:
    return BadRequest(f"Invalid bundle: {why}.", code="bad_bundle")


def check(path: Path, limits: Limits = DEFAULT) -> Archive:
    """Validates the archive. Reads all of it, so that a wrong size or checksum fails here and not when a task runs."""
    with _opened(path, limits) as archive:
        entries = _valid_entries(archive, path.stat().st_size, limits)
        for entry in entries:
            for _ in _content(archive, entry):
                continue
    return _archive(entries)


def unpack(path: Path, into: Path, limits: Limits = DEFAULT) -> Archive:
    """Validates the archive and unpacks it to `into`, a new folder to which nobody else writes.

    Of the file permissions, only the executable bit is kept.
    """
    with _opened(path, limits) as archive:
        entries = _valid_entries(archive, path.stat().st_size, limits)
        into.mkdir(mode=0o755)
        for entry in entries:
            _write(archive, entry, into)
    return _archive(entries)


def pack(folder: Path, out: Path) -> int:
    """Packs a folder and returns the number of files.

    The output is reproducible: files are sorted, carry no timestamps and are not compressed.
    """
    files = sorted(_packable(folder), key=lambda file: file.relative_to(folder).as_posix())
    if not files:
        raise bad(f"{folder} contains no files")
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
    """Returns the importable modules with their languages, and `bootstrap` if the bundle has one.

    An entrypoint is `module.function` for a module, or just `bootstrap`.
    """
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
        raise bad(f"its central directory cannot be read ({_error_text(error)})") from None


def _check_directory(file: BinaryIO, limits: Limits) -> None:
    """Limits the size of the central directory before `ZipFile` creates an object per entry.

    The limit is on its bytes: `ZipFile` parses entries until the bytes are used up, regardless of the recorded count.
    Reading the end record with the function that `ZipFile` uses guarantees that both see the same record, even in an
    archive with two.
    """
    end = _end_record(file)
    if not end:
        raise bad("it has no central directory")
    entries, size = end[_ENTRIES], end[_DIRECTORY_SIZE]
    if entries > limits.entries:
        raise bad(f"it has {entries} entries; the limit is {limits.entries}")
    if size > limits.entries * _DIRECTORY_BYTES:
        raise bad(f"its central directory has {size} bytes; the limit is {limits.entries * _DIRECTORY_BYTES}")


def _valid_entries(archive: zipfile.ZipFile, size: int, limits: Limits) -> list[zipfile.ZipInfo]:
    entries = archive.infolist()
    if len(entries) > limits.entries:
        raise bad(f"it has {len(entries)} entries; the limit is {limits.entries}")
    for entry in entries:
        if why := _entry_problem(entry):
            raise bad(f"{why} ({entry.filename[:100]!r})")
    _check_names(entries)
    _check_sizes(entries, size, limits)
    _check_overlaps(entries, archive.start_dir)
    return entries


def _entry_problem(entry: zipfile.ZipInfo) -> str | None:
    """Returns what is wrong with an entry, or None. File types are Unix types, which all common zip tools write."""
    if not entry.filename:  # a name is cut at the first NUL character
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
    return _name_problem(entry.orig_filename)


def _name_problem(name: str) -> str | None:
    path = name.removesuffix("/")
    if not path or len(name) > _LONGEST_NAME:
        return f"a name is empty or has more than {_LONGEST_NAME} characters"
    if any(len(part.encode(errors="replace")) > _LONGEST_PART for part in path.split("/")):
        return f"a name is too long: each path component may have at most {_LONGEST_PART} bytes"
    if not path.isprintable() or "\\" in path or ":" in path:
        return "a name contains a backslash, a colon or a non-printable character"
    if path.startswith("/") or any(part in ("", ".", "..") for part in path.split("/")):
        return "a name is absolute, or has an empty, '.' or '..' component"
    return None


def _check_names(entries: Sequence[zipfile.ZipInfo]) -> None:
    """Rejects duplicate names, compared in Unicode NFC, and entries below a path that is a file."""
    names = [unicodedata.normalize("NFC", entry.filename.removesuffix("/")) for entry in entries]
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise bad(f"it has two entries named {twice[:100]!r}")
    files = {name for name, entry in zip(names, entries, strict=True) if not entry.is_dir()}
    if not files:
        raise bad("it contains no files")
    for name in names:
        if inside := next((name[:at] for at, one in enumerate(name) if one == "/" and name[:at] in files), None):
            raise bad(f"an entry is below a path that is a file ({inside[:100]!r})")


def _check_sizes(entries: Sequence[zipfile.ZipInfo], size: int, limits: Limits) -> None:
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > limits.unpacked_bytes:
        raise bad(f"it unpacks to {unpacked} bytes; the limit is {limits.unpacked_bytes}")
    if unpacked > max(_NO_BOMB_BYTES, limits.ratio * size):
        raise bad(f"it unpacks to more than {limits.ratio} times its size")


def _check_overlaps(entries: Sequence[zipfile.ZipInfo], end: int) -> None:
    """Rejects overlapping entries: archives whose entries share bytes can unpack to far more than their size."""
    ordered = sorted(entries, key=lambda entry: entry.header_offset)
    starts = [entry.header_offset for entry in ordered[1:]] + [end]
    for entry, following in zip(ordered, starts, strict=True):
        if entry.header_offset < 0 or entry.header_offset + _LOCAL_HEADER + entry.compress_size > following:
            raise bad(f"entries overlap ({entry.filename[:100]!r})")


# Contents


def _content(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Iterator[bytes]:
    """Yields the content. The reader stops at the size in the directory and verifies the checksum."""
    try:
        with archive.open(entry) as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise bad(f"an entry cannot be read: {_error_text(error)} ({entry.filename[:100]!r})") from None


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
            raise bad(f"{path} is a symbolic link or a special file; replace it with a regular file")
        if path.is_dir():
            yield from _packable(path)
        else:
            yield path


def _error_text(error: Exception) -> str:
    return str(error)[:200] or type(error).__name__
