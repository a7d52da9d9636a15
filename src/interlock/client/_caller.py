"""One call: encode, exchange, retry, decode. The three clients are lists of such calls."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from interlock.client._http import BrokenExchange, Http, NotSent, Reply, Take
from interlock.client._problems import error_of, unreachable, untrusted
from interlock.client._retry import Backoff
from interlock.errors import InterlockError, ServerUnreachable, TooManyRequests, Unavailable

T = TypeVar("T")

TIMEOUT_SECONDS = 35.0
"""A server ends a slow statement after 30 and answers 503: its answer is worth waiting for."""

_encoder = msgspec.json.Encoder()


class Caller:
    def __init__(
        self,
        url: str,
        headers: dict[str, str],
        *,
        verify: ssl.SSLContext | bool,
        patience: float,
        on_retry: Callable[[InterlockError], None] | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.patience = patience
        """Seconds a failing call is tried again before its error is raised; infinity never gives up."""
        self._on_retry = on_retry
        self._headers, self._verify = headers, verify
        self._http = Http(url, verify=verify, headers=headers)

    def sending(self, media_type: str) -> Caller:
        """To the same server, for bodies that are no JSON; a connection of its own, to be closed by itself."""
        headers = self._headers | {"Content-Type": media_type}
        return Caller(self.url, headers, verify=self._verify, patience=self.patience)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    async def call(
        self,
        method: str,
        target: str,
        decoder: msgspec.json.Decoder[T],
        body: Any = None,
        *,
        extra: str = "",
        timeout: float = TIMEOUT_SECONDS,
        repeatable: bool = True,
    ) -> T:
        """`repeatable`: doing it twice is the same as doing it once, so that a lost reply may be retried."""
        encoded = b"" if body is None else _encoder.encode(body)
        backoff: Backoff | None = None
        while True:
            outcome = await self._try(method, target, encoded, extra, timeout, fresh=not repeatable)
            if isinstance(outcome, Reply):
                return decoder.decode(outcome.body)
            if not _worth_retrying(outcome, repeatable=repeatable):
                raise outcome
            if self._on_retry is not None:
                self._on_retry(outcome)
            backoff = backoff or Backoff(self.patience)
            await backoff.before_retry(outcome)

    async def download(
        self, method: str, target: str, take: Take, body: Any = None, *, extra: str = "", timeout: float
    ) -> None:
        """A reply that is handed on as it comes. Not tried again: a part of it may be gone already."""
        encoded = b"" if body is None else _encoder.encode(body)
        outcome = await self._try(method, target, encoded, extra, timeout, fresh=True, take=take)
        if not isinstance(outcome, Reply):
            raise outcome

    async def _try(
        self,
        method: str,
        target: str,
        body: bytes,
        extra: str,
        timeout: float,
        *,
        fresh: bool,
        take: Take | None = None,
    ) -> Reply | InterlockError:
        try:
            reply = await self._http.exchange(
                method, target, body, extra=extra, timeout=timeout, fresh=fresh, take=take
            )
        except ssl.SSLCertVerificationError as error:
            return untrusted(self.url, error.verify_message)
        except (NotSent, BrokenExchange) as error:
            failure = unreachable(self.url, str(error))
            failure.__cause__ = error
            return failure
        return reply if reply.status < 300 else error_of(reply)


def bearer(api_key: str, org: str | None) -> dict[str, str]:
    """`api_key` may be a token of the identity provider; `org` says which one, for a user in several."""
    return {"Authorization": f"Bearer {api_key}"} | ({} if org is None else {"X-Interlock-Org": org})


def _worth_retrying(failure: InterlockError, *, repeatable: bool) -> bool:
    if isinstance(failure, TooManyRequests) or isinstance(failure.__cause__, NotSent):
        return True
    return repeatable and isinstance(failure, Unavailable | ServerUnreachable)


def path(*segments: object) -> str:
    return "".join(f"/{quote(str(segment), safe='')}" for segment in segments)


def query(target: str, /, **parameters: object) -> str:
    given = {name: str(value) for name, value in parameters.items() if value is not None}
    return f"{target}?{urlencode(given)}" if given else target
