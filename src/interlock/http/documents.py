"""Fetches small documents over HTTP, for example the public keys of an issuer.

The server is trusted only for its document: redirects and other schemes are rejected, and time and memory are limited.
"""

from __future__ import annotations

import asyncio
import http.client
import ssl
import urllib.error
import urllib.request
from functools import cached_property
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from interlock.errors import Unavailable

MAX_BYTES: Final = 256 * 1024
_STEP_SECONDS: Final = 3.0
"""Timeout of the connection, and of each read."""
_ALL_SECONDS: Final = 10.0


class Documents:
    """Fetches with the standard library in a thread, which is enough for rare and small documents.

    Uses the proxies of the environment, except for this machine.
    """

    def __init__(self, ca: Path | None = None) -> None:
        self._ca = ca

    async def fetch(self, url: str) -> bytes:
        """Fetches a document.

        Raises Unavailable on errors, timeouts, documents over the limit and other statuses than 200.
        """
        try:
            return await asyncio.wait_for(asyncio.to_thread(self._read, url), _ALL_SECONDS)
        except urllib.error.HTTPError as error:
            error.close()
            raise _unavailable(url, f"status {error.code}") from None
        except TimeoutError:
            raise _unavailable(url, "it took too long") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _unavailable(url, type(error).__name__) from error

    def _read(self, url: str) -> bytes:
        request = urllib.request.Request(url, headers={"Accept": "application/json"})  # noqa: S310 - see _opener
        with self._opener.open(request, timeout=_STEP_SECONDS) as reply:
            body: bytes = reply.read(MAX_BYTES + 1)
        if len(body) > MAX_BYTES:
            raise _unavailable(url, f"the document has more than {MAX_BYTES} bytes")
        return body

    @cached_property
    def _opener(self) -> urllib.request.OpenerDirector:
        """An opener for HTTP and HTTPS only, without handlers for files and redirects."""
        opener = urllib.request.OpenerDirector()
        trust = ssl.create_default_context(cafile=str(self._ca) if self._ca else None)
        for handler in (
            urllib.request.ProxyHandler(),
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(context=trust),
            urllib.request.HTTPErrorProcessor(),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.UnknownHandler(),
        ):
            opener.add_handler(handler)
        return opener


def _unavailable(url: str, why: str) -> Unavailable:
    parts = urlsplit(url)
    return Unavailable(f"{parts.scheme}://{parts.hostname}{parts.path} cannot be fetched: {why}.", code="no_document")
