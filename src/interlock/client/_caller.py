"""One call: encode, exchange, retry with backoff, decode; and the errors that replies stand for."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import Callable
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from interlock.client._http import BrokenExchange, Http, NotSent, Reply, Take
from interlock.errors import (
    HTTP_ERRORS,
    BadRequest,
    ConfigurationError,
    Fenced,
    InterlockError,
    ServerUnreachable,
    TooManyRequests,
    Unavailable,
)
from interlock.wire.base import Problem

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 2.0


class Backoff:
    """Exponential backoff with jitter and a cap. After `patience` seconds in total, the failure is raised."""

    def __init__(self, patience: float) -> None:
        self._give_up_at = time.monotonic() + patience
        self._pause = FIRST_PAUSE_SECONDS

    async def before_retry(self, failure: InterlockError) -> None:
        pause = self._next_pause(failure)
        if time.monotonic() + pause > self._give_up_at:
            raise failure
        await asyncio.sleep(pause)

    def _next_pause(self, failure: InterlockError) -> float:
        if isinstance(failure, TooManyRequests):
            return failure.retry_after
        pause = self._pause * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards nothing
        self._pause = min(self._pause * 2, LONGEST_PAUSE_SECONDS)
        return pause


T = TypeVar("T")

TIMEOUT_SECONDS = 35.0
"""The server cancels a slow statement after 30 seconds and answers 503, so the client waits a little longer."""

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
        """Seconds for which a failing call is retried before its error is raised; infinity retries forever."""
        self._on_retry = on_retry
        self._headers, self._verify = headers, verify
        self._http = Http(url, verify=verify, headers=headers)

    def sending(self, media_type: str) -> Caller:
        """Returns a caller to the same server for bodies of another media type.

        It has its own connections: close it.
        """
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
        kind: type[T],
        body: Any = None,
        *,
        extra: str = "",
        timeout: float = TIMEOUT_SECONDS,
        repeatable: bool = True,
    ) -> T:
        """Calls the server, retries while `patience` lasts, and decodes the reply.

        `repeatable` marks an idempotent call, which may also be retried after a lost reply.
        """
        encoded = b"" if body is None else _encoder.encode(body)
        backoff: Backoff | None = None
        while True:
            outcome = await self._try(method, target, encoded, extra, timeout, fresh=not repeatable)
            if isinstance(outcome, Reply):
                return msgspec.json.decode(outcome.body, type=kind)
            if not _worth_retrying(outcome, repeatable=repeatable):
                raise outcome
            if self._on_retry is not None:
                self._on_retry(outcome)
            backoff = backoff or Backoff(self.patience)
            await backoff.before_retry(outcome)

    async def download(
        self, method: str, target: str, take: Take, body: Any = None, *, extra: str = "", timeout: float
    ) -> None:
        """Passes the reply to `take` as it arrives. Never retried: `take` may already have consumed a part."""
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
    """`api_key` may also be a token of the identity provider; `org` selects the org of a user who is in several."""
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


_problem = msgspec.json.Decoder(Problem)
_by_status = {error.status: error for error in HTTP_ERRORS}
_from_a_proxy = (502, 504)
"""A proxy in front of the server reports that the server is unreachable."""


def error_of(reply: Reply) -> InterlockError:
    try:
        problem = _problem.decode(reply.body)
    except msgspec.MsgspecError:
        detail = f"The server answered {reply.status} without a reason."
        problem = Problem(type="about:blank", title="", status=reply.status, detail=detail, code="")
    return _error(reply, problem)


def _error(reply: Reply, problem: Problem) -> InterlockError:
    if problem.code == Fenced.default_code:
        return Fenced(problem.detail, stale=problem.stale or "lease_token")
    if reply.status == TooManyRequests.status:
        return TooManyRequests(problem.detail, retry_after=_pause(reply, problem), code=problem.code or None)
    if reply.status in _from_a_proxy:
        return Unavailable(problem.detail, code=problem.code or None)
    kind = _by_status.get(reply.status, BadRequest if 400 <= reply.status < 500 else InterlockError)
    return kind(problem.detail, code=problem.code or None, **_members(problem))


def _members(problem: Problem) -> dict[str, object]:
    members = {
        "request_id": problem.request_id or None,
        "errors": problem.errors,
        "stale": problem.stale,
        "problems": problem.problems,
    }
    return {name: value for name, value in members.items() if value is not None}


def _pause(reply: Reply, problem: Problem) -> float:
    if problem.retry_after_ms is not None:
        return problem.retry_after_ms / 1000
    after = reply.retry_after or ""
    return float(after) if after.isdigit() else 1.0


def unreachable(url: str, reason: str) -> ServerUnreachable:
    return ServerUnreachable(
        f"{url} does not answer ({reason}): check the address, that the server is running there "
        "(`interlock up` starts one) and that this machine can reach it."
    )


def untrusted(url: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"The certificate of {url} is not trusted ({reason}): set INTERLOCK_TLS_CA to the certificate bundle of "
        "its authority, or pass `verify` in Python."
    )
