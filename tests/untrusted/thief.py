"""Code that tries to read every secret of an installation. It needs only the standard library."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from pathlib import Path
from typing import Any


def loot(folder: str, secrets: list[str], ports: dict[str, int]) -> list[str]:
    """Returns the places where it found a secret, and the servers that respond without a password."""
    found: list[str] = []
    for place, text in _texts(folder):
        found += [place for secret in secrets if secret.encode() in text]
    for name, port in ports.items():
        with contextlib.suppress(OSError):
            if _answers(name, port):
                found.append(f"{name} answers without a password")
    for path in Path(folder).rglob(".s.PGSQL.*"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
            line.settimeout(2)
            line.connect(str(path))
            if _postgres_lets_in(line):
                found.append(f"{path} lets in without a password")
    return sorted(set(found))


def _texts(folder: str) -> Any:
    yield "own environment", repr(dict(os.environ)).encode()
    for root, _, names in os.walk(folder):
        for name in names:
            yield from _read(f"{root}/{name}")
    for number in filter(str.isdigit, [entry.name for entry in Path("/proc").iterdir()]):
        for part in ("environ", "cmdline", "mem", "maps", "root/etc/hostname"):
            yield from _read(f"/proc/{number}/{part}")
        yield from _read(f"/proc/{number}/root{folder}/credentials.json")
        yield from _read(f"/proc/{number}/cwd/credentials.json")
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{number}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(descriptor.readlink()).startswith(folder):
                        yield from _read(str(descriptor))
    for name in ("credentials.json", "endpoints.json"):
        told = subprocess.run(["cat", f"{folder}/{name}"], capture_output=True, check=False)
        yield f"cat {name}", told.stdout
        with contextlib.suppress(OSError):
            os.link(f"{folder}/{name}", f"/var/tmp/stolen-{os.getpid()}")
            yield from _read(f"/var/tmp/stolen-{os.getpid()}")


def _read(path: str) -> Any:
    if path.startswith("/proc/") or Path(path).is_file():
        with contextlib.suppress(OSError, ValueError), Path(path).open("rb") as file:
            yield path, file.read(1 << 20)


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
