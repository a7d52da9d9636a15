"""First guesses of a newcomer, typed into a terminal next to `interlock up`: each ends in what they wanted."""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.pseudo_terminal import PseudoTerminal, Shell, Typed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BODY = b"a line of text\n" * 20_480
"""300 KB."""
OPERATOR = """
from interlock.workers import operator


@operator
def price(payload, ctx):
    print("pricing", payload["item"])
    return {"item": payload["item"], "price": payload["cents"] / 100}
"""
DAG = """
name: shop
jobs:
  - { name: orders, activation: source, source: { kind: manual }, operator: echo, outputs: [orders] }
publish:
  orders: { from: { job: orders, output: orders } }
"""


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY)

    def log_message(self, *_: object) -> None:
        """Keeps the test's output clean."""


@dataclass
class Desk:
    """Two terminals and an editor."""

    folder: Path
    shell: Shell
    page: str

    def type(self, line: str, *, expect: int | None = 0) -> Typed:
        return self.shell.type(line, expect=expect)

    def save(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    with tempfile.TemporaryDirectory(prefix="interlock-guesses-") as name:
        folder = Path(name)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{server.server_port}"
        (folder / "shop_operators.py").write_text(OPERATOR)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "INTERLOCK_OUTBOUND_ALLOW": json.dumps([host])}
        ports = [word for listener in ("gateway", "internal", "query") for word in (f"--{listener}", "127.0.0.1:0")]
        up = PseudoTerminal(["interlock", "up", "--workers", "platform", *ports], folder, environment)
        try:
            up.until("Interlock is up")
            shell = Shell(folder, environment)
            yield Desk(folder, shell, f"http://{host}/")
            shell.close()
        finally:
            up.process.send_signal(signal.SIGINT)
            up.close()
            server.shutdown()
            server.server_close()
        assert up.process.returncode == 0, up.shown[-3000:]


def test_body_of_300_kb_is_kept_and_printed(desk: Desk) -> None:
    desk.type(f'interlock job submit --operator http_fetch --task \'{{"url": "{desk.page}"}}\' --watch')
    listed = desk.type("interlock task list --status Completed --limit 1 -o json")
    task_id = json.loads(listed.text)["tasks"][0]["task_id"]
    shown = desk.type(f"interlock task show {task_id}")
    assert len(shown.text) < 5_000
    assert f"interlock task result {task_id}" in shown.words
    desk.type(f"interlock task result {task_id} > result.json")
    assert json.loads((desk.folder / "result.json").read_text())["body"] == BODY.decode()


def test_broken_operator_shows_its_line_and_runs_after_the_next_submission(desk: Desk) -> None:
    broken = desk.type(
        'interlock job submit --operator shop_operators:price --task \'{"item": "tea"}\' --watch', expect=1
    )
    listed = desk.type("interlock task list --status Failed --limit 1 -o json")
    task_id = json.loads(listed.text)["tasks"][0]["task_id"]
    logs = desk.type(f"interlock task logs {task_id}")
    assert "pricing tea" in logs.text
    assert "shop_operators.py" in logs.text
    assert "KeyError" in broken.text + logs.text
    desk.type('interlock job submit --operator shop_operators:price --task \'{"item": "tea", "cents": 250}\' --watch')


def test_first_words_in_sql_lead_to_a_dataset(desk: Desk) -> None:
    nothing = desk.type("interlock sql 'select * from orders'", expect=1)
    assert "interlock dag deploy" in nothing.words
    desk.save("shop.yaml", DAG)
    desk.type("interlock dag deploy shop.yaml")
    assert "shop:orders:orders" in desk.type("interlock sql 'show tables'").text
    assert "orders" in desk.type("interlock sql --tables").text
    desk.type("interlock sql 'describe orders'")
    wrong = desk.type("interlock sql 'select * from order_s'", expect=1)
    assert "Did you mean orders?" in wrong.words
    history = desk.type("interlock sql --history -o json")
    assert "select * from order_s" in [each["sql"] for each in json.loads(history.text)["queries"]]


def test_two_hundred_commands_pass_a_limit_or_are_refused(desk: Desk) -> None:
    for line in (
        "interlock service add billing",
        "interlock service add mailer",
        "interlock route add mailer send-mail --queue mail",
        "interlock acl allow billing mailer send-mail",
        "interlock limit set mailer send-mail --rate 50",
        "seq 200 > numbers.jsonl",
    ):
        desk.type(line)
    send = "interlock command send mailer send-mail --payloads numbers.jsonl --from billing"
    sent = desk.type(send)
    assert re.search(r"\b200\s+delivered", sent.text), sent.text
    refused = desk.type(f"{send} --patience 0", expect=1)
    assert "rate-limit-exceeded" in refused.text
    typo = desk.type("interlock command send mialer send-mail '{}' --from billing", expect=1)
    assert "interlock route add mialer send-mail" in typo.words
