"""A child process: its session, its environment, the tail of its output, and its end with everything it started."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from interlock.processes.child import Child, scrubbed
from interlock.processes.linux import ORPHANED

PATIENCE = 30.0
WITH_A_PROGRAM = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True);"
FOREVER = "import signal; signal.pause()"


async def started(code: str) -> Child:
    return await Child.start([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


async def line(child: Child) -> str:
    """Returns the first line. The rest of the output is read, too."""
    first = await asyncio.wait_for(child.output.readline(), PATIENCE)
    child.keep_tail(100)
    return first.decode().strip()


async def dead(pid: int) -> None:
    """Waits for the end of a process that is not a child of this one."""
    async with asyncio.timeout(PATIENCE):
        descriptor = os.pidfd_open(pid)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)


async def test_kill_ends_the_child_and_the_programs_it_started() -> None:
    child = await started(WITH_A_PROGRAM + FOREVER)
    ending = asyncio.create_task(dead(int(await line(child))))
    child.kill()
    assert await child.wait() == -signal.SIGKILL
    await ending
    child.kill()
    child.signal(signal.SIGTERM)


async def test_programs_that_a_child_leaves_in_its_group_are_killed() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as output:
        child = await Child.start([sys.executable, "-c", WITH_A_PROGRAM], stdout=writing)
        os.close(writing)
        ending = asyncio.create_task(dead(int(await asyncio.to_thread(output.readline))))
        assert await child.wait_for_group() == 0
        await ending


async def test_stop_kills_a_child_that_ignores_the_signal() -> None:
    child = await started(f"import signal; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); {FOREVER}")
    assert await line(child) == "ready"
    assert not await child.stop(0.01)
    assert child.returncode == -signal.SIGKILL


async def test_stop_lets_a_child_end_by_itself() -> None:
    child = await started(
        f"import sys, signal; signal.signal(15, lambda *_: sys.exit(3)); print(flush=True); {FOREVER}"
    )
    await line(child)
    assert await child.stop(PATIENCE)
    assert child.returncode == 3


async def test_wait_for_the_end_returns_early_in_a_hurry() -> None:
    child = await Child.start([sys.executable, "-c", FOREVER])
    hurry = asyncio.Event()
    hurry.set()
    assert not await asyncio.wait_for(child.ended(10 * PATIENCE, hurry), PATIENCE)
    child.kill()
    assert await child.ended(PATIENCE)


async def test_only_the_tail_of_the_output_is_kept() -> None:
    child = await started("print('x' * 1_000_000 + 'the end', end='')")
    child.keep_tail(10)
    assert await child.wait() == 0
    assert child.tail == b"xxxthe end"


async def test_child_has_a_session_of_its_own() -> None:
    child = await started("import os; print(os.getsid(0), os.getpgid(0))")
    assert await line(child) == f"{child.pid} {child.pid}"
    await child.wait()


async def test_child_of_a_dead_parent_ends_at_once() -> None:
    child = await started("from interlock.processes.linux import die_with; die_with(1 << 22); print('alive')")
    assert await line(child) == ""
    assert await child.wait() == ORPHANED


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal")
async def test_child_is_killed_with_its_parent() -> None:
    inner = "import os, sys; from interlock.processes.linux import die_with; die_with(int(sys.argv[1]))"
    code = f"""
import os, signal, subprocess, sys
inner = {inner!r} + '; print(os.getpid(), flush=True); import signal; signal.pause()'
subprocess.Popen([sys.executable, "-c", inner, str(os.getpid())], start_new_session=True)
signal.pause()
"""
    child = await started(code)
    ending = asyncio.create_task(dead(int(await line(child))))
    child.kill()
    await child.wait()
    await ending


def test_scrubbed_environment_has_only_named_variables_and_no_settings() -> None:
    environment = {"PATH": "/bin", "SECRET": "x", "INTERLOCK_TOKEN": "x"}
    assert scrubbed(environment, ["PATH", "HOME", "INTERLOCK_TOKEN"]) == {"PATH": "/bin"}
