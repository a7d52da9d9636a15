"""Zip archives of user code: packed reproducibly, and refused if they are malformed or suspicious."""

from __future__ import annotations

import io
import os
import stat
import struct
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from interlock.archives import Limits, check, digest_of, modules, pack, unpack
from interlock.errors import BadRequest

Odd = Callable[[zipfile.ZipFile], None]


def entry(name: str, mode: int = stat.S_IFREG | 0o644) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


def written(path: Path, fill: Odd) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        fill(archive)
    return path


def refused(path: Path, limits: Limits | None = None) -> str:
    with pytest.raises(BadRequest) as refusal:
        check(path, limits or Limits())
    assert refusal.value.code == "bad_bundle"
    with pytest.raises(BadRequest):
        unpack(path, path.parent / "unpacked", limits or Limits())
    return refusal.value.detail


def with_directory_of(count: int, path: Path, *, recorded: int | None = None) -> Path:
    """Creates an archive whose central directory has `count` entries and records `recorded` as their number."""
    written(path, lambda archive: archive.writestr("a.py", "1"))
    data = path.read_bytes()
    start, end = data.index(b"PK\x01\x02"), data.index(b"PK\x05\x06")
    directory = data[start:end] * count
    zip64 = struct.pack(
        "<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, recorded or count, recorded or count, len(directory), start
    )
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, start + len(directory), 1)
    last = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path.write_bytes(data[:start] + directory + zip64 + locator + last)
    return path


@pytest.mark.parametrize(("recorded", "why"), [(None, "entries; the limit is 10000"), (1, "its central directory has")])
def test_huge_central_directory_is_refused_before_parsing(tmp_path: Path, recorded: int | None, why: str) -> None:
    path = with_directory_of(1_000_000, tmp_path / "many.zip", recorded=recorded)
    tracemalloc.start()
    try:
        assert why in refused(path)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_zip64_directory_within_the_limits_is_read(tmp_path: Path) -> None:
    assert check(with_directory_of(1, tmp_path / "one.zip")).files == ("a.py",)


def twice(archive: zipfile.ZipFile) -> None:
    archive.writestr("a.py", "1")
    with pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("a.py", "2")


def eleven(archive: zipfile.ZipFile) -> None:
    for n in range(11):
        archive.writestr(f"f{n}", "")


ODD: dict[str, tuple[Odd, str]] = {
    "absolute": (lambda z: z.writestr("/etc/passwd", ""), "is absolute, or has an empty"),
    "up": (lambda z: z.writestr("a/../../b", ""), "is absolute, or has an empty"),
    "up alone": (lambda z: z.writestr("..", ""), "is absolute, or has an empty"),
    "dot": (lambda z: z.writestr("./a", ""), "is absolute, or has an empty"),
    "empty segment": (lambda z: z.writestr("a//b", ""), "is absolute, or has an empty"),
    "backslash": (lambda z: z.writestr("a\\b", ""), "character"),
    "drive": (lambda z: z.writestr("c:/a", ""), "character"),
    "line feed": (lambda z: z.writestr("a\nb", ""), "character"),
    "too long": (lambda z: z.writestr("a" * 501, ""), "more than 500 characters"),
    "too long for a file": (lambda z: z.writestr("a/" + "b" * 256, ""), "too long"),
    "too long in bytes": (lambda z: z.writestr("\u00e9" * 128, ""), "too long"),
    "link": (lambda z: z.writestr(entry("a", stat.S_IFLNK | 0o777), "/etc/passwd"), "link or a device"),
    "device": (lambda z: z.writestr(entry("a", stat.S_IFCHR | 0o666), ""), "link or a device"),
    "pipe": (lambda z: z.writestr(entry("a", stat.S_IFIFO | 0o666), ""), "link or a device"),
    "folder as a file": (lambda z: z.writestr(entry("a", stat.S_IFDIR | 0o755), ""), "link or a device"),
    "method": (lambda z: z.writestr("a", "x", compress_type=zipfile.ZIP_LZMA), "neither stored nor deflated"),
    "twice": (twice, "two entries named"),
    "twice by accents": (lambda z: (z.writestr("\u00e9", ""), z.writestr("e\u0301", ""))[0], "two entries named"),  # type: ignore[func-returns-value]
    "in a file": (lambda z: (z.writestr("a", ""), z.writestr("a/b", ""))[0], "below a path that is a file"),  # type: ignore[func-returns-value]
    "folders alone": (lambda z: z.writestr("a/", ""), "no files"),
}


@pytest.mark.parametrize("kind", ODD)
def test_archive_with_an_odd_entry_is_refused(kind: str, tmp_path: Path) -> None:
    fill, why = ODD[kind]
    assert why in refused(written(tmp_path / "odd.zip", fill))


def test_zip_bomb_is_refused_by_its_ratio(tmp_path: Path) -> None:
    bomb = written(tmp_path / "bomb.zip", lambda z: z.writestr("zeros", b"\0" * (8 << 20)))
    assert bomb.stat().st_size < 10_000
    assert "200 times" in refused(bomb)


def test_archive_over_its_limits_is_refused(tmp_path: Path) -> None:
    large = written(tmp_path / "large.zip", lambda z: z.writestr("noise", os.urandom(5000)))
    assert "the limit is 4999" in refused(large, Limits(unpacked_bytes=4999))
    many = written(tmp_path / "many.zip", eleven)
    assert "11 entries" in refused(many, Limits(entries=10))


def test_wrong_size_in_the_directory_is_refused(tmp_path: Path) -> None:
    honest = written(tmp_path / "a.zip", lambda z: z.writestr("a.py", b"x" * 1000)).read_bytes()
    place = honest.index(b"PK\x01\x02") + 24
    lying = honest[:place] + struct.pack("<I", 10) + honest[place + 4 :]
    (tmp_path / "a.zip").write_bytes(lying)
    assert "cannot be read" in refused(tmp_path / "a.zip")


def test_name_that_differs_from_the_directory_is_refused(tmp_path: Path) -> None:
    honest = written(tmp_path / "a.zip", lambda z: z.writestr("aa.py", "x")).read_bytes()
    (tmp_path / "a.zip").write_bytes(honest.replace(b"aa.py", b"/b.py", 1))
    assert "cannot be read" in refused(tmp_path / "a.zip")


def test_name_that_starts_with_nul_is_refused(tmp_path: Path) -> None:
    honest = written(tmp_path / "a.zip", lambda z: z.writestr("aa.py", "x")).read_bytes()
    (tmp_path / "a.zip").write_bytes(honest.replace(b"aa.py", b"\0a.py"))
    assert "no name" in refused(tmp_path / "a.zip")


def test_overlapping_entries_are_refused(tmp_path: Path) -> None:
    two = written(tmp_path / "a.zip", lambda z: (z.writestr("a", "x" * 99), z.writestr("b", "x" * 99))[0])  # type: ignore[func-returns-value]
    data = two.read_bytes()
    second = data.rindex(b"PK\x01\x02") + 42
    two.write_bytes(data[:second] + struct.pack("<I", 0) + data[second + 4 :])
    assert "overlap" in refused(two)


@pytest.mark.parametrize("content", [b"", b"PK", b"PK\x03\x04", b"#!/bin/sh\n", b"PK\x05\x06" + b"\0" * 18])
def test_non_archive_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(content)
    refused(tmp_path / "a.zip")


def test_archive_with_leading_bytes_is_refused(tmp_path: Path) -> None:
    honest = written(tmp_path / "a.zip", lambda z: z.writestr("a", "x")).read_bytes()
    (tmp_path / "a.zip").write_bytes(b"#!/bin/sh\n" + honest)
    refused(tmp_path / "a.zip")


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 400), byte=st.binary(min_size=1, max_size=4))
@example(at=0, byte=b"P")
def test_modified_archive_is_refused_or_stays_in_its_folder(tmp_path: Path, at: int, byte: bytes) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("alerts.py", "def handler(event, task): ...\n" * 20)
        archive.writestr("pkg/__init__.py", "")
    data = buffer.getvalue()
    place = tmp_path / "changed.zip"
    place.write_bytes(data[: at % len(data)] + byte + data[at % len(data) + len(byte) :])
    folder = tmp_path / f"out-{time.monotonic_ns()}"
    try:
        found = unpack(place, folder)
    except BadRequest:
        return
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert there == set(found.files)


def test_packing_is_reproducible(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "pkg" / "__pycache__").mkdir(parents=True)
    (source / "pkg" / "__init__.py").write_text("x = 1\n")
    (source / "pkg" / "__pycache__" / "x.pyc").write_bytes(b"\0")
    (source / "bootstrap").write_text("#!/bin/sh\n")
    (source / "bootstrap").chmod(0o755)
    assert pack(source, tmp_path / "1.zip") == 2
    os.utime(source / "bootstrap", (1, 1))
    pack(source, tmp_path / "2.zip")
    assert (tmp_path / "1.zip").read_bytes() == (tmp_path / "2.zip").read_bytes()
    found = unpack(tmp_path / "1.zip", tmp_path / "out")
    assert found.files == ("bootstrap", "pkg/__init__.py")
    assert (tmp_path / "out" / "bootstrap").stat().st_mode & 0o777 == 0o755
    assert digest_of(tmp_path / "1.zip") == digest_of(tmp_path / "2.zip")


def test_folder_with_a_link_is_not_packed(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "secret.py").symlink_to("/etc/passwd")
    with pytest.raises(BadRequest, match="is a symbolic link"):
        pack(tmp_path / "source", tmp_path / "a.zip")


def test_modules_lists_importable_modules() -> None:
    files = [
        "alerts.py",
        "pkg/__init__.py",
        "pkg/sub.py",
        "web.mjs",
        "lib/index.js",
        "bootstrap",
        "data.csv",
        "my-x.py",
    ]
    assert modules(files) == {
        "alerts": "python",
        "pkg": "python",
        "pkg.sub": "python",
        "web": "node",
        "lib": "node",
        "bootstrap": "bootstrap",
    }
