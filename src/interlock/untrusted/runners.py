"""The port to the runner for untrusted code, with two adapters: a local runner over HTTP, and an AWS Lambda function.

A runner starts one process per invocation and responds when it has ended. Closing the connection kills the process.
The dispatcher handles retries; nothing here retries.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

import msgspec

from interlock.settings import Settings
from interlock.wire.bundles import RunnerReport

if TYPE_CHECKING:
    import aiohttp

_report = msgspec.json.Decoder(RunnerReport)
_CONNECT_SECONDS: Final = 5.0
_GRACE_SECONDS: Final = 30.0
"""Time beyond the timeout of an invocation after which the runner is considered lost."""
_LONGEST_REPLY: Final = 1 << 20
_RETRY_SECONDS: Final = 1.0
_NO_RUNNER: Final = frozenset({404, 502, 503, 504})
"""Statuses of a runner that is stopping, or of a proxy without a runner."""


class RunnerBusy(Exception):
    """Raised when the runner has no free slot. Nothing was started."""

    def __init__(self, retry_after: float) -> None:
        super().__init__("the runner has no free slot")
        self.retry_after = retry_after


class RunnerAway(Exception):
    """Raised when no runner accepted the invocation. Nothing was started."""


class RunnerLost(Exception):
    """Raised when it is unknown whether the invocation was started and how it ended."""


class Runner(Protocol):
    async def invoke(self, invocation: bytes, seconds: float) -> RunnerReport:
        """Returns when the process has ended. Cancellation kills the process if the runner supports it."""

    async def answers(self) -> bool:
        """Returns True if the runner is reachable, as far as that is visible without an invocation."""

    async def close(self) -> None: ...


class HttpRunner:
    """The local runner, `interlock serve runner`."""

    def __init__(self, url: str, token: str) -> None:
        self._url = f"{url.rstrip('/')}/invoke"
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._session: aiohttp.ClientSession | None = None

    async def invoke(self, invocation: bytes, seconds: float) -> RunnerReport:
        import aiohttp  # noqa: PLC0415 - 0.3 s that only processes with invocations pay

        timeout = aiohttp.ClientTimeout(sock_connect=_CONNECT_SECONDS, total=seconds + _GRACE_SECONDS)
        try:
            async with self._opened().post(self._url, data=invocation, timeout=timeout, allow_redirects=False) as reply:
                return _understood(reply.status, reply.headers.get("Retry-After"), await _body(reply.content))
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise RunnerAway(f"no connection: {type(error).__name__}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RunnerLost(f"the connection broke: {type(error).__name__}") from error

    async def answers(self) -> bool:
        parts = urlsplit(self._url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(parts.hostname, port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        import aiohttp  # noqa: PLC0415 - as above

        if self._session is None:
            # One connection per invocation, because closing it kills the invocation.
            connector = aiohttp.TCPConnector(force_close=True, limit=0)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, trust_env=False)
        return self._session


async def _body(content: aiohttp.StreamReader) -> bytes:
    body = b""
    while chunk := await content.readany():
        body += chunk
        if len(body) > _LONGEST_REPLY:
            raise RunnerLost("its response is too long")
    return body


def _understood(status: int, retry_after: str | None, body: bytes) -> RunnerReport:
    if status == 429:
        raise RunnerBusy(_seconds(retry_after))
    if status in (401, 403):
        raise RunnerAway("it rejects our runner_token")
    if status in _NO_RUNNER:
        raise RunnerAway(f"it returned {status}")
    if status >= 500:
        # It failed on this invocation and would fail again: released, the task would be retried forever.
        raise RunnerLost(f"it returned {status}")
    if status != 200:
        return RunnerReport(outcome="refused", detail=f"The runner returned {status} for the invocation.")
    try:
        return _report.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RunnerLost("its response is not a report") from error


def _seconds(retry_after: str | None) -> float:
    try:
        return min(60.0, max(0.1, float(retry_after or _RETRY_SECONDS)))
    except ValueError:
        return _RETRY_SECONDS


class LambdaRunner:
    """An AWS Lambda function that runs interlock.untrusted.runner.lambda_function.

    Lambda may deliver an event twice, and continues after its caller has disconnected. The fence handles both.
    """

    def __init__(self, function: str, *, endpoint: str | None = None) -> None:
        self._function = function
        self._endpoint = endpoint
        self._stack = AsyncExitStack()
        self._client: Any = None  # has no static type
        self._opening = asyncio.Lock()

    async def invoke(self, invocation: bytes, seconds: float) -> RunnerReport:
        from botocore.exceptions import (  # noqa: PLC0415 - heavy, and for this adapter only
            BotoCoreError,
            ClientError,
            EndpointConnectionError,
            NoCredentialsError,
        )

        client = await self._opened()
        try:
            async with asyncio.timeout(seconds + _GRACE_SECONDS):
                reply = await client.invoke(
                    FunctionName=self._function, InvocationType="RequestResponse", Payload=invocation
                )
                body = await reply["Payload"].read()
        except ClientError as error:
            raise _refusal(error) from error
        except (EndpointConnectionError, NoCredentialsError) as error:
            raise RunnerAway(f"no connection: {type(error).__name__}") from error
        except (BotoCoreError, TimeoutError, OSError) as error:
            raise RunnerLost(f"the connection broke: {type(error).__name__}") from error
        return _of_lambda(reply.get("FunctionError"), body)

    async def answers(self) -> bool:
        """Always returns True: Lambda itself responds, and only an invocation shows whether the function exists."""
        return True

    async def close(self) -> None:
        await self._stack.aclose()

    async def _opened(self) -> Any:
        async with self._opening:
            if self._client is None:
                import aioboto3  # noqa: PLC0415 - heavy, and for this adapter only
                from botocore.config import Config  # noqa: PLC0415

                # Retries are disabled, because the dispatcher handles them.
                once = Config(retries={"total_max_attempts": 1}, connect_timeout=_CONNECT_SECONDS, read_timeout=1000)
                opened = aioboto3.Session().client("lambda", endpoint_url=self._endpoint, config=once)
                self._client = await self._stack.enter_async_context(opened)
            return self._client


_BUSY: Final = frozenset({"TooManyRequestsException", "ThrottlingException", "EC2ThrottledException"})


def _refusal(error: Any) -> Exception:
    """Converts an error of botocore, which has no types."""
    code = error.response.get("Error", {}).get("Code", "")
    if code in _BUSY:
        return RunnerBusy(_RETRY_SECONDS)
    return RunnerAway(f"Lambda returned {code}")


def _of_lambda(function_error: str | None, body: bytes) -> RunnerReport:
    if len(body) > _LONGEST_REPLY:
        raise RunnerLost("its response is too long")
    if function_error is None:
        return _understood(200, None, body)
    try:
        reported = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError:
        reported = {}
    message = str(reported.get("errorMessage", ""))[:1000]
    timed_out = "timed out" in message
    return RunnerReport(
        outcome="timeout" if timed_out else "signaled",
        cause=str(reported.get("errorType", "Lambda"))[:200],
        detail=message or "The Lambda function failed without a message.",
    )


def open_runner(settings: Settings) -> Runner | None:
    if settings.runner_lambda is not None:
        return LambdaRunner(settings.runner_lambda, endpoint=settings.runner_lambda_endpoint)
    if settings.runner_url is None:
        return None
    token = settings.runner_token.get_secret_value() if settings.runner_token else ""
    return HttpRunner(settings.runner_url, token)
