"""Bundles of user code for tests."""

from __future__ import annotations

import hashlib
import io
import zipfile
from typing import Any

from tests.support.system import System

HANDLER = "def handler(event, task):\n    return {'n': event['payload']['n']}\n"


def zipped(files: dict[str, str | bytes] | None = None) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in (files or {"main.py": HANDLER}).items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return buffer.getvalue()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


async def upload(system: System, content: bytes, name: str | None = None, **more: Any) -> dict[str, Any]:
    reply = await system.user(
        "POST",
        "/v1/bundles",
        content=content,
        params={"name": name} if name else {},
        headers={"Content-Type": "application/zip"},
        **more,
    )
    assert reply.status_code == 201, reply.text
    view: dict[str, Any] = reply.json()
    return view
