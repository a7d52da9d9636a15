"""The HTTP client of code that has no event loop: GET over HTTP or HTTPS, without redirects, bounded in time and size.

Uses only the standard library, because it is part of the Lambda function. The task SDK has its own client, because it
is one file that users install alone.
"""

from __future__ import annotations

import hashlib
import ssl
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Final

FAILURES: Final = (OSError, HTTPException)
"""Raised by a request. A status other than 200 is a urllib.error.HTTPError, which is an OSError."""
_CHUNK: Final = 1 << 20


class TooLarge(Exception):
    """Raised when a body is longer than its limit."""


class TooSlow(Exception):
    """Raised when a download takes longer than its deadline."""


def opener(tls: ssl.SSLContext | None = None, *, proxies: bool) -> urllib.request.OpenerDirector:
    """Returns an opener for HTTP and HTTPS only, without handlers for files and redirects.

    `proxies` uses those of the environment.
    """
    made = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(None if proxies else {}),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(context=tls),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.UnknownHandler(),
    ):
        made.add_handler(handler)
    return made


def read(opened: urllib.request.OpenerDirector, url: str, *, limit: int, seconds: float) -> bytes:
    """Returns a small JSON document. `seconds` is the timeout of the connection, and of each read."""
    request = urllib.request.Request(url, headers={"Accept": "application/json"})  # noqa: S310 - see opener
    with opened.open(request, timeout=seconds) as reply:
        body: bytes = reply.read(limit + 1)
    if len(body) > limit:
        raise TooLarge(f"the document has more than {limit} bytes")
    return body


def post_form(
    opened: urllib.request.OpenerDirector,
    url: str,
    form: Mapping[str, str],
    headers: Mapping[str, str],
    *,
    limit: int,
    seconds: float,
) -> bytes:
    """Sends a form and returns the small JSON document of the reply."""
    body = urllib.parse.urlencode(form).encode()
    sent = {"Accept": "application/json", "Content-Type": "application/x-www-form-urlencoded"} | dict(headers)
    request = urllib.request.Request(url, data=body, headers=sent)  # noqa: S310 - see opener
    with opened.open(request, timeout=seconds) as reply:
        document: bytes = reply.read(limit + 1)
    if len(document) > limit:
        raise TooLarge(f"the document has more than {limit} bytes")
    return document


def download(
    url: str,
    file: Path,
    *,
    limit: float = float("inf"),
    seconds: float = 60.0,
    deadline: float = float("inf"),
    tls: ssl.SSLContext | None = None,
    proxies: bool = True,
) -> str:
    """Writes a body of up to `limit` bytes to a file and returns its SHA-256.

    `seconds` is the timeout of the connection, and of each read; `deadline` is the one of the whole download.
    """
    digest, size, end = hashlib.sha256(), 0, time.monotonic() + deadline
    reply: HTTPResponse
    with opener(tls, proxies=proxies).open(url, timeout=seconds) as reply, file.open("wb") as out:
        while chunk := reply.read(_CHUNK):
            size += len(chunk)
            if size > limit:
                raise TooLarge(f"it has more than {limit} bytes")
            if time.monotonic() > end:
                raise TooSlow(f"it took longer than {deadline:.0f} s")
            digest.update(chunk)
            out.write(chunk)
    return digest.hexdigest()
