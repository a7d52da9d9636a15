"""Runs the README's tour, exactly as written, on a real `interlock up`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.documentation import ROOT, blocks, read
from tests.support.polls import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GATEWAY = "127.0.0.1:7070"
NOT_COMPLETED = ("--operator fail", "run watch", "from volumes")
"""Commands that exit with code 1: a task did not complete, or there is no complete range of blocks, so nothing runs on
Spark here and volumes has no rows. The demo's test covers these."""
CHAIN = "http://127.0.0.1:8545"
BLOCKS = 20


def _make_up() -> list[str]:
    """Returns the command that `make up` runs."""
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if "/interlock up" in line]
    return line.removesuffix(" $(UP_ARGS)").partition("/interlock ")[2].split()


@dataclass
class Terminal:
    """A second terminal, next to the one with `interlock up`."""

    folder: Path
    gateway: str

    def type(self, line: str, *, expect: int = 0) -> str:
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        ended = subprocess.run(
            # Without -f, curl would report success for an error reply.
            ["bash", "-c", line.replace(GATEWAY, self.gateway).replace("curl -s ", "curl -sf ")],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == expect, f"{line}\n{ended.stdout}{ended.stderr}"
        return ended.stdout

    def ask(self, path: str) -> Any:
        key = json.loads((self.folder / ".interlock" / "credentials.json").read_text())["admin_key"]
        return httpx.get(f"http://{self.gateway}{path}", headers={"Authorization": f"Bearer {key}"}).json()

    def followed(self, dataset: str) -> int | None:
        """Returns the last block in a dataset."""
        view = self.ask(f"/v1/datasets/{dataset}")
        cursor: int | None = next(
            one["cursor"] for one in view["versions"] if one["dataset_version"] == view["current_version"]
        )
        return cursor

    def with_ids(self, line: str) -> str:
        """Replaces RUN with the newest run and TASK with its first task, as a reader would."""
        run = self.ask("/v1/jobs?limit=1")["jobs"][0]["run"]["run_id"]
        task = self.ask(f"/v1/tasks?run={run}&limit=1")["tasks"][0]["task_id"]
        return line.replace("RUN", run).replace("TASK", task)


@pytest.fixture(scope="module")
def terminal() -> Iterator[Terminal]:
    with tempfile.TemporaryDirectory(prefix="interlock-readme-") as name:
        folder = Path(name)
        shutil.copytree(ROOT / "examples", folder / "examples")
        chain, url = _devchain()
        command = [sys.executable, "-m", "interlock.cli", *_make_up(), "--json", "--gateway", "127.0.0.1:0"]
        with (folder / "up.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, "--internal", "127.0.0.1:0", "--query", "127.0.0.1:0"],
                cwd=folder,
                env=os.environ | {"INTERLOCK_OUTBOUND_ALLOW": json.dumps([url.removeprefix("http://")])},
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert process.stdout is not None
        dag = folder / "examples" / "dags" / "tokens.yaml"
        dag.write_text(dag.read_text().replace(CHAIN, url))
        line = process.stdout.readline()
        assert line, (folder / "up.log").read_text()[-3000:]
        yield Terminal(folder, json.loads(line)["gateway"].removeprefix("http://"))
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        process.stdout.close()
        with chain:
            chain.terminate()


def _devchain() -> tuple[subprocess.Popen[str], str]:
    """Starts the tour's chain, with too few blocks for a range, and returns its URL."""
    options = ["--listen", "127.0.0.1:0", "--manual", "--blocks", str(BLOCKS), "-o", "json"]
    command = [sys.executable, "-m", "interlock.cli", "devchain", *options, "--parent", str(os.getpid())]
    chain = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert chain.stdout is not None
    return chain, json.loads(chain.stdout.readline())["url"]


def test_make_up_lets_jobs_reach_the_development_chain() -> None:
    exported = read("Makefile").partition("\nup: export ")[2].splitlines()[0]
    assert exported == f'INTERLOCK_OUTBOUND_ALLOW ?= ["{CHAIN.removeprefix("http://")}"]'


async def test_commands_of_the_tour_work_as_described(terminal: Terminal) -> None:
    operators, _ = blocks(read("README.md"), "python")
    (terminal.folder / "my_operators.py").write_text(operators)
    for line in _lines():
        if "follow:blocks" in line:
            await eventually(lambda: terminal.followed("tokens:follow:blocks") == BLOCKS)
        typed = terminal.with_ids(line) if "RUN" in line or "TASK" in line else line
        terminal.type(typed, expect=int(any(words in line for words in NOT_COMPLETED)))
    completed = terminal.ask("/v1/tasks?status=Completed")["tasks"]
    assert {"words": 3} in [task["result"] for task in completed]
    counted = terminal.type("interlock sql 'select count(*) from \"tokens:follow:blocks\"' --csv")
    assert counted.splitlines()[-1] == str(BLOCKS + 1)


def _lines() -> Iterator[str]:
    """Yields lines one by one, since ids are copied in between. Lines that share a variable stay together."""
    for block in blocks(read("README.md"), "sh"):
        if "curl" in block and shutil.which("curl"):
            yield block
        elif "make " not in block:
            yield from (line for line in block.splitlines() if line.startswith("interlock "))


def test_python_of_the_tour_runs(terminal: Terminal) -> None:
    _, program = blocks(read("README.md"), "python")
    (terminal.folder / "tour.py").write_text(program.replace(GATEWAY, terminal.gateway))
    assert "Completed=100" in terminal.type("python tour.py")
