"""An `interlock up` with work in it, as a user of the dashboard finds it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

OPERATORS = Path(__file__).parent / "operators"
SCRIPT = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
"""Sets the title of the page if any page interprets a user's text."""
LONG = "a-name-that-a-template-has-generated-with-the-date-and-everything-else-2026-11-18T20-00-00Z"
DAG = """
name: shop
jobs:
  - name: orders
    activation: source
    source: { kind: manual }
    runtime: dispatcher
    operator: echo
    outputs: [orders]
"""
ENDED_SECONDS = 90


@dataclass
class Site:
    """A running installation. `ready` is what `interlock up --json` prints."""

    folder: Path
    process: subprocess.Popen[str] | None = None
    ready: dict[str, str] | None = None

    @property
    def url(self) -> str:
        assert self.ready is not None
        return self.ready["gateway"]

    @property
    def key(self) -> str:
        assert self.ready is not None
        return self.ready["admin_key"]

    def start(self, gateway: str = "127.0.0.1:0") -> None:
        command = [sys.executable, "-m", "interlock.cli", "up", "--dir", str(self.folder), "--json"]
        listeners = ["--gateway", gateway, "--internal", "127.0.0.1:0", "--query", "127.0.0.1:0"]
        work = ["--workers", "platform", "--operators", str(OPERATORS)]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("INTERLOCK_")}
        settings = kept | {"INTERLOCK_DRAIN_SECONDS": "0", "INTERLOCK_REQUESTS_PER_SECOND": "10000"}
        errors = self.folder.with_name(f"{self.folder.name}.stderr")
        with errors.open("a") as log:
            self.process = subprocess.Popen(
                [*command, *listeners, *work], stdout=subprocess.PIPE, stderr=log, text=True, env=settings, cwd="/"
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, errors.read_text()
        self.ready = json.loads(line)

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def call(self, method: str, path: str, body: Any = None, key: str | None = None) -> Any:
        """Calls the API. Any: bodies of all kinds."""
        headers = {"Authorization": f"Bearer {key or self.key}"}
        reply = httpx.request(method, self.url + path, json=body, headers=headers, timeout=30)
        assert reply.is_success, f"{method} {path}: {reply.text}"
        return reply.json()

    def submit(self, operator: str, tasks: list[Any], **job: Any) -> str:
        """Submits a job, and returns the id of its run."""
        run: str = self.call("POST", "/v1/jobs", {"operator": operator, "tasks": tasks, **job})["run_id"]
        return run

    def ended(self, run: str) -> dict[str, Any]:
        """Waits for the end of a run by long polls of the command line."""
        command = [sys.executable, "-m", "interlock.cli", "run", "watch", run, "--dir", str(self.folder)]
        subprocess.run(command, capture_output=True, timeout=ENDED_SECONDS, check=False)
        view: dict[str, Any] = self.call("GET", f"/v1/runs/{run}")
        return view

    def key_for(self, user: str, role: str, org: str | None = None) -> str:
        body = {"user": user, "role": role, **({"org": org} if org else {})}
        key: str = self.call("POST", "/v1/keys", body)["key"]
        return key


def seed(site: Site) -> dict[str, str]:
    """Makes work of every kind, and returns the ids that tests open."""
    once = {"max_attempts": 1}
    pages = [{"url": f"https://shop-{n % 5}.example/item/{n}", "n": n} for n in range(80)]
    ids = {"failures": site.submit("fetch_page", pages, name="nightly-crawl", policy=once)}
    ids["hostile"] = site.submit("shout", [{"text": SCRIPT}], name="hostile", policy=once)
    ids["long"] = site.submit("echo", [{"text": "x" * 3000}], name=LONG)
    site.call("POST", "/v1/dags", {"yaml": DAG})
    for name in ("billing", "mailer"):
        site.call("POST", "/v1/services", {"name": name, "description": SCRIPT})
    site.call("POST", "/v1/routes", {"target": "mailer", "name": "send-invoice", "queue": "mail", "dlq": "mail-dlq"})
    site.call("POST", "/v1/acls", {"source": "billing", "target": "mailer", "name": "send-invoice"})
    site.call("POST", "/v1/limits", {"target": "mailer", "name": "send-invoice", "rate": 50})
    for run in (ids["failures"], ids["hostile"], ids["long"]):
        site.ended(run)
    ids["crawl"] = site.submit("crawl", [{"page": 1}], name="live-crawl")
    failed = site.call("GET", f"/v1/tasks?run={ids['failures']}&status=Failed&limit=1")["tasks"][0]
    hostile = site.call("GET", f"/v1/tasks?run={ids['hostile']}")["tasks"][0]
    ids |= {"task": failed["task_id"], "hostile_task": hostile["task_id"], "job": failed["job_id"]}
    return ids


@contextmanager
def running() -> Iterator[Site]:
    # Not under pytest's folder, which is closed to the other user that root's servers run as.
    place = Path(tempfile.mkdtemp(prefix="interlock-browser-"))
    site = Site(place / "state")
    site.start()
    try:
        yield site
    finally:
        site.stop()
        shutil.rmtree(place, ignore_errors=True)
