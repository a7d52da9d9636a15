"""A runner that is killed takes the code with it, and the next one starts on what it left behind."""

from __future__ import annotations

import asyncio
import signal
import sys
from uuid import uuid4

import psutil
import pytest

from tests.access.runners import CONFINEMENTS, heard, running, with_word, zipped
from tests.patience import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the walls are Linux's")


@pytest.mark.parametrize("confinement", CONFINEMENTS)
async def test_a_runner_that_is_killed_leaves_no_process(confinement: str) -> None:
    nonce = str(uuid4().int % 10**9)
    async with running(confinement, "http://127.0.0.1:9") as runner:
        payload = {"nonce": nonce, "tell": f"{runner.files.url}/v1/task/tell/{nonce}"}
        call = asyncio.create_task(runner.invoke(zipped("hostile"), "main.hang_with_children", payload=payload))
        await heard(runner, nonce)
        await eventually(lambda: len(with_word(nonce)) == 3)
        started = psutil.Process(runner.process.pid).children(recursive=True)
        runner.process.send_signal(signal.SIGKILL)
        await runner.ended()
        await asyncio.gather(call, return_exceptions=True)
        await eventually(lambda: not with_word(nonce))
        await eventually(lambda: not any(process.is_running() for process in started))
