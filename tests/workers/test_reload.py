"""Edited operators: the next task runs the new code, and running tasks are not lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from interlock.wire.base import TaskStatus
from interlock.wire.jobs import Policy
from interlock.wire.tasks import TaskView
from tests.support.system import System, until
from tests.support.worker_bench import Bench, benched
from tests.workers.test_worker import result

CODE = """
import socket
from interlock.workers import operator
from helping import VALUE

@operator
def answer(payload, ctx):
    return ["old", VALUE]

@operator
def wait(payload, ctx):
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(payload)
        door.sendall(b"0 1 1\\n")
        door.recv(1)
    return "old"
"""
ONCE = Policy(max_attempts=1)


@pytest.fixture
async def bench(system: System, tmp_path: Path) -> AsyncIterator[Bench]:
    async with benched(system, tmp_path, CODE) as found:
        write(found, "helping", "VALUE = 1\n")
        yield found


def write(bench: Bench, module: str, text: str) -> None:
    Path(bench.folder, f"{module}.py").write_text(text)


async def run(bench: Bench, operator: str = "answer", payload: Any = None) -> TaskView:
    (task,) = await bench.ended(await bench.run(operator, [payload], policy=ONCE))
    return task


async def test_next_task_runs_the_edited_operator(bench: Bench) -> None:
    await bench.worker(reload=True)
    assert result(await run(bench)) == ["old", 1]
    write(bench, "own_operators", CODE.replace("old", "new"))
    assert result(await run(bench)) == ["new", 1]
    write(bench, "helping", "VALUE = 2\n")
    task = await run(bench)
    assert (result(task), task.attempt) == (["new", 2], 1)


async def test_running_task_finishes_with_the_code_it_started_with(bench: Bench) -> None:
    await bench.worker(reload=True, concurrency=2)
    run_id = await bench.run("wait", [bench.gate.path], policy=ONCE)
    visitor = await bench.gate.arrival()
    write(bench, "own_operators", CODE.replace("old", "new"))
    assert result(await run(bench)) == ["new", 1]
    visitor.let_go()
    (task,) = await bench.ended(run_id)
    assert (task.status, result(task)) == (TaskStatus.COMPLETED, "old")


async def test_tasks_claimed_before_an_edit_run_the_new_code_in_their_first_attempt(bench: Bench) -> None:
    await bench.worker(reload=True)
    await run(bench)
    waiting = await bench.run("wait", [bench.gate.path], policy=ONCE)
    visitor = await bench.gate.arrival()
    run_id = await bench.run("answer", [None] * 50, policy=ONCE)
    write(bench, "own_operators", CODE.replace("old", "new"))
    visitor.let_go()
    tasks = await bench.ended(run_id)
    assert {(task.status, task.attempt) for task in tasks} == {(TaskStatus.COMPLETED, 1)}
    assert [result(task) for task in tasks] == [["new", 1]] * 50
    assert [task.status for task in await bench.ended(waiting)] == [TaskStatus.COMPLETED]


async def test_syntax_error_names_file_and_line_and_the_next_edit_works(bench: Bench) -> None:
    await bench.worker(reload=True)
    await run(bench)
    write(bench, "own_operators", CODE + "\ndef broken(:\n    pass\n")
    task = await run(bench)
    assert task.error_class == "OperatorNotFound"
    assert f"own_operators.py, line {len(CODE.splitlines()) + 2}" in (task.error_message or "")
    write(bench, "own_operators", CODE.replace("old", "mended"))
    assert result(await run(bench)) == ["mended", 1]


async def test_without_reload_code_is_kept_until_the_worker_is_asked_to_reload(bench: Bench) -> None:
    worker = await bench.worker()
    assert result(await run(bench)) == ["old", 1]
    write(bench, "helping", "VALUE = 23\n")
    assert result(await run(bench)) == ["old", 1]
    worker.reload()

    async def reloaded() -> bool:
        return bool(result(await run(bench)) == ["old", 23])

    await until(reloaded)
