"""Small documents that others publish over HTTP, such as the public keys of an issuer.

Who answers is not to be trusted further than its document: no redirect is followed, no other scheme is spoken, and
neither time nor memory is its to choose.
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

MOST_BYTES: Final = 256 * 1024
_STEP_SECONDS: Final = 3.0
"""For a connection, and for each piece of the reply."""
_ALL_SECONDS: Final = 10.0


class Documents:
    """Asked for rarely, a few bytes at a time: the standard library in a thread is enough. Proxies are those of the
    environment, but for what is on this machine."""

    def __init__(self, ca: Path | None = None) -> None:
        self._ca = ca

    async def fetch(self, url: str) -> bytes:
        """Unavailable when there is none, or one that is no answer: too late, too large, or with another status."""
        try:
            return await asyncio.wait_for(asyncio.to_thread(self._read, url), _ALL_SECONDS)
        except urllib.error.HTTPError as error:
            error.close()
            raise _none(url, f"it answers with status {error.code}") from None
        except TimeoutError:
            raise _none(url, "it takes too long") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _none(url, type(error).__name__) from error

    def _read(self, url: str) -> bytes:
        request = urllib.request.Request(url, headers={"Accept": "application/json"})  # noqa: S310 - see _opener
        with self._opener.open(request, timeout=_STEP_SECONDS) as reply:
            body: bytes = reply.read(MOST_BYTES + 1)
        if len(body) > MOST_BYTES:
            raise _none(url, f"its document has more than {MOST_BYTES} bytes")
        return body

    @cached_property
    def _opener(self) -> urllib.request.OpenerDirector:
        """With a handler for HTTP and HTTPS and none for anything else: not for files, and not for redirects."""
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


def _none(url: str, why: str) -> Unavailable:
    parts = urlsplit(url)
    return Unavailable(f"{parts.scheme}://{parts.hostname}{parts.path} gives no document: {why}.", code="no_document")
