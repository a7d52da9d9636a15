"""From a reply that is not a success to the error it stands for."""

from __future__ import annotations

import msgspec

from interlock.client._http import Reply
from interlock.errors import (
    HTTP_ERRORS,
    BadRequest,
    ConfigurationError,
    Fenced,
    InterlockError,
    ServerUnreachable,
    TooManyRequests,
    Unavailable,
)
from interlock.wire import Problem

_problem = msgspec.json.Decoder(Problem)
_by_status = {error.status: error for error in HTTP_ERRORS}
_from_a_proxy = (502, 504)
"""What stands before the server says that the server is away."""


def error_of(reply: Reply) -> InterlockError:
    try:
        problem = _problem.decode(reply.body)
    except msgspec.MsgspecError:
        detail = f"The server answered {reply.status} without saying why."
        problem = Problem(type="about:blank", title="", status=reply.status, detail=detail, code="")
    return _error(reply, problem)


def _error(reply: Reply, problem: Problem) -> InterlockError:
    if problem.code == Fenced.default_code:
        return Fenced(problem.detail, stale=problem.stale or "lease_token")
    if reply.status == TooManyRequests.status:
        return TooManyRequests(problem.detail, retry_after=_pause(reply, problem), code=problem.code or None)
    if reply.status in _from_a_proxy:
        return Unavailable(problem.detail, code=problem.code or None)
    kind = _by_status.get(reply.status, BadRequest if 400 <= reply.status < 500 else InterlockError)
    return kind(problem.detail, code=problem.code or None, **_members(problem))


def _members(problem: Problem) -> dict[str, object]:
    members = {
        "request_id": problem.request_id or None,
        "errors": problem.errors,
        "stale": problem.stale,
        "problems": problem.problems,
    }
    return {name: value for name, value in members.items() if value is not None}


def _pause(reply: Reply, problem: Problem) -> float:
    if problem.retry_after_ms is not None:
        return problem.retry_after_ms / 1000
    after = reply.retry_after or ""
    return float(after) if after.isdigit() else 1.0


def unreachable(url: str, reason: str) -> ServerUnreachable:
    return ServerUnreachable(
        f"{url} does not answer ({reason}): check that the address is right, that the server runs there "
        "(`interlock up` starts one) and that this machine may reach it."
    )


def untrusted(url: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"The certificate of {url} is not trusted ({reason}): give the bundle of its authority as "
        "INTERLOCK_TLS_CA, or `verify` in Python."
    )
