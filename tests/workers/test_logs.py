"""What attempts print: kept, bounded, readable while they run and after they crashed."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from interlock import failpoints
from interlock.wire.base import TaskStatus
from interlock.wire.jobs import Policy
from interlock.wire.logs import LogLine
from tests.support.system import System, until
from tests.support.worker_bench import Bench, benched

OPERATORS = """
import logging, os, signal, socket, subprocess, sys
from interlock.workers import TaskFailed, operator

def wait(path):
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(path)
        door.sendall(b"0 1 1\\n")
        door.recv(1)

@operator
def speak(payload, ctx):
    print("to stdout")
    print("to stderr", file=sys.stderr)
    logging.getLogger("mine").info("an info record")
    subprocess.run(["echo", "from a program"], check=True)
    sys.stdout.write("no line break")

def helper(payload):
    return 1 / payload

@operator
def divide(payload, ctx):
    return helper(payload)

@operator
def refuse(payload, ctx):
    raise TaskFailed("not today", "NotToday")

@operator
def chatter(payload, ctx):
    for number in range(payload):
        print(f"line {number:06}")

@operator
def wait_in_the_middle(payload, ctx):
    print("before")
    wait(payload)
    print("after")

@operator
def die(payload, ctx):
    print("last words")
    os.kill(os.getpid(), signal.SIGKILL)

@operator
def quiet(payload, ctx):
    return payload
"""


@pytest.fixture
async def bench(system: System, tmp_path: Path) -> AsyncIterator[Bench]:
    async with benched(system, tmp_path, OPERATORS) as found:
        yield found


ONCE = Policy(max_attempts=1)


async def lines_of(bench: Bench, task_id: UUID, attempt: int | None = None) -> list[LogLine]:
    return [line async for line in bench.client.logs.of_task(task_id, attempt=attempt)]


def rewrite(bench: Bench, text: str) -> None:
    Path(bench.folder, "own_operators.py").write_text(text)


async def one(bench: Bench, operator: str, payload: object) -> UUID:
    (task,) = await bench.ended(await bench.run(operator, [payload], policy=ONCE))
    return task.task_id


async def test_everything_that_an_attempt_prints_is_in_its_log(bench: Bench) -> None:
    await bench.worker()
    found = [(line.stream, line.text) for line in await lines_of(bench, await one(bench, "speak", None))]
    assert sorted(found) == [
        ("raw", "from a program"),
        ("stderr", "INFO mine: an info record"),
        ("stderr", "to stderr"),
        ("stdout", "no line break"),
        ("stdout", "to stdout"),
    ]


async def test_traceback_names_file_and_line_of_the_users_code_only(bench: Bench) -> None:
    await bench.worker()
    lines = await lines_of(bench, await one(bench, "divide", 0))
    text = "\n".join(line.text for line in lines)
    assert {line.stream for line in lines} == {"traceback"}
    number = OPERATORS.splitlines().index("    return 1 / payload") + 1
    assert f'own_operators.py", line {number}, in helper' in text
    assert "ZeroDivisionError: division by zero" in text
    assert "interlock/workers" not in text


async def test_declared_failure_has_a_traceback_too(bench: Bench) -> None:
    await bench.worker()
    text = "\n".join(line.text for line in await lines_of(bench, await one(bench, "refuse", 0)))
    assert "in refuse" in text
    assert "not today" in text


async def test_module_that_cannot_be_imported_names_file_and_line(bench: Bench) -> None:
    await bench.system.declare("own_operators:gone")
    rewrite(bench, OPERATORS + "\nfrom nowhere import nothing\n")
    await bench.worker()
    lines = await lines_of(bench, await one(bench, "speak", None))
    number = len(OPERATORS.splitlines()) + 2
    assert f'own_operators.py", line {number}' in "\n".join(line.text for line in lines)


async def test_long_log_keeps_its_beginning_and_its_end(bench: Bench) -> None:
    await bench.worker(task_log_bytes=4_000)
    lines = await lines_of(bench, await one(bench, "chatter", 1_000))
    gaps = [line.text for line in lines if line.stream == "gap"]
    texts = [line.text for line in lines if line.stream == "stdout"]
    assert texts[0] == "line 000000"
    assert texts[-1] == "line 000999"
    assert len(gaps) == 1
    assert f"{(1_000 - len(texts)) * 26} bytes left out" in gaps[0]
    assert sum(len(text) + 15 for text in texts) <= 4_000


async def test_log_is_readable_while_the_task_runs(bench: Bench) -> None:
    await bench.worker()
    run_id = await bench.run("wait_in_the_middle", [bench.gate.path])
    visitor = await bench.gate.arrival()
    (task,) = await bench.tasks(run_id)
    following = bench.client.logs.of_task(task.task_id, follow=True)
    assert (await anext(following)).text == "before"
    assert not (await bench.client.logs.task_page(task.task_id)).ended
    visitor.let_go()
    assert [line.text async for line in following] == ["after"]


async def test_log_of_a_killed_child_is_kept(bench: Bench) -> None:
    await bench.worker()
    assert [line.text for line in await lines_of(bench, await one(bench, "die", None))] == ["last words"]


async def test_log_that_a_killed_worker_sent_before_is_kept(bench: Bench) -> None:
    process = await bench.process()
    run_id = await bench.run("wait_in_the_middle", [bench.gate.path], policy=Policy(lease_seconds=1, max_attempts=1))
    await bench.gate.arrival()
    (task,) = await bench.tasks(run_id)
    await until(lambda: lines_of(bench, task.task_id))
    process.send_signal(signal.SIGKILL)
    await process.wait()
    (task,) = await bench.ended(run_id)
    assert task.status is TaskStatus.FAILED
    assert [line.text for line in await lines_of(bench, task.task_id)] == ["before"]


async def test_each_attempt_has_its_own_log(bench: Bench) -> None:
    await bench.worker()
    policy = Policy(max_attempts=2, backoff_seconds=0, jitter=0)
    (task,) = await bench.ended(await bench.run("divide", [0], policy=policy))
    first, second = await lines_of(bench, task.task_id, 1), await lines_of(bench, task.task_id, 2)
    assert first[-1].text == second[-1].text == "ZeroDivisionError: division by zero"
    assert first[-1].at < second[-1].at


async def test_logs_of_a_run_are_read_by_its_job(bench: Bench) -> None:
    await bench.worker()
    run_id = await bench.run("chatter", [1] * 50)
    tasks = await bench.ended(run_id)
    lines = [line async for line in bench.client.logs.of_job(tasks[0].job_id, run=run_id)]
    assert {line.task_id for line in lines} == {task.task_id for task in tasks}


async def test_tasks_that_print_nothing_cause_no_call_and_no_row(bench: Bench) -> None:
    await bench.worker()
    calls = []

    async def called() -> None:
        calls.append(1)

    failpoints.arm("worker.before_logs", called)
    await bench.ended(await bench.run("quiet", [1] * 20))
    failpoints.disarm("worker.before_logs")
    assert not calls
    assert await bench.system.value("select count(*) from interlock.task_logs") == 0


async def test_long_logs_of_a_run_are_packed(bench: Bench) -> None:
    await bench.worker()
    (task,) = await bench.ended(await bench.run("chatter", [2_000]))
    assert len(await lines_of(bench, task.task_id)) == 2_000
    assert await bench.system.value("select count(*) from interlock.task_logs where text is null") > 0


async def test_logs_go_with_their_run(bench: Bench) -> None:
    await bench.worker()
    run_id = await bench.run("chatter", [1] * 3, name="short_lived")
    await bench.ended(run_id)
    assert await bench.system.value("select count(*) from interlock.task_logs") == 3
    await bench.client.delete_job("short_lived")
    await until(lambda: no_logs(bench))


async def no_logs(bench: Bench) -> bool:
    return bool(await bench.system.value("select count(*) = 0 from interlock.task_logs"))


async def test_chunks_of_other_attempts_are_not_kept(still: System) -> None:
    task_id = await still.one()
    claim = await still.claim(task_id)
    chunk = {
        "task_id": task_id,
        "attempt": 1,
        "lease_token": claim["lease_token"],
        "start": 0,
        "text": "0" * 13 + "ohi\n",
    }
    run_id = (await still.task(task_id))["run_id"]
    for change, kept in [
        ({}, 0),
        ({"run_id": run_id, "lease_token": str(uuid4())}, 0),
        ({"run_id": run_id, "attempt": 2}, 0),
        ({"run_id": run_id}, 1),
        ({"run_id": run_id}, 0),
    ]:
        reply = await still.worker("POST", "/internal/task-logs", json={"items": [chunk | change]})
        assert reply.json() == {"kept": kept}, change
    log = (await still.user("GET", f"/v1/tasks/{task_id}/logs")).json()
    assert [line["text"] for line in log["lines"]] == ["hi"]
    assert (await still.user("GET", f"/v1/tasks/{task_id}/logs?attempt=2")).status_code == 404
    assert (await still.user("GET", f"/v1/tasks/{task_id}/logs?after=-1")).status_code == 400
    assert (await still.user("GET", f"/v1/tasks/{uuid4()}/logs")).status_code == 404
