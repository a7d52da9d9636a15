"""Servers that publish keys over real HTTP: a publisher of documents, and an identity provider."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


@dataclass
class Answer:
    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    def encoded(self) -> bytes:
        lines = {"Content-Length": str(len(self.body)), "Connection": "close"} | self.headers
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"HTTP/1.1 {self.status} Said\r\n{head}\r\n".encode() + self.body


@dataclass
class Publisher:
    url: str
    answers: dict[str, Answer] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    away: bool = False
    """Closes connections without a reply."""

    def says(self, path: str, document: Any) -> None:
        self.answers[path] = Answer(document if isinstance(document, bytes) else json.dumps(document).encode())


@asynccontextmanager
async def publishing() -> AsyncIterator[Publisher]:
    publisher = Publisher("")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        path = request.split(b" ")[1].decode()
        publisher.asked.append(path)
        if not publisher.away:
            writer.write(publisher.answers.get(path, Answer(status=404)).encoded())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    publisher.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield publisher


AUDIENCE = "interlock"
KEYS_PATH = "/keys"
DISCOVERY_PATH = "/.well-known/openid-configuration"

RSA_KEY = rsa.generate_private_key(65537, 2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
ED_KEY = ed25519.Ed25519PrivateKey.generate()
BY_ALGORITHM: dict[str, PrivateKey] = {"RS256": RSA_KEY, "PS256": RSA_KEY, "ES256": EC_KEY, "EdDSA": ED_KEY}
_WRITERS: dict[type[Any], Any] = {
    rsa.RSAPublicKey: RSAAlgorithm,
    ec.EllipticCurvePublicKey: ECAlgorithm,
    ed25519.Ed25519PublicKey: OKPAlgorithm,
}


def jwk(key: PrivateKey, kid: str, **more: Any) -> dict[str, Any]:
    public = key.public_key()
    writer = next(writer for kind, writer in _WRITERS.items() if isinstance(public, kind))
    written: dict[str, Any] = json.loads(writer.to_jwk(public))
    return written | {"kid": kid, "use": "sig"} | more


class IdentityProvider:
    """Publishes three keys, one of each kind, each named after an algorithm that it supports."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.publishes(*(jwk(key, kid) for kid, key in BY_ALGORITHM.items()))
        publisher.says(DISCOVERY_PATH, {"issuer": self.url, "jwks_uri": self.url + KEYS_PATH})

    @property
    def url(self) -> str:
        return self.publisher.url

    def publishes(self, *keys: dict[str, Any]) -> None:
        self.publisher.says(KEYS_PATH, {"keys": keys})

    @property
    def settings(self) -> dict[str, Any]:
        return {"oidc_issuer": self.url, "oidc_audience": AUDIENCE}

    def claims(self, subject: str, **more: Any) -> dict[str, Any]:
        now = int(time.time())
        return {"iss": self.url, "aud": AUDIENCE, "sub": subject, "iat": now, "exp": now + 300} | more

    def token(
        self,
        subject: str = "ada",
        *,
        alg: str = "ES256",
        kid: str | None = None,
        key: PrivateKey | None = None,
        headers: dict[str, Any] | None = None,
        **claims: Any,
    ) -> str:
        """Signs a token. A claim of None is omitted."""
        payload = {name: value for name, value in self.claims(subject, **claims).items() if value is not None}
        return jwt.encode(payload, key or BY_ALGORITHM[alg], alg, {"kid": kid or alg} | (headers or {}))


def compact(header: dict[str, Any], payload: bytes | dict[str, Any], signature: bytes = b"") -> str:
    """Builds a token by hand that no library would write."""
    text = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    parts = (json.dumps(header).encode(), text, signature)
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)
