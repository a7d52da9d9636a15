"""Third-party servers on real sockets: one with scripted answers, which can also act as a forward proxy."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

SILENCE = b""
"""Sends nothing and keeps the connection open."""
NAME = "stranger.test"


@dataclass(frozen=True)
class Asked:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Stranger:
    port: int = 0
    secure: bool = False
    asked: list[Asked] = field(default_factory=list)
    named: list[str | None] = field(default_factory=list)
    """Server name of each TLS handshake."""
    tunnels: dict[str, int] = field(default_factory=dict)
    """As a proxy: the local port that a CONNECT to host:port is forwarded to."""
    _answers: dict[str, deque[bytes]] = field(default_factory=dict)

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}{path}"

    def says(self, path: str, *answers: bytes) -> None:
        """Sets the answers of a path, in order; the last one repeats."""
        self._answers[path] = deque(answers)

    def targets(self) -> list[str]:
        return [one.target for one in self.asked]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            await self._serve(reader, writer)
        writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await _read(reader)
        self.asked.append(asked)
        if asked.method == "CONNECT":
            await self._tunnel(asked.target, reader, writer)
            return
        answers = self._answers.get(asked.target.partition("?")[0], deque([answer(b"nothing here", status=404)]))
        reply = answers.popleft() if len(answers) > 1 else answers[0]
        if reply == SILENCE:
            await reader.read()
        for start in range(0, len(reply), 1 << 20):
            writer.write(reply[start : start + (1 << 20)])
            await writer.drain()

    async def _tunnel(self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if target not in self.tunnels:
            writer.write(answer(b"", status=403))
            return
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.tunnels[target])
        writer.write(b"HTTP/1.1 200 Connected\r\n\r\n")
        await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))


async def _read(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    line, *lines = head.rstrip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    method, target, _ = line.split(" ")
    return Asked(method, target, headers, body)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
    writer.close()


def answer(body: bytes = b"", *, status: int = 200, **headers: str) -> bytes:
    """Builds a response. Write header names with _ for -."""
    lines = {"content_length": str(len(body)), "connection": "close"} | headers
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status} Said\r\n{head}\r\n".encode() + body


def chunked(pieces: Iterable[bytes], *, whole: bool = True) -> bytes:
    """Builds a chunked response. If not `whole`, the connection ends where the next chunk would begin."""
    body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    end = b"0\r\n\r\n" if whole else b""
    return b"HTTP/1.1 200 Said\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + body + end


@asynccontextmanager
async def terminating(url: str, identity: Path) -> AsyncIterator[str]:
    """An https URL at `localhost` of a server that speaks plain HTTP, as behind a load balancer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))

    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(identity)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    yield f"https://localhost:{server.sockets[0].getsockname()[1]}"
    server.close()


@asynccontextmanager
async def stranger(identity: Path | None = None) -> AsyncIterator[Stranger]:
    """`identity`: a PEM file with key and certificate, to serve TLS."""
    it = Stranger(secure=identity is not None)
    tls = None
    if identity is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(identity)
        tls.sni_callback = lambda _, name, __: it.named.append(name)
    server = await asyncio.start_server(it.serve, "127.0.0.1", 0, ssl=tls)
    it.port = server.sockets[0].getsockname()[1]
    yield it
    server.close()


def identity(path: Path, host: str = NAME) -> Path:
    """Writes a key and a self-signed certificate for `host`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
    return path
