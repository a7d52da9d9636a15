"""The port to whatever runs untrusted code, and its two adapters: a local runner by HTTP, and an AWS Lambda function.

A runner starts one process for one invocation and replies when that has ended. A connection that closes is the order to
kill it. Retries are the dispatcher's: nobody here tries anything twice.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

import msgspec

from interlock.settings import Settings
from interlock.wire import RunnerReport

if TYPE_CHECKING:
    import aiohttp

_report = msgspec.json.Decoder(RunnerReport)
_CONNECT_SECONDS: Final = 5.0
_GRACE_SECONDS: Final = 30.0
"""Beyond the time limit of an invocation: a runner that has not replied by then never will."""
_LONGEST_REPLY: Final = 1 << 20
_RETRY_SECONDS: Final = 1.0
_NOBODY_THERE: Final = frozenset({404, 502, 503, 504})
"""What a runner that stops answers, or whatever stands in the place of one."""


class RunnerBusy(Exception):
    """All places are taken; nothing was started."""

    def __init__(self, retry_after: float) -> None:
        super().__init__("the runner has no free place")
        self.retry_after = retry_after


class RunnerAway(Exception):
    """Nobody took the invocation; nothing was started."""


class RunnerLost(Exception):
    """Whether something was started, and what became of it, nobody will tell."""


class Runner(Protocol):
    async def invoke(self, invocation: bytes, seconds: float) -> RunnerReport:
        """Returns when the process has ended. Cancelling it kills the process, where the runner can."""

    async def answers(self) -> bool:
        """Whether somebody is there, as far as that shows without an invocation."""

    async def close(self) -> None: ...


class HttpRunner:
    """The local runner, `interlock runner`."""

    def __init__(self, url: str, token: str) -> None:
        self._url = f"{url.rstrip('/')}/invoke"
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._session: aiohttp.ClientSession | None = None

    async def invoke(self, invocation: bytes, seconds: float) -> RunnerReport:
        import aiohttp  # noqa: PLC0415 - a third of a second that a process without invocations need not pay

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
            # A connection of its own for each: closing it is how an invocation is killed.
            connector = aiohttp.TCPConnector(force_close=True, limit=0)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, trust_env=False)
        return self._session


async def _body(content: aiohttp.StreamReader) -> bytes:
    body = b""
    while chunk := await content.readany():
        body += chunk
        if len(body) > _LONGEST_REPLY:
            raise RunnerLost("its reply is too long")
    return body


def _understood(status: int, retry_after: str | None, body: bytes) -> RunnerReport:
    if status == 429:
        raise RunnerBusy(_seconds(retry_after))
    if status in (401, 403):
        raise RunnerAway("it refuses our runner_token")
    if status in _NOBODY_THERE:
        raise RunnerAway(f"it answers {status}")
    if status >= 500:
        # It broke over this very invocation, and would again: given back, it would come back for ever.
        raise RunnerLost(f"it answers {status}")
    if status != 200:
        return RunnerReport(outcome="refused", detail=f"The runner answered {status} to the invocation.")
    try:
        return _report.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RunnerLost("its reply is no report") from error


def _seconds(retry_after: str | None) -> float:
    try:
        return min(60.0, max(0.1, float(retry_after or _RETRY_SECONDS)))
    except ValueError:
        return _RETRY_SECONDS


class LambdaRunner:
    """A function of AWS Lambda that runs interlock.runner.lambda_function.

    Lambda may deliver an event twice, and goes on with one whose caller has left: the fence takes care of both.
    """

    def __init__(self, function: str, *, endpoint: str | None = None) -> None:
        self._function = function
        self._endpoint = endpoint
        self._stack = AsyncExitStack()
        self._client: Any = None  # comes without types
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
        """Lambda itself always does; whether the function is there shows when it is invoked."""
        return True

    async def close(self) -> None:
        await self._stack.aclose()

    async def _opened(self) -> Any:
        async with self._opening:
            if self._client is None:
                import aioboto3  # noqa: PLC0415 - heavy, and for this adapter only
                from botocore.config import Config  # noqa: PLC0415

                # Its own retries are off: the dispatcher owns them.
                once = Config(retries={"total_max_attempts": 1}, connect_timeout=_CONNECT_SECONDS, read_timeout=1000)
                opened = aioboto3.Session().client("lambda", endpoint_url=self._endpoint, config=once)
                self._client = await self._stack.enter_async_context(opened)
            return self._client


_BUSY: Final = frozenset({"TooManyRequestsException", "ThrottlingException", "EC2ThrottledException"})


def _refusal(error: Any) -> Exception:
    """Any: botocore comes without types."""
    code = error.response.get("Error", {}).get("Code", "")
    if code in _BUSY:
        return RunnerBusy(_RETRY_SECONDS)
    return RunnerAway(f"Lambda answers {code}")


def _of_lambda(function_error: str | None, body: bytes) -> RunnerReport:
    if len(body) > _LONGEST_REPLY:
        raise RunnerLost("its reply is too long")
    if function_error is None:
        return _understood(200, None, body)
    try:
        told = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError:
        told = {}
    message = str(told.get("errorMessage", ""))[:1000]
    timed_out = "timed out" in message
    return RunnerReport(
        outcome="timeout" if timed_out else "signaled",
        cause=str(told.get("errorType", "Lambda"))[:200],
        detail=message or "The Lambda function failed without a word.",
    )


def open_runner(settings: Settings) -> Runner | None:
    if settings.runner_lambda is not None:
        return LambdaRunner(settings.runner_lambda, endpoint=settings.runner_lambda_endpoint)
    if settings.runner_url is None:
        return None
    token = settings.runner_token.get_secret_value() if settings.runner_token else ""
    return HttpRunner(settings.runner_url, token)
