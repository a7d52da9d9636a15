"""A killed runner takes user code with it, and the next runner starts on its folder."""

from __future__ import annotations

import asyncio
import signal
import sys
from uuid import uuid4

import psutil
import pytest

from tests.support.polls import eventually
from tests.support.sandboxes import CONFINEMENTS, heard, running, with_word, zipped

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the walls need Linux")


@pytest.mark.parametrize("confinement", CONFINEMENTS)
async def test_killed_runner_leaves_no_process(confinement: str) -> None:
    nonce = str(uuid4().int % 10**9)
    async with running(confinement, "http://127.0.0.1:9") as runner:
        payload = {"nonce": nonce}
        call = asyncio.create_task(runner.invoke(zipped("hostile"), "main.hang_with_children", payload=payload))
        await heard(runner, nonce)
        await eventually(lambda: len(with_word(nonce)) == 3)
        started = psutil.Process(runner.process.pid).children(recursive=True)
        runner.process.send_signal(signal.SIGKILL)
        await runner.ended()
        await asyncio.gather(call, return_exceptions=True)
        await eventually(lambda: not with_word(nonce))
        await eventually(lambda: not any(process.is_running() for process in started))
