"""Every name in the public interface is documented, and every documented name exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from interlock.apps import dispatcher, gateway
from interlock.failpoints import NAMES
from interlock.processes.loop import Gathering, Periodic
from interlock.query import routes as query
from interlock.settings import Settings
from interlock.tasks.outbox_relay import Relay
from interlock.telemetry import REGISTRY
from interlock.wire.access import CredentialsRequest, KeyRequest, OrgRequest, TaskCredentials, WorkerTokenRequest
from interlock.wire.attempts import (
    BufferPublish,
    ClaimGroup,
    ClaimReply,
    ClaimRequest,
    Completion,
    Event,
    Heartbeat,
    Output,
    TaskInput,
    TaskPayload,
)
from interlock.wire.base import Outcome, Problem, RunState, TaskStatus
from interlock.wire.dags import BackfillRequest
from interlock.wire.datasets import InvalidateRequest
from interlock.wire.jobs import JobRequest, Policy, Scaling
from interlock.wire.queries import TaskQuery, UserQuery
from interlock.wire.tasks import CancelRequest, ReceiveRequest, RedriveRequest
from interlock.wire.webhooks import DeliveryRedrive, RotateRequest, WebhookRequest
from tests.docs.generate import COMMAND, settings_page
from tests.support.documentation import ROOT, read, rows, spans

SOURCE = ROOT / "src" / "interlock"


def documented(page: str) -> set[str]:
    return set(spans(read(page)))


# Settings


def test_settings_page_is_up_to_date() -> None:
    assert read("docs/settings.md") == settings_page(), f"run {COMMAND}"


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_has_a_description_and_is_on_the_page(name: str) -> None:
    assert Settings.model_fields[name].description
    assert f"INTERLOCK_{name.upper()}" in documented("docs/settings.md")


def test_every_environment_variable_in_the_docs_is_a_setting() -> None:
    known = {f"INTERLOCK_{name.upper()}" for name in Settings.model_fields}
    known |= {"INTERLOCK_CONFIG", "INTERLOCK_FAILPOINTS", "INTERLOCK_", "INTERLOCK_NAME"}
    for page in ROOT.glob("docs/*.md"):
        assert set(re.findall(r"INTERLOCK_[A-Z_]*", page.read_text())) - known == set(), page.name


# Metrics and failpoints


def _metrics() -> set[str]:
    return {f"{m.name}_total" if m.type == "counter" else m.name for m in REGISTRY.collect()}


def test_every_metric_is_documented() -> None:
    assert _metrics() - documented("docs/operations.md") == set()


def test_every_documented_metric_exists() -> None:
    named = {re.sub(r"\{.*", "", span) for span in documented("docs/operations.md") if span.startswith("interlock_")}
    assert named - _metrics() == set()


def test_every_failpoint_is_documented() -> None:
    assert documented("CONTRIBUTING.md") >= NAMES


# HTTP


def _routes(handlers: list[Any]) -> Iterator[tuple[str, Any]]:
    for handler in handlers:
        for path in handler.paths:
            template = re.sub(r"\{(\w+):\w+\}", r"{\1}", path)
            for method in handler.http_methods - {"OPTIONS"}:
                yield f"`{method} {template}`", handler


ROUTES = [*_routes(gateway.HANDLERS), *_routes(dispatcher.HANDLERS), *_routes(query.HANDLERS)]


@pytest.mark.parametrize(("route", "handler"), ROUTES, ids=[f"{h.fn.__module__[14:]} {r}" for r, h in ROUTES])
def test_every_route_is_documented_with_its_scope(route: str, handler: Any) -> None:
    found = [row for row in rows(read("docs/http-api.md")) if row[0] == route]
    assert found, f"{route} is not in docs/http-api.md"
    scope = handler.opt.get("scope")
    assert scope is None or any(row[1] == f"`{scope}`" for row in found)


def test_every_documented_route_exists() -> None:
    in_tables = {row[0] for row in rows(read("docs/http-api.md")) if re.match(r"`(GET|POST|DELETE|PUT) /", row[0])}
    assert in_tables - {route for route, _ in ROUTES} == set()


BODIES = [JobRequest, Policy, Scaling, CancelRequest, RedriveRequest, KeyRequest, WorkerTokenRequest, OrgRequest]
BODIES += [
    BackfillRequest,
    ClaimRequest,
    ClaimGroup,
    TaskPayload,
    ReceiveRequest,
    Heartbeat,
    Completion,
    Output,
    Event,
    BufferPublish,
    CredentialsRequest,
    TaskCredentials,
    InvalidateRequest,
    Problem,
    TaskInput,
    TaskQuery,
    UserQuery,
    WebhookRequest,
    RotateRequest,
    DeliveryRedrive,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_every_request_field_is_documented(body: Any) -> None:
    page = read("docs/http-api.md") + read("docs/workers.md") + read("docs/datasets.md")
    words = set(re.findall(r"\w+", page))
    assert {field.encode_name for field in msgspec.structs.fields(body)} - words == set()


def _codes() -> set[str]:
    source = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    return set(re.findall(r'\b(?:code|default_code)(?:: ClassVar\[str\])? ?= ?"([a-z_]+)"', source))


def test_every_error_code_is_documented() -> None:
    assert _codes() - documented("docs/http-api.md") == set()


def test_every_documented_error_code_exists() -> None:
    named = {row[1].strip("`") for row in rows(read("docs/http-api.md")) if row[0].isdigit()}
    assert len(named) > 20
    assert named - _codes() == set()


def test_every_explanation_reason_is_documented_with_advice() -> None:
    tree = ast.parse((SOURCE / "tasks" / "explain.py").read_text())
    reasons = {reason for node in ast.walk(tree) if (reason := _reason(node))}
    assert len(reasons) > 10
    assert reasons - documented("docs/http-api.md") == set()
    assert reasons - documented("docs/operations.md") == {"completed", "canceled"}


def _reason(node: ast.AST) -> str | None:
    """Returns the reason of a rule's return statement, which is (reason, sentence)."""
    match node:
        case ast.Return(value=ast.Tuple(elts=[ast.Constant(value=str() as reason), _])):
            return reason
    return None


def test_every_reason_for_not_claiming_is_documented() -> None:
    hints = str(ClaimReply.__annotations__["reason"])
    assert set(re.findall(r'"(\w+)"', hints)) - documented("docs/http-api.md") == set()


# Lifecycle


def test_every_statement_that_moves_a_task_is_in_the_table_of_transitions() -> None:
    statements = re.split(r"^-- name: ", (SOURCE / "tasks/queries/tasks.sql").read_text(), flags=re.MULTILINE)[1:]
    moving = {re.split(r"\W", text)[0] for text in statements if "update interlock.tasks" in text}
    assert len(moving) > 8
    assert moving - documented("docs/task-states.md") == set()


def test_every_state_is_documented() -> None:
    pages = documented("docs/task-states.md") | documented("docs/workers.md")
    states = {*TaskStatus, *RunState, *Outcome} - {Outcome.RELEASED}
    assert {str(state) for state in states} - {span.split(",")[0] for span in pages} == set()


def test_every_background_loop_is_documented() -> None:
    loops: list[type[Relay] | type[Periodic]] = [Relay, *Periodic.__subclasses__(), *Gathering.__subclasses__()]
    names = {loop.name for loop in loops if loop is not Gathering and loop.__module__.startswith("interlock.")}
    assert len(names) > 5
    assert names - documented("docs/architecture.md") == set()
