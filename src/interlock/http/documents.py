"""Fetches small documents over HTTP, for example the public keys of an issuer.

The server is trusted only for its document: redirects and other schemes are rejected, and time and memory are limited.
"""

from __future__ import annotations

import asyncio
import ssl
import urllib.error
from functools import cached_property
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from urllib.request import OpenerDirector

from interlock.errors import Unavailable
from interlock.http import fetch

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
        except fetch.TooLarge as error:
            raise _unavailable(url, str(error)) from None
        except (*fetch.FAILURES, ValueError) as error:
            raise _unavailable(url, type(error).__name__) from error

    def _read(self, url: str) -> bytes:
        return fetch.read(self._opener, url, limit=MAX_BYTES, seconds=_STEP_SECONDS)

    @cached_property
    def _opener(self) -> OpenerDirector:
        trust = ssl.create_default_context(cafile=str(self._ca) if self._ca else None)
        return fetch.opener(trust, proxies=True)


def _unavailable(url: str, why: str) -> Unavailable:
    parts = urlsplit(url)
    return Unavailable(f"{parts.scheme}://{parts.hostname}{parts.path} cannot be fetched: {why}.", code="no_document")
