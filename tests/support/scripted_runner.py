"""A scripted runner on a real socket, for faults that a dispatcher must survive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

TOKEN = "a-runner-token"

Invocation = dict[str, Any]
Behaviour = Callable[[Invocation], Awaitable[web.StreamResponse | dict[str, Any]]]


@dataclass
class ScriptedRunner:
    url: str = ""
    behaviour: Behaviour | None = None
    invocations: list[Invocation] = field(default_factory=list)
    open: int = 0
    most_open: int = 0
    killed: int = 0
    """Invocations whose connection closed before a reply."""

    async def invoke(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.Response(status=401)
        invocation = await request.json()
        self.invocations.append(invocation)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        assert self.behaviour is not None
        try:
            reply = await self.behaviour(invocation)
        except asyncio.CancelledError:
            self.killed += 1
            raise
        except ConnectionAbortedError:
            # The runner dies: the caller gets a broken connection.
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        finally:
            self.open -= 1
        return web.json_response(reply) if isinstance(reply, dict) else reply


@asynccontextmanager
async def scripted_runner(port: int = 0) -> AsyncIterator[ScriptedRunner]:
    runner = ScriptedRunner()
    app = web.Application()
    app.router.add_post("/invoke", runner.invoke)
    serving = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await serving.setup()
    site = web.TCPSite(serving, "127.0.0.1", port)
    await site.start()
    runner.url = f"http://127.0.0.1:{serving.addresses[0][1]}"
    yield runner
    await serving.cleanup()


async def exited(_: Invocation) -> dict[str, Any]:
    return {"outcome": "exited", "exit_code": 0, "cause": "", "detail": ""}
