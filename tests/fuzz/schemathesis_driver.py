"""Runs schemathesis on one listener, with all its phases, and returns its findings."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import schemathesis
from schemathesis import AuthContext, Case, HookContext
from schemathesis.core import NOT_SET
from schemathesis.engine import events, from_schema
from schemathesis.hooks import GLOBAL_HOOK_DISPATCHER

from tests.fuzz import checks
from tests.fuzz.listeners import FuzzedListeners
from tests.fuzz.openapi_documents import bent
from tests.fuzz.seeded_state import CAPABILITY, RUNNING, State, make_whole, names_of
from tests.support.code_bundles import zipped

EXAMPLES = int(os.environ.get("INTERLOCK_FUZZ_EXAMPLES", "3"))
"""Random requests per operation and phase, in addition to those derived from the document alone."""


@dataclass
class Found:
    """The findings of one run on a listener."""

    failures: dict[tuple[str, str | None], str] = field(default_factory=dict)
    """One failure per check and operation, which is enough to see the cause."""
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    phases: set[str] = field(default_factory=set)

    def told(self) -> str:
        return "\n\n".join(f"{check}: {operation}: {text}" for (check, operation), text in self.failures.items())


@schemathesis.serializer("application/zip")
def _as_bytes(_: Any, value: Any) -> bytes:
    """Encodes text of the document in which each character is a byte."""
    return value if isinstance(value, bytes) else str(value).encode("latin-1", "replace")


ANSWERED_EACH = {("negative_data_rejection", "POST /v1/commands")}
"""An invalid command gets its own verdict in a successful response, because its neighbours may be valid."""


def _config(base_url: str) -> schemathesis.Config:
    return schemathesis.Config.from_dict(
        {
            "base-url": base_url,
            "seed": 1,
            "request-timeout": 30,
            "continue-on-failure": True,
            "cache": {"enabled": False},
            "output": {"sanitization": {"enabled": False}},
            "checks": checks.CONFIG,
            "generation": {"deterministic": True, "max-examples": EXAMPLES, "no-shrink": True},
            "phases": {"stateful": {"max-steps": 6}},
        }
    )


def fuzz(site: FuzzedListeners, state: State, base_url: str, headers: dict[str, str]) -> Found:
    document = site.http.get(f"{base_url}/openapi.json").raise_for_status().json()
    schema = schemathesis.openapi.from_dict(bent(document), config=_config(base_url))
    schema.auth()(_credentials(headers))
    found = Found()
    with _before_each_call(state):
        for event in from_schema(schema).execute():
            _note(event, found)
    return found


def _credentials(headers: dict[str, str]) -> type:
    class Credentials:
        def get(self, case: Case[Any], context: AuthContext) -> dict[str, str]:
            return headers

        def set(self, case: Case[Any], data: dict[str, str], context: AuthContext) -> None:
            case.headers.update(data)

    return Credentials


@contextmanager
def _before_each_call(state: State) -> Iterator[None]:
    def before_call(context: HookContext, case: Case[Any], kwargs: dict[str, Any]) -> None:
        prepare(state, case)

    GLOBAL_HOOK_DISPATCHER.register_hook_with_name(before_call, "before_call")
    try:
        yield
    finally:
        GLOBAL_HOOK_DISPATCHER.unregister(before_call)


def prepare(state: State, case: Case[Any]) -> None:
    """Replaces stand-ins with existing objects, and adds the token that belongs to them."""
    if case.body is not NOT_SET and case.meta is not None and case.meta.generation.mode.is_positive:
        make_whole(case.body)
        if case.operation.path == "/v1/bundles":
            case.body = zipped().decode("latin-1")
    case.headers.update(state.exchange(dict(case.headers)))
    case.path_parameters = state.exchange({k: state.spared(v) for k, v in case.path_parameters.items()})
    case.query = state.exchange(case.query)
    if isinstance(case.body, dict) and case.body.get("task_id") == RUNNING:
        claim = state.take(RUNNING)
        case.body = state.exchange(case.body, names_of(claim))
        # A request that was generated without a token, or with a bad one, must stay so.
        if case.headers.get(CAPABILITY) == state.held["capability_token"]:
            case.headers[CAPABILITY] = claim["capability_token"]
    elif isinstance(case.body, dict | list):
        case.body = state.exchange(case.body)
    if case.operation.path == "/v1/objects" and case.headers.get("Authorization") == f"Bearer {state.admin_key}":
        case.headers["Authorization"] = f"Bearer {state.object_token}"
    if case.operation.path in ("/internal/queue/receive", "/v1/inbox/{queue}/receive"):
        _hurry(case.body)


def _hurry(body: Any) -> None:
    """Shortens receives, which would otherwise wait for up to half a minute each."""
    if isinstance(body, dict):
        wait = body.get("wait_seconds", 20.0)
        if isinstance(wait, int | float) and not isinstance(wait, bool) and 0 <= wait <= 30:
            body["wait_seconds"] = 0


def _note(event: events.EngineEvent, found: Found) -> None:
    if isinstance(event, events.NonFatalError):
        found.failures[event.label, event.info.title] = event.info.format()
    elif isinstance(event, events.FatalError):
        raise event.exception
    elif isinstance(event, events.ScenarioFinished):
        found.phases.add(event.phase.value)
        for case_id, node in event.recorder.cases.items():
            response = event.recorder.find_response(case_id=case_id)
            if response is not None:
                found.statuses[node.value.operation.label, response.status_code] += 1
        for nodes in event.recorder.checks.values():
            for check in nodes:
                info = check.failure_info
                if info is not None and (check.name, info.failure.operation) not in ANSWERED_EACH:
                    found.failures[check.name, info.failure.operation] = f"{info.failure}\n{info.code_sample}"
