"""The command line alone, without running processes: help, usage errors, settings, documents."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import typer

from interlock import __version__
from interlock.apps.doctor_checks import Result, objects
from interlock.cli.app import app, execute
from interlock.cli.serve import _passed_on
from interlock.settings import Settings


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    children = getattr(command, "commands", {})
    for name, child in children.items():
        yield from _commands(child, (*path, name))
    if not children:
        yield path


@pytest.fixture(autouse=True)
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets no settings except the defaults, and no folder of an `interlock up`."""
    for name in list(os.environ):
        if name.startswith("INTERLOCK_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = execute(list(arguments))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.parametrize("path", list(_commands(typer.main.get_command(app))), ids=" ".join)
def test_help_of_every_command_has_an_example_of_it(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys, *path, "--help")
    assert code == 0
    _, _, example = out.partition("Example:")
    assert f"interlock {' '.join(path)}" in " ".join(example.split())


def test_help_and_version_need_no_settings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLOCK_RANGE_SIZE", "many")
    assert _run(capsys, "--version") == (0, f"interlock {__version__}\n", "")
    assert _run(capsys, "--help")[0] == 0


def test_piped_output_has_no_colour_and_help_loads_fast() -> None:
    """Runs in a separate process to check its imports: no Rich, no client, no servers."""
    program = (
        "import sys; from interlock.cli.app import execute; code = execute(['--version']); "
        "heavy = {'rich', 'pydantic', 'asyncpg', 'litestar', 'httptools', 'structlog'} & set(sys.modules); "
        "sys.exit(f'loaded {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout


def test_shell_completes_commands_and_values() -> None:
    def complete(*words: str) -> list[str]:
        typed = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        environment = os.environ | {"_INTERLOCK_COMPLETE": "complete_bash"} | typed
        command = [sys.executable, "-m", "interlock.cli"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        return done.stdout.split()

    assert complete("interlock", "jo") == ["job"]
    assert complete("interlock", "task", "list", "--status", "C") == ["Completed", "Canceled"]


def test_closed_pipe_causes_no_error_message() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "interlock.cli", "config"]
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["job", "list", "--nonsense"], "No such option: --nonsense"),
        (["job", "submit", "--operator", "echo"], "There are no tasks"),
        (["job", "submit", "--operator", "echo", "--task", "{"], "--task 1 is not JSON"),
        (["job", "submit", "--operator", "echo", "--tasks", "absent.jsonl"], "--tasks absent.jsonl cannot be read"),
        (["job", "submit", "--operator", "echo", "--task", "1", "--config", "[]"], "--config must be a JSON object"),
        (["job", "submit", "--operator", "a b", "--task", "1"], "matching regex"),
        (["job", "submit", "--operator", "echo", "--task", "1", "--lease-seconds", "0"], "lease_seconds"),
        (["task", "show", "seven"], "is not an id"),
        (["task", "cancel"], "Give one task, or give --job or --run"),
        (["task", "cancel", "00000000-0000-0000-0000-000000000000", "--job", "x"], "Give one task"),
        (["task", "redrive"], "Give --job or --run"),
        (["task", "list", "--status", "Lost"], "Lost"),
        (["up", "--workers", "udf"], "'udf' has no worker in this build; choose from: platform, spark"),
        (["up", "--workers", "platform,steam"], "'steam' is not a runtime; choose from: platform"),
        (["up", "--workers", "platform", "--no-workers"], "not both"),
        (["up", "--workers", ","], "or give --no-workers"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_error_is_one_sentence_and_exit_code_2(
    line: list[str], sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = _run(capsys, *line)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_invalid_json_line_of_a_task_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"n": 1}\n\n{"n": \n')
    code, _, err = _run(capsys, "job", "submit", "--operator", "echo", "--tasks", "tasks.jsonl")
    assert code == 2
    assert "line 3 of tasks.jsonl is not JSON" in err


@pytest.mark.parametrize(
    "line", [["job", "list"], ["task", "list"], ["queue", "list"], ["users", "list"]], ids=" ".join
)
def test_client_command_without_a_server_suggests_to_start_one(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = _run(capsys, *line)
    assert (code, out) == (1, "")
    assert "interlock up" in err
    assert "INTERLOCK_GATEWAY_URL" in err


def test_verbose_shows_the_trace_in_any_position(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (["--verbose", "job", "list"], ["job", "--verbose", "list"], ["job", "list", "--verbose"]):
        code, _, err = _run(capsys, *line)
        assert code == 1
        assert "Traceback (most recent call last)" in err
        assert "interlock up" in err.splitlines()[-1]


def test_invalid_setting_stops_a_command_with_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERLOCK_DRAIN_SECONDS", "soon")
    code, out, err = _run(capsys, "up")
    assert (code, out) == (1, "")
    assert "'drain_seconds' (INTERLOCK_DRAIN_SECONDS) is invalid" in err


def test_process_without_a_database_names_the_setting(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = _run(capsys, "migrate")
    assert code == 1
    assert "set INTERLOCK_STATE_URL" in err


# Settings


def test_config_shows_each_setting_with_its_origin_and_no_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("INTERLOCK_STATE_URL", "postgresql://me:topsecret@db/interlock")
    (tmp_path / "interlock.toml").write_text("range_size = 7\n")
    code, out, _ = _run(capsys, "config", "--dir", "there", "--output", "json")
    rows = {row["setting"]: row for row in json.loads(out)}
    assert code == 0
    assert "topsecret" not in out
    assert rows["state_url"]["origin"] == "environment (INTERLOCK_STATE_URL)"
    assert (rows["range_size"]["value"], rows["range_size"]["origin"]) == (7, "interlock.toml")
    assert (rows["dir"]["value"], rows["dir"]["origin"]) == ("there", "command line")
    assert rows["gateway"]["origin"] == "default"
    code, out, _ = _run(capsys, "config")
    assert code == 0
    assert "topsecret" not in out
    assert "range_size" in out


# OpenAPI


@pytest.mark.parametrize(
    ("options", "path"), [([], "/v1/jobs"), (["--internal"], "/internal/task-claim")], ids=["gateway", "dispatcher"]
)
def test_openapi_is_printed_without_a_database(
    options: list[str], path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = _run(capsys, "openapi", *options)
    document = json.loads(out)
    assert code == 0
    assert document["openapi"].startswith("3.")
    assert path in document["paths"]
    assert ("/internal/task-claim" in document["paths"]) == bool(options)


# Doctor


def test_doctor_accepts_a_fresh_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = ("doctor", "--dir", "fresh", "--output", "json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INTERLOCK_GATEWAY", "127.0.0.1:0")
        patch.setenv("INTERLOCK_INTERNAL", "127.0.0.1:0")
        patch.setenv("INTERLOCK_QUERY", "127.0.0.1:0")
        code, out, _ = _run(capsys, *line)
    found = {row["check"]: row for row in json.loads(out)}
    assert code == 0, out
    assert found["python"]["result"] == "ok"
    assert found["embedded PostgreSQL"]["result"] == "ok"
    assert "not running" in found["state database"]["detail"]
    assert list(tmp_path.iterdir()) == []


def test_doctor_advises_on_each_problem(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERLOCK_GATEWAY", "0.0.0.0:0")
    monkeypatch.setenv("INTERLOCK_STATE_URL", "postgresql://nobody@127.0.0.1:1/none")
    folder = tmp_path / "kept"
    folder.mkdir()
    (folder / "credentials.json").write_text("{}")
    (folder / "credentials.json").chmod(0o644)
    code, out, _ = _run(capsys, "doctor", "--dir", str(folder), "--output", "json")
    broken = {row["check"]: row for row in json.loads(out) if row["result"] == "fail"}
    assert code == 1
    assert "not a loopback address" in broken["gateway address"]["detail"]
    assert broken["state database"]["advice"] == "check INTERLOCK_STATE_URL"
    assert broken["credentials"]["advice"] == f"chmod 600 {folder}/credentials.json"
    assert _run(capsys, "doctor", "--dir", str(folder))[0] == 1


def test_doctor_reports_an_object_root_that_cannot_be_granted(tmp_path: Path) -> None:
    odd, plain = (objects(Settings(dir=tmp_path / name)) for name in ("it's here", "here"))
    assert (odd.result, plain.result) == (Result.WARN, Result.OK)
    assert "objects_url" in (odd.advice or "")


def test_variable_without_an_org_is_refused_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = _run(capsys, "serve", "worker", "--pass-env", "RPC_KEY")
    assert code == 2
    assert "--pass-env ORG:RPC_KEY" in err
    assert "--process-env RPC_KEY" in err


@pytest.mark.parametrize("name", ["NO_SUCH_VARIABLE", "INTERLOCK_WORKER_TOKEN"])
def test_variable_that_cannot_be_passed_on_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("INTERLOCK_WORKER_TOKEN", "ilw_x")
    code, _, err = _run(capsys, "serve", "worker", "--pass-env", f"{UUID(int=7)}:{name}")
    assert code == 2
    assert f"no variable '{name}' to pass on" in err


def test_pass_env_groups_variables_by_org() -> None:
    ours, theirs = UUID(int=1), UUID(int=2)
    found = _passed_on([f"{ours}:A", f"{ours}:B", f"{theirs}:A"], {"A": "1", "B": "2", "C": "3"})
    assert found == {ours: {"A": "1", "B": "2"}, theirs: {"A": "1"}}


def test_secret_value_is_not_a_command_line_argument(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, _ = _run(capsys, "secret", "set", "KEY", "the-value")
    assert code == 2


@pytest.mark.parametrize(
    ("former", "current"), [("gateway", "serve gateway"), ("keys", "signing-key"), ("route-health", "route health")]
)
def test_former_name_of_a_command_works_with_a_hint(
    former: str, current: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = _run(capsys, former, "--help")
    assert (code, err) == (0, f"`interlock {former}` is now `interlock {current}`.\n")
    assert f"interlock {current}" in out
