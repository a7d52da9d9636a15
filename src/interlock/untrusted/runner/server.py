"""The runner's HTTP server: `POST /invoke`, for dispatchers that know the shared secret."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import structlog

from interlock import telemetry
from interlock.errors import (
    ConfigurationError,
    InterlockError,
    MethodNotAllowed,
    NotFound,
    TooLarge,
    TooManyRequests,
    Unauthenticated,
    Unavailable,
)
from interlock.http.connection import ConnectionLimits
from interlock.http.server import Server, config_of
from interlock.processes import linux
from interlock.untrusted.runner import invocation as verdict
from interlock.untrusted.runner.bundles import Bundles
from interlock.untrusted.runner.confinement import Interpreter
from interlock.untrusted.runner.contract import read
from interlock.untrusted.runner.invocation import (
    RETRY_SECONDS,
    Invoker,
    Places,
    clear,
    find_groups,
    find_machine,
    home_of,
    users_for,
)
from interlock.untrusted.runner.sandbox import Sandbox
from interlock.wire.bundles import RunnerReport

log = structlog.get_logger()

# ASGI's types: the keys of a message depend on its type.
_Message: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Message]]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]
_Headers: TypeAlias = dict[str, str]

_GRACE_SECONDS: Final = 10
_JSON: Final = {"Content-Type": "application/json"}
_PROBLEM: Final = {"Content-Type": "application/problem+json"}
_TEXT: Final = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}


@dataclass(frozen=True)
class Rules:
    """The settings that the runner needs; it keeps no others."""

    token: str
    folder: Path
    concurrency: int
    confinement: str
    python: str | None
    authorities: Path | None
    first_user: int
    bundle_bytes: int
    unpacked_bytes: int
    body_bytes: int
    drain_seconds: float
    connections: ConnectionLimits


class Application:
    """Replies when the code has ended. If the dispatcher disconnects, its code is killed."""

    def __init__(self, invoker: Invoker | ConfigurationError, rules: Rules) -> None:
        """With an error instead of an invoker, every invocation is refused with that error."""
        self._invoker = invoker
        self._rules = rules
        self._draining = asyncio.Event()
        self._out_of_patience = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = 0

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":  # a websocket; uvicorn turns the refusal into a 403
            await send({"type": "websocket.close"})
            return
        try:
            await self._answer(scope, receive, send)
        except InterlockError as error:
            await _reply(send, error.status, _problem(error), _PROBLEM | error.headers)

    async def _answer(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        match scope["method"], scope["path"]:
            case "POST", "/invoke":
                self._authenticate(scope)
                body = await _body(receive, self._rules.body_bytes)
                report = await self._attended(body, receive)
                if report is not None:
                    await _reply(send, 200, msgspec.json.encode(report), _JSON)
            case "GET" | "HEAD", "/healthz":
                await _reply(send, 200, self._health(), _JSON)
            case "GET" | "HEAD", "/metrics":
                self._authenticate(scope)
                await _reply(send, 200, telemetry.metrics_text(), _TEXT)
            case _, "/invoke":
                raise MethodNotAllowed("Send an invocation with POST.", allow="POST")
            case _:
                raise NotFound("The runner serves only POST /invoke.")

    def _authenticate(self, scope: _Message) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(given, f"Bearer {self._rules.token}".encode()):
            raise Unauthenticated("Send this runner's secret: `Authorization: Bearer …`.")

    def _health(self) -> bytes:
        if isinstance(self._invoker, ConfigurationError):
            return msgspec.json.encode({"status": "degraded", "checks": {"confinement": "missing"}})
        walls = str(self._invoker.sandbox.machine.walls)
        return msgspec.json.encode({"status": "ok", "checks": {"confinement": walls}})

    async def _attended(self, body: bytes, receive: _Receive) -> RunnerReport | None:
        """Returns the report, or None if the dispatcher has disconnected and the code was killed."""
        if self._draining.is_set():
            raise TooManyRequests("This runner is stopping.", retry_after=RETRY_SECONDS)
        invocation, event = read(body)
        if isinstance(self._invoker, ConfigurationError):
            return verdict.refused("no_confinement", self._invoker.detail)
        work = asyncio.create_task(self._invoker.invoke(invocation, event))
        with self._counted():
            ends = {asyncio.create_task(_hung_up(receive)), asyncio.create_task(self._out_of_patience.wait())}
            try:
                await asyncio.wait({work, *ends}, return_when=asyncio.FIRST_COMPLETED)
                report = work.result() if work.done() else None
            finally:
                await _ended(work, *ends)
        _note(report, invocation.task_id)
        if report is None and self._out_of_patience.is_set():
            raise Unavailable("This runner was stopped and has killed the code.")
        return report

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self._open += 1
        self._idle.clear()
        telemetry.RUNNER_INVOCATIONS_OPEN.inc()
        try:
            yield
        finally:
            self._open -= 1
            telemetry.RUNNER_INVOCATIONS_OPEN.dec()
            if not self._open:
                self._idle.set()

    async def drain(self) -> None:
        """Accepts no more invocations, waits a while for running ones, then kills them."""
        self._draining.set()
        try:
            await asyncio.wait_for(self._idle.wait(), self._rules.drain_seconds)
        except TimeoutError:
            log.warning("runner.drain_is_over", killed=self._open)
            self._out_of_patience.set()
            await self._idle.wait()


def _note(report: RunnerReport | None, task_id: str) -> None:
    outcome = str(report.outcome) if report else "hung_up"
    telemetry.RUNNER_INVOCATIONS.labels(outcome).inc()
    log.info("invocation.ended", task_id=task_id, outcome=outcome, cause=report.cause if report else None)


async def _hung_up(receive: _Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _ended(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _body(receive: _Receive, limit: int) -> bytes:
    parts, more = bytearray(), True
    while more:
        message = await receive()
        parts += message.get("body", b"")
        if len(parts) > limit:
            raise TooLarge(f"An invocation may have at most {limit} bytes.")
        more = message.get("more_body", False)
    return bytes(parts)


async def _reply(send: _Send, status: int, body: bytes, headers: _Headers) -> None:
    lines = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    lines.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


def _problem(error: InterlockError) -> bytes:
    about = {"type": f"urn:interlock:problem:{error.code}", "title": error.title, "status": error.status}
    return msgspec.json.encode(about | {"detail": error.detail, "code": error.code} | error.extra)


@asynccontextmanager
async def application(rules: Rules) -> AsyncIterator[Application]:
    """Prepares the application: users for the slots, walls that passed a trial, and a prestarted process."""
    users = users_for(rules.concurrency, rules.first_user)
    interpreter = await asyncio.to_thread(Interpreter.find, rules.python)
    try:
        machine = await find_machine(rules.folder, rules.confinement, interpreter, rules.authorities, users[0])
    except ConfigurationError as error:
        if rules.confinement != "auto":
            raise
        log.warning("runner.refuses_all", reason=error.detail)
        yield Application(error, rules)
        return
    verify = None if rules.authorities is None else ssl.create_default_context(cafile=str(rules.authorities))
    bundles = Bundles(
        home_of(rules.folder, machine.walls) / "bundles", rules.bundle_bytes, rules.unpacked_bytes, verify=verify
    )
    bundles.prepare()
    groups = find_groups()
    sandbox = Sandbox(machine)
    sandbox.stock_up()
    log.info("runner.ready", confinement=machine.walls, groups=groups is not None, places=rules.concurrency)
    try:
        yield Application(Invoker(bundles, Places(users), sandbox, groups), rules)
    finally:
        await sandbox.close()
        clear(machine)


async def serve(rules: Rules, listener: socket.socket, stop: asyncio.Event) -> None:
    hide()
    async with application(rules) as app:
        server = Server(config_of(app, grace_seconds=_GRACE_SECONDS, lifespan="off"), rules.connections)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await app.drain()
        server.should_exit = True
        await serving


def hide() -> None:
    """Prevents processes of the same user from reading this one's memory, environment or descriptors."""
    if os.uname().sysname == "Linux":
        linux.prctl(linux.PR_SET_DUMPABLE, 0)


def require_token(token: str | None) -> str:
    if not token:
        raise ConfigurationError(
            "A runner needs a shared secret: set INTERLOCK_RUNNER_TOKEN, for the runner and the dispatchers."
        )
    return token
