"""A child process and the wrapper's side of it, with real processes."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from msgspec import Raw

from interlock.wire.attempts import TaskPayload
from interlock.wire.tasks import Crash, JobRef
from interlock.workers import process, protocol
from interlock.workers.claimed_tasks import Held, lease_alone
from interlock.workers.process import EXIT_OUT_OF_MEMORY, ChildProcess, Launch

OPERATORS = """
import os, subprocess, sys, threading, time
from uuid import UUID
from interlock.wire.attempts import Event
from interlock.workers import TaskCanceled, operator

@operator
def environment(payload, ctx):
    with open("/proc/self/environ", "rb") as file:
        return {"environ": dict(os.environ), "proc": file.read().decode()}

@operator
def stubborn(payload, ctx):
    ctx.progress(0.5)
    while True:
        try:
            time.sleep(60)
        except TaskCanceled:
            pass

@operator
def source(payload, ctx):
    ctx.progress(0.1)
    for wanted in (True, False):
        while ctx.paused is not wanted:
            time.sleep(0.01)
        ctx.progress(0.5, f"paused: {wanted}")
    return "made"

@operator
def tidy(payload, ctx):
    try:
        ctx.progress(0.5)
        time.sleep(60)
    except Exception:
        return "swallowed"
    finally:
        print("cleaned up")

@operator
def chatty(payload, ctx):
    print("one\\ntwo")
    print("x" * 5000, file=sys.stderr)
    print("no newline", end="")

@operator
def loud(payload, ctx):
    subprocess.run(["echo", "from a program"], check=True)

@operator
def hungry(payload, ctx):
    return len(bytearray(2 << 30))

@operator
def leave(payload, ctx):
    sys.exit(4)

@operator
def odd(payload, ctx):
    return object()

@operator
def broken(payload, ctx):
    raise ValueError("nul \\0 and \\ud800")

@operator
def large(payload, ctx):
    return "x" * payload

@operator
def announce(payload, ctx):
    number = UUID(int=1)
    return ctx.emit([Event(dataset_uuid=number, dataset_version=number, cursor=5)])

@operator
def from_a_thread(payload, ctx):
    threads = [threading.Thread(target=ctx.progress, args=(i / 50, "t" * 100)) for i in range(50)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()

@operator("registered")
def registered(payload, ctx):
    return "by import"
"""


class Harness:
    """A child and all its reports, in order."""

    def __init__(self) -> None:
        self.messages: list[protocol.ToWrapper] = []
        self.lines: list[str] = []
        self._changed = asyncio.Condition()
        self.child: ChildProcess

    async def start(self, launch: Launch) -> None:
        self.child = await process.start(launch, self._heard, lambda _, line: self._printed(line))
        await self.until(lambda: protocol.Ready() in self.messages)

    def _heard(self, child: ChildProcess, messages: list[protocol.ToWrapper]) -> None:
        for message in messages:
            if isinstance(message, protocol.Finished | protocol.Raised | protocol.Stopped):
                child.answered(message.slot)
            self.messages.append(message)
        self._announce()

    def _printed(self, line: str) -> None:
        self.lines.append(line)
        self._announce()

    def _announce(self) -> None:
        async def announce() -> None:
            async with self._changed:
                self._changed.notify_all()

        self._announcing = asyncio.ensure_future(announce())

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(condition)

    def of(self, kind: type[Any], slot: int) -> list[Any]:
        return [m for m in self.messages if isinstance(m, kind) and getattr(m, "slot", None) == slot]

    async def answer(self, slot: int) -> Any:
        """Waits for the message that ends a slot."""
        endings = (protocol.Finished, protocol.Raised, protocol.Stopped)
        await self.until(lambda: any(isinstance(m, endings) and m.slot == slot for m in self.messages))
        return next(m for m in self.messages if isinstance(m, endings) and m.slot == slot)

    async def result(self, slot: int) -> Any:
        answer = await self.answer(slot)
        assert isinstance(answer, protocol.Finished), answer
        return msgspec.json.decode(answer.result)

    async def begun(self, slot: int) -> None:
        await self.until(lambda: self.of(protocol.Progressed, slot))


def held(slot: int, operator: str, payload: Any = None) -> Held:
    task = TaskPayload(
        task_id=uuid4(),
        job_id=uuid4(),
        attempt=1,
        job=JobRef(None, "job"),
        operator=operator,
        config=Raw(b"{}"),
        inputs=[],
        payload=Raw(msgspec.json.encode(payload)),
        org_id=uuid4(),
        run_id=None,
        index=None,
        outputs=[],
        timeout_at=datetime.now(UTC) + timedelta(hours=1),
    )
    lease = lease_alone(task, uuid4(), datetime.now(UTC) + timedelta(hours=1))
    return Held(slot, task.task_id, None, task.payload, lease, lease.kind, 0.001, 1.0, 0.0)


@pytest.fixture
def operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with operators, which the children get."""
    (tmp_path / "own_operators.py").write_text(textwrap.dedent(OPERATORS))
    paths = filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("INTERLOCK_WORKER_TOKEN", "a-worker-token")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-cloud-secret")
    monkeypatch.setenv("WANTED", "this one")
    return str(tmp_path)


@pytest.fixture
async def harness(operators: str) -> AsyncIterator[Harness]:
    made = Harness()
    await made.start(Launch(environment=("WANTED", "INTERLOCK_WORKER_TOKEN"), operators=(operators,)))
    yield made
    made.child.kill("drain")
    if made.child.alive:
        await made.child.ended()


THIEF = """
import pathlib, shutil, sys
shutil.copy(pathlib.Path(__file__).with_name("credentials"), pathlib.Path(__file__).with_name("stolen"))
del sys.modules[__name__]
sys.path.remove(str(pathlib.Path(__file__).parent))
import msgspec
"""
"""Takes the place of a package that the platform itself imports, and then loads the real one."""


async def test_no_file_of_the_working_directory_is_imported_before_confinement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text(THIEF)
    (tmp_path / "credentials").write_text("ilk_secret")
    monkeypatch.chdir(tmp_path)
    made = Harness()
    await made.start(Launch(hidden=(str(tmp_path / "credentials"),)))
    made.child.kill("drain")
    await made.child.ended()
    assert not (tmp_path / "stolen").exists()


async def test_operators_import_modules_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "operators"
    folder.mkdir()
    operator = "from interlock.workers import operator\nimport beside\n\n"
    operator += "@operator\ndef imported(payload, ctx):\n    return beside.VALUE\n"
    (folder / "importing.py").write_text(operator)
    (tmp_path / "beside.py").write_text("VALUE = 7")
    monkeypatch.chdir(tmp_path)
    made = Harness()
    await made.start(Launch(operators=("operators",)))
    made.child.assign([held(1, "importing:imported")])
    assert await made.result(1) == 7
    made.child.kill("drain")
    await made.child.ended()


async def test_source_is_notified_of_pause_and_resume(harness: Harness) -> None:
    one = held(1, "own_operators:source")
    harness.child.assign([one])
    await harness.begun(1)
    for paused in (True, False):
        one.paused = paused
        harness.child.pause(one)
        text = f"paused: {paused}"
        await harness.until(lambda text=text: any(m.text == text for m in harness.of(protocol.Progressed, 1)))  # type: ignore[misc]
    assert await harness.result(1) == "made"


async def test_child_runs_its_tasks_in_order_and_returns_results(harness: Harness) -> None:
    harness.child.assign([held(1, "echo", {"a": 1}), held(2, "registered"), held(3, "own_operators:large", 1_200_000)])
    harness.child.assign([held(4, "echo", "ü" * 800_000)])
    assert await harness.result(1) == {"a": 1}
    assert await harness.result(2) == "by import"
    answer = await harness.answer(3)
    assert (answer.error_class, "1048576" in answer.message) == ("ResultTooLarge", True)
    answer = await harness.answer(4)
    assert answer.error_class == "ResultTooLarge"
    assert harness.child.load == 0.0


async def test_operator_code_sees_no_token_in_its_environment(harness: Harness) -> None:
    harness.child.assign([held(1, "own_operators:environment")])
    seen = await harness.result(1)
    assert seen["environ"]["WANTED"] == "this one"
    assert "PATH" in seen["environ"]
    for place in (str(seen["environ"]), seen["proc"]):
        assert "INTERLOCK" not in place
        assert "a-worker-token" not in place
        assert "a-cloud-secret" not in place


@pytest.mark.parametrize(
    ("payload", "crash"),
    [
        ({"exit_code": 3}, Crash(exit_code=3)),
        ({"signal": "SIGKILL"}, Crash(signal="SIGKILL")),
        ({"signal": "SIGSEGV"}, Crash(signal="SIGSEGV")),
    ],
)
async def test_crash_loses_no_finished_task(harness: Harness, payload: dict[str, Any], crash: Crash) -> None:
    finished = [held(slot, "echo", slot) for slot in range(1, 51)]
    harness.child.assign([*finished, held(51, "fail", payload), held(52, "echo")])
    assert await harness.child.ended() == crash
    assert [await harness.result(slot) for slot in range(1, 51)] == list(range(1, 51))
    assert [left.slot for left in harness.child.assigned] == [51, 52]


async def test_exception_fails_the_task_and_the_child_continues(harness: Harness) -> None:
    names = ["own_operators:leave", "own_operators:odd", "nobody", "no.module:f"]
    harness.child.assign([held(slot, name) for slot, name in enumerate(names, 1)])
    harness.child.assign([held(5, "own_operators:broken"), held(6, "echo", 6)])
    classes = [(await harness.answer(slot)).error_class for slot in range(1, 6)]
    assert classes == ["SystemExit", "ResultNotJson", "OperatorNotFound", "OperatorNotFound", "ValueError"]
    assert (await harness.answer(5)).message == "nul \ufffd and ?"
    assert await harness.result(6) == 6


async def test_cancel_stops_only_the_running_task(harness: Harness) -> None:
    harness.child.assign([running := held(1, "own_operators:tidy"), held(2, "echo", 2)])
    await harness.begun(1)
    harness.child.cancel(running)
    assert isinstance(await harness.answer(1), protocol.Stopped)
    assert await harness.result(2) == 2
    assert [m.line for m in harness.of(protocol.Printed, 1)] == ["cleaned up"]


async def test_cancel_prevents_the_start_of_a_queued_task(harness: Harness) -> None:
    tasks = [held(1, "sleep", {"seconds": 60}), held(2, "own_operators:chatty"), held(3, "echo", 3)]
    harness.child.assign(tasks)
    await harness.begun(1)
    harness.child.cancel(tasks[1])
    harness.child.cancel(tasks[0])
    assert isinstance(await harness.answer(1), protocol.Stopped)
    assert isinstance(await harness.answer(2), protocol.Stopped)
    assert harness.of(protocol.Printed, 2) == []
    assert await harness.result(3) == 3


async def test_late_cancel_has_no_effect(harness: Harness) -> None:
    harness.child.assign([first := held(1, "echo", 1)])
    await harness.result(1)
    harness.child.assign([held(2, "sleep", {"seconds": 0.3})])
    await harness.begun(2)
    harness.child.cancel(first)
    assert await harness.result(2) == {"seconds": 0.3}


async def test_unstarted_tasks_can_be_recalled(harness: Harness) -> None:
    running = held(1, "sleep", {"seconds": 60})
    harness.child.assign([running, held(2, "echo"), held(3, "echo")])
    await harness.begun(1)
    harness.child.assign([held(4, "echo")])
    harness.child.recall()
    await harness.until(lambda: protocol.GivenBack([2, 3, 4]) in harness.messages)
    assert [task.slot for task in harness.child.given_back([2, 3, 4])] == [2, 3, 4]
    assert [task.slot for task in harness.child.assigned] == [1]
    harness.child.cancel(running)
    assert isinstance(await harness.answer(1), protocol.Stopped)


async def test_printed_lines_are_attributed_to_tasks_and_truncated(harness: Harness) -> None:
    harness.child.assign([held(1, "echo"), held(2, "own_operators:chatty"), held(3, "own_operators:loud")])
    await harness.answer(3)
    printed = harness.of(protocol.Printed, 2)
    assert [(m.stream, m.line) for m in printed[:2]] == [("stdout", "one"), ("stdout", "two")]
    assert (printed[2].stream, len(printed[2].line)) == ("stderr", 2000)
    assert (printed[3].stream, printed[3].line) == ("stdout", "no newline")
    await harness.until(lambda: "from a program" in harness.lines)


async def test_stack_trace_is_logged_without_the_message(harness: Harness) -> None:
    harness.child.assign([held(1, "python", "a secret")])
    harness.child.assign([held(2, "own_operators:large", {"a secret": 1})])
    answer = await harness.answer(2)
    assert answer.error_class == "TypeError"
    shown = "\n".join(m.frames for m in harness.of(protocol.Traced, 2))
    assert "own_operators.py" in shown
    assert "a secret" not in shown


async def test_events_are_emitted_through_the_wrapper(harness: Harness) -> None:
    harness.child.assign([held(1, "own_operators:announce"), held(2, "own_operators:announce")])
    await harness.until(lambda: harness.of(protocol.Emit, 1))
    (asked,) = harness.of(protocol.Emit, 1)
    assert [event.cursor for event in asked.events] == [5]
    harness.child.answer_emit(protocol.EmitAnswered(1, 1, None))
    assert await harness.result(1) == 1
    await harness.until(lambda: harness.of(protocol.Emit, 2))
    harness.child.answer_emit(protocol.EmitAnswered(2, 0, "the attempt is stale"))
    answer = await harness.answer(2)
    assert (answer.error_class, answer.message) == ("EmitRefused", "the attempt is stale")


async def test_threads_of_an_operator_may_report_progress(harness: Harness) -> None:
    harness.child.assign([held(1, "own_operators:from_a_thread")])
    await harness.result(1)
    assert len(harness.of(protocol.Progressed, 1)) == 50


async def test_stop_signal_to_the_process_group_does_not_end_a_child(harness: Harness) -> None:
    harness.child.assign([held(1, "sleep", {"seconds": 0.2})])
    await harness.begun(1)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(harness.child.pid, number)
    assert await harness.result(1) == {"seconds": 0.2}


async def test_memory_limit_fails_the_task_that_exceeds_it(operators: str) -> None:
    harness = Harness()
    await harness.start(Launch(memory_mb=512, operators=(operators,)))
    harness.child.assign([held(1, "own_operators:hungry"), held(2, "echo", 2)])
    assert (await harness.answer(1)).error_class == "MemoryError"
    assert await harness.result(2) == 2
    harness.child.retire()
    assert await harness.child.ended() == Crash(exit_code=0)


async def test_retired_child_exits(harness: Harness) -> None:
    harness.child.retire()
    assert await harness.child.ended() == Crash(exit_code=0)


STARTER = """
import asyncio
from interlock.workers import process
from interlock.workers.process import Launch
from tests.workers.test_worker_child import Harness, held

async def main():
    harness = Harness()
    await harness.start(Launch(operators=("own_operators",)))
    harness.child.assign([held(1, "own_operators:stubborn")])
    await harness.begun(1)
    print(harness.child.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_child_dies_with_its_wrapper(operators: str) -> None:
    environment = os.environ | {"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{Path(__file__).parents[2]}"}
    command = [sys.executable, "-c", STARTER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as wrapper:
        assert wrapper.stdout is not None
        child = os.pidfd_open(int(wrapper.stdout.readline()))
        wrapper.kill()
        ended, _, _ = select.select([child], [], [], 30)
        os.close(child)
    assert ended


def test_crash_is_described_in_a_message() -> None:
    causes = [process.crash_of(code, process.KernelKills()) for code in (3, -signal.SIGSEGV, -64, EXIT_OUT_OF_MEMORY)]
    assert [process.sentence(crash).removeprefix("The process that ran this task ") for crash in causes] == [
        "ended with exit code 3.",
        "was killed by SIGSEGV.",
        "was killed by SIGRTMAX.",
        "ran out of memory: give the runtime more memory, or split the task.",
    ]


def test_operators_cannot_read_the_workers_memory() -> None:
    pr_get_dumpable = 3
    script = (
        "import ctypes; from interlock.workers.wrapper import hide_memory; hide_memory(); "
        f"print(ctypes.CDLL(None).prctl({pr_get_dumpable}))"
    )
    shown = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == "0"
