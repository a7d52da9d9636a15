"""Modules that open connections: requests that a user can influence go only through `interlock.outbound`."""

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
        "interlock.http.fetch",
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
    "client/_http.py": "connects to the gateway or dispatcher chosen by the installation or the SDK's user",
    "client/_lists.py": "uploads to a URL that the user's own gateway signed, on the user's machine",
    "client/task.py": "connects to the dispatcher and object store that the runner passes to the task",
    "cli/job_results.py": "downloads from a URL that the user's own gateway signed, on the user's machine",
    "http/fetch.py": "requests what its callers ask for; they are listed here, too",
    "access/jwks.py": "fetches keys of the identity provider in the settings; no tenant can choose it",
    "untrusted/runners.py": "connects to the runner in the settings",
    "query/engine/files.py": "reads committed files from the object store in the settings",
    "stores/embedded/valkey.py": "connects to the server that this process has just started",
    "stores/kms.py": "connects to AWS, or to the endpoint in the settings",
    "stores/objects/s3.py": "connects to AWS, or to the object store in the settings",
    "bus/alerts.py": "connects to the mail server in the settings; tenants choose only recipients",
    "spark/objects.py": "connects to the object store in the settings",
    "spark/session.py": "connects to the Spark master in the settings",
    "untrusted/runner/bundles.py": "fetches a bundle from the object store by a URL that the dispatcher signed",
    "untrusted/runner/forwarder.py": "connects untrusted code to the one address that the runner allows",
    "untrusted/runner/in_sandbox/launch.py": "imports what the task SDK needs; opens no connection itself",
    "untrusted/runner/lambda_function.py": "fetches a bundle from the object store by a URL that the dispatcher signed",
}
"""Paths, or folders with a trailing slash, with the reason why a user cannot influence where they connect to."""


def clients_in(source: str) -> set[str]:
    """Returns the client libraries that a module imports, and the functions it uses that open connections."""
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


def test_only_listed_modules_open_connections() -> None:
    unknown = {module: clients for module, clients in connecting().items() if reason_for(module) is None}
    assert unknown == {}, "send through interlock.outbound, or add here why no user can influence the request"


def test_every_listed_module_opens_connections() -> None:
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
def test_client_library_is_found_in_any_import_form(source: str) -> None:
    assert clients_in(source)
