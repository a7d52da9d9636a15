"""AWS for tests: one MiniStack per test process, a real server on its own port with KMS, SQS, Lambda and others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aioboto3
import httpx

from tests.support.polls import answered

REGION = "us-east-1"


@dataclass(frozen=True)
class Aws:
    endpoint: str
    access_key: str = "test"
    secret_key: str = "test"
    region: str = REGION

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for a process that uses the default credential chain."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
        }

    def client(self, service: str) -> Any:
        """Returns an aioboto3 client, an async context manager, for the setup and checks of a test."""
        session = aioboto3.Session(
            aws_access_key_id=self.access_key, aws_secret_access_key=self.secret_key, region_name=self.region
        )
        return session.client(service, endpoint_url=self.endpoint)


@asynccontextmanager
async def ministack(folder: Path) -> AsyncIterator[Aws]:
    """Starts an empty server and kills it at the end, with all its data."""
    aws = Aws(f"http://127.0.0.1:{_free_port()}")
    server = _start(folder, aws)
    try:
        async with httpx.AsyncClient(timeout=5) as http:
            await answered(lambda: _is_ready(server, http, aws))
        yield aws
    finally:
        server.kill()
        server.wait()


def _start(folder: Path, aws: Aws) -> subprocess.Popen[bytes]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    asked = {"AUTH": "true", "BIND_HOST": "127.0.0.1", "GATEWAY_PORT": aws.endpoint.rpartition(":")[2]}
    command = [str(Path(sys.executable).parent / "ministack")]
    with (folder / "ministack.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=kept | asked)


async def _is_ready(server: subprocess.Popen[bytes], http: httpx.AsyncClient, aws: Aws) -> bool:
    assert server.poll() is None, "MiniStack has exited; see its log"
    try:
        return (await http.get(f"{aws.endpoint}/_ministack/health")).is_success
    except httpx.HTTPError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
