"""Modules that open connections: requests that a user can steer go through `interlock.outbound` and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import interlock

ROOT = Path(interlock.__file__).parent

CLIENTS = frozenset(
    {
        "aiobotocore",
        "aiohttp",
        "boto3",
        "botocore",
        "ftplib",
        "http.client",
        "httpcore",
        "httpx",
        "imaplib",
        "obstore",
        "pycurl",
        "requests",
        "smtplib",
        "telnetlib",
        "urllib.request",
        "urllib3",
        "websockets",
        "xmlrpc.client",
    }
)
CALLS = frozenset({"create_connection", "open_connection", "sock_connect", "PyJWKClient", "urlopen"})

OUTSIDE = {
    "outbound/": "the layer itself",
    "client/_http.py": "connects to the gateway or dispatcher that the installation or the SDK's user names",
    "client/_lists.py": "uploads to a URL that the user's own gateway signed, on the user's machine",
    "client/task.py": "connects to the dispatcher and object store that the runner hands to the task",
    "cli/job_export.py": "downloads from a URL that the user's own gateway signed, on the user's machine",
    "adapters/documents.py": "fetches keys of the identity provider that a setting names; no tenant can choose it",
    "adapters/runner.py": "connects to the runner that a setting names",
    "access/query/files.py": "reads committed files from the object store that a setting names",
    "adapters/embedded/valkey.py": "waits for the server that this process has just started",
    "adapters/kms.py": "connects to AWS, or to the endpoint that a setting names",
    "adapters/sts.py": "connects to AWS, or to the endpoint that a setting names",
    "adapters/objects/": "connects to the object store that a setting names",
    "bus/alert_mail.py": "connects to the mail server that a setting names; tenants choose recipients alone",
    "pipeline/objects.py": "connects to the object store that a setting names",
    "pipeline/session.py": "connects to the Spark master that a setting names",
    "runner/bundles.py": "fetches a bundle from the object store by a URL that the dispatcher signed",
    "runner/forward.py": "connects untrusted code to the one address that the runner allows",
    "runner/inside/launch.py": "loads what the task SDK needs, and connects to nothing itself",
    "runner/lambda_function.py": "fetches a bundle from the object store by a URL that the dispatcher signed",
}
"""Paths, or folders that end with a slash, and why a user cannot steer where they connect to."""


def clients_in(source: str) -> set[str]:
    """Names of client libraries that a module imports, and of functions that open connections that it uses."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {alias.name for alias in node.names} & CALLS
        else:
            names = []
        found |= {client for client in CLIENTS for name in names if name == client or name.startswith(f"{client}.")}
        if isinstance(node, ast.Attribute) and node.attr in CALLS:
            found.add(node.attr)
    return found


def connecting() -> dict[str, set[str]]:
    modules = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
    return {name: clients for name, source in modules.items() if (clients := clients_in(source))}


def reason_for(module: str) -> str | None:
    return next(
        (place for place in OUTSIDE if module == place or (place.endswith("/") and module.startswith(place))), None
    )


def test_no_other_module_opens_connections() -> None:
    unknown = {module: clients for module, clients in connecting().items() if reason_for(module) is None}
    assert unknown == {}, "send through interlock.outbound, or say here why no user can steer the request"


def test_every_entry_of_the_list_is_needed() -> None:
    assert set(OUTSIDE) - {reason_for(module) for module in connecting()} == set()


@pytest.mark.parametrize(
    "source",
    [
        "import httpx",
        "import urllib.request as u",
        "from urllib import request",
        "from urllib.request import urlopen as ask",
        "from http import client",
        "def f():\n    import aiohttp.client",
        "import asyncio\nasync def f(): await asyncio.open_connection('a', 1)",
        "import socket\nsocket.create_connection(('a', 1))",
        "from jwt import PyJWKClient",
    ],
)
def test_a_new_client_is_found_however_it_is_imported(source: str) -> None:
    assert clients_in(source)
