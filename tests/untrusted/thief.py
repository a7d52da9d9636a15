"""Code that tries to read every secret of an installation. It needs only the standard library."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

_PIECE = 1 << 20
_OVERLAP = 8192
"""At least the length of a secret, since a secret may lie on the border of two pieces."""
_LARGEST_FILE = 16 << 20

Clue = dict[str, str]
Text = tuple[str, bytes]


def clue(name: str, secret: bytes) -> Clue:
    """Describes a secret so that it can be recognized in memory, without being in the memory of the thief itself."""
    return {
        "name": name,
        "start": secret[:8].hex(),
        "size": str(len(secret)),
        "sha256": hashlib.sha256(secret).hexdigest(),
    }


def loot(folder: str, secrets: list[Clue], ports: dict[str, int], pids: list[int] | None = None) -> list[str]:
    """Returns the places where it found a secret, and the servers that respond without a password.

    It reads the memory of the processes `pids`, by default of all processes.
    """
    found: set[str] = set()
    for place, text in _texts(folder, pids):
        found |= {f"{place}: {one['name']}" for one in secrets if _holds(text, one)}
    for name, port in ports.items():
        with contextlib.suppress(OSError):
            if _answers(name, port):
                found.add(f"{name} answers without a password")
    for path in Path(folder).rglob(".s.PGSQL.*"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
            line.settimeout(2)
            line.connect(str(path))
            if _postgres_lets_in(line):
                found.add(f"{path} lets in without a password")
    return sorted(found)


def _holds(text: bytes, one: Clue) -> bool:
    start, size = bytes.fromhex(one["start"]), int(one["size"])
    at = text.find(start)
    while at >= 0:
        if hashlib.sha256(text[at : at + size]).hexdigest() == one["sha256"]:
            return True
        at = text.find(start, at + 1)
    return False


def _texts(folder: str, pids: list[int] | None) -> Iterator[Text]:
    yield "own environment", repr(dict(os.environ)).encode()
    yield from _objects()
    for root, _, names in os.walk(folder):
        for name in names:
            yield from _read(f"{root}/{name}")
    for number in ["self", *(_processes() if pids is None else map(str, pids))]:
        for part in ("environ", "cmdline", "maps", "root/etc/hostname"):
            yield from _read(f"/proc/{number}/{part}")
        yield from _read(f"/proc/{number}/root{folder}/credentials.json")
        yield from _read(f"/proc/{number}/cwd/credentials.json")
        yield from _open_files(number)
        yield from _memory(number)
    for name in ("credentials.json", "endpoints.json"):
        told = subprocess.run(["cat", f"{folder}/{name}"], capture_output=True, check=False)
        yield f"cat {name}", told.stdout
        with contextlib.suppress(OSError):
            os.link(f"{folder}/{name}", f"/var/tmp/stolen-{os.getpid()}")
            yield from _read(f"/var/tmp/stolen-{os.getpid()}")


def _objects() -> Iterator[Text]:
    """Yields the texts of all objects of this interpreter. The collector tracks their owners, not texts themselves."""
    for owner in gc.get_objects():
        for one in gc.get_referents(owner):
            if type(one) is str:
                yield "own objects", one.encode("utf-8", "replace")
            elif type(one) in (bytes, bytearray):
                yield "own objects", bytes(one)


def _processes() -> list[str]:
    try:
        names = [entry.name for entry in Path("/proc").iterdir()]
    except OSError:
        return []
    return [name for name in names if name.isdigit() and int(name) != os.getpid()]


def _open_files(number: str) -> Iterator[Text]:
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{number}/fd").iterdir():
            with contextlib.suppress(OSError):
                about = path.stat()
                if stat.S_ISREG(about.st_mode) and about.st_size < _LARGEST_FILE:
                    yield from _read(str(path))


def _memory(number: str) -> Iterator[Text]:
    """Yields the readable memory of a process, if the kernel permits. Files that are mapped read-only are skipped."""
    try:
        lines = Path(f"/proc/{number}/maps").read_text().splitlines()
        memory = os.open(f"/proc/{number}/mem", os.O_RDONLY)
    except OSError:
        return
    try:
        for line in lines:
            span, rights, *_, last = line.split()
            start, end = (int(text, 16) for text in span.split("-"))
            for at in range(start, end, _PIECE) if rights[0] == "r" and (rights[1] == "w" or last[0] != "/") else ():
                # Special regions such as [vvar] cannot be read.
                with contextlib.suppress(OSError, OverflowError):
                    piece = os.pread(memory, min(end - at, _PIECE + _OVERLAP), at)
                    if piece != bytes(len(piece)):  # most of the heap of a JVM is unused
                        yield f"memory of {number}", piece
    finally:
        os.close(memory)


def _read(path: str) -> Iterator[Text]:
    if path.startswith("/proc/") or Path(path).is_file():
        with contextlib.suppress(OSError, ValueError), Path(path).open("rb") as file:
            yield path, file.read(_LARGEST_FILE)


def _answers(name: str, port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=2) as line:
        if name == "valkey":
            line.sendall(b"PING\r\n")
            return line.recv(100).startswith(b"+PONG")
        return _postgres_lets_in(line)


def _postgres_lets_in(line: socket.socket) -> bool:
    """Sends a startup message without a password: `R` with 0 in the response means that none is required."""
    body = b"\x00\x03\x00\x00user\x00postgres\x00database\x00postgres\x00\x00"
    line.sendall((len(body) + 4).to_bytes(4, "big") + body)
    answer = line.recv(100)
    return answer[:1] == b"R" and answer[5:9] == b"\x00\x00\x00\x00"
