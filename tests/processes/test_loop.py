"""The runner of a background loop: it repeats without a pause while there is work, and survives errors."""

from __future__ import annotations

import asyncio

import pytest

from interlock.errors import Unavailable
from interlock.processes.loop import Gathering, forever
from interlock.telemetry import LOOP_PASSES


class Scripted:
    """A service whose passes return or raise scripted values. It idles after the last one."""

    seconds = 0.001

    def __init__(self, name: str, *script: int | Exception) -> None:
        self.name = name
        self._script = list(script)
        self.idles = 0
        self.over = asyncio.Event()

    async def run_once(self) -> int:
        answer = self._script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def idle(self, seconds: float) -> None:
        assert seconds == self.seconds
        self.idles += 1
        if not self._script:
            self.over.set()
            await asyncio.Event().wait()


class Breathing(Gathering):
    """A service that idles for the time that the last pass returned, and ends its script with an idle time of zero."""

    name, seconds = "breathing", 5.0

    def __init__(self, *breaths: float) -> None:
        self._breaths = [*breaths]
        self.rests: list[float] = []
        self.over = asyncio.Event()

    async def run_once(self) -> int:
        if not self._breaths:
            return 0
        self.batching_pause = self._breaths.pop(0)
        return 1

    async def idle(self, seconds: float) -> None:
        self.rests.append(seconds)
        if seconds == self.seconds:
            self.over.set()
            await asyncio.Event().wait()


async def ran(service: Scripted | Breathing) -> None:
    loop = asyncio.create_task(forever(service))
    async with asyncio.timeout(10):
        await service.over.wait()
    loop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loop


def passes(name: str, result: str) -> float:
    return float(LOOP_PASSES.labels(loop=name, result=result)._value.get())


async def test_loop_idles_only_after_a_pass_without_work() -> None:
    service = Scripted("busy", 5, 5, 0, 1, 0)
    await ran(service)
    assert service.idles == 2
    assert (passes("busy", "work"), passes("busy", "idle")) == (3, 2)


async def test_gathering_loop_idles_after_work_unless_there_is_more() -> None:
    service = Breathing(0.1, 0.0, 0.2)
    await ran(service)
    assert service.rests == [0.1, 0.2, 5.0]


@pytest.mark.parametrize("error", [Unavailable("gone"), OSError("gone"), RuntimeError("a bug")], ids=repr)
async def test_errors_do_not_end_a_loop(error: Exception) -> None:
    name = f"failing-{type(error).__name__}"
    service = Scripted(name, error, error, 1, 0)
    await ran(service)
    assert (passes(name, "error"), passes(name, "work")) == (2, 1)
