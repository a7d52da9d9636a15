"""Client commands against a real gateway: output for people and for programs, and exit codes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import re
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

from interlock.cli.app import execute
from tests.support.system import System


class CommandResult(NamedTuple):
    code: int
    out: str
    err: str


class Terminal:
    """Runs command lines in this process, as an admin of the system's org."""

    def __init__(self, system: System, capsys: pytest.CaptureFixture[str]) -> None:
        self.system = system
        self._capsys = capsys

    async def __call__(self, *line: str) -> CommandResult:
        self._capsys.readouterr()  # what a worker in this process has logged
        code = await asyncio.to_thread(execute, list(line))
        done = self._capsys.readouterr()
        return CommandResult(code, done.out, done.err)

    async def json(self, *line: str) -> Any:
        done = await self(*line, "--output", "json")
        assert done.code == 0, done
        return json.loads(done.out)

    async def submit(self, *payloads: str, operator: str = "echo", **options: str) -> dict[str, Any]:
        tasks = [word for payload in payloads for word in ("--task", payload)]
        more = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
        accepted: dict[str, Any] = await self.json("job", "submit", "--operator", operator, *tasks, *more)
        return accepted

    async def dead_letter(self, **options: str) -> tuple[dict[str, Any], str]:
        """Returns a run with one task that has failed permanently, and the task's id."""
        accepted = await self.submit('{"n": 1}', max_attempts="1", **options)
        task_id = (await self.system.task_ids(accepted["run_id"]))[0]
        claim = await self.system.claim(task_id)
        await self.system.complete(claim, "Failed", error_class="DiskFull", error_message="no room left")
        await self.system.settle()
        return accepted, task_id


@pytest.fixture
def terminal(system: System, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("INTERLOCK_GATEWAY_URL", system.gateway_url)
    monkeypatch.setenv("INTERLOCK_API_KEY", system.admin_key)
    return Terminal(system, capsys)


# Jobs and runs


async def test_job_is_submitted_from_options_a_file_and_stdin(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"n": 2}\n\n"three"\n')
    first = await terminal.json(
        "job", "submit", "--operator", "echo", "--task", '{"n": 1}', "--tasks", str(file), "--config", '{"k": "v"}'
    )
    assert first["total"] == 3
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\n2\n"))
    second = await terminal.json("job", "submit", "--operator", "echo", "--tasks", "-", "--priority", "bulk")
    assert second["total"] == 2
    tasks = (await terminal.json("task", "list", "--run", first["run_id"]))["tasks"]
    assert [task["payload"] for task in tasks] == [{"n": 1}, {"n": 2}, "three"]
    job = await terminal.json("job", "show", first["job_id"])
    assert (job["config"], job["priority"]) == ({"k": "v"}, "normal")


async def test_submitted_jobs_are_shown_as_a_table(terminal: Terminal) -> None:
    done = await terminal("job", "submit", "--operator", "echo", "--task", "1", "--name", "greet")
    assert done.code == 0
    assert "interlock run watch" in done.out
    listed = await terminal("job", "list")
    assert listed.out.split()[:3] == ["job", "name", "operator"]
    assert "greet" in listed.out
    shown = await terminal("job", "show", "greet")
    assert "max_attempts 3" in shown.out
    assert "1 Queued" in shown.out
    runs = await terminal("job", "runs", "greet")
    assert "Running" in runs.out
    assert "\x1b" not in done.out + listed.out + shown.out + runs.out


async def test_options_of_a_job_reach_its_policy(terminal: Terminal) -> None:
    accepted = await terminal.submit(
        '{"id": 1}',
        '{"id": 1}',
        name="strict",
        max_attempts="5",
        backoff_seconds="0.5",
        lease_seconds="9",
        timeout_seconds="90",
        non_retryable="DiskFull",
        max_concurrency="2",
        dedupe_by="/id",
    )
    assert (accepted["total"], accepted["deduplicated"]) == (1, 1)
    job = await terminal.json("job", "show", "strict")
    policy = job["policy"]
    assert (policy["max_attempts"], policy["backoff_seconds"], policy["non_retryable"]) == (5, 0.5, ["DiskFull"])
    assert (policy["lease_seconds"], policy["timeout_seconds"]) == (9, 90)
    assert job["scaling"]["max_concurrency"] == 2


async def test_lists_follow_pages_up_to_the_limit_and_return_a_cursor(terminal: Terminal) -> None:
    accepted = await terminal.submit(*(str(number) for number in range(5)))
    first = await terminal.json("task", "list", "--run", accepted["run_id"], "--limit", "3")
    assert [task["payload"] for task in first["tasks"]] == [0, 1, 2]
    rest = await terminal.json("task", "list", "--run", accepted["run_id"], "--cursor", first["next_cursor"])
    assert [task["payload"] for task in rest["tasks"]] == [3, 4]
    assert rest["next_cursor"] is None


async def test_watching_a_run_ends_with_its_outcome(terminal: Terminal) -> None:
    accepted = await terminal.submit("1")
    watching = asyncio.create_task(terminal("run", "watch", accepted["run_id"]))
    task_id = (await terminal.system.task_ids(accepted["run_id"]))[0]
    await terminal.system.complete(await terminal.system.claim(task_id))
    await terminal.system.settle()
    done = await watching
    assert done.code == 0
    assert "Completed, 1 of 1 done" in done.out
    failed, _ = await terminal.dead_letter()
    done = await terminal("run", "watch", failed["run_id"])
    assert done.code == 1
    assert "1 failed" in done.out
    done = await terminal("run", "watch", failed["run_id"], "--output", "json")
    assert done.code == 1
    assert json.loads(done.out)["state"] == "Failed"


async def test_run_is_canceled_without_confirmation_without_a_terminal(terminal: Terminal) -> None:
    accepted = await terminal.submit("1", "2")
    done = await terminal("run", "cancel", accepted["run_id"])
    assert (done.code, done.out) == (0, "2 tasks canceled.\n")
    await terminal.system.settle()
    assert (await terminal.json("run", "show", accepted["run_id"]))["state"] == "Canceled"


def _typed(system: System, answer: bytes, *line: str) -> tuple[int, str]:
    """Runs the command on a pseudo-terminal in another process. Returns its exit code and output."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"INTERLOCK_GATEWAY_URL": system.gateway_url, "INTERLOCK_API_KEY": system.admin_key}
    command = [sys.executable, "-m", "interlock.cli", *line]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        os.write(ours, answer)
        shown = b""
        try:
            while more := os.read(ours, 4096):
                shown += more
        except OSError:  # EIO on Linux: the other side has closed
            process.wait()
        os.close(ours)
    return process.returncode, shown.decode()


async def test_on_a_terminal_cancel_by_filter_needs_confirmation(terminal: Terminal) -> None:
    accepted = await terminal.submit("1", "2", name="many")
    line = ("task", "cancel", "--job", "many")
    code, shown = await asyncio.to_thread(_typed, terminal.system, b"n\n", *line)
    assert code == 1
    assert "Cancel 2 tasks?" in shown
    assert "Nothing was changed." in shown
    assert (await terminal.json("run", "show", accepted["run_id"]))["counts"]["Canceled"] == 0
    code, shown = await asyncio.to_thread(_typed, terminal.system, b"", *line, "--yes")
    assert (code, "2 tasks canceled." in shown) == (0, True)


async def test_colour_only_on_terminals_and_not_with_no_color(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    await terminal.submit("1")
    _, shown = await asyncio.to_thread(_typed, terminal.system, b"", "job", "list")
    assert "\x1b[" in shown
    monkeypatch.setenv("NO_COLOR", "1")
    _, shown = await asyncio.to_thread(_typed, terminal.system, b"", "job", "list")
    assert "\x1b[3" not in shown


# Tasks


async def test_lists_of_a_terminal_show_ids_that_commands_accept(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted, task_id = await terminal.dead_letter(name="hopeless")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    for line in (("task", "list", "--job", "hopeless"), ("run", "list", "--job", "hopeless")):
        _, shown = await asyncio.to_thread(_typed, terminal.system, b"", *line)
        found = re.search(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}\b", shown)
        assert found is not None, shown
        assert (task_id if line[0] == "task" else accepted["run_id"]).startswith(found[0])
        assert "DiskFull" in shown
        assert (await terminal(line[0], "show", found[0])).code == 0


async def test_dead_letter_is_listed_shown_explained_and_redriven(terminal: Terminal) -> None:
    _, task_id = await terminal.dead_letter(name="hopeless")
    listed = await terminal("task", "list", "--job", "hopeless", "--status", "Failed")
    assert "Failed, dead" in listed.out
    shown = await terminal("task", "show", task_id)
    assert "no room left" in shown.out
    explained = await terminal("task", "explain", task_id)
    assert "dead_letter" in explained.out
    attempts = await terminal("task", "attempts", task_id)
    assert "no room left" in attempts.out
    assert [one["outcome"] for one in (await terminal.json("task", "attempts", task_id))["attempts"]] == ["Failed"]
    assert (await terminal.json("task", "explain", task_id))["reason"] == "dead_letter"
    filters = ("--job", "hopeless", "--error-class", "DiskFull")
    assert (await terminal("task", "redrive", *filters, "--dry-run")).out == "1 tasks would be redriven.\n"
    assert (await terminal("task", "redrive", *filters)).out == "1 tasks redriven.\n"
    assert (await terminal.json("task", "show", task_id))["status"] == "Queued"


async def test_long_result_is_cut_with_the_command_that_prints_all_of_it(terminal: Terminal) -> None:
    accepted = await terminal.submit("1")
    (task_id,) = await terminal.system.task_ids(accepted["run_id"])
    long = "x" * 300_000
    await terminal.system.complete(await terminal.system.claim(task_id), result=long)
    await terminal.system.settle()
    shown = await terminal("task", "show", task_id)
    assert shown.out.count("x") < 1_000
    assert f"300002 bytes: interlock task result {task_id}" in " ".join(shown.out.split())
    assert json.loads((await terminal("task", "result", task_id)).out) == long


async def test_task_is_retried_watched_and_canceled(terminal: Terminal) -> None:
    _, task_id = await terminal.dead_letter()
    done = await terminal("task", "watch", task_id)
    assert done.code == 1
    assert "attempt 1, Failed, DiskFull, no room left, no retry" in done.out
    assert (await terminal("task", "retry", task_id)).out == f"Task {task_id} is Queued, for attempt 2.\n"
    done = await terminal("task", "retry", task_id)
    assert done.code == 1
    assert "only a Failed task can be retried" in done.err
    await terminal.system.claim(task_id)
    done = await terminal("task", "cancel", task_id)
    assert "is asked to stop" in done.out
    assert (await terminal.json("task", "show", task_id))["cancel_requested"] is True


async def test_cancel_by_filter_supports_dry_run(terminal: Terminal) -> None:
    await terminal.submit("1", "2", name="waiting")
    line = ("task", "cancel", "--job", "waiting", "--status", "Queued")
    assert (await terminal(*line, "--dry-run")).out == "2 tasks would be canceled.\n"
    assert (await terminal.json(*line)) == {"matched": 2, "dry_run": False, "remaining": False}
    tasks = (await terminal.json("task", "list", "--job", "waiting", "--status", "Canceled"))["tasks"]
    assert len(tasks) == 2


# Queues and principals


async def test_queues_and_workers_are_shown(terminal: Terminal) -> None:
    empty = await terminal("queue", "workers")
    assert "start one with `interlock serve worker`" in empty.out
    await terminal.submit("1")
    await terminal.system.receive(max=1)
    queues = (await terminal.json("queue", "list"))["queues"]
    platform = next(queue for queue in queues if queue["queue"] == "platform")
    assert (platform["depth"], platform["in_flight"]) == (0, 1)
    assert "platform" in (await terminal("queue", "status")).out
    assert (await terminal.json("queue", "workers"))["workers"][0]["worker_id"] == "test"
    assert (await terminal("queue", "dead-letters", "platform")).out == "There are no dead letters.\n"
    assert (await terminal("queue", "redrive", "platform")).out == "0 redelivered.\n"
    done = await terminal("queue", "redrive", "nowhere")
    assert (done.code, "Unknown queue 'nowhere'" in done.err) == (1, True)


async def test_key_is_made_used_and_revoked(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await terminal.json("users", "create", "ada", "--role", "reader", "--expires-in-days", "1")
    assert made["key"] not in (await terminal("users", "list")).out
    monkeypatch.setenv("INTERLOCK_API_KEY", made["key"])
    assert (await terminal("job", "list")).code == 0
    done = await terminal("job", "submit", "--operator", "echo", "--task", "1")
    assert (done.code, "lacks the scope 'jobs:write'" in done.err) == (1, True)
    monkeypatch.setenv("INTERLOCK_API_KEY", terminal.system.admin_key)
    revoked = await terminal("users", "revoke", made["view"]["key_id"])
    assert "of ada is revoked" in revoked.out
    monkeypatch.setenv("INTERLOCK_API_KEY", made["key"])
    done = await terminal("job", "list")
    assert (done.code, "The API key is not valid" in done.err) == (1, True)


async def test_each_org_has_its_own_keys(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    await terminal.submit("1", name="ours")
    assert (await terminal("users", "org", "acme")).code == 0
    made = await terminal.json("users", "create", "bob", "--role", "writer", "--org", "acme")
    monkeypatch.setenv("INTERLOCK_API_KEY", made["key"])
    assert (await terminal("job", "list")).out == "There are no jobs; `interlock job submit` creates one.\n"
    assert (await terminal("job", "show", "ours")).code == 1


async def test_worker_token_is_made_and_revoked(terminal: Terminal) -> None:
    made = await terminal.json("users", "worker-token", "rack-7", "--runtime", "platform")
    asked = {"queue": "platform", "worker_id": "rack-7", "wait_seconds": 0}
    reply = await terminal.system.worker("POST", "/internal/queue/receive", token=made["token"], json=asked)
    assert reply.status_code == 200
    beyond = asked | {"queue": "udf"}
    reply = await terminal.system.worker("POST", "/internal/queue/receive", token=made["token"], json=beyond)
    assert reply.status_code == 403
    listed = await terminal("users", "worker-tokens")
    assert "rack-7" in listed.out
    assert made["token"] not in listed.out
    assert "(rack-7) is revoked" in (await terminal("users", "revoke-worker-token", made["view"]["token_id"])).out
    done = await terminal("users", "worker-token", "x", "--runtime", "steam")
    assert (done.code, "Unknown runtime 'steam'" in done.err) == (1, True)


async def test_signing_keys_are_listed_and_rotated(terminal: Terminal) -> None:
    before = await terminal.json("signing-key", "list")
    rotated = await terminal.json("signing-key", "rotate")
    assert rotated["kid"] not in {key["kid"] for key in before}
    listed = await terminal("signing-key", "list")
    assert "signs" in listed.out
    assert "verifies" in listed.out
    assert "signs from now on" in (await terminal("signing-key", "rotate")).out


# Errors, and commands on the database


async def test_unknown_id_is_one_sentence_and_exit_code_1(terminal: Terminal) -> None:
    nobody = "00000000-0000-0000-0000-000000000000"
    for line in (("job", "show", "absent"), ("run", "show", nobody), ("task", "explain", nobody)):
        done = await terminal(*line)
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith("Error: There is no ")
        assert done.err.count("\n") == 1


async def test_unreachable_gateway_is_one_sentence(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLOCK_GATEWAY_URL", "http://127.0.0.1:1")
    done = await terminal("job", "list")
    assert (done.code, done.out) == (1, "")
    assert "http://127.0.0.1:1 does not answer" in done.err
    assert "`interlock up` starts one" in done.err


async def test_migrate_and_doctor_use_the_configured_database(
    terminal: Terminal, state_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("INTERLOCK_STATE_URL", state_url)
    monkeypatch.setenv("INTERLOCK_DIR", str(tmp_path / "fresh"))
    assert (await terminal("migrate")).out == "The schema is up to date.\n"
    assert await terminal.json("migrate") == {"applied": []}
    found = {row["check"]: row for row in json.loads((await terminal("doctor", "--output", "json")).out)}
    assert found["state database"]["detail"].startswith("PostgreSQL 18")
    assert found["state database clock"]["result"] == "ok"
    assert found["state database schema"]["result"] == "ok"


async def test_doctor_fails_for_an_outdated_schema(
    terminal: Terminal, state_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("INTERLOCK_STATE_URL", state_url)
    monkeypatch.setenv("INTERLOCK_DIR", str(tmp_path / "fresh"))
    async with terminal.system.kernel.stores.database.connection() as connection:
        await connection.execute("delete from public.interlock_migrations")
    done = await terminal("doctor", "--output", "json")
    found = {row["check"]: row for row in json.loads(done.out)}
    assert done.code == 1
    assert "interlock migrate" in found["state database schema"]["detail"]
